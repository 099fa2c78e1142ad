"""Looks for proof that the kernel killed one of ours for memory: a counter of the job's own control group."""

from __future__ import annotations

import re
from pathlib import Path

_PROC = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def read_oom_kills(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return how many processes of this control group the kernel has killed for memory; None: nobody says."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    counts = [count for line in lines if (count := _read_count(line, groups)) is not None]
    return max(counts, default=None)


def _read_count(line: str, groups: Path) -> int | None:
    """Read the counter of one line of /proc/self/cgroup: ``0::/path``, or ``9:memory:/path`` with version 1."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if controllers == "":
        file = groups / path.lstrip("/") / "memory.events"
    elif "memory" in controllers.split(","):
        file = groups / "memory" / path.lstrip("/") / "memory.oom_control"
    else:
        return None
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
