"""The figures by which two jobs are compared: where each is found, how it is said, what is better. Pure.

compare.py puts them side by side, and says what became of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from badcjobs.report.factors import Bill
from badcjobs.report.summarize import Summary
from badcjobs.report.words import duration, energy, mass, money, number, share_words

# How the figures of two jobs are compared: 2 × as …, 12 % …, 12 % …
MUCH = ("much", "more", "less")
MANY = ("many", "more", "fewer")
FAST = ("fast", "faster", "slower")
LONG = ("long", "longer", "shorter")


@dataclass(frozen=True, slots=True)
class Kind:
    """One figure of the comparison: how to find it, say it, and judge it."""

    key: str
    name: str
    find: Callable[[Summary], float | None]
    say: Callable[[float], str]
    words: tuple[str, str, str] = MUCH
    better: int = 0  # 1: more is better; -1: less is; 0: neither
    alike: Callable[[Summary], float | None] | None = None  # what must agree before anything is better or worse
    measured: Callable[[Summary], float | None] | None = None  # percent of the whole that was measured
    at_least: bool = False  # what was not measured would come on top
    points: bool = False  # it is a percentage: the difference is said in points
    parts: Callable[[Summary], bool] | None = None  # of what the figure is the sum: the same for both, or no comparison
    of_work: bool = False  # not compared, or of a percentage not judged, where one of the jobs has analysed nothing


def _busy(summary: Summary) -> float | None:
    known = [(d.busy_mean_percent, d.samples) for d in summary.devices if d.busy_mean_percent is not None]
    return _ratio(sum(percent * many for percent, many in known), sum(many for _, many in known))


def _audio_per_chunk(summary: Summary) -> float | None:
    return _ratio(summary.audio_hours * 3600, summary.done - summary.chunks_of_unknown_length)


def _chunks(summary: Summary) -> float:
    return summary.chunks


def at_least(words: str) -> str:
    """Return a figure of which a part was not measured; at least under 0.01 would be nonsense."""
    return f"measured: {words}" if words.startswith("under ") else f"at least {words}"


def cost_measured(bill: Bill | None, energy_percent: float | None) -> float:
    """Return how much of the cost is known in percent, if what was not measured took as much energy as the rest."""
    if bill is None or not bill.energy or not bill.total:
        return 100.0
    missing = bill.energy * (100 / energy_percent - 1) if energy_percent else float("inf")
    return 100 * bill.total / (bill.total + missing)


def _energy_measured(summary: Summary) -> float | None:
    return summary.energy_measured_percent


def _rate_measured(summary: Summary) -> float | None:
    """Return for how much of their time those devices were measured that said anything: the rate is theirs alone."""
    known = [device for device in summary.devices if device.energy_j is not None]
    share = _ratio(sum(device.energy_measured_s for device in known), sum(sum(d.state_s.values()) for d in known))
    return None if share is None else 100 * share


def _tries_measured(summary: Summary) -> float | None:
    share = _ratio(summary.chunk_cost.energy_tries, summary.chunk_cost.tries)
    return None if share is None else 100 * share


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None


def _plain(digits: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: number(value, digits) + (f" {unit}" if unit else "")


KINDS = (
    Kind("times_real_time", "speed (× real time)", lambda s: s.times_real_time, _plain(1), FAST, 1, of_work=True),
    Kind("audio_hours_per_gpu_hour", "audio-hours per GPU-hour", lambda s: s.audio_hours_per_gpu_hour, _plain(1),
          MUCH, 1, of_work=True),
    Kind("devices_at_once", "GPUs at once, on average", lambda s: s.devices_at_once, _plain(1), MANY),
    Kind("tasks", "task attempts", lambda s: s.tasks, _plain(0), MANY),
    Kind("chunks_done", "chunks done", lambda s: s.done, _plain(0), MANY),
    Kind("chunks_failed", "chunks failed", lambda s: s.failed, _plain(0), MANY, -1, alike=_chunks),
    Kind("tries_per_chunk", "tries per chunk done", lambda s: _ratio(s.tries, s.done), _plain(2), MANY, -1),
    Kind("audio_hours", "audio-hours", lambda s: s.audio_hours, _plain(2)),
    Kind("wall_s", "running time", lambda s: s.wall_s, duration, LONG),
    Kind("gpu_hours", "GPU-hours", lambda s: s.gpu_hours, _plain(2)),
    Kind("busy_mean_percent", "busy, mean of all devices", _busy, _plain(0, "%"), MUCH, 1, points=True, of_work=True),
    Kind("audio_s_per_chunk", "seconds of audio per chunk", _audio_per_chunk, _plain(1), LONG),
    Kind("chunk_p50_s", "seconds per chunk, p50", lambda s: s.chunk_s.p50 if s.chunk_s else None, _plain(2), LONG, -1,
          alike=_audio_per_chunk),
    Kind("chunk_p95_s", "seconds per chunk, p95", lambda s: s.chunk_s.p95 if s.chunk_s else None, _plain(2), LONG, -1,
          alike=_audio_per_chunk),
    Kind("gpu_s_per_chunk", "GPU-seconds per chunk", lambda s: s.chunk_cost.gpu_s_mean, _plain(2), MUCH, -1,
          alike=_audio_per_chunk),
    Kind("energy_j_per_chunk", "joules per chunk", lambda s: s.chunk_cost.energy_j_mean, _plain(1), MUCH, -1,
          alike=_audio_per_chunk, measured=_tries_measured),
    Kind("energy_wh", "energy", lambda s: s.energy_wh, energy, measured=_energy_measured, at_least=True),
    Kind("energy_measured_percent", "GPU time with known energy", _energy_measured, share_words, points=True),
    Kind("kwh_per_1000_audio_hours", "kWh per 1,000 audio-hours", lambda s: s.kwh_per_1000_audio_hours, _plain(2),
          MUCH, -1, measured=_rate_measured, at_least=True),
    Kind("cost_total", "cost", lambda s: s.bill.total if s.bill else None, money,
          measured=lambda s: cost_measured(s.bill, s.energy_measured_percent), at_least=True,
          parts=lambda s: s.bill is not None and s.bill.energy is not None),
    Kind("co2_kg", "CO₂", lambda s: s.bill.co2_kg if s.bill else None, mass, measured=_energy_measured,
          at_least=True),
    Kind("detections_per_audio_hour", "detections per audio-hour", lambda s: _ratio(s.detections, s.audio_hours),
          _plain(1), MANY),
)  # fmt: skip
