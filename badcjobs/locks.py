"""Locks: two mechanisms, and the uses that name one of them.

    device       kernel lock   devices/free.py             one run at a time uses a GPU outside Slurm
    live files   kernel lock   store/live_folder.py        only the task itself writes its live files
    sbatch       kernel lock   devices/slurm_programs.py   the next submit waits for an sbatch whose caller was killed
    probe file   kernel lock   workers/learned.py          one probe at a time adds its result
    claim        lease         task/startup.py             one task at a time works on a part of a source
    merge        lease         store/merge.py              one merge at a time writes a job database
    run folder   lease         store/run_lock.py           one submit reads it, one emulation works in it, at a time

A kernel lock is for the processes of one machine: it is released when its holder has ended, even after SIGKILL. A
lease is for several machines, whose shared disk may have no kernel locks: a small file that its holder writes at every
heartbeat.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from badcjobs.seams import Clock
from badcjobs.small_files import open_regular, parse_fields, parse_json, read_small

log = logging.getLogger(__name__)

# --- kernel locks -----------------------------------------------------------------------------------------------------

_POLL_S = 0.1


def try_lock(file: int) -> bool:
    """Lock an open file until it is closed in every process that has it; False: another process keeps it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_lock_alone(file: int) -> bool:
    """Lock an open file until this process closes it; a child that outlives the process does not keep the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def wait_for_lock(file: int) -> None:
    """Lock an open file, however long another process keeps it."""
    fcntl.flock(file, fcntl.LOCK_EX)


TryLock = Callable[[int], bool]


def lock_within(file: int, patience_s: float, sleep: Callable[[float], None], lock: TryLock = try_lock) -> bool:
    """Lock an open file, or wait some time for it."""
    for _ in range(round(patience_s / _POLL_S)):
        if lock(file):
            return True
        sleep(_POLL_S)
    return lock(file)


def unlock(file: int) -> None:
    """Unlock a file at once, even if another process has the same open file."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def kernel_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created and stays; without effect on a filesystem that has no locks."""
    with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT)) as file:
        with suppress(OSError):
            wait_for_lock(file.fileno())
        yield


# --- processes --------------------------------------------------------------------------------------------------------

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """Return the number of this boot of the machine; empty: not known."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def find_process(pid: int) -> str | None:
    """Describe a process by boot, container, number and start; None: there is no such process, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        container = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - not a path
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return f"{read_boot_id() or None} {container} {pid} {fields[19]}"


# --- leases -----------------------------------------------------------------------------------------------------------
# The name of a lease says what it is for and is never used again. A process first writes its own lease, then looks for
# rival leases: of two processes at least one sees the other, and the earlier one wins. The clocks of two machines are
# never compared: a lease is silent if the one who looks sees no change for three heartbeats. To take a lease over is to
# remove it; a holder whose lease is gone stops.

LONGEST_BEAT_S = 10.0  # so that a process that is refused, or taken over, learns it soon
_SILENT_BEATS = 3
_LOOKS_PER_BEAT = 10
_BYTES = 1024  # of every version of a lease, so that it can be written in place
_MOST_BYTES = 64 * _BYTES
_LAST_MS = 253_402_300_799_999  # of the year 9999
_FILE_NAME = re.compile(r"\.(.+)-([0-9a-f]+)")


@dataclass(frozen=True)
class Holder:
    """The content of a lease."""

    name: str  # of the task; in a lease of a merge, a submit or an emulation, of the node
    pid: int
    process: str | None  # as ``find_process`` describes it
    every_s: float
    since_ms: int
    restart: int = 0  # Slurm's; the one in the name of a task also counts several runs in one job
    beat_at_ms: int = 0
    beat: int = 0
    works: bool = False  # False: it still looks for others

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """Parse the text of a lease; None: it is damaged."""
        with suppress(ValueError):
            holder = parse_fields(cls, parse_json(text))
            times_ms = (holder.since_ms, holder.beat_at_ms)
            if 0 < holder.every_s <= LONGEST_BEAT_S and all(0 <= at_ms <= _LAST_MS for at_ms in times_ms):
                return holder
        return None

    @property
    def is_of_this_machine(self) -> bool:
        """Whether it was a process of this machine, and of this container."""
        here = find_process(os.getpid())
        return bool(self.process and here and self.process.split()[:2] == here.split()[:2])

    def has_ended(self) -> bool:
        """Return whether it was a process of this machine that no longer exists."""
        return self.is_of_this_machine and find_process(self.pid) != self.process


def this_process(clock: Clock) -> Holder:
    """Return the holder of a lease of this process."""
    pid = os.getpid()
    return Holder(os.uname().nodename, pid, find_process(pid), LONGEST_BEAT_S, clock.now_ms())


class Held(Exception):
    """A living rival holds the lease; ``holder`` is None if its file cannot be understood, or if ours was removed."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(holder)
        self.holder = holder


@dataclass
class _Sight:
    """A rival lease, as it was at the first look, and for how long it has been silent."""

    text: str
    silent_s: float = 0.0


class Lease:
    """A lease, from the beginning to the end of a block; ``lost``: another process has taken it over.

    The beginning raises Held, and waits as long as it is not known whether another holder is alive.
    """

    def __init__(
        self, folder: Path, name: str, me: Holder, clock: Clock, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        self.lost = False
        self._folder = folder
        self._name = name
        self._me = me
        self._clock = clock
        self._while_waiting = while_waiting
        # The earlier holder has the smaller token; equal clocks do not matter.
        self._token = f"{me.since_ms:012x}{secrets.token_hex(4)}"
        self.path = folder / f".{name}-{self._token}"
        self._ended = threading.Event()
        self._beat_at_s = clock.monotonic_s()
        self._step_s = min(1.0, me.every_s / _LOOKS_PER_BEAT)

    # --- what the uses may decide

    def is_rival(self, name: str) -> bool:
        """Return whether only one of this lease and that one can be held."""
        return name == self._name

    def is_valid(self, holder: Holder) -> bool:
        """Return whether a process that this program has started can be this holder."""
        return True

    def replaces(self, holder: Holder) -> bool:
        """Return whether this holder has to give way to us, alive or not."""
        return False

    def describe(self, holder: Holder) -> str:
        """Return a holder's name in messages."""
        return f"process {holder.pid} on {holder.name}"

    def on_rival(self, holder: Holder | None, name: str) -> None:
        """Report a rival, once; ``name`` is its own or, if it is not known, that of its file."""

    # --- holding

    def __enter__(self) -> Lease:
        try:
            self._acquire()
        except BaseException:
            self.release()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()

    def wait(self) -> Lease:
        """Return the lease when it is our turn; the caller has to release it."""
        while True:
            try:
                return self.__enter__()
            except Held:
                # Our file is gone meanwhile: the next one in turn sees that it does not have to wait for us.
                self._clock.sleep(2 * self._step_s)
                self._ended.clear()
                self.lost = False

    def release(self) -> None:
        """Give the lease back."""
        self._ended.set()
        with suppress(OSError):
            self.path.unlink()

    def check(self) -> bool:
        """Return whether the lease is still ours; after a long time without a heartbeat, look first."""
        if self._clock.monotonic_s() - self._beat_at_s > 2 * self._me.every_s:
            self.beat()
        return not self.lost

    def beat(self) -> None:
        """Write the next heartbeat into our own file, never into that of another process."""
        self._me = replace(self._me, beat=self._me.beat + 1, beat_at_ms=self._clock.now_ms())
        began_s = self._clock.monotonic_s()
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.write(self._text())
        except OSError as error:
            self.lost = not self._ended.is_set() and error.errno in (errno.ENOENT, errno.ESTALE)
            log.debug("no heartbeat in %s: %s", self.path.name, error)
        self._beat_at_s = began_s  # last: until the file was found, another thread that checks looks itself

    # --- acquiring

    def _acquire(self) -> None:
        self.path.write_bytes(self._text())
        sights: dict[Path, _Sight] = {}
        while rivals := self._rivals():
            for path in rivals:
                self._look_at(path, sights)
            began_s = self._clock.monotonic_s()
            self._while_waiting()
            self._clock.sleep(self._step_s)
            # A look that hangs with its filesystem is one look: the holder may hang, too.
            passed_s = min(self._clock.monotonic_s() - began_s, 2 * self._step_s)
            for sight in sights.values():
                sight.silent_s += passed_s
            self.beat()
        self._me = replace(self._me, works=True)
        self.beat()
        threading.Thread(target=self._beat_on, name="lease", daemon=True).start()

    def _rivals(self) -> list[Path]:
        """Return the files of rival leases; their names are enough for that."""
        if self.lost:
            raise Held(None)
        rivals = []
        for file_name in sorted(os.listdir(self._folder)):  # noqa: PTH208 - names, not paths
            match = _FILE_NAME.fullmatch(file_name)
            if match and match[2] != self._token and self.is_rival(match[1]):
                rivals.append(self._folder / file_name)
        return rivals

    def _look_at(self, path: Path, sights: dict[Path, _Sight]) -> None:
        """Remove the lease of a rival that has ended; raise Held if the rival is alive and wins."""
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        try:
            text = read_small(path, _MOST_BYTES).decode(errors="replace")
        except OSError as error:  # of a holder that is alive, at least the time changes
            text = f"{error}, {status.st_mtime_ns}"
        holder = Holder.parse(text)
        if holder is not None and not self.is_valid(holder):
            holder = None
        name = path.name if holder is None else self.describe(holder)
        sight = sights.get(path) or _Sight(text)

        why = self._why_over(holder, is_ours=status.st_uid == os.geteuid())
        silence_s = _SILENT_BEATS * (self._me if holder is None else holder).every_s
        if why is None and text == sight.text and sight.silent_s >= silence_s:
            why = f"it is silent for {silence_s:g} s"
        if why is not None:
            log.info("taking over the work of %s: %s", name, why)
            path.unlink(missing_ok=True)
            return

        if path not in sights:
            sights[path] = sight
            self.on_rival(holder, name)
        elif text != sight.text:
            if holder is None or holder.works or path.name.rpartition("-")[2] < self._token:
                raise Held(holder)
            sights[path] = _Sight(text)  # it came later, and gives up when it sees us

    def _why_over(self, holder: Holder | None, *, is_ours: bool) -> str | None:
        """Return why a rival no longer counts; None: it may be alive."""
        if holder is None:
            return None
        if self.replaces(holder):
            return "Slurm has restarted it"
        if is_ours and holder.has_ended():  # some machines hide the processes of other users
            return "it has ended"
        return None

    def _text(self) -> bytes:
        return json.dumps(asdict(self._me)).ljust(_BYTES).encode()

    def _beat_on(self) -> None:
        while not (self.lost or self._ended.wait(self._me.every_s)):
            self.beat()


def find_holder(folder: Path, name: str, now_ms: int) -> Holder | None:
    """Return who seems to hold a lease, at one look; None: no process does.

    A holder on another machine counts as alive if its file has changed lately.
    """
    for path in folder.glob(f".{name}-*"):
        with suppress(OSError):
            changed_at_ms = path.lstat().st_mtime * 1000
            holder = Holder.parse(read_small(path, _MOST_BYTES).decode(errors="replace"))
            if holder is None:
                continue
            if holder.is_of_this_machine:
                is_alive = not holder.has_ended()
            else:
                is_alive = now_ms - changed_at_ms < 1000 * _SILENT_BEATS * LONGEST_BEAT_S
            if is_alive:
                return holder
    return None
