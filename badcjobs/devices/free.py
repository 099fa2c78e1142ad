"""Choose free devices on a machine without Slurm: lock the best, wait for them, or report why they are not free.

A lock is flock(2) on one file per device; all users of the machine share the locks. The kernel releases it when the run
and every process that got the open file (``DeviceLocks.files``) have ended, even after SIGKILL. The text in the file
(the holder) is valid only while it is locked. Files are never removed: a lock on a removed file would not keep other
runs away.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.devices.listing import DeviceNow, Listing, OpenedDevices, open_devices
from badcjobs.errors import NotHere
from badcjobs.locks import lock_within, try_lock, unlock
from badcjobs.model import StandIn, not_none
from badcjobs.paths import user_name
from badcjobs.seams import Clock, Environ
from badcjobs.words import count

_MOST_TEXT = 500
_GATE = "picking.lock"
_GATE_PATIENCE_S = 2.0
STAND_INS = ("simulated", "replay")  # backends whose devices are never locked: they exist in one run only

Choice = tuple[list[DeviceNow], list[DeviceNow]]  # the devices that were chosen, and those that cannot be had

# Other users can put anything into the folder: do not follow links, and do not block on a pipe.
# Child processes do not inherit a lock (O_CLOEXEC). Workers die with the wrapper, but a program may leave a daemon that
# does not use the GPU and would keep it locked for weeks. If it uses the GPU, the next run sees its memory and load.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


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


def describe_holder(pid: int, run: Path) -> str:
    """Return the text in a lock file: user, pid and run folder."""
    return f"run of {user_name(os.getuid())}, pid {pid}, {run}"


@dataclass(eq=False)
class DeviceLocks(AbstractContextManager["DeviceLocks"]):
    """The device locks of this run, held until ``release`` or the end of the process; others see the ``holder``."""

    folder: Path
    clock: Clock
    holder: str
    _held: list[int] = field(default_factory=list)  # the open files

    def claim(self, uuid: str) -> str | None:
        """Lock a device; return None, or why it cannot be locked (another run has it)."""
        try:
            file = self._open(re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock")
        except OSError as error:
            return f"cannot be locked: {error.strerror}"
        if not try_lock(file):
            why = _describe_lock(file)
            os.close(file)
            return why
        self._held.append(file)
        _write_text(file, self.holder)
        return None

    @property
    def files(self) -> tuple[int, ...]:
        """The open files of the locks: a process that inherits them keeps the devices locked if this one dies."""
        return tuple(self._held)

    def release(self) -> None:
        """Unlock all devices."""
        while self._held:
            file = self._held.pop()
            _write_text(file, "")
            unlock(file)
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other runs from choosing devices at the same time.

        Without it two runs that want all devices would each lock some and release them again. A run that hangs here
        must not block the machine: after 2 seconds we continue anyway.
        """
        gate = None
        with suppress(OSError):  # the device locks are enough for correctness
            gate = self._open(_GATE)
            lock_within(gate, _GATE_PATIENCE_S, self.clock.sleep)
        try:
            yield
        finally:
            if gate is not None:
                os.close(gate)

    def _open(self, name: str) -> int:
        """Open a lock file; create it, and its folder, if needed."""
        try:
            with suppress(FileExistsError):
                self.folder.mkdir()
                self.folder.chmod(0o1777)  # for any umask: all users can lock, only the owner can remove
            folder = os.open(self.folder, os.O_DIRECTORY | _SAFE_FLAGS)
        except OSError as error:
            raise NotHere(
                f"cannot use {self.folder} for device locks",
                why=error.strerror,
                fix="export BADCJOBS_LOCK_DIR=/a/folder   (the same for all users, on a disk of this machine)",
            ) from error
        try:
            file = _open_or_create(name, folder)
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(0, "not a regular file")
        return file


def _open_or_create(name: str, folder: int) -> int:
    # No O_CREAT for an existing file: in a sticky folder Linux then refuses files of other users, even if they are
    # writable (fs.protected_regular). Read access is enough for a lock.
    for access in (os.O_RDWR, os.O_RDONLY):
        with suppress(FileNotFoundError, PermissionError):
            return os.open(name, access | _SAFE_FLAGS, dir_fd=folder)
    file = os.open(name, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, dir_fd=folder)
    os.fchmod(file, 0o666)
    return file


def _write_text(file: int, text: str) -> None:
    with suppress(OSError):  # a file of another user may be read-only; the lock works without the text
        os.ftruncate(file, 0)
        os.pwrite(file, text.encode(errors="replace")[:_MOST_TEXT], 0)


def _describe_lock(file: int) -> str:
    """Return who has locked a file."""
    text = os.pread(file, _MOST_TEXT, 0).decode(errors="replace").strip()
    holder = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return f"is locked by {holder or 'another run'}"


# --- free devices ---------------------------------------------------------------------------------------------------

_BETWEEN_READINGS_S = 0.5
_PROGRESS_EVERY_S = 10.0
_NAP_S = 0.2  # the longest delay before a signal ends the wait


@dataclass(frozen=True)
class DeviceRequest:
    """The number of devices, and the limits of each; None: no limit."""

    count: int
    min_memory_mib: int | None
    max_utilization_percent: float | None
    wait_s: float
    check_every_s: float = 2.0


class NotFree(NotHere):
    """There are fewer free devices than requested."""


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
    """Lock the devices that ``badcjobs gpus --free`` shows, and list them, best first."""
    with open_devices(environ, waiting.clock, stand_in) as opened:
        picked, skipped = pick_free(request, opened, locks, waiting)
        why = f"{opened.grant.why}; the best {request.count} of {len(opened.grant.devices)} by --free"
        return Listing(tuple(picked), why, opened.reader.backend, opened.reader.why, tuple(skipped))


def pick_free(request: DeviceRequest, opened: OpenedDevices, locks: DeviceLocks, waiting: Waiting) -> Choice:
    """Lock and return the best of the granted devices, and those that were skipped; wait as the request allows.

    Raises NotFree if there are too few devices, or, with the reason for each device, if the time is over.
    """
    wanted = count(request.count, "free GPU")
    _refuse_hopeless(request, opened)
    progress_at_s = waiting.clock.monotonic_s()
    deadline_s = progress_at_s + request.wait_s
    while True:
        earlier = opened.now()
        waiting.sleep(_BETWEEN_READINGS_S)
        devices = [worse_of(first, second) for first, second in zip(earlier, opened.now(), strict=True)]
        picked, skipped = lock_best(devices, request, locks)
        if picked:
            return picked, skipped

        now_s = waiting.clock.monotonic_s()
        left_s = deadline_s - now_s
        reasons = [f"{_name(device)} {device.why}" for device in skipped]
        if left_s <= 0:
            what = f"{wanted} requested, {len(devices) - len(skipped)} found"
            fix = "the same command with --wait 600, or a smaller --free (run: --config run.wait_s=600, --max-gpus)"
            raise NotFree(what, why="\n".join(reasons), fix=fix)
        if now_s >= progress_at_s:
            progress_at_s = now_s + _PROGRESS_EVERY_S
            waiting.report(f"waiting for {wanted}: {'; '.join(reasons)}; {left_s:.0f} s left")
        waiting.sleep(min(request.check_every_s, left_s))


def _refuse_hopeless(request: DeviceRequest, opened: OpenedDevices) -> None:
    """Refuse more devices, or more memory, than there are: waiting cannot help."""
    devices = opened.grant.devices
    wanted = count(request.count, "free GPU")
    if len(devices) < request.count:
        fix = "badcjobs gpus --all"
        if devices:
            fix = f"the same command with --free {len(devices)} (run: --max-gpus {len(devices)})"
        why = "\n".join(filter(None, [opened.grant.why, opened.trouble]))
        raise NotFree(f"{wanted} requested, but this process may use {len(devices)}", why=why, fix=fix)
    totals = not_none(device.memory_total_bytes for device in devices)
    sizes_mib = sorted((total // 2**20 for total in totals), reverse=True)
    if len(sizes_mib) == len(devices) and sizes_mib[request.count - 1] < (request.min_memory_mib or 0):
        enough = sizes_mib[request.count - 1]
        raise NotFree(
            f"{wanted} with {request.min_memory_mib:,} MiB requested, but too few GPUs here are large enough",
            why="\n".join(f"a GPU here has {size:,} MiB in total" for size in dict.fromkeys(sizes_mib)),
            fix=f"the same command with --min-memory-mib {enough} (run: --config run.min_memory_mib={enough})",
        )


def lock_best(devices: Sequence[DeviceNow], request: DeviceRequest, locks: DeviceLocks) -> Choice:
    """Lock the best devices (none, if they are too few); return them, and with the reason those that cannot be had."""
    picked: list[DeviceNow] = []
    skipped: list[DeviceNow] = []
    best_first = sorted(devices, key=lambda device: (-(device.score or 0.0), device.index or 0))
    is_stand_in = devices[0].backend in STAND_INS
    with nullcontext() if is_stand_in else locks.exclusive():
        for device in best_first:
            why = why_not_free(device, request)
            if why is None and len(picked) < request.count and not is_stand_in:
                why = locks.claim(device.uuid or "")
            if why is not None:
                skipped.append(replace(device, why=why))
            elif len(picked) < request.count:
                choice = f"one of the {request.count} most free GPUs: score {device.score:.2f}"
                picked.append(replace(device, why=f"{device.why}; {choice}"))
        if len(picked) < request.count:
            locks.release()
            picked = []
    return picked, sorted(skipped, key=lambda device: device.index or 0)


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
    if busy_percent is None or free_bytes is None:
        return "has unknown utilization or free memory"
    if request.max_utilization_percent is not None and busy_percent > request.max_utilization_percent:
        return f"is {busy_percent} % busy"
    if request.min_memory_mib is not None and free_bytes < request.min_memory_mib * 2**20:
        return f"has {free_bytes // 2**20:,} MiB free"
    return None


def worse_of(first: DeviceNow, second: DeviceNow) -> DeviceNow:
    """Return the reading that shows the device less free, or none: one that is idle for a moment is not free."""
    return min(second, first, key=lambda device: -1.0 if device.score is None else device.score)
