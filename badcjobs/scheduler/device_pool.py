"""The devices of this machine, lent to emulated tasks: none is lent twice unless that is wished for.

Other runs of this machine respect the same locks (``run --free``, another emulation); who keeps them comes in as an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from badcjobs.errors import NotHere
from badcjobs.model import Device


class Locks(Protocol):
    """Locks that are given back together."""

    def claim(self, uuid: str) -> str | None:
        """Return None when the device is now ours, else who has it."""
        ...

    def release(self) -> None: ...

    def alone(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class KernelLocks(Protocol):
    """Locks that another process can keep when this one is killed."""

    @property
    def files(self) -> tuple[int, ...]:
        """The open files that hold them."""
        ...


@dataclass(slots=True)
class _Place:
    """One device of the pool, and who has it."""

    device: Device
    users: int = 0
    locks: Locks | None = None


class DevicePool:
    """Lends devices, the least used first; says who has those that cannot be had."""

    def __init__(self, devices: Sequence[Device], new_locks: Callable[[], Locks], *, share: bool = False) -> None:
        self._places = [_Place(device) for device in devices]
        self._new_locks = new_locks
        self.share = share
        self.refusals: tuple[str, ...] = ()  # of the last try to take some: who of other runs has which

    def __len__(self) -> int:
        return len(self._places)

    @property
    def devices(self) -> list[Device]:
        """All there are, lent or not."""
        return [place.device for place in self._places]

    @property
    def lock_files(self) -> tuple[int, ...]:
        """The open files that hold the locks of all that is lent."""
        kept: Iterable[object] = [place.locks for place in self._places]
        return tuple(file for locks in kept if isinstance(locks, KernelLocks) for file in locks.files)

    def check(self, count: int, why: str) -> None:
        """Refuse what this pool can never lend; ``why`` says where the pool is from."""
        if count > len(self):
            fewer = f"--gpus-per-task {len(self)} (with --script: --sbatch=--gpus-per-node={len(self)})"
            if not len(self):
                fewer = "--gpus-per-task 0 --cpu-workers 2 (with --script: write --cpu-workers 2 into it)"
            raise NotHere(
                f"each task asks for {count} GPU{'s' * (count > 1)}, but this machine has {len(self) or 'none'}",
                why=why,
                fix=f"the same command with {fewer}, or --simulate {count} to try it out",
            )

    def take(self, count: int) -> tuple[Device, ...] | None:
        """Lend so many devices; None: not now."""
        fit = [place for place in self._places if self.share or not place.users]
        self.refusals = ()
        if count == 0 or len(fit) < count:
            return None if count else ()
        with self._new_locks().alone():  # else two who want all devices would each get some
            chosen = self._lock_first(count, sorted(fit, key=lambda place: place.users))
        if len(chosen) < count:
            self.give_back(chosen)
            return None
        return tuple(sorted(chosen, key=lambda device: device.index or 0))

    def give_back(self, devices: Iterable[Device]) -> None:
        """Take devices back; the last user of one unlocks it."""
        for device in devices:
            place = next(place for place in self._places if place.device == device)
            place.users -= 1
            if place.users == 0 and place.locks is not None:
                place.locks.release()
                place.locks = None

    def _lock_first(self, count: int, places: Sequence[_Place]) -> list[Device]:
        chosen: list[Device] = []
        for place in places:
            holder = None if len(chosen) == count else self._lock(place)
            if holder is not None:
                self.refusals += (f"GPU {place.device.index} {holder}",)
            elif len(chosen) < count:
                place.users += 1
                chosen.append(place.device)
        return chosen

    def _lock(self, place: _Place) -> str | None:
        """Return None when the device is ours, else which other run has it."""
        if place.users or place.device.uuid is None:
            return None
        locks = self._new_locks()
        holder = locks.claim(place.device.uuid)
        if holder is None:
            place.locks = locks
        return holder


def visible_lists(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that show these devices alone; for none, that hide all."""
    if not devices:
        # HIP takes an empty CUDA_VISIBLE_DEVICES for none and shows everything; ROCR does as it is told.
        return {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    if devices[0].vendor == "amd":
        return {"ROCR_VISIBLE_DEVICES": ",".join(device.pin for device in devices)}
    tokens = [device.token for device in devices]
    if not all(token.isdecimal() for token in tokens):  # a list holds numbers or UUIDs, never both
        tokens = [device.pin for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(tokens), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
