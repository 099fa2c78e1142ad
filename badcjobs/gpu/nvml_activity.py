"""How hard a device worked: GPM where there is GPM, else counters, processes and the plain utilization.

The plain utilization is blind to light load (0 at a true 5 %), so it comes last.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from badcjobs.gpu.nvml_answers import NoAnswer, is_refusal, raise_if_gone, reason_of
from badcjobs.gpu.nvml_draft import Draft
from badcjobs.gpu.nvml_gpm import FROM_GPM, ONLY_FROM_GPM, GpmWindows, NoGpm, open_gpm
from badcjobs.gpu.nvml_pcie import PCIE_METRICS, PcieCounters
from badcjobs.gpu.nvml_processes import ProcessesSeen, ProcessWatch
from badcjobs.gpu.nvml_thrift import Thrift


class Activity:
    """What one device did between two looks at it."""

    def __init__(self, *, to_slice: bool) -> None:
        self._to_slice = to_slice
        self._processes = ProcessWatch(to_slice=to_slice)
        self._thrift = Thrift()
        self._gpm_thrift = Thrift(most_turns=1)  # a window then lasts two turns, and still covers every moment
        self._pcie = PcieCounters()
        self._gpm: GpmWindows | None = None
        self._has_gpm: bool | None = None  # None: the device has not said so far

    def look(self, nvml: Any, handle: Any, now_s: float, draft: Draft) -> None:
        """Write down everything that happened since the last look."""
        if self._has_gpm is not False and self._gpm_thrift.is_due():
            with self._gpm_thrift.timed():
                self._look_with_gpm(nvml, handle, draft)
        if self._has_gpm is False and not self._to_slice:
            self._look_at_pcie(nvml, handle, now_s, draft)
        # Without GPM their shares are how busy the device was; with it they can be spared where they are dear.
        with_shares = not self._has_gpm or self._thrift.is_due()
        with self._thrift.timed() if with_shares else nullcontext():
            seen = self._processes.look(nvml, handle, with_shares=with_shares)
        draft.processes = seen.processes
        if seen.why_none is not None:
            draft.miss(["processes"], seen.why_none, for_good=False)
        self._judge(draft, seen)

    def glance(self, draft: Draft) -> None:
        """Write down, between two looks, what nothing but the plain utilization tells."""
        if self._has_gpm is False and not self._processes.tell_their_shares:
            _take_utilization(draft)

    def hurry(self) -> None:
        """Leave nothing out of the next look."""
        self._thrift.hurry()
        self._gpm_thrift.hurry()

    def let_go(self, nvml: Any | None) -> None:
        """Begin anew, as with a device that was lost; without ``nvml`` there is nothing left to give back."""
        gpm, self._gpm = self._gpm, None
        if gpm is not None and nvml is not None:
            gpm.close()
        self._processes.forget()
        self._pcie.forget()

    def _look_with_gpm(self, nvml: Any, handle: Any, draft: Draft) -> None:
        try:
            if self._gpm is None:
                self._gpm = open_gpm(nvml, handle, is_slice=self._to_slice)
                self._has_gpm = True
            values, failures = self._gpm.next_window()
        except Exception as error:  # broad: without GPM there is still everything else
            self._do_without_gpm(error, draft)
            return
        for metric, value in values.items():
            draft.give(metric, value, "gpm")
        for metric, reason in failures.items():
            draft.miss([metric], reason, for_good=False)

    def _do_without_gpm(self, error: Exception, draft: Draft) -> None:
        raise_if_gone(error)
        if not (isinstance(error, NoGpm) or is_refusal(error)):
            draft.miss(FROM_GPM, reason_of(error), for_good=False)
            return
        if self._gpm is not None:
            self._gpm.close()
        self._gpm, self._has_gpm = None, False
        draft.miss(ONLY_FROM_GPM, f"no GPM on this device: {reason_of(error)}", for_good=True)

    def _look_at_pcie(self, nvml: Any, handle: Any, now_s: float, draft: Draft) -> None:
        try:
            rates = self._pcie.rates(nvml, handle, now_s)
        except NoAnswer as reason:
            draft.miss(PCIE_METRICS, str(reason), for_good=self._pcie.refused)
            return
        for metric, rate in rates.items():
            draft.give(metric, rate, "counters")

    def _judge(self, draft: Draft, seen: ProcessesSeen) -> None:
        """Settle for what share of the time the device worked."""
        if draft.value("busy_percent") is not None:
            return
        if self._has_gpm and "busy_percent" not in draft.missing:
            return  # a window has only begun, or goes on
        if seen.busy_percent is not None:
            draft.give("busy_percent", seen.busy_percent, "processes")
        # In a container the list may be empty because it shows nobody: then the device is not idle but says so itself.
        elif seen.processes == () and not draft.value("utilization_percent"):
            draft.give("busy_percent", 0.0, "processes")
        elif not _take_utilization(draft) and "busy_percent" not in draft.missing:
            draft.miss(["busy_percent"], draft.missing.get("utilization_percent", "Not Available"), for_good=False)


def _take_utilization(draft: Draft) -> bool:
    utilization = draft.value("utilization_percent")
    if utilization is not None:
        draft.give("busy_percent", float(utilization), "utilization")
    return utilization is not None
