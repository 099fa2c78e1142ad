"""Decides which devices are ours: CUDA_VISIBLE_DEVICES alone grants, and is read the way CUDA reads it.

A list holds indices or UUIDs, as its first token does; it ends at the first token that is no device of that kind;
a device named twice takes all of them away. SLURM_JOB_GPUS and its kin are physical numbers, stale in steps and wrong
on other nodes: they never add a device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from badcjobs.model import Device, InventoryDevice

VARIABLE = "CUDA_VISIBLE_DEVICES"
_NONE = ("", "-1", "NoDevFiles")

# Seen on a real driver (580): 00, +0 and 0abc are index 0; GPU-D9CE finds GPU-d9ce…, but gpu-d9ce and GPU- do not.
_INDEX = re.compile(r"\+?[0-9]+")
_UUID = re.compile(r"(GPU|MIG)-.")


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices of this task, in the order of their tokens, and the reason in words."""

    devices: tuple[Device, ...]
    why: str


def resolve_devices(
    environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool
) -> Grant:
    """Map the visible tokens to devices; ``inventory`` is None when no reader works here."""
    value = environ.get(VARIABLE)
    if value is None:
        return _without_variable(inventory, in_slurm=in_slurm)
    if value.strip() in _NONE:
        return Grant((), f"{VARIABLE}={value!r} grants no device")
    tokens = [token.strip() for token in value.split(",")]
    if inventory is None:
        return _unread(tokens, value)
    return _match(tokens, inventory, value)


def _without_variable(inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool) -> Grant:
    if in_slurm:
        return Grant((), f"inside a Slurm job and {VARIABLE} is not set: Slurm granted no GPU")
    if not inventory:
        return Grant((), "no GPU was found on this machine")
    devices = (
        _device(str(d.index), d, f"index {d.index} → {d.uuid}; {VARIABLE} is not set, outside Slurm: all devices")
        for d in inventory
    )
    return Grant(tuple(devices), f"{VARIABLE} is not set and this is no Slurm job: all devices of the machine")


def _unread(tokens: Sequence[str], value: str) -> Grant:
    granted: list[Device] = []
    for token in tokens:
        if not _same_kind(token, tokens[0]):
            break  # CUDA stops at the first token that is no device
        if any(_plain(token) == _plain(device.token) for device in granted):
            return _repeated(token, value)
        granted.append(Device(token, f"token {token}, from {VARIABLE}={value}; no driver library to look it up"))
    return Grant(tuple(granted), f"{VARIABLE}={value}; the devices cannot be read here, so tokens are used as they are")


def _match(tokens: Sequence[str], inventory: Sequence[InventoryDevice], value: str) -> Grant:
    granted: list[Device] = []
    for token in tokens:
        found = _find(token, inventory) if _same_kind(token, tokens[0]) else None
        if found is None:
            rest = f"stops at {token!r}, which is no device here (CUDA stops there too)"
            return Grant(tuple(granted), f"{VARIABLE}={value} {rest}")
        if any(found.uuid == device.uuid for device in granted):
            return _repeated(token, value)
        granted.append(_device(token, found, f"token {token} → index {found.index} → {found.uuid}, from {VARIABLE}"))
    return Grant(tuple(granted), f"{VARIABLE}={value}")


def _repeated(token: str, value: str) -> Grant:
    return Grant((), f"{VARIABLE}={value} names {token} twice: CUDA then shows no device at all")


def _same_kind(token: str, first: str) -> bool:
    """Say whether a token can stand in this list: the first one decides between indices and UUIDs."""
    if _INDEX.match(first):
        return _INDEX.match(token) is not None
    return _UUID.match(first) is not None and _UUID.match(token) is not None


def _plain(token: str) -> str:
    """Return a token in its simplest form: 1 for +01."""
    number = _INDEX.match(token)
    return str(int(number[0])) if number else token.lower()


def _find(token: str, inventory: Sequence[InventoryDevice]) -> InventoryDevice | None:
    if number := _INDEX.match(token):
        return next((device for device in inventory if device.index == int(number[0])), None)
    kind, rest = token[:4], token[4:].lower()
    matches = [
        device for device in inventory if device.uuid.startswith(kind) and device.uuid[4:].lower().startswith(rest)
    ]
    return matches[0] if len(matches) == 1 else None


def _device(token: str, found: InventoryDevice, why: str) -> Device:
    return Device(
        token=token,
        why=why,
        index=found.index,
        uuid=found.uuid,
        name=found.name,
        backend=found.backend,
        memory_total_bytes=found.memory_total_bytes,
        power_limit_w=found.power_limit_w,
        pci_bus_id=found.pci_bus_id,
        driver=found.driver,
    )
