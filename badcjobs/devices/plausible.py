"""What a metric can be at all: the one place where readers tell a value from nonsense.

A sensor or a program gone mad says 9999999999999999999 or -5; written down, that would be the peak of a paper, or more
than SQLite can hold. Such a value becomes None with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

_PERCENT = (0, 100)
_BYTES = (0, 2**53)
_CELSIUS = (-50, 200)
_WATT = (0, 10_000)
_MHZ = (0, 100_000)

LIMITS: Mapping[str, tuple[float, float]] = {
    "utilization_percent": _PERCENT,
    "memory_utilization_percent": _PERCENT,
    "memory_used_bytes": _BYTES,
    "temperature_c": _CELSIUS,
    "power_w": _WATT,
    "energy_j": (0, 1e15),
    "sm_clock_mhz": _MHZ,
    "memory_clock_mhz": _MHZ,
    "throttle_reasons": (0, 2**63 - 1),
    "sm_activity_percent": _PERCENT,
    "sm_occupancy_percent": _PERCENT,
    "busy_percent": _PERCENT,
    "tensor_percent": _PERCENT,
    "dram_percent": _PERCENT,
    "pcie_rx_bytes_per_s": _BYTES,
    "pcie_tx_bytes_per_s": _BYTES,
    "fan_percent": _PERCENT,
    "encoder_percent": _PERCENT,
    "decoder_percent": _PERCENT,
    "ecc_errors": (0, 2**53),
    # of an inventory, and of processes
    "index": (0, 2**16),
    "memory_total_bytes": _BYTES,
    "power_limit_w": _WATT,
    "slowdown_c": _CELSIUS,
    "pid": (0, 2**32 - 1),
}


class NoAnswer(Exception):
    """A question has no answer now, or one that cannot be; the text is the reason."""


def check_range(metric: str, value: Value, said: object = None) -> Value:
    """Return the value; raise NoAnswer for one that cannot be, in the words it was said in. Texts pass."""
    if isinstance(value, int | float) and metric in LIMITS:
        low, high = LIMITS[metric]
        if not low <= value <= high:  # nor is "not a number" in between
            raise NoAnswer(why_absurd(value if said is None else said))
    return value


def or_none(metric: str, value: Value | None) -> Value | None:
    """Return the value, or None for one that cannot be; for facts that have no place for a reason."""
    try:
        return check_range(metric, value)
    except NoAnswer:
        return None


def why_absurd(said: object) -> str:
    """Say why there is no value."""
    return f"gave {str(said)[:60]}, which cannot be"
