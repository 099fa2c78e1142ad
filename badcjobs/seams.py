"""Where badcjobs meets the world: one Protocol per seam, one contract suite each in ``tests/contract``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from badcjobs.model import (
    ArrayOrder,
    Chunk,
    ChunkResult,
    ChunkStarted,
    InventoryDevice,
    JobStates,
    Reading,
    Submitted,
    WorkerPlan,
)


class Clock(Protocol):
    """UTC milliseconds that never run backwards, and a way to wait."""

    def now_ms(self) -> int: ...

    def monotonic_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class ReaderUnavailable(Exception):
    """This way of reading GPUs does not work here; the text says why."""


class DeviceUnreadable(Exception):
    """One device gives no reading now; the text is the reason written into the gap."""


class GpuReader(Protocol):
    """Reads the devices of this machine.

    ``inventory`` raises ReaderUnavailable; ``read`` raises only DeviceUnreadable, and leaves
    a metric that the device does not give as None, with the reason in ``Reading.missing``.
    A reason stays the same while its cause does: each new text is a gap of its own.
    """

    backend: str
    why: str  # why this one reads the devices, in words

    def inventory(self) -> Sequence[InventoryDevice]: ...

    def read(self, uuid: str) -> Reading: ...

    def force_full_read(self) -> None:
        """Let the next reading of each device leave nothing out: it is the last of a recording."""
        return

    def close(self) -> None:
        """Give back what the reader holds."""
        return


class Process(Protocol):
    """A running program, as much of ``subprocess.Popen`` as engines use."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Launcher(Protocol):
    """Starts programs in a process group of their own and ends whole groups.

    Slurm's signals are the wrapper's business: a program hears none of them, or TERM alone with ``hears_term``.
    """

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        stderr: Path,
        pipes: bool = False,
        hears_term: bool = False,
    ) -> Process: ...

    def kill(self, process: Process) -> None: ...

    def prefix_for(self, worker: str) -> list[str]:
        """Return the words that are put before a program (``--engine-prefix``); most often there are none."""
        ...


class SessionBroken(Exception):
    """The engine process is gone or useless: open a new session.

    Of the chunks without a result those that had begun are suspects: one alone is blamed, several are tried again in
    smaller company. Where the engine never says what it begins, the first one is blamed. All others go back to the
    queue. ``at_start``: the engine was not ready yet, and no chunk had anything to do with it.
    """

    def __init__(self, error_class: str, message: str, *, at_start: bool = False) -> None:
        super().__init__(message)
        self.error_class = error_class
        self.at_start = at_start


class More(Protocol):
    """Where a session that is at work gets further chunks."""

    def __call__(self, wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
        """Return up to ``wanted`` chunks that belong to the batch from now on; never blocks, may return none.

        ``idle`` says how many the session could begin at once: near the end of the work it gets no more than those.
        """
        ...


def nothing_more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
    """Be the ``more`` of a batch that stays as it is."""
    return ()


class Session(Protocol):
    """One engine at work on one device.

    ``process`` yields a result for every chunk of the batch and of what it got from ``more`` (and ChunkStarted where
    the engine knows), or fewer after ``interrupt``, or raises SessionBroken. ``more`` is called in the same thread,
    before the session runs dry; ``interrupt`` and ``kill`` come from another thread.
    """

    pid: int | None  # None: a new process for each chunk

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]: ...

    def interrupt(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> int | None: ...


class Engine(Protocol):
    """A way to analyse audio: knows how to start, and what its own success looks like."""

    name: str

    @property
    def version(self) -> str | None:
        """What tells this engine from another version of it; None: not known."""
        ...

    @property
    def wants(self) -> int:
        """How many chunks a session likes to hold: a few if it asks for more, a batch if it takes only that."""
        ...

    def check(self) -> None:
        """Raise NotHere when this engine cannot run on this machine."""
        ...

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Start working on one device; ``scratch`` is an empty node-local folder."""
        ...


class Scheduler(Protocol):
    """Where arrays run: under Slurm, or emulated on this machine."""

    name: str
    poll_s: float  # nobody is asked for states more often than this

    def script(self, order: ArrayOrder) -> str:
        """Return the text that ``submit`` would hand in for the array, byte for byte; do nothing."""
        ...

    def submit(self, order: ArrayOrder) -> Submitted:
        """Hand in the array; raise NotHere without a scheduler, its own words when it refuses."""
        ...

    def states(self, job: Submitted) -> JobStates:
        """Ask once where the whole array stands, its merge job included; raise Unanswered when nobody answers now."""
        ...


class Unanswered(Exception):
    """The scheduler did not say where a job stands; ask again later."""
