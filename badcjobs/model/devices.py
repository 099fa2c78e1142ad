"""Devices: what a machine has, what a task was given, what stands in for them, and what their numbers are judged by."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ROCR_UUID = re.compile(r"GPU-[0-9A-Fa-f]{16}")  # the only form that ROCR_VISIBLE_DEVICES takes; amdsmi has another
_FIRST_DRIVER_WITH_MIG_UUIDS = 470


@dataclass(frozen=True, slots=True)
class StandIn:
    """What takes the place of this machine's devices: simulated ones, or a recording; paths are absolute."""

    simulate: int | None = None
    script: str | None = None  # TOML: how simulated devices behave
    replay: str | None = None  # a task database
    ledger: str | None = None  # folder: what programs pretend to use of simulated devices


@dataclass(frozen=True, slots=True)
class InventoryDevice:
    """A device that a reader found on this machine, ours or not."""

    index: int
    uuid: str
    name: str
    backend: str
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None  # where the device begins to slow down
    memory_reserved_bytes: int = 0  # what the driver keeps for itself, and nobody can have
    vendor: str = "nvidia"
    # A MIG slice has the index of its card, which is listed just before its slices.
    parent_uuid: str | None = None
    slice: str | None = None  # "<gpu instance>/<compute instance>", as in the old tokens MIG-GPU-<uuid>/gi/ci


@dataclass(frozen=True, slots=True)
class Device:
    """A device granted to this task, and how we know."""

    token: str
    why: str
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    backend: str = "none"
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None
    memory_reserved_bytes: int = 0
    vendor: str = "nvidia"
    parent_uuid: str | None = None

    @property
    def pin(self) -> str:
        """What shows a worker this device alone: its UUID, or the token (AMD: the index) where UUIDs do not serve."""
        if self.uuid is None:
            return self.token
        if self.vendor == "amd" and not _ROCR_UUID.fullmatch(self.uuid):
            return self.token if self.index is None else str(self.index)
        if self.uuid.startswith("MIG-") and self._driver_is_older_than(_FIRST_DRIVER_WITH_MIG_UUIDS):
            return self.token
        return self.uuid

    def _driver_is_older_than(self, major: int) -> bool:
        number = (self.driver or "").partition(".")[0]
        return number.isdecimal() and int(number) < major
