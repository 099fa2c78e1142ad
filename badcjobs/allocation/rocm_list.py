"""Reads the lists of visible AMD devices: ROCR_VISIBLE_DEVICES first, then HIP's own list within what that one left.

As the runtimes do it: ROCR takes indices and UUIDs (or prefixes) mixed; HIP counts within ROCR's list, and honours
CUDA_VISIBLE_DEVICES where HIP_VISIBLE_DEVICES is not set. A list ends at the first token that is no device; ROCR ends
it at a repeated device too, HIP passes over that one. We differ once: HIP takes a list that is set but empty for none
at all and shows every device; whoever empties it wants to show none, so here it grants none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from badcjobs.allocation.grant import Grant, granted, grants_nothing, split_tokens
from badcjobs.model import Device, InventoryDevice

ROCR, HIP, CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def read_rocm_lists(environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None) -> Grant | None:
    """Return what the variables grant, None when none of them is set; ``inventory`` is None without a reader."""
    hip = HIP if HIP in environ else CUDA
    grant: Grant | None = None
    pool = None if inventory is None else [granted(str(d.index), d, "") for d in inventory]
    if ROCR in environ:
        grant = _narrow(ROCR, environ[ROCR], pool)
        pool = list(grant.devices)
    if hip in environ:
        before = "" if grant is None else f"{grant.why}; "
        inner = _narrow(hip, environ[hip], pool, counts_places=grant is not None)
        grant = Grant(inner.devices, before + inner.why)
    return grant


def _narrow(variable: str, value: str, pool: Sequence[Device] | None, *, counts_places: bool = False) -> Grant:
    """Return the devices of the pool that a list names; ``counts_places``: its numbers are places in the pool."""
    if grants_nothing(value):
        return Grant((), f"{variable}={value!r} grants no device")
    found: list[Device] = []
    for token in split_tokens(value):
        device = _find(token, variable, pool, counts_places=counts_places)
        repeated = device is not None and any(_identity(device) == _identity(other) for other in found)
        if repeated and variable != ROCR:
            continue
        if device is None or repeated:
            what = "was named before" if repeated else "is no device here"
            return Grant(tuple(found), f"{variable}={value} stops at {token!r}, which {what}")
        found.append(device)
    return Grant(tuple(found), f"{variable}={value}")


def _find(token: str, variable: str, pool: Sequence[Device] | None, *, counts_places: bool) -> Device | None:
    number = int(token) if token.isascii() and token.isdecimal() else None
    is_uuid = len(token) > 4 and token.upper().startswith("GPU-")
    if pool is None:
        way = f"token {token}, from {variable}; nothing here can look it up"
        return Device(token, way, vendor="amd") if number is not None or is_uuid else None
    if number is not None and counts_places:
        chosen = [pool[number]] if number < len(pool) else []
    elif number is not None:
        chosen = [device for device in pool if device.index == number]
    else:
        chosen = [device for device in pool if is_uuid and _name(device).upper().startswith(token.upper())]
    return _explained(chosen[0], token, variable) if len(chosen) == 1 else None


def _explained(device: Device, token: str, variable: str) -> Device:
    if device.why:  # ROCR has said where it is
        return replace(device, why=f"token {token} of {variable} → {device.why}")
    return replace(device, token=token, why=f"token {token} → index {device.index} → {device.uuid}, from {variable}")


def _identity(device: Device) -> str:
    return device.uuid or device.token.upper()


def _name(device: Device) -> str:
    return device.uuid or device.token
