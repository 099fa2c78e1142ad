"""Where the tasks of an emulated array stand: in memory, and in a small file for whoever asks from outside."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from badcjobs.model import Device
from badcjobs.scheduler.emulated_task import Attempt
from badcjobs.scheduler.local_record import AttemptEnd
from badcjobs.seams import Clock

PENDING, RUNNING, COMPLETED, FAILED = "PENDING", "RUNNING", "COMPLETED", "FAILED"

_WRITE_EVERY_S = 0.5


@dataclass(slots=True)
class TaskRow:
    """One array task, from its submission to its end."""

    index: int | None
    log: Path
    state: str = PENDING
    restarts: int = 0
    asked: int = 0  # how often it was started again because it asked for it, with exit code 75
    exit_code: int | None = None  # of its last attempt
    note: str = ""
    devices: tuple[Device, ...] = ()
    attempt: Attempt | None = field(default=None, repr=False)
    ends: list[AttemptEnd] = field(default_factory=list)  # of all its attempts that are over

    def to_dict(self) -> dict[str, object]:
        """Return the row as ``--json`` shows it."""
        return {
            "index": self.index,
            "state": self.state,
            "exit_code": self.exit_code,
            "restarts": self.restarts,
            "attempts": [asdict(end) for end in self.ends],
            "log": str(self.log),
            "note": self.note or None,
        }


def count_words(rows: Sequence[TaskRow]) -> str:
    """Return how far an array is, in words."""
    counts = Counter(row.state for row in rows)
    waiting, running = counts.pop(PENDING, 0), counts.pop(RUNNING, 0)
    ended = ", ".join(f"{many} {state.lower()}" for state, many in sorted(counts.items()))
    return (
        f"{sum(counts.values())} of {len(rows)} ended"
        + (f" ({ended})" if ended else "")
        + (f", {running} running, {waiting} waiting")
    )


class StateFile:
    """Writes the states down, not more often than somebody would look."""

    def __init__(self, path: Path | None, job_id: int, pid: int, clock: Clock) -> None:
        self._path = path
        self._head = {"job_id": job_id, "pid": pid}
        self._clock = clock
        self._next_s = 0.0
        self._stale = False

    def write(self, rows: Sequence[TaskRow], *, changed: bool, last: bool = False) -> None:
        """Write what has changed, now or soon; ``last`` writes it now."""
        self._stale |= changed
        if self._path is None or not self._stale or (not last and self._clock.monotonic_s() < self._next_s):
            return
        self._next_s, self._stale = self._clock.monotonic_s() + _WRITE_EVERY_S, False
        draft = self._path.with_suffix(".tmp")
        try:
            draft.write_text(json.dumps({**self._head, "ended": last, "tasks": [row.to_dict() for row in rows]}))
            draft.replace(self._path)
        except OSError:
            pass  # a full disk under it must not stop the work


def read_states(path: Path) -> dict[int, str]:
    """Return the state of every array task from such a file; raises OSError or ValueError where there is none."""
    document = json.loads(path.read_text())
    return {row["index"] or 0: row["state"] for row in document["tasks"]}


def read_pid(path: Path) -> int:
    """Return the process that runs the array, from such a file."""
    return int(json.loads(path.read_text())["pid"])
