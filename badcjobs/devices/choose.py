"""Choose the reader: a recording or simulated devices if requested, else the first reader that works on this machine.

A machine without a GPU is not an error here: ``inventory`` fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from badcjobs.devices.simulated import ReplayReader, SimulatedReader, load_script, simulated_devices
from badcjobs.model import InventoryDevice, StandIn
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable


@dataclass(eq=False)
class NoReader(GpuReader):
    """Used where no reader works; ``why`` lists what was tried."""

    backend = "none"

    why: str

    def inventory(self) -> Sequence[InventoryDevice]:
        raise ReaderUnavailable(self.why)

    def read(self, uuid: str) -> NoReturn:
        raise DeviceUnreadable(self.why)


# Each reader of real devices is imported only when it is chosen, to keep the memory of the recorder's process small.


def open_reader(
    stand_in: StandIn, clock: Clock, started_at_ms: int, search_path: str | None, sysfs: str | None = None
) -> GpuReader:
    """Return the reader for this run; its ``why`` is the reason for the choice.

    ``search_path`` is the PATH for programs such as nvidia-smi, ``sysfs`` replaces /sys. Raises only BadInput, for a
    stand-in that cannot be used; starts NVML at most once.
    """
    if stand_in.replay is not None:
        return ReplayReader(Path(stand_in.replay), clock=clock, started_at_ms=started_at_ms)
    if stand_in.simulate is not None or stand_in.script is not None:
        devices = simulated_devices(stand_in.simulate or 0)
        if stand_in.script is not None:
            devices = load_script(Path(stand_in.script))
        ledger = None if stand_in.ledger is None else Path(stand_in.ledger)
        return SimulatedReader(devices, clock=clock, started_at_ms=started_at_ms, ledger=ledger)
    return _first_that_works(clock, search_path, Path(sysfs or "/sys"))


def _first_that_works(clock: Clock, search_path: str | None, sysfs: Path) -> GpuReader:
    tried: list[str] = []
    for reader in _readers(clock, search_path, sysfs):
        try:
            reader.inventory()
        except ReaderUnavailable as error:
            tried.append(str(error))
        except Exception as error:  # broad: a broken driver must not stop a task
            tried.append(f"{reader.backend} does not work: {error!r}")
        else:
            if tried:
                reader.why = "; ".join(tried)
            return reader
        reader.close()
    return NoReader("; ".join(tried))


def _readers(clock: Clock, search_path: str | None, sysfs: Path) -> Iterator[GpuReader]:
    from badcjobs.devices.nvml import DcgmActivity, NvmlReader
    from badcjobs.devices.programs import find_program

    yield NvmlReader(clock, DcgmActivity(find_program("dcgmi", search_path), clock))
    from badcjobs.devices.nvidia_smi import NvidiaSmiReader

    yield NvidiaSmiReader(find_program("nvidia-smi", search_path), clock)
    from badcjobs.devices.amd import AmdReader

    yield AmdReader(clock, sysfs)
    from badcjobs.devices.sysfs import SysfsReader

    yield SysfsReader(sysfs)
