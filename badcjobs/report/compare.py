"""Two jobs side by side: their figures, the changes, and the settings that differ. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from badcjobs.report.document import finite
from badcjobs.report.job_tables import flat_settings
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary, percent_of, ratio
from badcjobs.report.tables import Table, ending
from badcjobs.report.verdict import news_words
from badcjobs.words import UNKNOWN, count, duration, energy, moment, number, share_words

COMPARISON_VERSION = 1
_SAME = 0.005  # a smaller relative difference is "the same"
_SAME_POINTS = 0.5
_ALIKE = 0.01  # if chunk lengths differ by less than this, the cost of a chunk can be called better or worse
_ENOUGH = 90.0  # percent: figures measured for less of the time are not comparable
INCOMPARABLE = "cannot be compared"
_NOW = "up to date"
_OF_ONE_RUN = {"out", "source", "root", "shard"}  # these always differ
# The words for a change: "2 × as WORD", "12 % MORE", "12 % LESS".
MUCH = ("much", "more", "less")
MANY = ("many", "more", "fewer")
FAST = ("fast", "faster", "slower")
LONG = ("long", "longer", "shorter")
Document = dict[str, Any]  # for --json, or a part of it
Find = Callable[[Summary], float | None]
Say = Callable[[float], str]  # writes a figure


class Kind(NamedTuple):
    """One figure of the comparison: how to compute it, write it, and judge it."""

    key: str
    name: str
    say: Say
    words: tuple[str, str, str] = MUCH
    better: int = 0  # 1: more is better; -1: less is; 0: neither
    find: Find | None = None  # None: it is the attribute ``key`` of the summary
    alike: Find | None = None  # must agree in both jobs, or the change is not called better or worse
    measured: Find | None = None  # percent of the time for which it was measured
    at_least: bool = False  # what was not measured would be added
    points: bool = False  # it is a percentage: the difference is in percentage points
    of_work: bool = False  # not compared (a percentage: not judged) if one of the jobs has analysed nothing


def _busy(summary: Summary) -> float | None:
    """Return the mean over all devices, each with the weight of its samples."""
    devices = [device for device in summary.devices if device.busy_mean_percent is not None]
    total = sum((device.busy_mean_percent or 0.0) * device.samples for device in devices)
    return ratio(total, sum(device.samples for device in devices))


def _audio_per_chunk(summary: Summary) -> float | None:
    return ratio(summary.audio_hours * 3600, summary.done - summary.facts.done_of_unknown_length)


def _rate_measured(summary: Summary) -> float | None:
    """Return for how much of their time the devices with known energy were measured: the rate covers only these."""
    metered = summary.metered
    return percent_of(sum(device.energy_measured_s for device in metered), sum(device.total_s for device in metered))


def _plain(digits: int, unit: str = "") -> Say:
    return lambda value: number(value, digits) + (f" {unit}" if unit else "")


def _or_none(digits: int) -> Say:
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
    Kind(
        "chunk_p50_s",
        "seconds per chunk, p50",
        _plain(2),
        LONG,
        -1,
        lambda s: s.chunk_s.p50 if s.chunk_s else None,
        _audio_per_chunk,
    ),
    Kind(
        "chunk_p95_s",
        "seconds per chunk, p95",
        _plain(2),
        LONG,
        -1,
        lambda s: s.chunk_s.p95 if s.chunk_s else None,
        _audio_per_chunk,
    ),
    Kind(
        "gpu_s_per_chunk",
        "GPU-seconds per chunk",
        _plain(2),
        MUCH,
        -1,
        lambda s: s.chunk_cost.gpu_s_mean,
        _audio_per_chunk,
    ),
    Kind(
        "energy_j_per_chunk",
        "joules per chunk",
        _plain(1),
        MUCH,
        -1,
        lambda s: s.chunk_cost.energy_j_mean,
        _audio_per_chunk,
        lambda s: percent_of(s.chunk_cost.energy_tries, s.chunk_cost.tries),
    ),
    Kind("energy_wh", "energy", energy, measured=lambda s: s.energy_measured_percent, at_least=True),
    Kind("energy_measured_percent", "GPU time with known energy", share_words, points=True),
    Kind(
        "kwh_per_1000_audio_hours",
        "kWh per 1,000 audio-hours",
        _plain(2),
        MUCH,
        -1,
        measured=_rate_measured,
        at_least=True,
    ),
    Kind(
        "detections_per_audio_hour",
        "detections per audio-hour",
        _plain(1),
        MANY,
        find=lambda s: ratio(s.detections, s.audio_hours),
    ),
)


def _state_kind(state: str) -> Kind:
    def share(summary: Summary) -> float | None:
        if state in summary.states:
            return summary.states[state].share_percent
        return 0.0 if summary.states else None

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
    this: Document
    other: Document
    conclusion: str
    figures: tuple[Figure, ...]
    states: tuple[Figure, ...]  # the share of the GPU time in each state, in percent
    settings: dict[str, Document]  # those that differ: name → this and other
    settings_known: bool  # of both

    def to_dict(self) -> Document:
        """Return the document of ``badcjobs report --compare --json``."""
        return finite(self)  # type: ignore[no-any-return]


def compare(this: Summary, this_title: str, other: Summary, other_title: str) -> Comparison:
    """Compare a job with another one."""
    about = _about(this, this_title)
    about_other = _about(other, other_title)
    differences = _differences(about, about_other)
    figures = [_figure(kind, this, other, judged=not differences) for kind in FIGURES]
    conclusion = _conclude(figures, this_title, other_title) + differences
    if this.facts == other.facts:
        conclusion += " Both are the same run: it is compared with itself."
    return Comparison(
        version=COMPARISON_VERSION,
        this=about,
        other=about_other,
        conclusion=conclusion,
        figures=tuple(figure for figure in figures if figure.this is not None or figure.other is not None),
        states=tuple(_figure(kind, this, other) for kind in _SHARES if kind.key in {**this.states, **other.states}),
        settings=_different_settings(this.facts.last_settings, other.facts.last_settings),
        settings_known=bool(this.facts.last_settings and other.facts.last_settings),
    )


def _different_settings(this: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Document]:
    """Return the settings that differ; one that a job does not have (another version ran it) is no difference."""
    ours = flat_settings(this)
    theirs = flat_settings(other)
    differences = {}
    for key in sorted(ours.keys() & theirs.keys() - _OF_ONE_RUN):
        if ours[key] != theirs[key]:
            differences[key] = {"this": ours[key], "other": theirs[key]}
    return differences


def _about(summary: Summary, title: str) -> Document:
    return {
        "title": title,
        "verdict": summary.verdict,
        "started_at_ms": summary.started_at_ms,
        "last_sign_ms": summary.last_sign_ms,
        "models": sorted({device.name for device in summary.devices if device.name}),
        "engines": sorted({task.engine for task in summary.facts.tasks if task.engine}),
        "merged": summary.merged,
        "cut_short": summary.cut_short,
    }


def _differences(this: Document, other: Document) -> str:
    """Return a sentence if engines or models differ: then nothing is called better or worse."""
    differences = []
    for key, noun in (("engines", "engine"), ("models", "devices")):
        if this[key] and other[key] and this[key] != other[key]:
            differences.append(f"{noun} ({', '.join(this[key])} against {', '.join(other[key])})")
    if not differences:
        return ""
    return f" They differ in {' and '.join(differences)}: no change is called better or worse."


def news_of(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return a remark for each job that is out of date or has an interrupted submit, with the command to run."""
    remarks: list[tuple[str, str | None]] = []
    for about in (comparison.this, comparison.other):
        merged = about["merged"]
        cut_short = about["cut_short"]
        news = news_words(merged)
        if news:
            if merged.command is not None:
                news += "; to include that:"
            remarks.append((f"The merge of {about['title']}: {news}", merged.command))
        if cut_short is not None:
            remarks.append((f"The run {about['title']}: {cut_short.what}:", cut_short.command))
    return remarks


def comparison_tables(
    comparison: Comparison, head: Sequence[str], longest: int | None = None
) -> Iterator[tuple[str, Table | list[str]]]:
    """Yield headings and tables: the jobs and their figures, the share of each state, the settings that differ.

    Names from the jobs are cut to ``longest`` characters. If no setting differs, a line says so.
    """

    def table(name: str, heading: str, rows: Sequence[Sequence[str]]) -> Table:
        jobs = [(title, "") for title in head]
        columns = [(heading, "text"), *jobs, ("", "text")]
        return Table(name, "Both jobs", columns[: len(rows[0])], rows)

    this = _described(comparison.this, longest)
    other = _described(comparison.other, longest)
    rows = [(name, this[name], other[name], "") for name in this]
    rows = [row for row in rows if row[1:3] != (_NOW, _NOW)]
    yield "Figures", table("figures", "", [*rows, *map(_row, comparison.figures)])
    if comparison.states:
        shares = list(map(_row, comparison.states))
        yield "What the devices did", table("states", "share of the GPU time", shares)
    if comparison.settings:
        settings = [
            (_cut(key, longest), _cut(_setting(pair["this"]), longest), _cut(_setting(pair["other"]), longest))
            for key, pair in comparison.settings.items()
        ]
        yield "Settings", table("settings", "settings that differ", settings)
    elif comparison.settings_known:
        yield "Settings", ["no setting differs"]
    else:
        yield "Settings", ["the settings of one of them are not known"]


def _row(figure: Figure) -> tuple[str, ...]:
    return figure.name, figure.this_words, figure.other_words, figure.change


def _described(about: Document, longest: int | None) -> dict[str, str]:
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
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- figures ----------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """A figure of one job."""

    value: float | None
    measured: float  # percent of the time
    words: str


def _side(kind: Kind, summary: Summary) -> _Side:
    find = kind.find or attrgetter(kind.key)
    value = find(summary)
    measured = 100.0 if kind.measured is None else kind.measured(summary) or 0.0
    words = UNKNOWN if value is None else kind.say(value)
    if value is not None and kind.at_least and measured < NEARLY_ALL:
        words = at_least(words)
    return _Side(value, measured, words)


def _figure(kind: Kind, this: Summary, other: Summary, *, judged: bool = True) -> Figure:
    """Return a figure; it is better or worse only if both jobs measured all of it, with similar chunks."""
    ours = _side(kind, this)
    theirs = _side(kind, other)
    known = ours.value is not None and theirs.value is not None
    measured = min(ours.measured, theirs.measured)
    idle = kind.of_work and not (this.times_real_time and other.times_real_time)
    comparable = measured >= _ENOUGH and (kind.points or not idle)
    fair = judged and not idle and measured >= NEARLY_ALL and _alike(kind, this, other)
    if known and not comparable:
        change = INCOMPARABLE
    elif known and ours.words == theirs.words:
        change = "the same"  # a difference that is not visible is none
    else:
        change = change_words(ours.value, theirs.value, kind.words, kind.better if fair else 0, points=kind.points)
    return Figure(
        key=kind.key,
        name=kind.name,
        this=ours.value,
        other=theirs.value,
        ratio=ours.value / theirs.value if ours.value is not None and theirs.value and comparable else None,
        change=change,
        this_words=ours.words,
        other_words=theirs.words,
    )


def _alike(kind: Kind, this: Summary, other: Summary) -> bool:
    """Say whether the jobs had chunks of about the same length, where that matters for a figure."""
    if kind.alike is None:
        return True
    ours = kind.alike(this)
    theirs = kind.alike(other)
    return ours is not None and bool(theirs) and abs(ours / (theirs or 1.0) - 1) < _ALIKE


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
    direction = more if this > other else less
    change = direction
    if points:
        difference = abs(math.floor(this + 0.5) - math.floor(other + 0.5))  # else 7 % and 3 % may differ by 5 points
        change = f"{count(max(1, difference), 'point')} {direction}"
    elif other > 0 and this >= 2 * other:
        change = f"{number(this / other)} × as {as_word}"
    elif 0 < this < other / 100:  # "100 % less" would be nothing
        change = f"1/{number(other / this, 0)} as {as_word}"
    elif other > 0 and this >= 0:
        change = f"{abs(this / other - 1) * 100:.0f} % {direction}"
    if not better:
        return change
    return f"{change} (better)" if (this > other) == (better > 0) else f"{change} (worse)"


def _conclude(figures: Sequence[Figure], this: str, other: str) -> str:
    """Return the comparison in one sentence."""
    by_key = {figure.key: figure for figure in figures}
    speed = by_key["times_real_time"]
    if speed.ratio is None:
        idle = "both have"
        if speed.this or speed.other:
            idle = f"{other if speed.this else this} has"
        return f"The speed of {this} and {other} cannot be compared: {idle} analysed nothing."
    faster = "as fast as"
    if abs(speed.ratio - 1) >= _SAME:
        faster = f"{number(speed.ratio, 2)} × as fast as"
    sentence = f"{this} is {faster} {other}"
    devices = by_key["devices_at_once"]
    if devices.this is not None and devices.other is not None and (devices.this or devices.other):
        sentence += f", with {_gpus(devices.this)} against {_gpus(devices.other)} in use on average"
    rate = by_key["audio_hours_per_gpu_hour"]
    if rate.ratio is not None:
        sentence += f"; each GPU-hour analyses {number(rate.ratio, 2)} × as much audio"
    return f"{sentence}."


def _gpus(many: float) -> str:
    return f"{number(many)} GPUs" if many else "no GPU"
