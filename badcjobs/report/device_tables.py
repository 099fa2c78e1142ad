"""The devices of a job in tables, as cells: what they did, what was measured, shared by the text and the notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from badcjobs.report.device_summary import DeviceSummary
from badcjobs.report.states import STATE_WORDS, StateSummary, partly_measured, together
from badcjobs.report.words import UNKNOWN, durations, energies, percent, share_words, spark, three

Rows = list[tuple[str, ...]]
STATE_HEADS = ("what the GPUs did", "GPU time", "of the time", "energy", "of the energy")
MEASURED_HEAD = "measured"


def least_busy(devices: Sequence[DeviceSummary], most: int) -> Sequence[DeviceSummary]:
    """Return all devices or, where they are too many, those that were busy least, in their order."""
    if len(devices) <= most:
        return devices
    places = sorted(range(len(devices)), key=lambda place: _busy(devices[place]))[:most]
    return [devices[place] for place in sorted(places)]


def _busy(device: DeviceSummary) -> float:
    known = device.utilization_mean_percent if device.busy_mean_percent is None else device.busy_mean_percent
    return 101.0 if known is None else known


def state_rows(states: Mapping[str, StateSummary]) -> Rows:
    """Return what all devices together did with their time and energy."""
    partly, whole = partly_measured(states), together(states)
    rows: Rows = [(*STATE_HEADS, *([MEASURED_HEAD] if partly else []))]
    shown = [(words, found) for state, words in STATE_WORDS.items() if (found := states.get(state)) is not None]
    times = durations([*(found.gpu_hours * 3600 for _, found in shown), whole.gpu_hours * 3600])
    joules = energies([*(found.energy_wh for _, found in shown), whole.energy_wh])
    for (words, found), time, used in zip(shown, times, joules, strict=False):
        measured = [_share(found.measured_percent)] if partly else []
        rows.append((words, time, _share(found.share_percent), used, _share(found.energy_share_percent), *measured))
    all_energy = "100%" if whole.energy_wh is not None else UNKNOWN
    return [*rows, ("together", times[-1], "100%", joules[-1], all_energy,
                    *([_share(whole.measured_percent)] if partly else []))]  # fmt: skip


def _share(value: float | None) -> str:
    return share_words(value).replace(" %", "%")


def work_rows(devices: Sequence[DeviceSummary]) -> Rows:
    """Return what each device did."""
    rows: Rows = [("device", "task", "utilization over time", "busy", "working", "chunks", "energy", "gaps")]
    joules = energies([None if d.energy_j is None else d.energy_j / 3600 for d in devices])
    times = durations([d.gap_s for d in devices])
    for d, used, gap in zip(devices, joules, times, strict=True):
        # Where telemetry was off there is neither a reading nor a gap.
        gaps = gap if d.gap_s else "none" if d.samples else UNKNOWN
        busy, working = percent(d.busy_mean_percent), percent(working_percent(d))
        rows.append((_name(d), d.task, spark(d.spark) or UNKNOWN, busy, working, f"{d.tries_done:,}", used, gaps))
    return rows


def working_percent(device: DeviceSummary) -> float | None:
    """Return the share of its time in which a device worked on chunks that were done."""
    total_s = sum(device.state_s.values())
    return 100 * device.state_s.get("working", 0.0) / total_s if total_s > 0 else None


def rank_rows(devices: Sequence[DeviceSummary]) -> Rows:
    """Return p50, p95 and maximum of what was measured on each device."""
    rows: Rows = [("p50 / p95 / max", "task", "util %", "memory GiB", "°C", "power W", "chunk s")]
    for d in devices:
        rows.append(
            (
                _name(d),
                d.task,
                _ranks(d, "utilization_percent"),
                _ranks(d, "memory_used_bytes", per=2**30, digits=1),
                _ranks(d, "temperature_c"),
                _ranks(d, "power_w"),
                three(d.chunk_p50_s, d.chunk_p95_s, d.chunk_max_s, 2 if (d.chunk_max_s or 0) < 10 else 1),
            )
        )
    return rows


def _ranks(device: DeviceSummary, metric: str, *, per: float = 1.0, digits: int = 0) -> str:
    found = device.metrics.get(metric)
    return UNKNOWN if found is None else three(found.p50 / per, found.p95 / per, found.maximum / per, digits)


def _name(device: DeviceSummary) -> str:
    return f"{device.label} {device.name or UNKNOWN}"[:16].rstrip()
