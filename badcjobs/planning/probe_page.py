"""The results of a probe, memory and speed by chunk length, as text and as a self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from badcjobs.model import FITS, NO_START, TOO_LONG, Probed, not_none
from badcjobs.planning.probe_search import device_words, setup_words, usual_trials
from badcjobs.report.page import NO_CHARTS, Section, figure, paragraph, whole_page
from badcjobs.report.tables import WIDTH, Cell, Table, columns, table_html, table_text
from badcjobs.report.text import wrap
from badcjobs.words import memory, number, share_words

_OUTCOMES = {FITS: "fits", TOO_LONG: "out of memory", NO_START: "no room for the models"}
_MEMORY = "memory"
_SPEED = "speed"
_CAPTIONS = {
    _MEMORY: "Peak memory of the device; dashed: its total memory; dotted: the best and the safe length.",
    _SPEED: "Seconds of audio analysed in a second of work, without the start of the engine.",
}
_GIB = 2**30


def probe_text(
    probes: Sequence[Probed],
    kept: str,
    notes: Sequence[str] = (),
    width: int = WIDTH,
) -> str:
    """Return the tables and the sentences below them; ``kept``: the file, and what reads it."""
    lines = []
    for place, probed in enumerate(probes):
        lines += wrap(
            f"{device_words(probed.key)}; {setup_words(probed.key)}",
            indent=2,
            width=width,
        )
        lines += [*table_text(_table(place, probed), width), ""]
        for sentence in _sentences(probed):
            lines += wrap(f"  {sentence}", indent=4, width=width)
        lines.append("")
    sentences = [f"note: {note}" for note in notes]
    if any(probed.result is not None for probed in probes):
        sentences.insert(0, f"stored in {kept}")
    for sentence in sentences:
        lines += wrap(f"  {sentence}", indent=4, width=width)
    return "\n".join(lines).rstrip()


def probe_page(probes: Sequence[Probed], notes: Sequence[str]) -> str:
    """Return the page."""
    parts = None
    places: dict[str, str] = {}
    with suppress(ImportError):  # Bokeh is not installed
        from badcjobs.report import chart_figures as figures

        drawn: dict[str, Any] = {}
        for place, probed in enumerate(probes):
            drawn |= _curves(place, probed, figures)
        if drawn:
            script, places = figures.as_parts(drawn)
            parts = figures.chart_code(), script, dict[str, Any]()
    sections = []
    for place, probed in enumerate(probes):
        body = paragraph(setup_words(probed.key), "quiet")
        for text in _sentences(probed):
            body += paragraph(f"{text[0].upper()}{text[1:]}.")
        charts = ""
        for name, caption in _CAPTIONS.items():
            drawn_at = places.get(f"{name}-{place}")
            if drawn_at is not None:
                charts += figure(
                    f"{name}-{place}",
                    drawn_at,
                    f"{caption} The table below has the figures.",
                    caption,
                )
        if charts:
            body += f'<div class="charts">{charts}</div>'
        elif not places:
            body += NO_CHARTS
        body += table_html(_table(place, probed))
        sections.append(Section(f"probe-{place}", device_words(probed.key), body))
    notes_html = "".join(paragraph(note) for note in notes)
    header = '<p class="kicker">badcjobs probe</p><h1>How long a chunk may be</h1>'
    footer = ". What it means: <code>badcjobs guide plan</code>."
    return whole_page("How long a chunk may be", header + notes_html, sections, footer, parts)


def _curves(place: int, probed: Probed, figures: Any) -> Iterator[tuple[str, Any]]:
    usual = usual_trials(probed.trials)
    result = probed.result
    marks_s = [] if result is None else sorted({*not_none((result.best_s, result.safe_s))})

    total = probed.key.memory_bytes
    total_gib = total and total / _GIB
    peaks = [(trial.length_s, trial.peak_bytes / _GIB) for trial in usual if trial.peak_bytes is not None]
    rates = [(trial.length_s, trial.times_real_time) for trial in usual if trial.times_real_time is not None]
    for kind, unit, digits, values, limit in (
        (_MEMORY, "GiB", "0.[00]", peaks, total_gib),
        (_SPEED, "× real time", "0,0.[0]", rates, None),
    ):
        if values:
            name = f"{kind}-{place}"
            yield name, figures.curve(name, unit, digits, values, limit, marks_s)


def _table(place: int, probed: Probed) -> Table:
    total = probed.key.memory_bytes
    best_s = probed.result and probed.result.best_s
    rows = []
    for trial in sorted(probed.trials, key=lambda trial: (trial.lean, trial.length_s)):
        rate = trial.times_real_time
        full_percent = 100 * trial.peak_bytes / total if trial.peak_bytes and total else None
        outcome = _OUTCOMES[trial.outcome]
        if trial.lean:
            outcome += ", with one thread"
        elif trial.outcome == FITS and trial.length_s == best_s:
            outcome += " ← best"
        cells = (
            Cell(f"{trial.length_s:g} s", trial.length_s),
            Cell(memory(trial.peak_bytes), trial.peak_bytes),
            Cell(share_words(full_percent), full_percent),
            Cell(number(rate, 1), rate),
            outcome,
        )
        rows.append(cells)
    heads = columns("chunk length", "peak memory", "of the device", "× real time", "<outcome")
    return Table(
        f"trials-{place}",
        f"Every length that was tried on {device_words(probed.key)}",
        heads,
        rows,
    )


def _sentences(probed: Probed) -> Iterator[str]:
    """Yield what the trials mean."""
    if not probed.finished:
        yield "not finished: the same command continues"
    result = probed.result
    if result is None:
        return
    margin = f"safe, with a margin of {result.margin_percent:g} %: {result.safe_s or 0:g} s"
    lean = f"safe: {result.lean_safe_s or 0:g} s. Runs cut what is longer"
    for name, longest_s, too_long_s, safe in (
        ("longest", result.longest_s, result.too_long_s, margin),
        ("with one thread", result.lean_longest_s, result.lean_too_long_s, lean),
    ):
        if longest_s is not None and too_long_s is not None:
            yield f"{name}: {longest_s:g} s fits, {too_long_s:g} s does not; {safe}"
        elif longest_s is not None:
            yield f"{name}: all that was tried fits, up to {longest_s:g} s"
        elif too_long_s is not None or name == "longest":
            yield f"{name}: nothing fits"
    if result.best_s is not None:
        rate = number(result.times_real_time, 0)
        yield f"best: {result.best_s:g} s ({rate} × real time), the shortest within 2 % of the fastest that is safe"
    if all(trial.peak_bytes is None for trial in probed.trials):
        yield "peak memory is not known: it could not be read; the lengths are valid all the same"
