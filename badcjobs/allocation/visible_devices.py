"""Decides which devices are ours: the list of visible devices alone grants, and is read the way its runtime reads it.

CUDA_VISIBLE_DEVICES for NVIDIA (cuda_list.py), ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES for AMD (rocm_list.py).
Without a list: all devices outside Slurm, none inside a job. Whatever else speaks of devices only explains
(other_lists.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from badcjobs.allocation.cuda_list import VARIABLE, own_token, read_cuda_list, usable
from badcjobs.allocation.grant import Grant, granted
from badcjobs.allocation.other_lists import explain
from badcjobs.allocation.rocm_list import HIP, ROCR, read_rocm_lists
from badcjobs.model import InventoryDevice


def resolve_devices(
    environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool
) -> Grant:
    """Map the visible tokens to devices; ``inventory`` is None when no reader works here."""
    amd = _is_amd(environ, inventory)
    variable = ROCR if amd else VARIABLE
    grant = _by_list(environ, inventory, amd=amd) or _without_list(variable, inventory, in_slurm=in_slurm)
    remarks = explain(environ, visible=environ.get(variable), devices=len(grant.devices))
    return Grant(grant.devices, "; ".join([grant.why, *remarks]))


def _is_amd(environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None) -> bool:
    if inventory:
        return inventory[0].vendor == "amd"
    # Where Slurm was told nothing about its cards, it sets the lists of all vendors: CUDA's is the likelier truth.
    return VARIABLE not in environ and (ROCR in environ or HIP in environ)


def _by_list(environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None, *, amd: bool) -> Grant | None:
    if amd:
        return read_rocm_lists(environ, inventory)
    value = environ.get(VARIABLE)
    return None if value is None else read_cuda_list(value, inventory)


def _without_list(variable: str, inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool) -> Grant:
    if in_slurm:
        return Grant((), f"inside a Slurm job and {variable} is not set: Slurm granted no GPU")
    if not inventory:
        return Grant((), "no GPU was found on this machine")
    why = f"{variable} is not set, outside Slurm: all devices"
    devices = (granted(own_token(d), d, f"{_whereabouts(d)}; {why}") for d in usable(inventory))
    return Grant(tuple(devices), f"{variable} is not set and this is no Slurm job: all devices of the machine")


def _whereabouts(device: InventoryDevice) -> str:
    if device.parent_uuid is None:
        return f"index {device.index} → {device.uuid}"
    return f"index {device.index} → {device.parent_uuid}, in MIG mode: slice {device.slice} → {device.uuid}"
