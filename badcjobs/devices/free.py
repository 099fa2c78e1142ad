"""Choose free devices on a machine without Slurm: lock the best, wait for them, or report why they are not free.

A lock is flock(2) on one file per device; all users of the machine share the locks. The kernel releases it when the run
and every process that got the open file (``DeviceLocks.files``) have ended, even after SIGKILL. The text in the file
(the holder) is valid only while it is locked. Files are never removed: a lock on a removed file would not keep other
runs away.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.devices.listing import DeviceNow, Listing, OpenedDevices, open_devices, score_of
from badcjobs.errors import BadInput, NotHere
from badcjobs.locks import lock_within, try_lock, unlock
from badcjobs.model import StandIn
from badcjobs.paths import user_name
from badcjobs.seams import Clock, Environ

_MOST_TEXT = 500
Choice = tuple[list[DeviceNow], list[DeviceNow]]  # the devices that were chosen, and those that cannot be had
STAND_INS = ("simulated", "replay")  # backends whose devices are never locked: they exist in one run only

# Other users can put anything into the folder: do not follow links, and do not block on a pipe.
# Child processes do not inherit a lock (O_CLOEXEC). Workers die with the wrapper, but a program may leave a daemon that
# does not use the GPU and would keep it locked for weeks. If it uses the GPU, the next run sees its memory and load.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _open_file(folder: Path, name: str, *, create: bool) -> int | None:
    """Open a lock file; None: it does not exist, and ``create`` is false."""
    is_new = False
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir()
                is_new = True
        dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS)
        if is_new:
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
        fd = _open_in(dir_fd, name, create=create)
    except FileNotFoundError:
        return None
    finally:
        os.close(dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def _open_in(dir_fd: int, name: str, *, create: bool) -> int:
    if not create:
        return os.open(name, os.O_RDONLY | _SAFE_FLAGS, dir_fd=dir_fd)
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


def _write_text(fd: int, text: str) -> None:
    with suppress(OSError):  # a file of another user may be read-only; the lock works without the text
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace")[:_MOST_TEXT], 0)


def _describe_lock(file: int) -> str:
    """Return who has locked a file."""
    text = os.pread(file, _MOST_TEXT, 0).decode(errors="replace").strip()
    holder = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"is locked by {holder or 'another run'}"


_GATE = "picking.lock"
_GATE_PATIENCE_S = 2.0


def lock_folder(environ: Environ) -> Path:
    """Return the folder of the locks, the same for all users of this machine."""
    if environ.get("BADCJOBS_LOCK_DIR"):
        return Path(environ["BADCJOBS_LOCK_DIR"])
    system = Path("/run/lock")
    # Look at the mode instead of trying to write: root can write everywhere, and would use a folder that others do not.
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    if is_public:
        return system / "badcjobs"
    return Path("/tmp/badcjobs-locks")


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
        name = re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock"
        try:
            return self._look_at(name) if self._holder is None else self._take(name, self._holder)
        except OSError as error:
            purpose = "checked for a lock" if self._holder is None else "locked"
            return f"cannot be {purpose}: {error.strerror}"

    def _look_at(self, name: str) -> str | None:
        file = _open_file(self._folder, name, create=False)
        if file is None:
            return None
        try:
            return None if try_lock(file, shared=True) else _describe_lock(file)
        finally:
            os.close(file)

    def _take(self, name: str, holder: str) -> str | None:
        while True:
            file = _open_file(self._folder, name, create=True)
            assert file is not None
            if not try_lock(file):
                why = _describe_lock(file)
                os.close(file)
                return why
            if self._still_exists(file, name):
                self._held.append(file)
                _write_text(file, holder)
                return None
            os.close(file)

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
            unlock(fd)
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
            if fd is not None:
                lock_within(fd, _GATE_PATIENCE_S, self._clock.sleep)
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


class Waiting(NamedTuple):
    """How to wait: the clock, where to report progress, and a check that raises to end the wait."""

    clock: Clock
    report: Callable[[str], None]
    check: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Wait; an exception from ``check`` ends the wait early."""
        until_s = self.clock.monotonic_s() + seconds
        while True:
            self.check()
            left_s = until_s - self.clock.monotonic_s()
            if left_s <= 0:
                return
            self.clock.sleep(min(_NAP_S, left_s))


def list_free(
    environ: Environ, stand_in: StandIn, request: DeviceRequest, locks: DeviceLocks, waiting: Waiting
) -> Listing:
    """Return the devices that ``badcjobs gpus --free`` shows, best first."""
    with open_devices(environ, waiting.clock, stand_in) as opened:
        picked, skipped = pick_free(request, opened, locks, waiting)
        why = f"{opened.grant.why}; the best {request.count} of {len(opened.grant.devices)} by --free"
        return Listing(tuple(picked), why, opened.reader.backend, opened.reader.why, tuple(skipped))


def pick_free(request: DeviceRequest, opened: OpenedDevices, locks: DeviceLocks, waiting: Waiting) -> Choice:
    """Lock and return the best of the granted devices, and those that were skipped; wait as the request allows.

    Raises NotFree, with the reason for each device, if the time is over or waiting cannot help.
    """
    check_request(request)
    _raise_if_hopeless(request, opened)
    progress_at_s = waiting.clock.monotonic_s()
    deadline_s = progress_at_s + request.wait_s
    while True:
        earlier = opened.now()
        waiting.sleep(_BETWEEN_READINGS_S)
        devices = [worse_of(first, second) for first, second in zip(earlier, opened.now(), strict=True)]
        picked, skipped = lock_best(devices, request, locks)
        if picked:
            return [_explain_choice(device, request) for device in picked], skipped

        now_s = waiting.clock.monotonic_s()
        left_s = deadline_s - now_s
        reasons = [f"{_name(device)} {device.why}" for device in skipped]
        if left_s <= 0:
            what = f"{_gpus(request.count)} requested, not found"
            if request.wait_s:
                what += f" in {request.wait_s:.0f} s"
            fix = "the same command with --wait 600, or a smaller --free (run: --config run.wait_s=600, --max-gpus)"
            raise NotFree(what, opened, why="\n".join(reasons), fix=fix, skipped=skipped)
        if now_s >= progress_at_s:
            progress_at_s = now_s + _PROGRESS_EVERY_S
            waiting.report(f"waiting for {_gpus(request.count)}: {'; '.join(reasons)}; {left_s:.0f} s left")
        waiting.sleep(min(request.check_every_s, left_s))


def _explain_choice(device: DeviceNow, request: DeviceRequest) -> DeviceNow:
    choice = f"one of the {request.count} most free GPUs: score {device.score:.2f}"
    return replace(device, why=f"{device.why}; {choice}")


def check_request(request: DeviceRequest) -> None:
    """Refuse numbers that make no sense; the command line accepts nan and inf as numbers."""
    if request.count < 1:
        raise BadInput(
            f"--free {request.count} requests no device",
            why="--free N chooses the N devices that are most free, at least 1",
            fix="the same command with --free 1",
        )
    if not 0 <= request.wait_s < math.inf:
        raise BadInput(
            f"--wait {request.wait_s} is not a number of seconds",
            why="the wait must be finite",
            fix="--wait 3600   (1 hour)",
        )
    limit = request.max_utilization_percent
    if limit is not None and not 0 <= limit <= 100:
        raise BadInput(
            f"--max-utilization {limit:g} is not a percentage",
            why="a device is 0 to 100 % busy",
            fix="--max-utilization 10",
        )


def _raise_if_hopeless(request: DeviceRequest, opened: OpenedDevices) -> None:
    """Raise NeverFree if waiting cannot help: too few GPUs, or too few with enough memory."""
    granted = len(opened.grant.devices)
    if granted < request.count:
        fix = "badcjobs gpus --all"
        if granted:
            fix = f"the same command with --free {granted} (run: --max-gpus {granted})"
        raise NeverFree(
            f"{_gpus(request.count)} requested, but this process may use {granted}",
            opened,
            why="\n".join(filter(None, [opened.grant.why, opened.trouble])),
            fix=fix,
        )
    if request.min_memory_mib is None:
        return
    totals = [device.memory_total_bytes for device in opened.grant.devices]
    least_bytes = request.min_memory_mib * 2**20
    large = sum(total is None or total >= least_bytes for total in totals)  # unknown counts as enough
    if large >= request.count:
        return
    sizes_mib = sorted(((total or 0) // 2**20 for total in totals), reverse=True)
    possible_mib = sizes_mib[request.count - 1]
    memory = f"{request.min_memory_mib:,} MiB"
    if request.count > 1:
        memory += " each"
    raise NeverFree(
        f"{_gpus(request.count)} with {memory} requested, but {large} of {granted} GPUs are large enough",
        opened,
        why="\n".join(f"a GPU here has {size:,} MiB in total" for size in dict.fromkeys(sizes_mib)),
        fix=f"the same command with --min-memory-mib {possible_mib} or less"
        f" (run: --config run.min_memory_mib={possible_mib})",
    )


def lock_best(devices: Sequence[DeviceNow], request: DeviceRequest, locks: DeviceLocks) -> Choice:
    """Lock the best devices (none, if they are too few); return them, and with the reason those that cannot be had."""
    reasons = [why_not_free(device, request) for device in devices]
    picked: list[DeviceNow] = []
    best_first = sorted(
        range(len(devices)), key=lambda place: (-(devices[place].score or 0.0), devices[place].index or 0)
    )
    with locks.exclusive():
        for place in best_first:
            device = devices[place]
            if len(picked) == request.count:
                break
            if reasons[place] is None and device.backend not in STAND_INS:
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
    busy_percent = device.utilization_percent
    free_bytes = device.memory_free_bytes
    if busy_percent is None:
        return _unknown("utilization", device.missing.get("utilization_percent"))
    if free_bytes is None:
        return _unknown("free memory", device.missing.get("memory_used_bytes"))
    reasons = []
    if request.max_utilization_percent is not None and busy_percent > request.max_utilization_percent:
        reasons.append(f"is {busy_percent} % busy")
    if request.min_memory_mib is not None and free_bytes < request.min_memory_mib * 2**20:
        reasons.append(f"has {free_bytes // 2**20:,} MiB free")
    return " and ".join(reasons) or None


def _unknown(name: str, reason: str | None) -> str:
    if reason is None:
        return f"has unknown {name}"
    return f"has unknown {name}: {reason}"


def worse_of(first: DeviceNow, second: DeviceNow) -> DeviceNow:
    """Return the second reading with the worse values of both: a device that is idle for a moment is not free."""
    free_bytes = _worse(min, first.memory_free_bytes, second.memory_free_bytes)
    busy_percent = _worse(max, first.utilization_percent, second.utilization_percent)
    return replace(
        second,
        memory_free_bytes=free_bytes,
        utilization_percent=busy_percent,
        score=score_of(free_bytes, second.memory_total_bytes, busy_percent),
        trouble=second.trouble or first.trouble,
        missing={**first.missing, **second.missing},
    )


def _worse(choose: Callable[[int, int], int], first: int | None, second: int | None) -> int | None:
    if first is None or second is None:
        return None
    return choose(first, second)


def _gpus(count: int) -> str:
    return "1 free GPU" if count == 1 else f"{count} free GPUs"
