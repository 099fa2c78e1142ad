"""Two jobs side by side: what is more, what is less, and which settings differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from badcjobs.model import Freshness
from badcjobs.report.compared_figures import KINDS, MUCH, Kind, at_least
from badcjobs.report.headlines import news_words
from badcjobs.report.states import NEARLY_ALL, STATE_WORDS
from badcjobs.report.summarize import Summary, finite
from badcjobs.report.words import UNKNOWN, count, moment, number, share_words

COMPARISON_VERSION = 1
_SAME = 0.005  # less than this is no difference
_SAME_POINTS = 0.5
_ALIKE = 0.01  # chunks of two jobs that differ by less than this may be judged by what one of them takes
_ENOUGH = 90.0  # percent: of what was measured for less of the time, nobody can say how much more it is
_UP_TO_DATE = "up to date"
INCOMPARABLE = "cannot be compared"
_OF_ONE_RUN = ("out", "source", "root", "shard")  # of course these differ


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both jobs, and what became of it in words."""

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
    settings: dict[str, dict[str, Any]]  # those that differ: key → this and other
    settings_known: bool  # of both

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs report --compare --json``."""
        return finite(asdict(self))  # type: ignore[no-any-return]


def compare(this: Summary, this_title: str, other: Summary, other_title: str) -> Comparison:
    """Compare a job with another one."""
    figures = tuple(_figure(kind, this, other) for kind in KINDS)
    shown = tuple(figure for figure in figures if figure.this is not None or figure.other is not None)
    return Comparison(
        version=COMPARISON_VERSION,
        this=_about(this, this_title),
        other=_about(other, other_title),
        conclusion=_conclude(figures, this_title, other_title),
        figures=shown,
        states=tuple(_share(state, this, other) for state in STATE_WORDS if state in {**this.states, **other.states}),
        settings=_differences(this, other),
        settings_known=bool(this.settings and other.settings),
    )


def _about(summary: Summary, title: str) -> dict[str, Any]:
    models = sorted({device.name for device in summary.devices if device.name})
    engines = sorted({task.engine for task in summary.task_list if task.engine})
    started = {"started_at_ms": summary.started_at_ms, "last_sign_ms": summary.last_sign_ms}
    found = {"models": models, "engines": engines, "merged": asdict(summary.merged)}
    cut_short = None if summary.cut_short is None else asdict(summary.cut_short)
    return {"title": title, "verdict": summary.verdict, **started, **found, "cut_short": cut_short}


def news_of(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return what there is to say of a job with news since its merge, or a submit cut short; each with its command."""
    found = []
    for about in (comparison.this, comparison.other):
        merged = Freshness(**about["merged"])
        if news := news_words(merged):
            ending = "" if merged.command is None else "; to take that in:"
            found.append((f"The merge of {about['title']}: {news}{ending}", merged.command))
        if (cut_short := about["cut_short"]) is not None:
            found.append((f"The run {about['title']}: {cut_short['what']}:", cut_short["command"]))
    return found


def about_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return what the two jobs are, in words; how old they are only where one of them is out of date."""
    this, other = (_described(one) for one in (comparison.this, comparison.other))
    rows = [(name, this[name], other[name]) for name in this]
    return [row for row in rows if row != ("merged", _UP_TO_DATE, _UP_TO_DATE)]


def _described(about: dict[str, Any]) -> dict[str, str]:
    merged = Freshness(**about["merged"])
    as_of = "out of date" if merged.as_of_ms is None else moment(merged.as_of_ms)
    return {
        "started": UNKNOWN if about["started_at_ms"] is None else moment(about["started_at_ms"]),
        "devices": ", ".join(about["models"]) or UNKNOWN,
        "engine": ", ".join(about["engines"]) or UNKNOWN,
        "verdict": about["verdict"],
        "merged": as_of if news_words(merged) else _UP_TO_DATE,
    }


def _figure(kind: Kind, this: Summary, other: Summary) -> Figure:
    a, b = kind.find(this), kind.find(other)
    words = [_said(kind, one, value) for one, value in ((this, a), (other, b))]
    change = _change(kind, this, other, words)
    ratio = a / b if a is not None and b and change != INCOMPARABLE else None
    return Figure(kind.key, kind.name, a, b, ratio, change, words[0], words[1])


def _said(kind: Kind, summary: Summary, value: float | None) -> str:
    if value is None:
        return UNKNOWN
    partly = kind.at_least and _measured(kind, summary) < NEARLY_ALL
    return at_least(kind.say(value)) if partly else kind.say(value)


def _measured(kind: Kind, summary: Summary) -> float:
    return 100.0 if kind.measured is None else kind.measured(summary) or 0.0


def _change(kind: Kind, this: Summary, other: Summary, words: list[str]) -> str:
    """Return what became of a figure; better or worse only where both jobs measured it whole, over like chunks."""
    a, b = kind.find(this), kind.find(other)
    measured = min(_measured(kind, this), _measured(kind, other))
    alike = kind.parts is None or kind.parts(this) == kind.parts(other)
    idle = kind.of_work and not (this.times_real_time and other.times_real_time)
    if a is not None and b is not None and (measured < _ENOUGH or not alike or (idle and not kind.points)):
        return INCOMPARABLE
    if UNKNOWN not in words and words[0] == words[1]:
        return "the same"  # what nobody can see is no difference
    fair = measured >= NEARLY_ALL and (kind.alike is None or _agree(kind.alike(this), kind.alike(other))) and not idle
    say = points_words if kind.points else change_words
    return say(a, b, kind.words, kind.better if fair else 0)


def _agree(this: float | None, other: float | None) -> bool:
    return this is not None and bool(other) and abs(this / (other or 1.0) - 1) < _ALIKE


def change_words(this: float | None, other: float | None, words: tuple[str, str, str], better: int = 0) -> str:
    """Return how a figure of this job stands to that of the other: '2.1 × as fast (better)', '12 % less'."""
    if this is None or other is None:
        return UNKNOWN
    as_word, more, less = words
    if this == other or (other and abs(this / other - 1) < _SAME):
        return "the same"
    judged = _judged(this > other, better)
    if other <= 0 or this < 0:
        return (more if this > other else less) + judged
    if this >= 2 * other:
        return f"{number(this / other)} × as {as_word}{judged}"
    if 0 < this < other / 100:  # 100 % less would be nothing
        return f"1/{number(other / this, 0)} as {as_word}{judged}"
    return f"{abs(this / other - 1):.0%} {more if this > other else less}{judged}".replace("%", " %")


def points_words(this: float | None, other: float | None, words: tuple[str, str, str], better: int = 0) -> str:
    """Return by how many points a percentage of this job, as it is shown, is above or below that of the other."""
    if this is None or other is None:
        return UNKNOWN
    _, more, less = words
    if abs(this - other) < _SAME_POINTS:
        return "the same"
    shown = abs(math.floor(this + 0.5) - math.floor(other + 0.5))  # else 7 % and 3 % may differ by 5 points
    points = count(max(1, shown), "point")
    return f"{points} {more if this > other else less}{_judged(this > other, better)}"


def _judged(more: bool, better: int) -> str:
    return "" if not better else " (better)" if more == (better > 0) else " (worse)"


def _share(state: str, this: Summary, other: Summary) -> Figure:
    a, b = (s.states[state].share_percent if state in s.states else 0.0 if s.states else None for s in (this, other))
    words, ratio = [share_words(a), share_words(b)], a / b if a is not None and b else None
    change = "the same" if UNKNOWN not in words and words[0] == words[1] else points_words(a, b, MUCH)
    return Figure(state, STATE_WORDS[state], a, b, ratio, change, words[0], words[1])


def _conclude(figures: tuple[Figure, ...], this: str, other: str) -> str:
    """Return the comparison in one sentence."""
    found = {figure.key: figure for figure in figures}
    speed, devices, rate = (found[k] for k in ("times_real_time", "devices_at_once", "audio_hours_per_gpu_hour"))
    idle = [title for title, value in ((this, speed.this), (other, speed.other)) if not value]
    if idle or speed.ratio is None:
        who = f"{idle[0]} has" if len(idle) == 1 else "both have"
        return f"The speed of {this} and {other} cannot be compared: {who} analysed nothing."
    words = f"{this} is {_as(speed.ratio)} {other}{_with_devices(devices, other)}"
    if rate.ratio is not None:
        words += f"; a GPU-hour of it gives {number(rate.ratio, 2)} × the audio"
    return words + "."


def _as(ratio: float) -> str:
    return "as fast as" if abs(ratio - 1) < _SAME else f"{number(ratio, 2)} × as fast as"


def _with_devices(devices: Figure, other: str) -> str:
    """Say how many GPUs it took, where both are known."""
    if devices.this is None or devices.other is None:
        return ""
    if not devices.this:
        return ", without a GPU" if devices.other else "; both without a GPU"
    if devices.ratio is None:
        return f", with {number(devices.this)} GPUs at once, where {other} had none"
    same = abs(devices.ratio - 1) < _SAME
    return ", with as many GPUs at once" if same else f", with {number(devices.ratio, 2)} × the GPUs at once"


def _differences(this: Summary, other: Summary) -> dict[str, dict[str, Any]]:
    """Return settings that differ; one that a job does not know (an earlier version ran it) is no difference."""
    ours, theirs = _flat(this.settings), _flat(other.settings)
    keys = [key for key in ours if key in theirs and key not in _OF_ONE_RUN]
    return {key: {"this": ours[key], "other": theirs[key]} for key in sorted(keys) if ours[key] != theirs[key]}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of a table under names of their own: alerts.idle_s."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, Mapping) else None
        found.update({key: value} if inner is None else {f"{key}.{name}": item for name, item in inner.items()})
    return found
