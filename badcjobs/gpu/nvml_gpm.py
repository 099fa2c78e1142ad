"""GPM: what Hopper and later cards count in hardware, read as windows that leave no moment out.

A window is the difference of two samples. The second sample of one window is the first of the next, also when a
window failed or came late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isfinite
from typing import Any

log = logging.getLogger(__name__)

ACTIVITY = {  # metric → the binding's name for it
    "busy_percent": "NVML_GPM_METRIC_GRAPHICS_UTIL",
    "sm_activity_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
TRAFFIC = {  # in MiB/s; of the whole card, so not for slices
    "pcie_rx_bytes_per_s": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
    "pcie_tx_bytes_per_s": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
}
FROM_GPM = (*ACTIVITY, *TRAFFIC)
ONLY_FROM_GPM = tuple(metric for metric in ACTIVITY if metric != "busy_percent")  # the others have another source

_OVERSHOOT_PERCENT = 1.0  # two samples are not taken in one instant; more than this cannot be

Values = dict[str, float | int]
Failures = dict[str, str]


class NoGpm(Exception):
    """This device has no GPM; the text is the reason."""


class GpmWindows:
    """The windows of one device; ``take_sample`` fills a sample that this class has allocated."""

    def __init__(self, nvml: Any, take_sample: Callable[[Any], object], names: dict[str, str]) -> None:
        self._nvml = nvml
        self._take_sample = take_sample
        self._metrics = tuple(names)
        self._request = nvml.c_nvmlGpmMetricsGet_t(version=nvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(names))
        for place, name in enumerate(names.values()):
            self._request.metrics[place].metricId = getattr(nvml, name)
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]  # where the window began; the next one
        self._begun = False

    def next_window(self) -> tuple[Values, Failures]:
        """End the window and begin the next; the first call only begins one and has no values."""
        begin, end = self._samples
        self._take_sample(end)
        if self._begun:
            self._request.sample1, self._request.sample2 = begin, end
            self._nvml.nvmlGpmMetricsGet(self._request)
        answer = self._answers() if self._begun else ({}, {})
        self._samples, self._begun = [end, begin], True
        return answer

    def _answers(self) -> tuple[Values, Failures]:
        values: Values = {}
        failures: Failures = {}
        for place, metric in enumerate(self._metrics):
            one = self._request.metrics[place]
            if one.nvmlReturn:
                failures[metric] = str(self._nvml.NVMLError(one.nvmlReturn))
            elif not isfinite(one.value):
                failures[metric] = "Not Available"
            else:
                values[metric] = round(one.value * 2**20) if metric in TRAFFIC else _without_overshoot(one.value)
        return values, failures

    def close(self) -> None:
        """Give the samples back."""
        samples, self._samples = self._samples, []
        for sample in samples:
            try:
                self._nvml.nvmlGpmSampleFree(sample)
            except Exception as error:  # broad: a sample that stays behind does no harm
                log.debug("a GPM sample was not given back: %s", error)


def _without_overshoot(percent: float) -> float:
    return 100.0 if 100 < percent <= 100 + _OVERSHOOT_PERCENT else percent


def open_gpm(nvml: Any, handle: Any, *, is_slice: bool) -> GpmWindows:
    """Return the windows of a card or slice; raise NoGpm where the driver says that there are none."""
    card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if is_slice else handle
    if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
        raise NoGpm("the driver says that it does not support it")
    if not is_slice:
        return GpmWindows(nvml, lambda sample: nvml.nvmlGpmSampleGet(card, sample), ACTIVITY | TRAFFIC)
    gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
    return GpmWindows(nvml, lambda sample: nvml.nvmlGpmMigSampleGet(card, gpu_instance, sample), ACTIVITY)
