"""Choose free devices on a machine without Slurm: lock the best, wait for them, or report why they are not free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from badcjobs.devices.listing import DeviceNow, Listing, OpenedDevices, open_devices, score_of
from badcjobs.devices.locks import DeviceLocks
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import StandIn
from badcjobs.seams import Clock

_BETWEEN_READINGS_S = 0.5
_POLL_S = 2.0
_PROGRESS_EVERY_S = 10.0
_NAP_S = 0.2  # the longest delay before a signal ends the wait


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """The number of devices, and the limits of each; None: no limit."""

    count: int
    min_memory_mib: int | None = None
    max_utilization_percent: float | None = None
    wait_s: float = 0.0


class NotFree(NotHere):
    """There are fewer free devices than requested; ``backend`` is the reader of the devices."""

    def __init__(self, what: str, opened: OpenedDevices, *, why: str, fix: str) -> None:
        super().__init__(what, why=why, fix=fix)
        self.backend, self.backend_why = opened.backend, opened.backend_why


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
        picked = pick_free(request, opened, locks, waiting)
        why = f"{opened.grant.why}; the best {request.count} of {len(opened.grant.devices)} by --free"
        return Listing(tuple(picked), why, opened.reader.backend, opened.backend_why)


def pick_free(request: DeviceRequest, opened: OpenedDevices, locks: DeviceLocks, waiting: Waiting) -> list[DeviceNow]:
    """Lock and return the best of the granted devices; wait for them as long as the request allows.

    Raises NotFree, with the reason for each device, if the time is over or waiting cannot help.
    """
    check_request(request)
    _raise_if_hopeless(request, opened)
    deadline_s, progress_at_s = waiting.clock.monotonic_s() + request.wait_s, waiting.clock.monotonic_s()
    while True:
        earlier = opened.now()
        waiting.sleep(_BETWEEN_READINGS_S)
        twice = [worse_of(one, other) for one, other in zip(earlier, opened.now(), strict=True)]
        picked, refused = lock_best(twice, request, locks)
        if picked:
            words = f"one of the {request.count} most free GPUs: score"
            return [replace(device, why=f"{device.why}; {words} {device.score:.2f}") for device in picked]
        left_s = deadline_s - waiting.clock.monotonic_s()
        if left_s <= 0:
            waited = f" in {request.wait_s:.0f} s" if request.wait_s else ""
            raise NotFree(
                f"{_gpus(request.count)} requested, not found{waited}",
                opened,
                why="\n".join(refused),
                fix="the same command with --wait 600, or a smaller --free (run: --config run.wait_s=600, --max-gpus)",
            )
        if waiting.clock.monotonic_s() >= progress_at_s:
            progress_at_s = waiting.clock.monotonic_s() + _PROGRESS_EVERY_S
            waiting.report(f"waiting for {_gpus(request.count)}: {'; '.join(refused)}; {left_s:.0f} s left")
        waiting.sleep(min(_POLL_S, left_s))


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
    """Raise NotFree if waiting cannot help: too few GPUs, or too few with enough memory."""
    many = len(opened.grant.devices)
    if many < request.count:
        raise NotFree(
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
        raise NotFree(
            f"{_gpus(request.count)} with {memory} requested, but {big} of {many} GPUs are large enough",
            opened,
            why="\n".join(f"a GPU here has {size:,} MiB in total" for size in dict.fromkeys(sizes_mib)),
            fix=f"the same command with --min-memory-mib {enough} or less (run: --config run.min_memory_mib={enough})",
        )


def lock_best(
    devices: Sequence[DeviceNow], request: DeviceRequest, locks: DeviceLocks
) -> tuple[list[DeviceNow], list[str]]:
    """Lock the best devices and return them; if they are too few, lock none and return the reason for each device."""
    reasons = [why_not_free(device, request) for device in devices]
    picked: list[DeviceNow] = []
    with locks.exclusive():
        best_first = sorted(enumerate(devices), key=lambda one: (-(one[1].score or 0.0), one[1].index or 0))
        for place, device in best_first:
            if len(picked) < request.count and reasons[place] is None:
                reasons[place] = locks.claim(device.uuid or "")
                if reasons[place] is None:
                    picked.append(device)
        if len(picked) == request.count:
            return picked, []
        locks.release()
    refused = []
    for device, reason in zip(devices, reasons, strict=True):
        by_index = device.index is not None and device.parent_uuid is None
        if reason is not None:
            refused.append(f"{f'GPU {device.index}' if by_index else device.uuid or device.token} {reason}")
    return [], refused


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
