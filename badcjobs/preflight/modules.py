"""Judges the modules of a job script: loaded as the site wants them, and there to be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import ModuleFacts, ScriptFacts
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.preflight.site import Site


def judge_modules(script: ScriptFacts | None, site: Site | None, found: ModuleFacts | None) -> Iterator[Finding]:
    """Judge the modules: in the script as the site wants them, and there to be loaded."""
    if script is not None and script.start is not None and site is not None:
        yield from _judge_order(script, site.modules)
    if found is None or not found.wanted:
        return
    line = f"module load {' '.join(found.wanted)}"
    missing = [word for word in found.wanted if not any(_is(one, word) for one in found.loaded)]
    if not found.command:
        text = f"this machine has no module command, so nobody knows about {', '.join(found.wanted)}"
        yield warning("modules", text, f"bash -lc '{line}'   (on a login node of the cluster)")
    elif missing:
        said = f": {found.said}" if found.said else ""
        text, fix = f"{', '.join(missing)} cannot be loaded{said}", f"module avail {missing[0].partition('/')[0]}"
        if script is not None and script.unfollowed:
            yield warning("modules", f"{text} (tried here without the script's {script.unfollowed[0]})", fix)
        else:
            yield problem("modules", text, fix)
    else:
        yield fine("modules", f"{line} works here")


def _judge_order(script: ScriptFacts, wanted: tuple[str, ...]) -> Iterator[Finding]:
    named = [word.partition("/")[0] for word in script.modules]
    there = [word for word in wanted if word in named]
    fix = f"module load {' '.join(wanted)}   (in the script, before badcjobs)"
    if script.start is not None and script.start.contained:
        return  # an image brings its own
    if len(there) < len(wanted):
        missing = ", ".join(word for word in wanted if word not in named)
        yield warning("modules", f"{script.name} does not load {missing}", fix)
    elif sorted(there, key=named.index) != there:
        yield warning("modules", f"{script.name} loads {' '.join(named)}; the order is {' '.join(wanted)}", fix)


def _is(loaded: str, wanted: str) -> bool:
    return loaded == wanted or loaded.startswith(f"{wanted}/")
