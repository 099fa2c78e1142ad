"""What a task takes from outside: nothing below the CLI looks for it by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.seams import Clock
from badcjobs.stop import StopRequest
from badcjobs.work_now import WorkNow


@dataclass(frozen=True)
class World:
    """The environment, the time, the signals and the place of this process."""

    environ: Mapping[str, str]
    clock: Clock
    stop: StopRequest
    hostname: str
    pid: int
    cwd: Path
    cores: int
    log_to: Callable[[Path], None] = field(default=lambda path: None)
    progress: Callable[[int], None] = field(default=lambda rows: None)
    show: Callable[[Callable[[], WorkNow]], None] = field(default=lambda look: None)  # looks only when it likes to
