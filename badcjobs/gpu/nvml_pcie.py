"""PCIe traffic from the byte counters of a device, where GPM does not tell it.

``nvmlDeviceGetPcieThroughput`` is never used: it holds the caller for 20 ms in each direction.
"""

from __future__ import annotations

from typing import Any

from badcjobs.gpu.nvml_answers import Line, NoAnswer, check

PCIE_METRICS = ("pcie_rx_bytes_per_s", "pcie_tx_bytes_per_s")

# Drivers know these fields since 550, the binding has names for them since 12.545.
_RX_BYTES, _TX_BYTES = 198, 197
_MEMBER = {1: "uiVal", 2: "ulVal", 3: "ullVal"}  # by NVML_VALUE_TYPE_


class PcieCounters:
    """The rates between two readings of one device's counters."""

    def __init__(self) -> None:
        self._line = Line(_read_counters)
        self._before: tuple[float, tuple[int, ...]] | None = None

    @property
    def refused(self) -> bool:
        return self._line.refused

    def rates(self, nvml: Any, handle: Any, now_s: float) -> dict[str, int]:
        """Return metric → bytes per second since the last call; nothing at the first."""
        counts = self._line.ask(nvml, handle)
        before, self._before = self._before, (now_s, counts)
        if before is None or now_s <= before[0]:
            return {}
        moved = [new - old for new, old in zip(counts, before[1], strict=True)]
        if min(moved) < 0:  # NVML's manual: the value can wrap
            raise NoAnswer("the byte counter began anew")
        return {metric: round(one / (now_s - before[0])) for metric, one in zip(PCIE_METRICS, moved, strict=True)}

    def forget(self) -> None:
        """Begin anew, as with a device that was lost."""
        self._before = None


def _read_counters(nvml: Any, handle: Any) -> tuple[int, ...]:
    return tuple(_count(nvml, value) for value in nvml.nvmlDeviceGetFieldValues(handle, [_RX_BYTES, _TX_BYTES]))


def _count(nvml: Any, field: Any) -> int:
    if field.nvmlReturn == nvml.NVML_ERROR_INVALID_ARGUMENT:  # so says a driver of a field that it does not know
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return int(check(getattr(field.value, _MEMBER.get(field.valueType, "ullVal"))))
