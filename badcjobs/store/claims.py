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
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from badcjobs.errors import BadcjobsError, ExitCode
from badcjobs.model import TaskKey
from badcjobs.paths import RunFolder
from badcjobs.seams import Clock
from badcjobs.store.atomic_write import replacing
from badcjobs.store.live_folder import read_boot_id

log = logging.getLogger(__name__)

LONGEST_BEAT_S = 10.0  # so that a task that is refused, or taken over, learns it soon
_SILENT_BEATS = 3
_LOOKS_PER_BEAT = 10
_BYTES = 1024  # of every version of a claim, so that it can be written in place
_NAME = re.compile(r"\.claim-([0-9a-f]{8})-(all|\d+)-(\d+)-(\d+)-([0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a source: every ``count``-th row, or those of one line of a list of manifests."""

    source: int  # a number for the source and its root folder
    line: int | None  # of a list of manifests; None: of all of it, or there is no list
    index: int
    count: int

    def overlaps(self, other: Part) -> bool:
        """Return whether the two parts may have a row in common."""
        if self.source != other.source or (self.line is None) != (other.line is None):
            return self.source == other.source
        return self.line == other.line and (self.index - other.index) % math.gcd(self.count, other.count) == 0

    def claim_name(self, token: str) -> str:
        """Return the name of a claim on this part."""
        return f".claim-{self.source:08x}-{'all' if self.line is None else self.line}-{self.index}-{self.count}-{token}"


def parse_name(name: str) -> tuple[Part, str] | None:
    """Return the part and the token in the name of a claim; None: not a claim."""
    if (found := _NAME.fullmatch(name)) is None:
        return None
    source, line, index, count, token = found.groups()
    return Part(int(source, 16), None if line == "all" else int(line), int(index), int(count)), token


@dataclass(frozen=True, slots=True)
class Holder:
    """The content of a claim."""

    task: str  # its name
    restart: int  # Slurm's; the one in the name also counts several runs in one job
    machine: str  # process numbers are comparable only within one boot and one container
    pid: int
    process_start: str | None
    every_s: float
    since_ms: int
    beat_at_ms: int
    beat: int = 0
    works: bool = False  # False: it still looks for others

    @classmethod
    def here(cls, key: TaskKey, restart: int, pid: int, every_s: float, now_ms: int) -> Holder:
        """Describe this process."""
        return cls(key.name, restart, _read_machine(), pid, _read_start(pid), every_s, now_ms, now_ms)

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Parse the text of a claim; None: it is damaged."""
        try:
            found = cls(**json.loads(text))
            return found if TaskKey.parse(found.task) and 0 < found.every_s <= LONGEST_BEAT_S else None
        except (ValueError, TypeError):
            return None

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this machine that no longer exists."""
        return self.machine == _read_machine() != "" and _read_start(self.pid) != self.process_start

    def is_earlier_attempt_of(self, other: Holder) -> bool:
        """Return whether Slurm has restarted the task of this attempt since."""
        mine, theirs = TaskKey.parse(self.task), TaskKey.parse(other.task)
        if mine is None or theirs is None:
            return False
        same = [(key.job_id, key.array_index, key.procid) for key in (mine, theirs)]
        return same[0] == same[1] and self.restart < other.restart


def _read_machine() -> str:
    with suppress(OSError):
        return f"{read_boot_id()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115 - not a path
    return ""


def _read_start(pid: int) -> str | None:
    """Return when a process started, in the kernel's count; None: it has ended."""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else others[18]


class PartTaken(BadcjobsError):
    """A live task works on the same part."""

    exit_code = ExitCode.RUN_ME_AGAIN


class Claim:
    """The claim of this task; ``lost``: another task has taken the part over."""

    def __init__(self, out: RunFolder, part: Part, me: Holder, clock: Clock) -> None:
        self.lost = False
        self.out, self._part, self._me, self._clock = out, part, me, clock
        self._token = f"{me.since_ms:012x}{secrets.token_hex(4)}"  # the earlier one is less; equal clocks do not matter
        self.path = out.tasks / part.claim_name(self._token)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="claim", daemon=True)

    def acquire(self, while_waiting: Callable[[], None]) -> None:
        """Take the part, or raise PartTaken; wait as long as it is not known whether another holder is alive."""
        draft = self.path.with_suffix(".tmp")
        with replacing(self.path, draft, lasting=False):
            draft.write_text(self._text())
        step_s = min(1.0, self._me.every_s / _LOOKS_PER_BEAT)
        seen: dict[Path, tuple[str, float]] = {}  # the text of a claim at the first look, and how long it was silent
        while rivals := self._rivals():
            for path in rivals:
                self._look_at(path, seen)
            began_s = self._clock.monotonic_s()
            while_waiting()
            self._clock.sleep(step_s)
            # A look that hangs with its filesystem is one look: the holder may hang, too.
            passed_s = min(self._clock.monotonic_s() - began_s, 2 * step_s)
            seen = {path: (text, silent_s + passed_s) for path, (text, silent_s) in seen.items()}
            self._beat()
        self._me = replace(self._me, works=True)
        self._beat()
        self._thread.start()

    def release(self) -> None:
        """Give the part back."""
        self._ended.set()
        with suppress(OSError):
            self.path.unlink()

    def _rivals(self) -> list[Path]:
        """Return the claims on overlapping parts; their names are enough for that."""
        if self.lost:
            raise self._refusal(None)
        found = []
        for name in os.listdir(self.out.tasks):  # noqa: PTH208 - names, not paths
            claim = parse_name(name)
            if claim is not None and claim[1] != self._token and claim[0].overlaps(self._part):
                found.append(self.out.tasks / name)
        return sorted(found)

    def _look_at(self, path: Path, seen: dict[Path, tuple[str, float]]) -> None:
        """Remove a claim without a live holder; raise PartTaken if its holder is alive and wins."""
        try:
            with path.open(errors="replace") as file:
                text, is_ours = file.read(), os.fstat(file.fileno()).st_uid == os.geteuid()
        except FileNotFoundError:
            return
        holder = Holder.parse(text)
        if path not in seen and holder is not None:
            log.info("task %s has claimed the same work; waiting for its next heartbeat", holder.task)
        first_text, silent_s = seen.setdefault(path, (text, 0.0))
        limit_s = _SILENT_BEATS * (self._me.every_s if holder is None else holder.every_s)
        # Some machines hide the processes of other users.
        ended = holder is not None and ((is_ours and holder.has_ended) or holder.is_earlier_attempt_of(self._me))
        if ended or (text == first_text and silent_s >= limit_s):
            why = "it has ended" if ended else f"it is silent for {limit_s:g} s"
            log.warning("taking over the work of task %s: %s", holder.task if holder else path.name, why)
            path.unlink(missing_ok=True)
        elif text != first_text:
            if holder is None or holder.works or path.name.rpartition("-")[2] < self._token:
                raise self._refusal(holder)
            seen[path] = text, 0.0  # it came later, and gives up when it sees us

    def _refusal(self, holder: Holder | None) -> PartTaken:
        part = self._part
        what = f"shard {part.index}/{part.count}" + (f" of line {part.line + 1}" if part.line is not None else "")
        look = shlex.join(["badcjobs", "monitor", str(self.out.path)])
        key = None if holder is None else TaskKey.parse(holder.task)
        if holder is None or key is None:
            return PartTaken(f"another live task works on {what} of this source in {self.out.path}", fix=look)
        since, beat = (
            datetime.fromtimestamp(at_ms / 1000, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            for at_ms in (holder.since_ms, holder.beat_at_ms)
        )
        return PartTaken(
            f"task {holder.task} works on {what} of this source in {self.out.path}",
            why=f"job {key.job_id}, array index {key.array_index}, node {key.node}, since {since},"
            f" last heartbeat {beat}; both would process the same chunks",
            fix=f"{look}   (to work on it again, wait until that task has ended)",
        )

    def _text(self) -> str:
        return json.dumps(asdict(self._me)).ljust(_BYTES)

    def _beat_on(self) -> None:
        while not (self.lost or self._ended.wait(self._me.every_s)):
            self._beat()

    def _beat(self) -> None:
        """Write the next heartbeat into our own file, never into that of another task."""
        self._me = replace(self._me, beat=self._me.beat + 1, beat_at_ms=self._clock.now_ms())
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, self._text().encode())
            finally:
                os.close(fd)
        except OSError as error:
            self.lost = not self._ended.is_set() and error.errno in (errno.ENOENT, errno.ESTALE)
            log.debug("no heartbeat in %s: %s", self.path.name, error)


@contextmanager
def held(claim: Claim, while_waiting: Callable[[], None]) -> Iterator[Claim]:
    """Hold a part of the source; give it back at the end, however the block ends."""
    try:
        try:
            claim.acquire(while_waiting)
        except OSError as error:
            raise claim.out.unusable(error) from error
        yield claim
    finally:
        claim.release()
