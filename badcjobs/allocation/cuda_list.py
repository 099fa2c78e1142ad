"""Reads CUDA_VISIBLE_DEVICES the way CUDA reads it.

A list holds indices or UUIDs, as its first token does; it ends at the first token that is no device of that kind;
a device named twice takes all of them away. A slice of a card in MIG mode is a device, the card itself is none: a
token for the card means its first slice.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from badcjobs.allocation.grant import Grant, granted, grants_nothing, split_tokens
from badcjobs.model import Device, InventoryDevice

VARIABLE = "CUDA_VISIBLE_DEVICES"

# Seen on a real driver (580): 00, +0 and 0abc are index 0; GPU-D9CE finds GPU-d9ce…, but gpu-d9ce and GPU- do not.
_INDEX = re.compile(r"\+?[0-9]+")
_UUID = re.compile(r"(GPU|MIG)-.")
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)")  # drivers before 470 know slices by these names alone

_BLIND_TO_SLICES = "nvidia-smi"  # this backend lists cards only


def read_cuda_list(value: str, inventory: Sequence[InventoryDevice] | None) -> Grant:
    """Return what a value of CUDA_VISIBLE_DEVICES grants; ``inventory`` is None when no reader works here."""
    if grants_nothing(value):
        return Grant((), f"{VARIABLE}={value!r} grants no device")
    tokens = split_tokens(value)
    return _unread(tokens, value) if inventory is None else _match(tokens, inventory, value)


def usable(inventory: Sequence[InventoryDevice]) -> list[InventoryDevice]:
    """Return what programs can work on: the slices of a card in MIG mode, and every other card."""
    cut = {device.parent_uuid for device in inventory}
    return [device for device in inventory if device.uuid not in cut]


def own_token(device: InventoryDevice) -> str:
    """Return the token that names this device alone: a card by its index, a slice by its UUID or its old name."""
    if device.parent_uuid is None:
        return str(device.index)
    return device.uuid if device.slice is None else f"MIG-{device.parent_uuid}/{device.slice}"


def _unread(tokens: Sequence[str], value: str) -> Grant:
    found: list[Device] = []
    for token in tokens:
        if not _same_kind(token, tokens[0]):
            break  # CUDA stops at the first token that is no device
        if any(_plain(token) == _plain(device.token) for device in found):
            return _repeated(token, value)
        found.append(Device(token, f"token {token}, from {VARIABLE}={value}; no driver library to look it up"))
    return Grant(tuple(found), f"{VARIABLE}={value}; the devices cannot be read here, so tokens are used as they are")


def _match(tokens: Sequence[str], inventory: Sequence[InventoryDevice], value: str) -> Grant:
    found: list[Device] = []
    for token in tokens:
        device = _look_up(token, inventory) if _same_kind(token, tokens[0]) else None
        if device is None:
            rest = f"stops at {token!r}, which is no device here (CUDA stops there too)"
            return Grant(tuple(found), f"{VARIABLE}={value} {rest}")
        if any(_identity(device) == _identity(other) for other in found):
            return _repeated(token, value)
        found.append(device)
    return Grant(tuple(found), f"{VARIABLE}={value}")


def _look_up(token: str, inventory: Sequence[InventoryDevice]) -> Device | None:
    found = _find(token, inventory)
    if found is None:
        return _unseen_slice(token, inventory)
    way = f"token {token} → index {found.index} → {found.uuid}"
    first_slice = next((device for device in inventory if device.parent_uuid == found.uuid), None)
    if first_slice is None:
        return granted(token, found, f"{way}, from {VARIABLE}")
    return granted(token, first_slice, f"{way}, in MIG mode: its first slice → {first_slice.uuid}, from {VARIABLE}")


def _unseen_slice(token: str, inventory: Sequence[InventoryDevice]) -> Device | None:
    """Return a slice that the reader cannot know: it is granted all the same, and pinned by its token."""
    blind = bool(inventory) and all(device.backend == _BLIND_TO_SLICES for device in inventory)
    if not blind or not token.startswith("MIG-"):
        return None
    return Device(token, f"token {token}, from {VARIABLE}; {_BLIND_TO_SLICES} lists cards, not their slices")


def _find(token: str, inventory: Sequence[InventoryDevice]) -> InventoryDevice | None:
    if number := _INDEX.match(token):
        # A card stands before its slices, which have its index too.
        return next((device for device in inventory if device.index == int(number[0])), None)
    if old := _OLD_SLICE.fullmatch(token):
        cards, cut = old[1].lower(), f"{old[2]}/{old[3]}"
        by_name = [d for d in inventory if d.slice == cut and (d.parent_uuid or "").lower().startswith(cards)]
        return by_name[0] if len(by_name) == 1 else None
    kind, rest = token[:4], token[4:].lower()
    matches = [
        device for device in inventory if device.uuid.startswith(kind) and device.uuid[4:].lower().startswith(rest)
    ]
    return matches[0] if len(matches) == 1 else None


def _repeated(token: str, value: str) -> Grant:
    return Grant((), f"{VARIABLE}={value} names {token} twice: CUDA then shows no device at all")


def _same_kind(token: str, first: str) -> bool:
    """Say whether a token can stand in this list: the first one decides between indices and UUIDs."""
    if _INDEX.match(first):
        return _INDEX.match(token) is not None
    return _UUID.match(first) is not None and _UUID.match(token) is not None


def _identity(device: Device) -> str:
    return device.uuid or _plain(device.token)


def _plain(token: str) -> str:
    """Return a token in its simplest form: 1 for +01."""
    number = _INDEX.match(token)
    return str(int(number[0])) if number else token.lower()
