"""Assign the devices of this machine to the tasks of an emulated array."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from badcjobs.devices.allocation import is_in_slurm, local_folder, own_job_id
from badcjobs.devices.free import STAND_INS, DeviceLocks, describe_holder, lock_folder
from badcjobs.devices.listing import open_devices
from badcjobs.errors import NotHere
from badcjobs.model import Device, StandIn
from badcjobs.task.startup import World
from badcjobs.words import count as count_of


@dataclass
class DevicePool:
    """Assigns the devices of this machine to tasks, the least used first; tasks share a device only with ``share``.

    Other runs on this machine (``run --max-gpus``, another emulation) respect the same locks; ``refusals`` names their
    holders. Without ``new_locks`` (simulated devices) nothing is locked.
    """

    devices: Sequence[Device]
    new_locks: Callable[[], DeviceLocks] | None = None
    share: bool = False

    def __post_init__(self) -> None:
        self._users = dict.fromkeys(self.devices, 0)
        self._locks: dict[Device, DeviceLocks] = {}
        self.refusals: list[str] = []  # of the last call of take

    def lock_files(self, devices: Iterable[Device]) -> list[int]:
        """Return the open lock files of assigned devices; a process that inherits them keeps the devices locked."""
        return [file for device in devices if device in self._locks for file in self._locks[device].files]

    def take(self, count: int) -> tuple[Device, ...] | None:
        """Assign this many devices; None: not available now."""
        self.refusals = []
        if count == 0:
            return ()
        free = [device for device, users in self._users.items() if self.share or not users]
        if len(free) < count:
            return None
        chosen: list[Device] = []
        alone = nullcontext() if self.new_locks is None else self.new_locks().exclusive()
        with alone:  # else two runs would get a part each
            for device in sorted(free, key=self._users.__getitem__):
                if len(chosen) < count and self._lock(device):
                    self._users[device] += 1
                    chosen.append(device)
        if len(chosen) < count:
            self.give_back(chosen)
            return None
        return tuple(sorted(chosen, key=lambda device: device.index or 0))

    def _lock(self, device: Device) -> bool:
        if self._users[device] or device.uuid is None or self.new_locks is None:
            return True
        locks = self.new_locks()
        holder = locks.claim(device.uuid)
        if holder is not None:
            self.refusals.append(f"GPU {device.index} {holder}")
            return False
        self._locks[device] = locks
        return True

    def give_back(self, devices: Iterable[Device]) -> None:
        """Return devices to the pool; a device without users is unlocked."""
        for device in devices:
            self._users[device] -= 1
            if not self._users[device] and device in self._locks:
                self._locks.pop(device).release()


def open_pool(count: int, stand_in: StandIn, world: World, run: Path, *, share: bool) -> DevicePool:
    """Return the devices that this process may use, for tasks that request ``count`` each.

    ``run``: what other runs see as the holder of a device.
    """
    if count == 0:
        return DevicePool((), share=share)
    with open_devices(world.environ, world.clock, stand_in) as sight:
        grant = sight.grant.for_work()
        trouble = sight.trouble
    devices = grant.devices
    most = len(devices)
    if count > most:
        fewer = f"--gpus-per-task {most}" if most else "--gpus-per-task 0 -- --cpu-workers 2"
        raise NotHere(
            f"each task asks for {count_of(count, 'GPU')}, but this machine has {most or 'none'}",
            why="\n".join(filter(None, [grant.why, trouble])),
            fix=f"the same command with {fewer}, or with -- --simulate {count} to try it out",
        )
    if devices[0].backend in STAND_INS:
        return DevicePool(devices, share=share)
    folder = lock_folder(world.environ)
    if is_in_slurm(world.environ):  # Slurm itself keeps other jobs off the devices of this one
        private = local_folder(world.environ) or tempfile.gettempdir()
        folder = Path(private) / f"badcjobs-locks-{own_job_id(world.environ) or 'job'}"
    new_locks = partial(DeviceLocks, folder, world.clock, describe_holder(world.pid, run))
    return DevicePool(devices, new_locks, share=share)
