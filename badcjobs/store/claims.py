"""Claims: of all live tasks that have the same part of a source, one works and the others are refused.

A claim is a small file in the folder of the tasks. Its name states the part and is never used again; its holder writes
it anew at every heartbeat. A task first writes its own claim, then looks for claims of overlapping parts: of two tasks
at least one sees the other, and the earlier one wins. There are no locks, and the clocks of two machines are never
compared: a claim is silent if the one who looks sees no change for three heartbeats. To take a part over is to remove
the claim; a holder whose claim is gone stops.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from badcjobs.errors import BadcjobsError, ExitCode
from badcjobs.model import TaskKey
from badcjobs.paths import RunFolder, shell_line
from badcjobs.seams import Clock
from badcjobs.small_files import parse_fields, parse_json, read_small
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.live_folder import read_boot_id

log = logging.getLogger(__name__)

LONGEST_BEAT_S = 10.0  # so that a task that is refused, or taken over, learns it soon
_SILENT_BEATS = 3
_LOOKS_PER_BEAT = 10
_BYTES = 1024  # of every version of a claim, so that it can be written in place
_MOST_BYTES = 64 * _BYTES
_LAST_MS = 253_402_300_799_999  # of the year 9999
_NAME = re.compile(r"\.claim-([0-9a-f]{8})-(all|\d+)-(\d+)-(\d+)-([0-9a-f]+)")


class PartTaken(BadcjobsError):
    """A live task works on the same part."""

    exit_code = ExitCode.RUN_ME_AGAIN


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source: every ``count``-th row, or those of one line of a list of manifests."""

    source: str  # eight digits for the source and its root folder
    line: str  # of a list of manifests; "all": all of it, or there is no list
    index: int
    count: int

    def overlaps(self, other: Part) -> bool:
        """Return whether the two parts may have a row in common."""
        if self.source != other.source or (self.line == "all") != (other.line == "all"):
            return self.source == other.source
        return self.line == other.line and (self.index - other.index) % math.gcd(self.count, other.count) == 0


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a claim."""

    task: str  # its name
    restart: int  # Slurm's; the one in the name also counts several runs in one job
    pid: int
    process: str | None  # as ``find_process`` describes it
    every_s: float
    since_ms: int
    beat_at_ms: int = 0
    beat: int = 0
    works: bool = False  # False: it still looks for others

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Parse the text of a claim; None: it is damaged."""
        with suppress(ValueError):
            holder = parse_fields(cls, parse_json(text))
            is_possible = 0 < holder.every_s <= LONGEST_BEAT_S and 0 <= holder.since_ms <= _LAST_MS
            if TaskKey.parse(holder.task) and is_possible and 0 <= holder.beat_at_ms <= _LAST_MS:
                return holder
        return None

    @property
    def key(self) -> TaskKey:
        """The task as a key."""
        key = TaskKey.parse(self.task)
        assert key is not None
        return key

    def has_ended(self) -> bool:
        """Return whether it was a process of this machine that no longer exists."""
        here = find_process(os.getpid())
        same_machine = bool(self.process and here and self.process.split()[:2] == here.split()[:2])
        return same_machine and find_process(self.pid) != self.process

    def is_earlier_attempt_of(self, other: Holder) -> bool:
        """Return whether Slurm has restarted the task of this attempt since."""
        mine, theirs = ((one.key.job_id, one.key.array_index, one.key.procid) for one in (self, other))
        return mine == theirs and self.restart < other.restart


def find_process(pid: int) -> str | None:
    """Describe a process by boot, container, number and start; None: there is no such process, or it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        container = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:
        return None
    return None if state in "ZX" else f"{read_boot_id() or None} {container} {pid} {others[18]}"


class Claim:
    """The claim of this task, from the beginning to the end of a block; ``lost``: another task has taken the part over.

    The beginning raises PartTaken, and waits as long as it is not known whether another holder is alive.
    """

    def __init__(self, out: RunFolder, part: Part, me: Holder, clock: Clock, while_waiting: Callable[[], None]) -> None:
        self.lost = False
        self.replaced: set[str] = set()  # earlier attempts of this task, which may still run
        self._out, self._part, self._me, self._clock, self._while_waiting = out, part, me, clock, while_waiting
        self._token = f"{me.since_ms:012x}{secrets.token_hex(4)}"  # the earlier one is less; equal clocks do not matter
        self.path = out.tasks / f".claim-{part.source}-{part.line}-{part.index}-{part.count}-{self._token}"
        self._ended = threading.Event()
        self._ignored: set[Path] = set()
        self._beat_at_s = clock.monotonic_s()

    def check(self) -> bool:
        """Return whether the part is still ours; after a long time without a heartbeat (a suspended job) look first."""
        if self._clock.monotonic_s() - self._beat_at_s > 2 * self._me.every_s:
            self._beat()
        return not self.lost

    def __enter__(self) -> Claim:
        try:
            self._acquire()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise self._out.unusable(error) from error
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        with suppress(OSError):
            self.path.unlink()

    def _acquire(self) -> None:
        replace_text(self.path, self._text())
        step_s = min(1.0, self._me.every_s / _LOOKS_PER_BEAT)
        seen: dict[Path, tuple[str, float]] = {}  # the text of a claim at the first look, and how long it was silent
        while rivals := self._rivals():
            for path in rivals:
                self._look_at(path, seen)
            began_s = self._clock.monotonic_s()
            self._while_waiting()
            self._clock.sleep(step_s)
            # A look that hangs with its filesystem is one look: the holder may hang, too.
            passed_s = min(self._clock.monotonic_s() - began_s, 2 * step_s)
            seen = {path: (text, silent_s + passed_s) for path, (text, silent_s) in seen.items()}
            self._beat()
        self._me = replace(self._me, works=True)
        self._beat()
        threading.Thread(target=self._beat_on, name="claim", daemon=True).start()

    def _rivals(self) -> list[Path]:
        """Return the claims on overlapping parts; their names are enough for that."""
        if self.lost:
            raise self._refusal(None)
        claims = filter(None, map(_NAME.fullmatch, os.listdir(self._out.tasks)))  # noqa: PTH208 - names, not paths
        others = (claim for claim in claims if claim[5] != self._token)
        parts = {claim[0]: Part(claim[1], claim[2], int(claim[3]), int(claim[4])) for claim in others}
        paths = (self._out.tasks / name for name, part in sorted(parts.items()) if part.overlaps(self._part))
        return [path for path in paths if path not in self._ignored]

    def _look_at(self, path: Path, seen: dict[Path, tuple[str, float]]) -> None:
        """Remove a claim without a live holder; raise PartTaken if its holder is alive and wins."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        try:
            text = read_small(path, _MOST_BYTES).decode(errors="replace")
        except OSError as error:  # of a holder that is alive, at least the time changes
            text = f"{error}, {status.st_mtime_ns}"
        is_ours = status.st_uid == os.geteuid()
        holder = Holder.parse(text)
        name, every_s = (path.name, self._me.every_s) if holder is None else (holder.task, holder.every_s)
        if path not in seen:
            log.info("task %s has claimed the same work; waiting for its next heartbeat", name)
        first_text, silent_s = seen.setdefault(path, (text, 0.0))
        why = None
        if holder is not None and holder.is_earlier_attempt_of(self._me):
            why = "Slurm has restarted it"
            self.replaced.add(name)
        elif holder is not None and is_ours and holder.has_ended():  # some machines hide the processes of other users
            why = "it has ended"
        elif text == first_text and silent_s >= _SILENT_BEATS * every_s:
            why = f"it is silent for {_SILENT_BEATS * every_s:g} s"
        if why is not None:
            log.warning("taking over the work of task %s: %s", name, why)
            try:
                path.unlink(missing_ok=True)
            except OSError:
                if holder is not None:
                    raise
                self._ignored.add(path)  # it was never a claim: a folder
        elif text != first_text:
            if holder is None or holder.works or path.name.rpartition("-")[2] < self._token:
                raise self._refusal(holder)
            seen[path] = text, 0.0  # it came later, and gives up when it sees us

    def _refusal(self, holder: Holder | None) -> PartTaken:
        part, name, why = self._part, "another live task", "both would process the same chunks"
        if holder is not None:
            name, key = f"task {holder.task}", holder.key
            since, beat = (
                datetime.fromtimestamp(at_ms / 1000, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
                for at_ms in (holder.since_ms, holder.beat_at_ms)
            )
            where = f"job {key.job_id}, array index {key.array_index}, node {key.node}"
            why = f"{where}, since {since}, last heartbeat {beat}; {why}"
        line = "" if part.line == "all" else f" of line {int(part.line) + 1}"
        return PartTaken(
            f"{name} works on shard {part.index}/{part.count}{line} of this source in {self._out.path}",
            why=why,
            fix=f"{shell_line('badcjobs', 'monitor', self._out.path)}   (run again when that task has ended)",
        )

    def _text(self) -> str:
        return json.dumps(asdict(self._me)).ljust(_BYTES)

    def _beat_on(self) -> None:
        while not (self.lost or self._ended.wait(self._me.every_s)):
            self._beat()

    def _beat(self) -> None:
        """Write the next heartbeat into our own file, never into that of another task."""
        self._me = replace(self._me, beat=self._me.beat + 1, beat_at_ms=self._clock.now_ms())
        began_s = self._clock.monotonic_s()
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.write(self._text().encode())
        except OSError as error:
            self.lost = not self._ended.is_set() and error.errno in (errno.ENOENT, errno.ESTALE)
            log.debug("no heartbeat in %s: %s", self.path.name, error)
        self._beat_at_s = began_s  # last: until the file was found, another thread that checks looks itself
