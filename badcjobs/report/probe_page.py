"""What a probe has found, as one self-contained page: charts where Bokeh is installed, and the same in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from badcjobs import __version__
from badcjobs.model import FITS, Probed, Trial
from badcjobs.report.page_frame import ASSETS, head, scripts_in
from badcjobs.report.page_parts import Cell, Section, Table, paragraph, section_html, table_html
from badcjobs.report.probe_text import about, curve_of, heading, remark, sentences, share, speed
from badcjobs.report.words import memory

_NO_CHARTS = (
    "<p>The charts are missing, because Bokeh is not installed where this page was made. With it, make the page again:"
    "</p><pre>pip install 'badcjobs[report]'</pre>"
)
_MEMORY, _SPEED = "memory", "speed"
_CAPTIONS = {
    _MEMORY: "Peak memory of the device; the dashed line is what it has. Dotted lines: the best length, the safe one.",
    _SPEED: "Seconds of audio analysed in a second of work, without the start of the engine.",
}
_GIB = 2**30


def probe_page(probes: Sequence[Probed], notes: Sequence[str] = ()) -> str:
    """Return the page."""
    code, script, places = _draw(probes)
    sections = [_section(number, probed, places) for number, probed in enumerate(probes)]
    scripts = [*scripts_in(code), *([script] if script else [])]
    scripts.append((ASSETS / "page.js").read_text(encoding="utf-8"))
    body = (
        '<div class="frame">\n<header><p class="kicker">badcjobs probe</p><h1>How long a chunk may be</h1></header>\n'
        + _navigation(sections)
        + "\n<main>"
        + "".join(section_html(section) for section in sections)
        + "".join(paragraph(note) for note in notes)
        + f"</main>\n<footer>Made by badcjobs {escape(__version__)}. What it means: <code>badcjobs guide probe</code>."
        "</footer>\n</div>\n"
    )
    data = '<script type="application/json" id="chart-data">{}</script>\n' if places else ""
    ours = "".join(f"<script>{one}</script>\n" for one in scripts)
    text = head("How long a chunk may be", scripts) + body + data + ours + "</body></html>\n"
    return text.encode("utf-8", "replace").decode("utf-8")


def _navigation(sections: Sequence[Section]) -> str:
    links = "".join(f'<li><a href="#{escape(s.name)}"><span>{escape(s.heading)}</span></a></li>' for s in sections)
    return f'<nav aria-label="Models of device"><ul>{links}</ul></nav>'


def _draw(probes: Sequence[Probed]) -> tuple[str, str, Mapping[str, str]]:
    """Return Bokeh itself, what draws the charts, and the place of each; nothing where it is not installed."""
    try:
        from badcjobs.report import chart_figures as figures
    except ImportError:
        return "", "", {}
    drawn = {name: one for number, probed in enumerate(probes) for name, one in _curves(number, probed, figures)}
    if not drawn:
        return "", "", {}
    script, places = figures.as_parts(drawn)
    return figures.chart_code(), script, places


def _curves(number: int, probed: Probed, figures: Any) -> Iterator[tuple[str, Any]]:
    usual = [t for t in curve_of(probed) if t.outcome == FITS and not t.lean]
    result, total = probed.result, probed.key.memory_bytes
    marks_s = [] if result is None else sorted({s for s in (result.best_s, result.safe_s) if s is not None})
    read = [(t.length_s, t.peak_bytes / _GIB) for t in usual if t.peak_bytes is not None]
    timed = [(t.length_s, t.times_real_time) for t in usual if t.times_real_time is not None]
    limit = None if total is None else total / _GIB
    for name, label, digits, points, most in (
        (_MEMORY, "GiB", "0.[00]", read, limit),
        (_SPEED, "× real time", "0,0.[0]", timed, None),
    ):
        if points:
            lengths_s, values = zip(*points, strict=True)
            form = figures.CurveForm(f"{name}-{number}", label, digits, lengths_s, values, most, marks_s)
            yield f"{name}-{number}", figures.curve(form)


def _section(number: int, probed: Probed, places: Mapping[str, str]) -> Section:
    mine = {name: places[f"{name}-{number}"] for name in (_MEMORY, _SPEED) if f"{name}-{number}" in places}
    charts = "".join(_figure(name, number, place) for name, place in mine.items())
    body = (
        paragraph(about(probed), "quiet")
        + "".join(paragraph(said[0].upper() + said[1:] + ".") for said in sentences(probed))
        + (f'<div class="charts">{charts}</div>' if charts else "" if places else _NO_CHARTS)
        + table_html(_table(number, probed))
    )
    return Section(f"probe-{number}", heading(probed), body)


def _figure(name: str, number: int, place: str) -> str:
    words = _CAPTIONS[name]
    return (
        f'<figure><div class="chart" id="chart-{name}-{number}" tabindex="0" role="group" aria-roledescription="chart"'
        f' aria-label="{escape(words)} The table below has the figures.">{place}</div>'
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def _table(number: int, probed: Probed) -> Table:
    headings = ("chunk length", "peak memory", "of the device", "× real time", "<outcome")
    rows = [_row(trial, probed) for trial in curve_of(probed)]
    return Table(f"trials-{number}", f"Every length that was tried on {heading(probed)}", headings, rows)


def _row(trial: Trial, probed: Probed) -> tuple[str | Cell, ...]:
    total = probed.key.memory_bytes
    full = None if trial.peak_bytes is None or not total else trial.peak_bytes / total
    return (
        Cell(f"{trial.length_s:g} s", trial.length_s),
        Cell(memory(trial.peak_bytes), trial.peak_bytes),
        Cell(share(trial, total), full),
        Cell(speed(trial), trial.times_real_time),
        remark(trial, probed.result) or "fits",
    )
