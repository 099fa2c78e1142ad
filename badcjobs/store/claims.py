"""Claims: of all live tasks that have the same part of a source, one works and the others are refused.

A claim is a lease in the folder of the tasks; its name states the part.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from badcjobs.errors import BadcjobsError, ExitCode
from badcjobs.locks import Held, Holder, Lease
from badcjobs.model import TaskKey
from badcjobs.paths import RunFolder, shell_line
from badcjobs.seams import Clock
from badcjobs.words import moment

log = logging.getLogger(__name__)


class PartTaken(BadcjobsError):
    """A live task works on the same part."""

    exit_code = ExitCode.RUN_ME_AGAIN


@dataclass(frozen=True)
class Part:
    """A part of a source: every ``count``-th row, or those of one line of a list of manifests."""

    source: str  # eight digits for the source and its root folder
    line: str  # of a list of manifests; "all": all of it, or there is no list
    index: int
    count: int

    @classmethod
    def parse(cls, name: str) -> Part | None:
        """Return the part that the name of a claim states; None: it is another name."""
        with suppress(ValueError):
            kind, source, line, index, count = name.split("-")
            if kind == "claim":
                return cls(source, line, int(index), int(count))
        return None

    @property
    def name(self) -> str:
        """The name of its claims."""
        return f"claim-{self.source}-{self.line}-{self.index}-{self.count}"

    def overlaps(self, part: Part) -> bool:
        """Return whether the two parts may have a row in common."""
        if self.source != part.source:
            return False
        if self.line != part.line:
            return "all" in (self.line, part.line)
        return (self.index - part.index) % math.gcd(self.count, part.count) == 0


class Claim(Lease):
    """The claim of this task; its beginning raises PartTaken if another live task has the part."""

    def __init__(
        self,
        out: RunFolder,
        part: Part,
        me: Holder,
        clock: Clock,
        while_waiting: Callable[[], None],
    ) -> None:
        super().__init__(out.tasks, part.name, me, clock, while_waiting)
        self.replaced: set[str] = set()  # earlier attempts of this task, which may still run
        self._out = out
        self._part = part

    def __enter__(self) -> Claim:
        try:
            super().__enter__()
        except Held as error:
            raise self._refusal(error.holder) from None
        except OSError as error:
            raise self._out.unusable(error) from error
        return self

    def is_rival(self, name: str) -> bool:
        """Return whether a claim is on a part that overlaps ours."""
        part = Part.parse(name)
        return part is not None and part.overlaps(self._part)

    def is_valid(self, holder: Holder) -> bool:
        """Return whether the holder is a task."""
        return TaskKey.parse(holder.name) is not None

    def replaces(self, holder: Holder) -> bool:
        """Return whether Slurm has restarted the holder as this attempt."""
        key = TaskKey.parse(holder.name)
        mine = TaskKey.parse(self._me.name)
        assert key is not None and mine is not None
        is_same = replace(key, restart=mine.restart, node=mine.node) == mine
        if not is_same or holder.restart >= self._me.restart:
            return False
        self.replaced.add(holder.name)
        return True

    def describe(self, holder: Holder) -> str:
        """Return the name of a task in messages."""
        return f"task {holder.name}"

    def on_rival(self, holder: Holder | None, name: str) -> None:
        """Log that the part is claimed."""
        log.info("%s has claimed the same work; waiting for its next heartbeat", name)

    def _refusal(self, holder: Holder | None) -> PartTaken:
        part = self._part
        name = "another live task"
        why = "both would process the same chunks"
        if holder is not None:
            key = TaskKey.parse(holder.name)
            assert key is not None
            name = self.describe(holder)
            where = f"job {key.job_id}, array index {key.array_index}, node {key.node}"
            why = f"{where}, since {moment(holder.since_ms)}, last heartbeat {moment(holder.beat_at_ms)}; {why}"
        line = "" if part.line == "all" else f" of line {int(part.line) + 1}"
        return PartTaken(
            f"{name} works on shard {part.index}/{part.count}{line} of this source in {self._out.path}",
            why=why,
            fix=f"{shell_line('badcjobs', 'monitor', self._out.path)}   (run again when that task has ended)",
        )
