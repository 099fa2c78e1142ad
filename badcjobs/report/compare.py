"""Two jobs side by side: their figures, the changes, and the settings that differ. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from badcjobs.report.job_tables import flat_settings
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary, finite, ratio
from badcjobs.report.tables import Table, ending
from badcjobs.report.verdict import news_words
from badcjobs.report.words import UNKNOWN, count, duration, energy, moment, number, share_words

COMPARISON_VERSION = 1
_SAME = 0.005  # a smaller relative difference is "the same"
_SAME_POINTS = 0.5
_ALIKE = 0.01  # if chunk lengths differ by less than this, the cost of a chunk can be called better or worse
_ENOUGH = 90.0  # percent: figures measured for less of the time are not comparable
INCOMPARABLE = "cannot be compared"
_NOW = "up to date"
_OF_ONE_RUN = ("out", "source", "root", "shard")  # these always differ
# The words for a change: "2 × as WORD", "12 % MORE", "12 % LESS".
MUCH = ("much", "more", "less")
MANY = ("many", "more", "fewer")
FAST = ("fast", "faster", "slower")
LONG = ("long", "longer", "shorter")
Find = Callable[[Summary], float | None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One figure of the comparison: how to compute it, write it, and judge it."""

    key: str
    name: str
    say: Callable[[float], str]
    words: tuple[str, str, str] = MUCH
    better: int = 0  # 1: more is better; -1: less is; 0: neither
    find: Find | None = None  # None: it is the attribute ``key`` of the summary
    alike: Find | None = None  # must agree in both jobs, or the change is not called better or worse
    measured: Find | None = None  # percent of the time for which it was measured
    at_least: bool = False  # what was not measured would be added
    points: bool = False  # it is a percentage: the difference is in percentage points
    of_work: bool = False  # not compared (a percentage: not judged) if one of the jobs has analysed nothing


def _busy(summary: Summary) -> float | None:
    known = [(d.busy_mean_percent, d.samples) for d in summary.devices if d.busy_mean_percent is not None]
    return ratio(sum(percent * many for percent, many in known), sum(many for _, many in known))


def _audio_per_chunk(summary: Summary) -> float | None:
    return ratio(summary.audio_hours * 3600, summary.done - summary.facts.done_of_unknown_length)


def _rate_measured(summary: Summary) -> float | None:
    """Return for how much of their time the devices with known energy were measured: the rate covers only these."""
    known = [device for device in summary.devices if device.energy_j is not None]
    return _percent(sum(device.energy_measured_s for device in known), sum(device.total_s for device in known))


def _percent(part: float, whole: float) -> float | None:
    share = ratio(part, whole)
    return share and 100 * share


def _plain(digits: int, unit: str = "") -> Callable[[float], str]:
    return lambda value: number(value, digits) + (f" {unit}" if unit else "")


def _or_none(digits: int) -> Callable[[float], str]:
    return lambda value: number(value, digits) if value else "none"


FIGURES = (
    Kind("times_real_time", "speed (× real time)", _plain(1), FAST, 1, of_work=True),
    Kind("audio_hours_per_gpu_hour", "audio-hours per GPU-hour", _plain(1), MUCH, 1, of_work=True),
    Kind("devices_at_once", "GPUs in use, on average", _or_none(1), MANY),
    Kind("tasks", "task attempts", _plain(0), MANY),
    Kind("chunks_done", "chunks done", _plain(0), MANY, find=lambda s: s.done),
    Kind("chunks_failed", "chunks failed", _plain(0), MANY, -1, lambda s: s.failed, alike=lambda s: s.chunks),
    Kind("tries_per_chunk", "tries per chunk done", _plain(2), MANY, -1, lambda s: ratio(s.facts.tries, s.done)),
    Kind("audio_hours", "audio-hours", _plain(2)),
    Kind("wall_s", "running time", duration, LONG),
    Kind("gpu_hours", "GPU-hours", _or_none(2)),
    Kind("busy_mean_percent", "busy, mean of all devices", _plain(0, "%"), MUCH, 1, _busy, points=True, of_work=True),
    Kind("audio_s_per_chunk", "seconds of audio per chunk", _plain(1), LONG, find=_audio_per_chunk),
    Kind("chunk_p50_s", "seconds per chunk, p50", _plain(2), LONG, -1,
         lambda s: s.chunk_s.p50 if s.chunk_s else None, _audio_per_chunk),
    Kind("chunk_p95_s", "seconds per chunk, p95", _plain(2), LONG, -1,
         lambda s: s.chunk_s.p95 if s.chunk_s else None, _audio_per_chunk),
    Kind("gpu_s_per_chunk", "GPU-seconds per chunk", _plain(2), MUCH, -1,
         lambda s: s.chunk_cost.gpu_s_mean, _audio_per_chunk),
    Kind("energy_j_per_chunk", "joules per chunk", _plain(1), MUCH, -1,
         lambda s: s.chunk_cost.energy_j_mean, _audio_per_chunk,
         lambda s: _percent(s.chunk_cost.energy_tries, s.chunk_cost.tries)),
    Kind("energy_wh", "energy", energy, measured=lambda s: s.energy_measured_percent, at_least=True),
    Kind("energy_measured_percent", "GPU time with known energy", share_words, points=True),
    Kind("kwh_per_1000_audio_hours", "kWh per 1,000 audio-hours", _plain(2), MUCH, -1,
         measured=_rate_measured, at_least=True),
    Kind("detections_per_audio_hour", "detections per audio-hour", _plain(1), MANY,
         find=lambda s: ratio(s.detections, s.audio_hours)),
)  # fmt: skip


def _state_kind(state: str) -> Kind:
    def share(summary: Summary) -> float | None:
        found = summary.states.get(state)
        return found.share_percent if found else 0.0 if summary.states else None

    return Kind(state, STATE_WORDS[state], share_words, find=share, points=True)


_SHARES = tuple(map(_state_kind, STATE_WORDS))


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both jobs, and its change in words."""

    key: str
    name: str
    this: float | None
    other: float | None
    ratio: float | None  # this over other
    change: str
    this_words: str
    other_words: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two jobs side by side."""

    version: int
    this: dict[str, Any]
    other: dict[str, Any]
    conclusion: str
    figures: tuple[Figure, ...]
    states: tuple[Figure, ...]  # the share of the GPU time in each state, in percent
    settings: dict[str, dict[str, Any]]  # those that differ: name → this and other
    settings_known: bool  # of both

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``badcjobs report --compare --json``."""
        return finite(self)  # type: ignore[no-any-return]


def compare(this: Summary, this_title: str, other: Summary, other_title: str) -> Comparison:
    """Compare a job with another one."""
    about = (_about(this, this_title), _about(other, other_title))
    differ = _differences(*about)
    itself = " Both are the same run: it is compared with itself." if this.facts == other.facts else ""
    figures = tuple(_figure(kind, this, other, judged=not differ) for kind in FIGURES)
    # A setting that one job does not have (another version ran it) is not a difference.
    ours, theirs = flat_settings(this.facts.last_settings), flat_settings(other.facts.last_settings)
    both = sorted(key for key in ours if key in theirs and key not in _OF_ONE_RUN)
    shown = tuple(figure for figure in figures if figure.this is not None or figure.other is not None)
    return Comparison(
        version=COMPARISON_VERSION,
        this=about[0],
        other=about[1],
        conclusion=_conclude(figures, this_title, other_title) + differ + itself,
        figures=shown,
        states=tuple(_figure(kind, this, other) for kind in _SHARES if kind.key in {**this.states, **other.states}),
        settings={key: {"this": ours[key], "other": theirs[key]} for key in both if ours[key] != theirs[key]},
        settings_known=bool(this.facts.last_settings and other.facts.last_settings),
    )


def _about(summary: Summary, title: str) -> dict[str, Any]:
    models = sorted({device.name for device in summary.devices if device.name})
    engines = sorted({task.engine for task in summary.facts.tasks if task.engine})
    return {
        "title": title,
        "verdict": summary.verdict,
        "started_at_ms": summary.started_at_ms,
        "last_sign_ms": summary.last_sign_ms,
        "models": models,
        "engines": engines,
        "merged": summary.merged,
        "cut_short": summary.cut_short,
    }


def _differences(this: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a sentence if engines or models differ: then nothing is called better or worse."""
    kinds = [
        f"{what} ({', '.join(this[key])} against {', '.join(other[key])})"
        for key, what in (("engines", "engine"), ("models", "devices"))
        if this[key] and other[key] and this[key] != other[key]
    ]
    return f" They differ in {' and '.join(kinds)}: no change is called better or worse." if kinds else ""


def news_of(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return a remark for each job that is out of date or has an interrupted submit, with the command to run."""
    found = []
    for about in (comparison.this, comparison.other):
        merged = about["merged"]
        if news := news_words(merged):
            ending = "" if merged.command is None else "; to include that:"
            found.append((f"The merge of {about['title']}: {news}{ending}", merged.command))
        if (cut_short := about["cut_short"]) is not None:
            found.append((f"The run {about['title']}: {cut_short.what}:", cut_short.command))
    return found


def comparison_tables(
    comparison: Comparison, head: Sequence[str], longest: int | None = None
) -> Iterator[tuple[str, Table | list[str]]]:
    """Yield headings and tables: the jobs and their figures, the share of each state, the settings that differ.

    Names from the jobs are cut to ``longest`` characters. If no setting differs, a line says so.
    """
    jobs, change = [(title, "") for title in head], ("", "text")
    this, other = (_described(one, longest) for one in (comparison.this, comparison.other))
    about = [(name, this[name], other[name], "") for name in this if (this[name], other[name]) != (_NOW, _NOW)]
    rows = [*about, *((f.name, f.this_words, f.other_words, f.change) for f in comparison.figures)]
    yield "Figures", Table("figures", "Both jobs", [("", "text"), *jobs, change], rows)
    shares = [(f.name, f.this_words, f.other_words, f.change) for f in comparison.states]
    if shares:
        heading = "share of the GPU time"
        yield "What the devices did", Table("states", "Both jobs", [(heading, "text"), *jobs, change], shares)
    settings = [
        tuple(_cut(text, longest) for text in (key, *map(_setting, (pair["this"], pair["other"]))))
        for key, pair in comparison.settings.items()
    ]
    if settings:
        yield "Settings", Table("settings", "Both jobs", [("settings that differ", "text"), *jobs], settings)
    else:
        known = comparison.settings_known
        yield "Settings", ["no setting differs" if known else "the settings of one of them are not known"]


def _described(about: dict[str, Any], longest: int | None) -> dict[str, str]:
    """Return a description of a job, in words."""
    merged = about["merged"]
    as_of = "out of date" if merged.as_of_ms is None else moment(merged.as_of_ms)
    return {
        "started": UNKNOWN if about["started_at_ms"] is None else moment(about["started_at_ms"]),
        "devices": _cut(", ".join(about["models"]) or UNKNOWN, longest),
        "engine": _cut(", ".join(about["engines"]) or UNKNOWN, longest),
        "verdict": about["verdict"],
        "merged": as_of if news_words(merged) else _NOW,
    }


def _cut(text: str, longest: int | None) -> str:
    return text if longest is None else ending(text, longest)


def _setting(value: Any) -> str:
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- figures ----------------------------------------------------------------------------------------------------------


def _figure(kind: Kind, this: Summary, other: Summary, *, judged: bool = True) -> Figure:
    """Return a figure; it is better or worse only if both jobs measured all of it, with similar chunks."""
    find: Find = kind.find or attrgetter(kind.key)
    values = a, b = find(this), find(other)
    shares = [100.0 if kind.measured is None else kind.measured(one) or 0.0 for one in (this, other)]
    words = [UNKNOWN if value is None else kind.say(value) for value in values]
    for place, (value, share) in enumerate(zip(values, shares, strict=True)):
        if value is not None and kind.at_least and share < NEARLY_ALL:
            words[place] = at_least(words[place])
    idle = kind.of_work and not (this.times_real_time and other.times_real_time)
    incomparable = a is not None and b is not None and (min(shares) < _ENOUGH or (idle and not kind.points))
    one, two = (1.0, 1.0) if kind.alike is None else (kind.alike(this), kind.alike(other))
    alike = one is not None and bool(two) and abs(one / (two or 1.0) - 1) < _ALIKE
    fair = judged and min(shares) >= NEARLY_ALL and alike and not idle
    if incomparable:
        change = INCOMPARABLE
    elif UNKNOWN not in words and words[0] == words[1]:
        change = "the same"  # a difference that is not visible is none
    else:
        change = change_words(a, b, kind.words, kind.better if fair else 0, points=kind.points)
    ratio = a / b if a is not None and b and not incomparable else None
    return Figure(kind.key, kind.name, a, b, ratio, change, words[0], words[1])


def at_least(words: str) -> str:
    """Return a figure that was measured only in part; "at least under 0.01" would be nonsense."""
    return f"measured: {words}" if words.startswith("under ") else f"at least {words}"


def change_words(
    this: float | None, other: float | None, words: tuple[str, str, str], better: int = 0, *, points: bool = False
) -> str:
    """Return the change from the other job to this one: '2.1 × as fast (better)', '12 % less'.

    ``points``: the figure is a percentage; the change is the difference of the percentages as shown.
    """
    if this is None or other is None:
        return UNKNOWN
    if points and abs(this - other) < _SAME_POINTS:
        return "the same"
    if not points and (this == other or (other and abs(this / other - 1) < _SAME)):
        return "the same"
    as_word, more, less = words
    said = direction = more if this > other else less
    if points:
        shown = abs(math.floor(this + 0.5) - math.floor(other + 0.5))  # else 7 % and 3 % may differ by 5 points
        said = f"{count(max(1, shown), 'point')} {direction}"
    elif other > 0 and this >= 2 * other:
        said = f"{number(this / other)} × as {as_word}"
    elif 0 < this < other / 100:  # "100 % less" would be nothing
        said = f"1/{number(other / this, 0)} as {as_word}"
    elif other > 0 and this >= 0:
        said = f"{abs(this / other - 1) * 100:.0f} % {direction}"
    return said + ("" if not better else " (better)" if (this > other) == (better > 0) else " (worse)")


def _conclude(figures: tuple[Figure, ...], this: str, other: str) -> str:
    """Return the comparison in one sentence."""
    found = {figure.key: figure for figure in figures}
    speed, devices, rate = (found[k] for k in ("times_real_time", "devices_at_once", "audio_hours_per_gpu_hour"))
    idle = [title for title, value in ((this, speed.this), (other, speed.other)) if not value]
    if idle or speed.ratio is None:
        who = f"{idle[0]} has" if len(idle) == 1 else "both have"
        return f"The speed of {this} and {other} cannot be compared: {who} analysed nothing."
    faster = "as fast as" if abs(speed.ratio - 1) < _SAME else f"{number(speed.ratio, 2)} × as fast as"
    gpus = ""
    if devices.this is not None and devices.other is not None and (devices.this or devices.other):
        ours, theirs = (f"{number(many)} GPUs" if many else "no GPU" for many in (devices.this, devices.other))
        gpus = f", with {ours} against {theirs} in use on average"
    audio = "" if rate.ratio is None else f"; each GPU-hour analyses {number(rate.ratio, 2)} × as much audio"
    return f"{this} is {faster} {other}{gpus}{audio}."
