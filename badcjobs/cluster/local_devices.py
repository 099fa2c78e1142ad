"""The devices of this machine, lent to emulated tasks: none is lent twice unless tasks share them.

Other runs of this machine respect the same locks (``run --free``, another emulation).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from badcjobs.devices.allocation import parse_allocation
from badcjobs.devices.listing import open_devices
from badcjobs.devices.locks import DeviceLocks, holder_words, lock_folder
from badcjobs.errors import NotHere
from badcjobs.model import Device, StandIn
from badcjobs.task.startup import World


@dataclass(slots=True)
class _Place:
    """One device of the pool, and who has it."""

    device: Device
    users: int = 0
    locks: DeviceLocks | None = None


class DevicePool:
    """Lends devices, the least used first; says who has those that cannot be had.

    Without ``new_locks`` they are nobody's but ours, and no other run is kept off them.
    """

    def __init__(
        self, devices: Sequence[Device], new_locks: Callable[[], DeviceLocks] | None = None, *, share: bool = False
    ) -> None:
        self._places = [_Place(device) for device in devices]
        self._new_locks = new_locks
        self.share = share
        self.refusals: tuple[str, ...] = ()  # of the last try to take some: who of other runs has which

    def __len__(self) -> int:
        return len(self._places)

    @property
    def lock_files(self) -> tuple[int, ...]:
        """The open files that hold the locks of all that is lent."""
        return tuple(file for place in self._places if place.locks is not None for file in place.locks.files)

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
        with nullcontext() if self._new_locks is None else self._new_locks().alone():  # else two would each get some
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
            if len(chosen) == count:
                break
            if not place.users and place.device.uuid is not None and self._new_locks is not None:
                locks = self._new_locks()
                holder = locks.claim(place.device.uuid)
                if holder is not None:
                    self.refusals += (f"GPU {place.device.index} {holder}",)
                    continue
                place.locks = locks
            place.users += 1
            chosen.append(place.device)
        return chosen


def open_pool(count: int, stand_in: StandIn, world: World, run: Path, *, share: bool, lock: bool) -> DevicePool:
    """Return the devices that this process may use, for tasks that ask for ``count`` each."""
    if count == 0:
        return DevicePool((), share=share)
    in_job = parse_allocation(world.environ, hostname="", pid=0, started_at_ms=0).in_slurm
    with open_devices(world.environ, world.clock, stand_in, in_slurm=in_job) as sight:
        devices, why = sight.grant.devices, "\n".join(filter(None, [sight.grant.why, sight.trouble]))
    folder = lock_folder(world.environ)
    if in_job:  # other jobs are kept off its devices by the scheduler that granted them
        parent = Path(world.environ.get("TMPDIR") or tempfile.gettempdir())
        folder = parent / f"badcjobs-locks-{world.environ.get('SLURM_JOB_ID', 'job')}"
        if private := world.environ.get("SLURM_TMPDIR"):
            folder = Path(private) / "badcjobs-locks"

    def new_locks() -> DeviceLocks:
        return DeviceLocks(folder, world.clock, holder_words(world.pid, run))

    pool = DevicePool(devices, new_locks if lock else None, share=share)
    pool.check(count, why)
    return pool


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
