"""One card or slice as NVML shows it: finds it, and asks what is due.

What there is to ask stands in ``nvml_metrics.py`` and ``nvml_activity.py``.
"""

from __future__ import annotations

from typing import Any

from badcjobs.gpu.nvml_activity import Activity
from badcjobs.gpu.nvml_draft import Draft, Refusals
from badcjobs.gpu.nvml_faults import FaultWatch
from badcjobs.gpu.nvml_metrics import BOARD_WIDE, DEAR, HOT, WARM, Tier
from badcjobs.gpu.nvml_thrift import Thrift
from badcjobs.model import Reading
from badcjobs.seams import DeviceUnreadable

_WARM_S = 4.9  # every 5 s; a tick that comes a little early counts
_SHORTEST_WINDOW_S = 0.2  # GPM needs its samples at least 0.1 s apart
_AT_ONCE = float("-inf")


class NvmlDevice:
    """What a reader has learned of one device, and how it reads it."""

    def __init__(self, uuid: str, faults: FaultWatch) -> None:
        self._uuid = uuid
        self._faults = faults
        self._is_slice = uuid.startswith("MIG-")
        self._refusals = Refusals(dict.fromkeys(BOARD_WIDE, "board-wide under MIG") if self._is_slice else {})
        self._hot = Tier(HOT, self._refusals.reasons, to_slice=self._is_slice)
        self._warm = Tier(WARM, self._refusals.reasons, to_slice=self._is_slice)
        self._dear = Tier(DEAR, self._refusals.reasons, to_slice=self._is_slice)
        self._thrift = Thrift()
        self._activity = Activity(to_slice=self._is_slice)
        self._handle: Any = None  # None: not looked up, or lost
        self._warm_due_s = _AT_ONCE

    def read(self, nvml: Any, now_s: float) -> Reading:
        """Ask what is due; raise NVML's error when the device is gone, DeviceUnreadable when it says nothing."""
        if self._handle is None:
            self._handle = self._meet(nvml)
        draft = Draft(self._refusals)
        self._hot.ask(nvml, self._handle, draft)
        if draft.is_empty:
            raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(draft.missing.values())))}")
        if now_s >= self._warm_due_s:
            self._warm_due_s = now_s + _WARM_S
            self._warm.ask(nvml, self._handle, draft)
            if self._thrift.is_due():
                with self._thrift.timed():
                    self._dear.ask(nvml, self._handle, draft)
            self._activity.look(nvml, self._handle, now_s, draft)
        else:
            self._activity.glance(draft)
        return draft.finish(self._faults.fetch(self._uuid))

    def hurry(self, now_s: float) -> None:
        """Let the next reading be a whole one, unless the last one was so just now."""
        if now_s > self._warm_due_s - _WARM_S + _SHORTEST_WINDOW_S:
            self._warm_due_s = _AT_ONCE
            self._thrift.hurry()
            self._activity.hurry()

    def let_go(self, nvml: Any | None) -> None:
        """Forget where the device is, not what it refused; without ``nvml`` there is nothing left to give back."""
        self._handle = None
        self._warm_due_s = _AT_ONCE
        self._activity.let_go(nvml)

    def _meet(self, nvml: Any) -> Any:
        handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        self._faults.listen(nvml, self._uuid, handle, is_slice=self._is_slice)
        return handle
