"""The engines by name: each is a module ``engine_NAME`` with ``TRAITS`` and ``make_engine``; settings.py lists them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from badcjobs.paths import RunFolder
from badcjobs.seams import Engine, EngineTraits
from badcjobs.settings import ENGINES, RunSettings
from badcjobs.workers.program_start import EngineStart


def traits_of(name: str | None) -> EngineTraits:
    """Return what an engine declares about itself; one that is not in the list declares nothing."""
    if name not in ENGINES:
        return EngineTraits()
    traits: EngineTraits = import_module(f"badcjobs.workers.engine_{name}").TRAITS
    return traits


def choose_engine(settings: RunSettings, start: EngineStart) -> Engine:
    """Return the engine that the settings name."""
    if settings.keep_raw and settings.out:
        start = replace(start, raw=RunFolder(start.cwd / settings.out).raw)
    engine: Engine = import_module(f"badcjobs.workers.engine_{settings.engine}").make_engine(settings, start)
    return engine
