"""Two jobs side by side: their figures, the changes, and the settings that differ. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import floor
from operator import attrgetter
from typing import Any, NamedTuple

from badcjobs.report.document import finite
from badcjobs.report.job_tables import flat_settings, setting_words
from badcjobs.report.rules import busy_percent
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, Summary, ratio
from badcjobs.report.tables import Table
from badcjobs.report.verdict import news_words
from badcjobs.words import UNKNOWN, count, duration, energy, moment, number, plain, share_words

COMPARISON_VERSION = 1
_SAME = 0.005  # a smaller relative difference is "the same"
INCOMPARABLE = "cannot be compared"
_OF_ONE_RUN = {"out", "source", "root", "shard"}  # these always differ
Document = dict[str, Any]  # for --json, or a part of it


class Kind(NamedTuple):
    """One figure of the comparison: how to write it, and how to compute it."""

    key: str
    name: str
    say: Callable[[float | None], str]  # of percentages ``share_words``: their difference is in percentage points
    find: Callable[[Summary], Any] | None = (
        None  # returns a number or None; None: it is the attribute ``key`` of the summary
    )
    of_energy: bool = False  # it is compared only if nearly all energy of both jobs was measured


_WHOLE = partial(number, digits=0)
_TWO = partial(number, digits=2)
FIGURES = (
    Kind("times_real_time", "speed (× real time)", number),
    Kind("audio_hours_per_gpu_hour", "audio-hours per GPU-hour", number),
    Kind("devices_at_once", "GPUs in use, on average", number),
    Kind("tasks", "task attempts", _WHOLE),
    Kind("chunks_done", "chunks done", _WHOLE, attrgetter("done")),
    Kind("chunks_failed", "chunks failed", _WHOLE, attrgetter("failed")),
    Kind("tries_per_chunk", "tries per chunk done", _TWO, lambda s: ratio(s.facts.tries, s.done)),
    Kind("audio_hours", "audio-hours", _TWO),
    Kind("wall_s", "running time", duration),
    Kind("gpu_hours", "GPU-hours", _TWO),
    Kind("busy_mean_percent", "busy, mean of all devices", share_words, busy_percent),
    Kind(
        "audio_s_per_chunk",
        "seconds of audio per chunk",
        number,
        lambda s: ratio(s.audio_hours * 3600, s.done - s.facts.done_of_unknown_length),
    ),
    Kind("chunk_p50_s", "seconds per chunk, p50", _TWO, lambda s: s.chunk_s and s.chunk_s.p50),
    Kind("chunk_p95_s", "seconds per chunk, p95", _TWO, lambda s: s.chunk_s and s.chunk_s.p95),
    Kind("gpu_s_per_chunk", "GPU-seconds per chunk", _TWO, attrgetter("facts.cost.gpu_s_mean")),
    Kind("energy_j_per_chunk", "joules per chunk", number, attrgetter("facts.cost.energy_j_mean"), of_energy=True),
    Kind("energy_wh", "energy", energy, of_energy=True),
    Kind("energy_measured_percent", "GPU time with known energy", share_words),
    Kind("kwh_per_1000_audio_hours", "kWh per 1,000 audio-hours", _TWO, of_energy=True),
    Kind(
        "detections_per_audio_hour", "detections per audio-hour", number, lambda s: ratio(s.detections, s.audio_hours)
    ),
)


def _share_of(state: str, summary: Summary) -> float | None:
    if state in summary.states:
        return summary.states[state].share_percent
    return 0.0 if summary.states else None


_SHARES = [Kind(state, name, share_words, partial(_share_of, state)) for state, name in STATE_WORDS.items()]


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
    figures = [_figure(kind, this, other) for kind in FIGURES]
    conclusion = _conclude(figures, this_title, other_title)
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
    in_both = sorted(ours.keys() & theirs.keys() - _OF_ONE_RUN)
    return {key: {"this": ours[key], "other": theirs[key]} for key in in_both if ours[key] != theirs[key]}


def _about(summary: Summary, title: str) -> Document:
    return {
        "title": title,
        "verdict": summary.verdict,
        "started_at_ms": summary.started_at_ms,
        "last_sign_ms": summary.last_sign_ms,
        "models": sorted({device.name for device in summary.devices if device.name}),
        "engines": sorted({task.engine for task in summary.facts.tasks if task.engine}),
        "merged": summary.merged,
    }


def news_of(comparison: Comparison) -> Iterator[tuple[str, str | None]]:
    """Yield a remark for each job that is out of date, with the command to run."""
    for about in (comparison.this, comparison.other):
        news = news_words(about["merged"])
        if news:
            yield f"The merge of {about['title']}: {news}.", about["merged"].command


def comparison_tables(comparison: Comparison) -> Iterator[tuple[str, Table]]:
    """Yield headings and tables: the jobs and their figures, the share of each state, the settings that differ."""
    titles = [(plain(about["title"]), "text") for about in (comparison.this, comparison.other)]
    columns = [("", "text"), *titles, ("change", "text")]
    rows = [*_described(comparison), *map(_row, comparison.figures)]
    yield "Figures", Table("figures", "Both jobs", columns, rows)
    if comparison.states:
        columns[0] = ("share of the GPU time", "text")
        yield "What the devices did", Table("states", "Both jobs", columns, [*map(_row, comparison.states)])
    settings = [
        (key, setting_words(pair["this"]), setting_words(pair["other"])) for key, pair in comparison.settings.items()
    ]
    if not settings:
        known = "no setting differs" if comparison.settings_known else "the settings of one of them are not known"
        settings = [(known, "", "")]
    yield "Settings", Table("settings", "Both jobs", [("settings that differ", "text"), *titles], settings)


def _row(figure: Figure) -> tuple[str, ...]:
    return figure.name, figure.this_words, figure.other_words, figure.change


def _described(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """Yield a description of both jobs, in words."""
    both = (comparison.this, comparison.other)
    starts = [UNKNOWN if about["started_at_ms"] is None else moment(about["started_at_ms"]) for about in both]
    yield "started", *starts, ""
    for name, key in (("devices", "models"), ("engine", "engines")):
        yield name, *(", ".join(about[key]) or UNKNOWN for about in both), ""
    yield "verdict", *(about["verdict"] for about in both), ""


# --- figures ----------------------------------------------------------------------------------------------------------


def _figure(kind: Kind, this: Summary, other: Summary) -> Figure:
    """Return a figure; it is compared only if both jobs have enough of what it needs."""
    find = kind.find or attrgetter(kind.key)
    ours = find(this)
    theirs = find(other)
    our_words = kind.say(ours)
    their_words = kind.say(theirs)
    measured = [summary.energy_measured_percent or 0.0 for summary in (this, other)]
    comparable = not kind.of_energy or min(measured) >= NEARLY_ALL
    if ours is None or theirs is None:
        change = UNKNOWN
    elif not comparable:
        change = INCOMPARABLE
    elif our_words == their_words:
        change = "the same"  # a difference that is not visible is none
    else:
        change = change_words(ours, theirs, points=kind.say is share_words)
    return Figure(
        key=kind.key,
        name=kind.name,
        this=ours,
        other=theirs,
        ratio=ours / theirs if ours is not None and theirs and comparable else None,
        change=change,
        this_words=our_words,
        other_words=their_words,
    )


def change_words(this: float, other: float, *, points: bool = False) -> str:
    """Return the change from the other job to this one: '2.10 ×'.

    ``points``: the figure is a percentage; the change is the difference of the percentages as shown.
    """
    difference = floor(this + 0.5) - floor(other + 0.5)
    if (points and not difference) or abs(this - other) < _SAME * other:
        return "the same"
    if points:
        return f"{count(abs(difference), 'point')} {'more' if difference > 0 else 'less'}"
    return f"{number(this / other, 2)} ×" if other else "more"


def _conclude(figures: Sequence[Figure], this: str, other: str) -> str:
    """Return the comparison in one sentence."""
    by_key = {figure.key: figure for figure in figures}
    speed = by_key["times_real_time"]
    if not speed.ratio:
        return f"The speed of {this} and {other} cannot be compared: one of them, or both, analysed nothing."
    sentence = f"{this} is {number(speed.ratio, 2)} × as fast as {other}"
    if abs(speed.ratio - 1) < _SAME:
        sentence = f"{this} is as fast as {other}"
    devices = by_key["devices_at_once"]
    sentence += f", with {devices.this_words} against {devices.other_words} GPUs in use on average"
    rate = by_key["audio_hours_per_gpu_hour"]
    if rate.ratio is not None:
        sentence += f"; each GPU-hour analyses {number(rate.ratio, 2)} × as much audio"
    return f"{sentence}."
