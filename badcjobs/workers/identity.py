"""What an engine is: its version, and how many chunks it works on at once. Results of a probe hold for that alone."""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.model import WorkerPlan
from badcjobs.seams import Engine
from badcjobs.workers.hawkears2 import sized_arguments, threads_of

_HAWKEARS = ("hawkears", "hawkears1")
UNKNOWN = "unknown"


def version_of(engine: Engine) -> str:
    """Return the version of an engine that has been checked; programs without one are known by their files."""
    return str(getattr(engine, "version", None) or UNKNOWN)


def lanes_of(engine: str, args: Sequence[str], plan: WorkerPlan) -> int:
    """Return on how many chunks one worker of this engine works at the same time."""
    return threads_of(sized_arguments(args, plan)) if engine in _HAWKEARS else 1
