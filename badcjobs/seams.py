"""The seams to the outside world: one Protocol each, with one contract suite each in ``tests/contract``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, InventoryDevice, Reading, WorkerMemory, WorkerPlan

Environ = Mapping[str, str]  # the variables of a process


class Clock(Protocol):
    """UTC milliseconds that never run backwards, and a way to wait."""

    def now_ms(self) -> int: ...

    def monotonic_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class ReaderUnavailable(Exception):
    """This reader does not work here; the text is the reason."""


class DeviceUnreadable(Exception):
    """One device cannot be read now; the text is the reason recorded with the gap."""


class GpuReader(Protocol):
    """Reads the devices of this machine.

    ``inventory`` raises ReaderUnavailable; ``read`` raises only DeviceUnreadable. A metric that the device does not
    give is None, with the reason in ``Reading.missing``. The reason must not vary while its cause is the same: each
    new text starts a new gap.
    """

    backend: str
    why: str  # why this reader was chosen
    watched: bool = False  # a monitor shows the readings now: read the activity every 2 s

    def inventory(self) -> Sequence[InventoryDevice]: ...

    def read(self, uuid: str) -> Reading: ...

    def force_full_read(self) -> None:
        """Read every metric at the next reading of each device, which is the last of a recording."""
        return

    def close(self) -> None:
        """Release the reader's resources."""
        return


class SessionBroken(Exception):
    """The engine process is dead or unusable: open a new session.

    Chunks that had started and have no result are suspects: a single one is blamed, several are retried in smaller
    groups. If the engine does not report starts, the first chunk is blamed. All other chunks return to the queue.
    ``at_start``: the engine was not ready yet, so no chunk is the cause.
    """

    def __init__(self, error_class: str, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.at_start = at_start


class More(Protocol):
    """Gives a working session more chunks."""

    def __call__(self, wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
        """Return up to ``wanted`` more chunks, which then belong to the batch; never blocks, may return none.

        ``idle``: how many the session could start immediately; near the end of the work it gets no more than that.
        """


def nothing_more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
    """Return no chunks: the ``more`` of a fixed batch."""
    return ()


class Session(Protocol):
    """One engine process on one device.

    ``process`` yields a result for every chunk of the batch and of ``more`` (and ChunkStarted if the engine reports
    it), or fewer after ``interrupt``, or raises SessionBroken. ``more`` is called in the same thread, before the
    session runs out of chunks; ``interrupt`` and ``kill`` are called from another thread.
    """

    pid: int | None  # None: a new process for each chunk

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """What an engine declares about itself; the defaults are those of an unknown program."""

    memory_per_worker: WorkerMemory | None = None  # main memory; None: not known until it is measured
    cores_per_chunk: int | None = None  # kept busy by a chunk in progress; None: not known, so start with few workers
    error_patterns: Sequence[tuple[str, str]] = ()  # error classes and regular expressions for its output
    reads_places: bool = False  # it filters species by the place and date of a recording
    writes_tables: bool = False  # which run.keep_raw can keep
    one_program_per_chunk: bool = False
    simulates_memory: bool = False  # it reports the memory that it would use on a simulated device


class Engine(Protocol):
    """A way to analyse audio: how to start it, and how to recognise success."""

    name: str
    traits: EngineTraits

    @property
    def version(self) -> str | None:
        """The version of this engine; None: not known."""

    @property
    def wants(self) -> int:
        """How many chunks a session should hold: a few if it calls ``more``, else a full batch."""

    def check(self) -> None:
        """Raise NotHere if this engine cannot run on this machine."""

    def chunks_at_once(self, plan: WorkerPlan) -> int:
        """Return how many chunks one worker processes at the same time."""

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Start a session on one device; ``scratch`` is a node-local folder of its worker."""


class Unanswered(Exception):
    """Slurm gave no answer; ask again later."""
