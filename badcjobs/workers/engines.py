"""The engines by name: each is a module ``engine_NAME`` with ``TRAITS`` and ``make_engine``; settings.py lists them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from badcjobs.paths import RunFolder
from badcjobs.processes import Launcher
from badcjobs.seams import Clock, Engine, EngineTraits
from badcjobs.settings import ENGINES, RunSettings
from badcjobs.workers.program_start import START_S, EngineStart


def traits_of(name: str | None) -> EngineTraits:
    """Return what an engine declares about itself; one that is not in the list declares nothing."""
    if name not in ENGINES:
        return EngineTraits()
    traits: EngineTraits = import_module(f"badcjobs.workers.engine_{name}").TRAITS
    return traits


def choose_engine(
    settings: RunSettings,
    environ: Mapping[str, str],
    launcher: Launcher,
    clock: Clock,
    *,
    cwd: Path,
    allow_cpu: bool,
    start_s: float = START_S,
    places: bool = False,
) -> Engine:
    """Return the engine that the settings name; relative paths are relative to ``cwd``.

    ``start_s``: how long it may take to start. ``places``: chunks may have a place.
    """
    raw = None
    if settings.keep_raw and settings.out:
        raw = RunFolder(cwd / settings.out).raw
    start = EngineStart(
        settings.engine_args,
        environ,
        launcher,
        clock,
        raw,
        places,
        cwd,
        allow_cpu,
        start_s,
    )
    engine: Engine = import_module(f"badcjobs.workers.engine_{settings.engine}").make_engine(settings, start)
    return engine
