"""Choose free devices on a machine without Slurm: lock the best, wait for them, or report why they are not free.

A lock is flock(2) on one file per device; all users of the machine share the locks. The kernel releases it when the run
and every process that got the open file (``DeviceLocks.files``) have ended, even after SIGKILL. The text in the file
(the holder) is valid only while it is locked. Files are never removed: a lock on a removed file would not keep other
runs away.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.devices.listing import DeviceNow, Listing, OpenedDevices, open_devices, score_of
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import StandIn
from badcjobs.paths import user_name
from badcjobs.seams import Clock

_MOST_TEXT = 500
STAND_INS = ("simulated", "replay")  # backends whose devices are never locked: they exist in one run only

# Other users can put anything into the folder: do not follow links, and do not block on a pipe.
# Child processes do not inherit a lock (O_CLOEXEC). Workers die with the wrapper, but a program may leave a daemon that
# does not use the GPU and would keep it locked for weeks. If it uses the GPU, the next run sees its memory and load.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _open_file(folder: Path, name: str, *, create: bool) -> int | None:
    """Open a lock file; None: it does not exist, and ``create`` is false."""
    made = False
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir()
                made = True
        dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS)
        if made:
            os.fchmod(dir_fd, 0o1777)  # for any umask: all users can lock, only the owner can remove
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            return None
        raise NotHere(
            f"cannot use {folder} for device locks",
            why=error.strerror,
            fix="export BADCJOBS_LOCK_DIR=/a/folder   (the same for all users, on a disk of this machine)",
        ) from error
    try:
        fd = _open_or_create(name, dir_fd) if create else os.open(name, os.O_RDONLY | _SAFE_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    finally:
        os.close(dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def _open_or_create(name: str, dir_fd: int) -> int:
    # No O_CREAT for an existing file: in a sticky folder Linux then refuses files of other users, even if they are
    # writable (fs.protected_regular).
    while True:
        try:
            return os.open(name, os.O_RDWR | _SAFE_FLAGS, dir_fd=dir_fd)
        except PermissionError:
            return os.open(name, os.O_RDONLY | _SAFE_FLAGS, dir_fd=dir_fd)  # read access is enough for a lock
        except FileNotFoundError:
            pass
        with suppress(FileExistsError):  # another run created it first
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o666, dir_fd=dir_fd)
            os.fchmod(fd, 0o666)
            return fd


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file; return False if another process has the lock."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_text(fd: int, text: str) -> None:
    with suppress(OSError):  # a file of another user may be read-only; the lock works without the text
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace")[:_MOST_TEXT], 0)


_GATE = "picking.lock"
_GATE_TRIES, _GATE_REST_S = 100, 0.02


def lock_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the locks, the same for all users of this machine."""
    if environ.get("BADCJOBS_LOCK_DIR"):
        return Path(environ["BADCJOBS_LOCK_DIR"])
    system = Path("/run/lock")
    # Look at the mode instead of trying to write: root can write everywhere, and would use a folder that others do not.
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    return system / "badcjobs" if is_public else Path("/tmp/badcjobs-locks")


class DeviceLocks(AbstractContextManager["DeviceLocks"]):
    """The device locks of this run, held until ``release`` or the end of the process.

    ``holder`` is the text that other runs show; None: only look at the locks of others, and create no file.
    """

    def __init__(self, folder: Path, clock: Clock, holder: str | None) -> None:
        self._folder = folder
        self._clock = clock
        self._holder = holder
        self._held: list[int] = []

    def claim(self, uuid: str) -> str | None:
        """Lock a device; return None, or why it cannot be locked (another run has it)."""
        name, takes = re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock", self._holder is not None
        try:
            while (fd := _open_file(self._folder, name, create=takes)) is not None:
                if not _lock(fd, fcntl.LOCK_EX if takes else fcntl.LOCK_SH):
                    text = os.pread(fd, _MOST_TEXT, 0).decode(errors="replace").strip()
                    os.close(fd)
                    who = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
                    return f"is locked by {who or 'another run'}"
                if self._holder is not None and self._still_exists(fd, name):
                    self._held.append(fd)
                    _write_text(fd, self._holder)
                    break
                os.close(fd)
                if not takes:
                    break
        except OSError as error:
            return f"cannot be {'locked' if takes else 'checked for a lock'}: {error.strerror}"
        return None

    def _still_exists(self, fd: int, name: str) -> bool:
        """Return whether the open file still has its name: a cleanup may have removed it."""
        try:
            return os.path.samestat(os.fstat(fd), (self._folder / name).lstat())
        except FileNotFoundError:
            return False

    @property
    def files(self) -> tuple[int, ...]:
        """The open files of the locks: a process that inherits them keeps the devices locked if this one dies."""
        return tuple(self._held)

    def release(self) -> None:
        """Unlock all devices."""
        while self._held:
            fd = self._held.pop()
            _write_text(fd, "")
            fcntl.flock(fd, fcntl.LOCK_UN)  # immediately, even if another process has the same open file
            os.close(fd)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other runs from choosing devices at the same time.

        Without it two runs that want all devices would each lock some and release them again, and the check of a lock
        would look like a lock. A run that hangs here must not block the machine: after 2 seconds we continue anyway.
        """
        try:
            fd = _open_file(self._folder, _GATE, create=self._holder is not None)
        except OSError:
            fd = None  # the device locks are enough for correctness
        try:
            for _ in range(_GATE_TRIES):
                if fd is None or _lock(fd, fcntl.LOCK_EX):
                    break
                self._clock.sleep(_GATE_REST_S)
            yield
        finally:
            if fd is not None:
                os.close(fd)

    def __exit__(self, *_: object) -> None:
        self.release()


def describe_holder(pid: int, run: Path) -> str:
    """Return the text in a lock file: user, pid and run folder."""
    return f"run of {user_name(os.getuid())}, pid {pid}, {run}"


# --- free devices ---------------------------------------------------------------------------------------------------

_BETWEEN_READINGS_S = 0.5
_PROGRESS_EVERY_S = 10.0
_NAP_S = 0.2  # the longest delay before a signal ends the wait


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The number of devices, and the limits of each; None: no limit."""

    count: int
    min_memory_mib: int | None = None
    max_utilization_percent: float | None = None
    wait_s: float = 0.0
    check_every_s: float = 2.0


class NotFree(NotHere):
    """There are fewer free devices than requested; ``listing`` is the same as a list without devices."""

    def __init__(
        self, what: str, opened: OpenedDevices, *, why: str, fix: str, skipped: Sequence[DeviceNow] = ()
    ) -> None:
        super().__init__(what, why=why, fix=fix)
        self.listing = Listing((), f"{what}\n{why}", opened.reader.backend, opened.reader.why, tuple(skipped))


class NeverFree(NotFree):
    """Waiting cannot help: too few devices, or too few with enough memory."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait: the clock, where to report progress, and a check that raises to end the wait."""

    clock: Clock
    report: Callable[[str], None]
    check: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Wait; an exception from ``check`` ends the wait early."""
        until_s = self.clock.monotonic_s() + seconds
        while (left_s := until_s - self.clock.monotonic_s()) > 0:
            self.check()
            self.clock.sleep(min(_NAP_S, left_s))
        self.check()


def list_free(
    environ: Mapping[str, str], stand_in: StandIn, request: DeviceRequest, locks: DeviceLocks, waiting: Waiting
) -> Listing:
    """Return the devices that ``badcjobs gpus --free`` shows, best first."""
    with open_devices(environ, waiting.clock, stand_in) as opened:
        picked, skipped = pick_free(request, opened, locks, waiting)
        why = f"{opened.grant.why}; the best {request.count} of {len(opened.grant.devices)} by --free"
        return Listing(tuple(picked), why, opened.reader.backend, opened.reader.why, tuple(skipped))


def pick_free(
    request: DeviceRequest, opened: OpenedDevices, locks: DeviceLocks, waiting: Waiting
) -> tuple[list[DeviceNow], list[DeviceNow]]:
    """Lock and return the best of the granted devices, and those that were skipped; wait as the request allows.

    Raises NotFree, with the reason for each device, if the time is over or waiting cannot help.
    """
    check_request(request)
    _raise_if_hopeless(request, opened)
    deadline_s, progress_at_s = waiting.clock.monotonic_s() + request.wait_s, waiting.clock.monotonic_s()
    while True:
        earlier = opened.now()
        waiting.sleep(_BETWEEN_READINGS_S)
        twice = [worse_of(one, other) for one, other in zip(earlier, opened.now(), strict=True)]
        picked, skipped = lock_best(twice, request, locks)
        refused = [f"{_name(device)} {device.why}" for device in skipped]
        if picked:
            words = f"one of the {request.count} most free GPUs: score"
            return [replace(device, why=f"{device.why}; {words} {device.score:.2f}") for device in picked], skipped
        left_s = deadline_s - waiting.clock.monotonic_s()
        if left_s <= 0:
            waited = f" in {request.wait_s:.0f} s" if request.wait_s else ""
            raise NotFree(
                f"{_gpus(request.count)} requested, not found{waited}",
                opened,
                why="\n".join(refused),
                fix="the same command with --wait 600, or a smaller --free (run: --config run.wait_s=600, --max-gpus)",
                skipped=skipped,
            )
        if waiting.clock.monotonic_s() >= progress_at_s:
            progress_at_s = waiting.clock.monotonic_s() + _PROGRESS_EVERY_S
            waiting.report(f"waiting for {_gpus(request.count)}: {'; '.join(refused)}; {left_s:.0f} s left")
        waiting.sleep(min(request.check_every_s, left_s))


def check_request(request: DeviceRequest) -> None:
    """Refuse numbers that make no sense; the command line accepts nan and inf as numbers."""
    count, wait_s, limit = request.count, request.wait_s, request.max_utilization_percent
    if count < 1:
        why = "--free N chooses the N devices that are most free, at least 1"
        raise BadInput(f"--free {count} requests no device", why=why, fix="the same command with --free 1")
    if not 0 <= wait_s < math.inf:
        fix = "--wait 3600   (1 hour)"
        raise BadInput(f"--wait {wait_s} is not a number of seconds", why="the wait must be finite", fix=fix)
    if limit is not None and not 0 <= limit <= 100:
        what, fix = f"--max-utilization {limit:g} is not a percentage", "--max-utilization 10"
        raise BadInput(what, why="a device is 0 to 100 % busy", fix=fix)


def _raise_if_hopeless(request: DeviceRequest, opened: OpenedDevices) -> None:
    """Raise NeverFree if waiting cannot help: too few GPUs, or too few with enough memory."""
    many = len(opened.grant.devices)
    if many < request.count:
        raise NeverFree(
            f"{_gpus(request.count)} requested, but this process may use {many}",
            opened,
            why="\n".join(filter(None, [opened.grant.why, opened.trouble])),
            fix=f"the same command with --free {many} (run: --max-gpus {many})" if many else "badcjobs gpus --all",
        )
    totals = [device.memory_total_bytes for device in opened.grant.devices]
    wanted_bytes = (request.min_memory_mib or 0) * 2**20
    big = sum(total is None or total >= wanted_bytes for total in totals)  # unknown counts as enough
    if big < request.count:
        sizes_mib = sorted(((total or 0) // 2**20 for total in totals), reverse=True)
        enough = sizes_mib[request.count - 1]
        memory = f"{request.min_memory_mib:,} MiB{' each' if request.count > 1 else ''}"
        raise NeverFree(
            f"{_gpus(request.count)} with {memory} requested, but {big} of {many} GPUs are large enough",
            opened,
            why="\n".join(f"a GPU here has {size:,} MiB in total" for size in dict.fromkeys(sizes_mib)),
            fix=f"the same command with --min-memory-mib {enough} or less (run: --config run.min_memory_mib={enough})",
        )


def lock_best(
    devices: Sequence[DeviceNow], request: DeviceRequest, locks: DeviceLocks
) -> tuple[list[DeviceNow], list[DeviceNow]]:
    """Lock the best devices (none, if they are too few); return them, and with the reason those that cannot be had."""
    reasons = [why_not_free(device, request) for device in devices]
    picked: list[DeviceNow] = []
    with locks.exclusive():
        best_first = sorted(enumerate(devices), key=lambda one: (-(one[1].score or 0.0), one[1].index or 0))
        for place, device in best_first:
            if len(picked) < request.count and reasons[place] is None:
                if device.backend not in STAND_INS:
                    reasons[place] = locks.claim(device.uuid or "")
                if reasons[place] is None:
                    picked.append(device)
        if len(picked) < request.count:
            locks.release()
            picked = []
    skipped = [replace(device, why=why) for device, why in zip(devices, reasons, strict=True) if why is not None]
    return picked, skipped


def _name(device: DeviceNow) -> str:
    if device.index is not None and device.parent_uuid is None:
        return f"GPU {device.index}"
    return device.uuid or str(device.token)


def why_not_free(device: DeviceNow, request: DeviceRequest) -> str | None:
    """Return why a device is not free enough; None: it is. A device with unknown values is not free."""
    if device.trouble is not None:
        return f"cannot be read: {device.trouble}"
    busy, free_bytes = device.utilization_percent, device.memory_free_bytes
    if busy is None or free_bytes is None:
        metric, name = ("utilization_percent", "utilization") if busy is None else ("memory_used_bytes", "free memory")
        return f"has unknown {name}" + (f": {device.missing[metric]}" if metric in device.missing else "")
    reasons = []
    if request.max_utilization_percent is not None and busy > request.max_utilization_percent:
        reasons.append(f"is {busy} % busy")
    if request.min_memory_mib is not None and free_bytes < request.min_memory_mib * 2**20:
        reasons.append(f"has {free_bytes // 2**20:,} MiB free")
    return " and ".join(reasons) or None


def worse_of(one: DeviceNow, other: DeviceNow) -> DeviceNow:
    """Return the later reading with the worse values of both: a device that is idle for a moment is not free."""
    free = _worse(one.memory_free_bytes, other.memory_free_bytes, min)
    busy = _worse(one.utilization_percent, other.utilization_percent, max)
    return replace(
        other,
        memory_free_bytes=free,
        utilization_percent=busy,
        score=score_of(free, other.memory_total_bytes, busy),
        trouble=other.trouble or one.trouble,
        missing={**one.missing, **other.missing},
    )


def _worse(one: int | None, other: int | None, which: Callable[[int, int], int]) -> int | None:
    return None if one is None or other is None else which(one, other)


def _gpus(many: int) -> str:
    return f"{many} free GPU" + ("" if many == 1 else "s")
