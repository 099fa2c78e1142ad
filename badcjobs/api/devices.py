"""``badcjobs.list_devices``: what ``badcjobs gpus`` shows, as objects."""

from __future__ import annotations

from badcjobs.api.arguments import check_simulate
from badcjobs.api.here import read_here
from badcjobs.devices import DeviceNow, list_granted
from badcjobs.model import StandIn


def list_devices(all: bool = False, simulate: int | None = None) -> list[DeviceNow]:
    """Return the devices that this process may use, each with its state now.

    The same devices as ``badcjobs gpus``: inside a job those that Slurm granted, outside all of them, and always only
    what ``CUDA_VISIBLE_DEVICES`` shows. An empty list where there is none; what is not known of one is None.

        >>> from badcjobs import list_devices
        >>> for device in list_devices(simulate=2):
        ...     print(device.index, device.name, device.memory_total_bytes)
        0 Simulated GPU 17179869184
        1 Simulated GPU 17179869184

    Parameters
    ----------
    all
        Every card of the machine, granted or not (``device.granted`` tells).
    simulate
        Pretend that the machine has so many devices; a number below 1 is a ``ValueError``.
    """
    check_simulate(simulate)
    here = read_here()
    found = list_granted(here.environ, here.clock, stand_in=StandIn(simulate), everything=all)
    return list(found.devices)
