"""What visible devices come to: a Grant. How a list is read stands in cuda_list.py and rocm_list.py."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.model import Device, InventoryDevice

_NONE = ("", "-1", "NoDevFiles")


@dataclass(frozen=True, slots=True)
class Grant:
    """The devices of this task, in the order of their tokens, and the reason in words."""

    devices: tuple[Device, ...]
    why: str


def grants_nothing(value: str) -> bool:
    """Say whether this value of a variable is a way to write: no device."""
    return value.strip() in _NONE


def split_tokens(value: str) -> list[str]:
    """Return the tokens of a list, without the blanks around them."""
    return [token.strip() for token in value.split(",")]


def granted(token: str, found: InventoryDevice, why: str) -> Device:
    """Return a device of the inventory as one that is ours."""
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
        slowdown_c=found.slowdown_c,
        memory_reserved_bytes=found.memory_reserved_bytes,
        vendor=found.vendor,
        parent_uuid=found.parent_uuid,
    )
