"""Find the devices granted to this task: parse CUDA_VISIBLE_DEVICES, ROCR_… and HIP_… as CUDA and ROCm do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from badcjobs.model import Device, InventoryDevice

CUDA, ROCR, HIP = "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the step's list first
_NONE = ("", "-1", "NoDevFiles")  # values that mean: no device


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices of this task, in the order of their tokens, and the reason."""

    devices: tuple[Device, ...]
    why: str


def as_device(token: str, found: InventoryDevice, why: str) -> Device:
    """Return a device of the inventory as a granted one, or (with an empty token) as one that is not granted."""
    facts = asdict(found)
    del facts["slice"]
    return Device(token, why, **facts)


def resolve_devices(
    environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool
) -> Grant:
    """Map the visible tokens to devices; ``inventory`` is None if no reader works."""
    # If Slurm does not know the vendor of its GPUs, it sets the lists of all vendors: CUDA is the most likely one.
    only_rocm = CUDA not in environ and (ROCR in environ or HIP in environ)
    amd = inventory[0].vendor == "amd" if inventory else only_rocm
    variable = ROCR if amd else CUDA
    if amd:
        grant = _read_rocm_lists(environ, inventory)
    else:
        grant = _read_cuda_list(environ[CUDA], inventory) if CUDA in environ else None
    grant = grant or _without_list(variable, inventory, in_slurm=in_slurm)
    many, why = len(grant.devices), [grant.why]
    name = next((name for name in _SLURM_LISTS if environ.get(name)), None)
    if name is not None and not many:
        why.append(f"{name} is {environ[name]}, but this step has no GPU")
    elif name is not None and environ[name] != environ.get(variable):
        why.append(f"{name}={environ[name]} has the physical numbers of the node")
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node and on_node != str(many):  # not always a number: typed GPUs are counted as a100:1
        why.append(f"SLURM_GPUS_ON_NODE={on_node} counts all tasks of the step on this node")
    shown = environ.get("NVIDIA_VISIBLE_DEVICES")
    if shown is not None and not (many and shown == "all"):  # CUDA's container images set it to all
        why.append(f"NVIDIA_VISIBLE_DEVICES={shown} is for container runtimes and is ignored")
    return Grant(grant.devices, "; ".join(why))


def _without_list(variable: str, inventory: Sequence[InventoryDevice] | None, *, in_slurm: bool) -> Grant:
    if in_slurm:
        return Grant((), f"inside a Slurm job and {variable} is not set: Slurm granted no GPU")
    if not inventory:
        return Grant((), "no GPU was found on this machine")
    in_mig_mode = {device.parent_uuid for device in inventory}
    found = []
    for device in inventory:
        if device.uuid in in_mig_mode:
            continue  # programs use the slices of a card in MIG mode
        token, where = str(device.index), f"index {device.index} → {device.uuid}"
        if device.parent_uuid is not None:
            token = device.uuid if device.slice is None else f"MIG-{device.parent_uuid}/{device.slice}"
            where = f"index {device.index} → {device.parent_uuid}, in MIG mode: slice {device.slice} → {device.uuid}"
        found.append(as_device(token, device, f"{where}; {variable} is not set, outside Slurm: all devices"))
    return Grant(tuple(found), f"{variable} is not set and this is not a Slurm job: all devices of the machine")


# --- CUDA's list ------------------------------------------------------------------------------------------------------

# Measured with driver 580: 00, +0 and 0abc are index 0; GPU-D9CE matches GPU-d9ce…, but gpu-d9ce and GPU- do not.
_INDEX = re.compile(r"\+?[0-9]+")
_UUID = re.compile(r"(GPU|MIG)-.")
_OLD_SLICE = re.compile(r"MIG-(GPU-[^/]+)/([0-9]+)/([0-9]+)")  # the only names of slices before driver 470

_WITHOUT_SLICES = "nvidia-smi"  # this backend lists only cards


def _read_cuda_list(value: str, inventory: Sequence[InventoryDevice] | None) -> Grant:
    if value.strip() in _NONE:
        return Grant((), f"{CUDA}={value!r} grants no device")
    tokens = [token.strip() for token in value.split(",")]
    found: list[Device] = []
    for token in tokens:
        device = None
        if _same_kind(token, tokens[0]):
            unread = f"token {token}, from {CUDA}={value}; not looked up: no driver library"
            device = Device(token, unread) if inventory is None else _look_up(token, inventory)
        if device is None and inventory is not None:
            rest = f"stops at {token!r}, which is not a device here (CUDA stops there too)"
            return Grant(tuple(found), f"{CUDA}={value} {rest}")
        if device is None:
            break
        if any(_identity(device) == _identity(other) for other in found):
            return Grant((), f"{CUDA}={value} contains {token} twice: CUDA then shows no device")
        found.append(device)
    unread = "; the devices cannot be read here, so the tokens are used unchanged" if inventory is None else ""
    return Grant(tuple(found), f"{CUDA}={value}{unread}")


def _look_up(token: str, inventory: Sequence[InventoryDevice]) -> Device | None:
    found = _find(token, inventory)
    if found is None:
        # The reader does not list slices: grant the slice anyway, and select it by its token.
        no_slices = bool(inventory) and all(device.backend == _WITHOUT_SLICES for device in inventory)
        why = f"token {token}, from {CUDA}; {_WITHOUT_SLICES} lists cards, not their slices"
        return Device(token, why) if no_slices and token.startswith("MIG-") else None
    way = f"token {token} → index {found.index} → {found.uuid}"
    first_slice = next((device for device in inventory if device.parent_uuid == found.uuid), None)
    if first_slice is None:
        return as_device(token, found, f"{way}, from {CUDA}")
    return as_device(token, first_slice, f"{way}, in MIG mode: its first slice → {first_slice.uuid}, from {CUDA}")


def _find(token: str, inventory: Sequence[InventoryDevice]) -> InventoryDevice | None:
    if number := _INDEX.match(token):
        # A card comes before its slices, which have the same index.
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


def _same_kind(token: str, first: str) -> bool:
    """Return whether a token is of the same kind, index or UUID, as the first token of the list."""
    if _INDEX.match(first):
        return _INDEX.match(token) is not None
    return _UUID.match(first) is not None and _UUID.match(token) is not None


def _identity(device: Device) -> str:
    """Return the identity of a device: its UUID, else the normalized token, 1 for +01."""
    number = _INDEX.match(device.token)
    return device.uuid or (str(int(number[0])) if number else device.token.lower())


# --- ROCm's lists -----------------------------------------------------------------------------------------------------


def _read_rocm_lists(environ: Mapping[str, str], inventory: Sequence[InventoryDevice] | None) -> Grant | None:
    """Return the devices of ROCm's lists; None if no list is set. ``inventory`` is None without a reader."""
    hip = HIP if HIP in environ else CUDA
    grant: Grant | None = None
    pool = None if inventory is None else [as_device(str(d.index), d, "") for d in inventory]
    if ROCR in environ:
        grant = _narrow(ROCR, environ[ROCR], pool)
        pool = list(grant.devices)
    if hip in environ:
        before = "" if grant is None else f"{grant.why}; "
        inner = _narrow(hip, environ[hip], pool, by_position=grant is not None)
        grant = Grant(inner.devices, before + inner.why)
    return grant


def _narrow(variable: str, value: str, pool: Sequence[Device] | None, *, by_position: bool = False) -> Grant:
    """Return the devices of the pool in a list; ``by_position``: its numbers are positions in the pool."""
    if value.strip() in _NONE:
        return Grant((), f"{variable}={value!r} grants no device")
    found: dict[str, Device] = {}
    for token in (token.strip() for token in value.split(",")):
        device = _find_in_pool(token, variable, pool, by_position=by_position)
        name = "" if device is None else (device.uuid or device.token).upper()
        if name in found and variable != ROCR:
            continue
        if device is None or name in found:
            what = "is not a device here" if device is None else "is in the list twice"
            return Grant(tuple(found.values()), f"{variable}={value} stops at {token!r}, which {what}")
        found[name] = device
    return Grant(tuple(found.values()), f"{variable}={value}")


def _find_in_pool(token: str, variable: str, pool: Sequence[Device] | None, *, by_position: bool) -> Device | None:
    number = int(token) if token.isascii() and token.isdecimal() else None
    is_uuid = len(token) > 4 and token.upper().startswith("GPU-")
    if pool is None:
        way = f"token {token}, from {variable}; not looked up: no reader works"
        return Device(token, way, vendor="amd") if number is not None or is_uuid else None
    if number is not None and by_position:
        chosen = list(pool[number : number + 1])
    elif number is not None:
        chosen = [device for device in pool if device.index == number]
    else:
        chosen = [d for d in pool if is_uuid and (d.uuid or d.token).upper().startswith(token.upper())]
    if len(chosen) != 1:
        return None
    device = chosen[0]
    if device.why:  # set by the list of ROCR
        return replace(device, why=f"token {token} of {variable} → {device.why}")
    return replace(device, token=token, why=f"token {token} → index {device.index} → {device.uuid}, from {variable}")
