"""Picks free devices where no Slurm shares them out: judges, claims the best ones, waits for them, or says why not."""

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
_TELL_EVERY_S = 10.0
_NAP_S = 0.2  # a signal while we wait is obeyed so soon


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """How many devices, and what each must have; None: no limit."""

    count: int
    min_memory_mib: int | None = None
    max_utilization_percent: float | None = None
    wait_s: float = 0.0


class NotFree(NotHere):
    """Not so many devices as were wished for; knows what reads those that there are."""

    def __init__(self, what: str, opened: OpenedDevices, *, why: str, fix: str) -> None:
        super().__init__(what, why=why, fix=fix)
        self.backend, self.backend_why = opened.backend, opened.backend_why


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait: the time, whom to tell, and whether to go on (it raises when not)."""

    clock: Clock
    tell: Callable[[str], None]
    go_on: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        """Wait, and end early with whatever ``go_on`` raises."""
        until_s = self.clock.monotonic_s() + seconds
        while (left_s := until_s - self.clock.monotonic_s()) > 0:
            self.go_on()
            self.clock.sleep(min(_NAP_S, left_s))
        self.go_on()


def list_free(
    environ: Mapping[str, str],
    stand_in: StandIn,
    wish: DeviceWish,
    claims: DeviceLocks,
    how: Waiting,
) -> Listing:
    """Return the devices that ``badcjobs gpus --free`` shows, best first."""
    with open_devices(environ, how.clock, stand_in) as opened:
        picked = pick_free(wish, opened, claims, how)
        why = f"{opened.grant.why}; the best {wish.count} of {len(opened.grant.devices)} by --free"
        return Listing(tuple(picked), why, opened.reader.backend, opened.backend_why)


def pick_free(wish: DeviceWish, opened: OpenedDevices, claims: DeviceLocks, how: Waiting) -> list[DeviceNow]:
    """Return the best devices of those that are ours, claimed; wait for them as long as the wish says.

    Raises NotFree, with the reason for each device, when the time is over or waiting cannot help.
    """
    check_wish(wish)
    _raise_if_hopeless(wish, opened)
    deadline_s, tell_at_s = how.clock.monotonic_s() + wish.wait_s, how.clock.monotonic_s()
    while True:
        earlier = opened.now()
        how.sleep(_BETWEEN_READINGS_S)
        twice = [worse_of(one, other) for one, other in zip(earlier, opened.now(), strict=True)]
        picked, refused = choose(twice, wish, claims)
        if picked:
            words = f"picked by --free {wish.count}: score"
            return [replace(device, why=f"{device.why}; {words} {device.score:.2f}") for device in picked]
        left_s = deadline_s - how.clock.monotonic_s()
        if left_s <= 0:
            waited = f" in {wish.wait_s:.0f} s" if wish.wait_s else ""
            raise NotFree(
                f"{_gpus(wish.count)} wanted, not found{waited}",
                opened,
                why="\n".join(refused),
                fix="the same command with --wait 600 (badcjobs run: --config run.wait_s=600), or a smaller --free",
            )
        if how.clock.monotonic_s() >= tell_at_s:
            tell_at_s = how.clock.monotonic_s() + _TELL_EVERY_S
            how.tell(f"waiting for {_gpus(wish.count)}: {'; '.join(refused)}; {left_s:.0f} s left")
        how.sleep(min(_POLL_S, left_s))


def check_wish(wish: DeviceWish) -> None:
    """Refuse numbers with which nobody can judge or wait; what a command line takes may be no number at all."""
    if wish.count < 1:
        raise BadInput(
            f"--free {wish.count} asks for no device",
            why="--free N picks the N devices that are most free, at least one",
            fix="the same command with --free 1",
        )
    if not 0 <= wish.wait_s < math.inf:
        raise BadInput(
            f"--wait {wish.wait_s} is no number of seconds", why="waiting has to end", fix="--wait 3600   (an hour)"
        )
    limit = wish.max_utilization_percent
    if limit is not None and not 0 <= limit <= 100:
        raise BadInput(
            f"--max-utilization {limit:g} is no share", why="a device is 0 to 100 % busy", fix="--max-utilization 10"
        )


def _raise_if_hopeless(wish: DeviceWish, opened: OpenedDevices) -> None:
    """Raise NotFree where waiting can never help: too few cards, or too few that are big enough."""
    many = len(opened.grant.devices)
    if many < wish.count:
        raise NotFree(
            f"{_gpus(wish.count)} wanted, but this process may use {many or 'none'}",
            opened,
            why="\n".join(filter(None, [opened.grant.why, opened.trouble])),
            fix=f"the same command with --free {many}" if many else "badcjobs gpus --all",
        )
    totals = [device.memory_total_bytes for device in opened.grant.devices]
    wanted_bytes = (wish.min_memory_mib or 0) * 2**20
    big = sum(total is None or total >= wanted_bytes for total in totals)  # one that does not say may be
    if big < wish.count:
        sizes_mib = sorted(((total or 0) // 2**20 for total in totals), reverse=True)
        each = " each" if wish.count > 1 else ""
        raise NotFree(
            f"{_gpus(wish.count)} with {wish.min_memory_mib:,} MiB{each} wanted, but {big or 'none'} is that big",
            opened,
            why="\n".join(f"a card here has {size:,} MiB in all" for size in dict.fromkeys(sizes_mib)),
            fix=f"the same command with --min-memory-mib {sizes_mib[wish.count - 1]} or less",
        )


def choose(devices: Sequence[DeviceNow], wish: DeviceWish, claims: DeviceLocks) -> tuple[list[DeviceNow], list[str]]:
    """Claim the best devices; return them, or none and the reason for each that cannot be had."""
    reasons = [why_not_free(device, wish) for device in devices]
    picked: list[DeviceNow] = []
    with claims.alone():
        best_first = sorted(enumerate(devices), key=lambda one: (-(one[1].score or 0.0), one[1].index or 0))
        for place, device in best_first:
            if len(picked) < wish.count and reasons[place] is None:
                reasons[place] = claims.claim(device.uuid or "")
                if reasons[place] is None:
                    picked.append(device)
        if len(picked) == wish.count:
            return picked, []
        claims.release()
    refused = []
    for device, reason in zip(devices, reasons, strict=True):
        by_index = device.index is not None and device.parent_uuid is None
        if reason is not None:
            refused.append(f"{f'GPU {device.index}' if by_index else device.uuid or device.token} {reason}")
    return [], refused


def why_not_free(device: DeviceNow, wish: DeviceWish) -> str | None:
    """Return why a device is not free enough; None: it is. What is not known is not free."""
    if device.trouble is not None:
        return f"gives no reading: {device.trouble}"
    busy, free_bytes = device.utilization_percent, device.memory_free_bytes
    if busy is None or free_bytes is None:
        metric, name = ("utilization_percent", "utilization") if busy is None else ("memory_used_bytes", "free memory")
        return f"its {name} is unknown" + (f": {device.missing[metric]}" if metric in device.missing else "")
    reasons = []
    if wish.max_utilization_percent is not None and busy > wish.max_utilization_percent:
        reasons.append(f"{busy} % busy")
    if wish.min_memory_mib is not None and free_bytes < wish.min_memory_mib * 2**20:
        reasons.append(f"{free_bytes // 2**20:,} MiB free")
    return " and ".join(reasons) or None


def worse_of(one: DeviceNow, other: DeviceNow) -> DeviceNow:
    """Return the later reading, made as bad as the worse of both: a moment without work is no free device."""
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
