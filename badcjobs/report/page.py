"""The report as one self-contained page: it opens from disk, sends no requests and runs only its own scripts.

Each chart comes with the same data in words and numbers, for readers who cannot see it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from badcjobs import __version__
from badcjobs.model import CHARTED, ChartData, not_none
from badcjobs.report import job_tables as tables
from badcjobs.report.summary import STATE_WORDS, Finding, Summary, count_devices, devices_words
from badcjobs.report.tables import table_html
from badcjobs.report.verdict import MOST_FINDINGS, Verdict, bar, headlines, verdict_of
from badcjobs.report.words import count, escape, number, period, share_words

if TYPE_CHECKING:
    from badcjobs.report.charts import Charts

_BAR = 200  # steps
_MANY_ROWS = 24
_ROWS = (
    '<label>One row per <select id="by"><option value="rows">device and array task</option>'
    '<option value="cards">device</option></select></label>'
)
_FIND = (
    '<label>Find a task <input id="find" type="search" list="tasks-found" autocomplete="off"></label>'
    '<datalist id="tasks-found"></datalist>'
)
_MOVES = (
    ("in", "Zoom in", "+"),
    ("out", "Zoom out", "−"),
    ("back", "Earlier", "←"),
    ("on", "Later", "→"),
    ("all", "Show all", "All"),
)
_BUTTONS = "".join(
    f'<button type="button" data-move="{move}" title="{words}" aria-label="{words}">{sign}</button>'
    for move, words, sign in _MOVES
)
_TIME = f'<span class="moves" role="group" aria-label="Time">{_BUTTONS}</span>'
_HOW_TO_READ = (
    "The line is the mean; the band goes from the smallest to the largest reading. A dashed line is the limit of the "
    "device."
)
_OF_ALL = " For all devices together, the darker band contains four out of five devices."
_HOW_TO_ZOOM = (
    "Drag across a chart to zoom in, double-click to show all; or select a chart and use the keys + − ← → and 0. Point "
    "at it to see the numbers. All charts over time move together. Times are in UTC."
)


def page(summary: Summary, title: str, charts: ChartData | None = None) -> str:
    """Return the page; without ``charts``, or without Bokeh, it has all numbers but no charts."""
    drawn = None
    if charts is not None:
        try:
            from badcjobs.report.charts import draw

            drawn = draw(summary, charts)
        except ImportError:  # Bokeh is not installed
            pass
    header = _header(summary, title)
    sections = not_none(_sections(summary, charts, drawn))
    footer = " from the job database. <code>badcjobs guide report</code> explains every number."
    skip = '<a class="skip" href="#numbers">Skip to the numbers</a>\n'
    parts = None if drawn is None or not drawn.places else (drawn.chart_code, drawn.script, drawn.data)
    return whole_page(title, header, sections, footer, parts, skip)


def _header(summary: Summary, title: str) -> str:
    """Return the first screen: did it work, what did it cost, what is wrong, what to do next."""
    verdict = verdict_of(summary)
    about = [count(summary.tasks, "array task"), count(count_devices(summary.devices), "device")]
    about.append(count(len({task.node for task in summary.facts.tasks}), "node"))
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        about.append(period(summary.started_at_ms, summary.last_sign_ms))
    engines = sorted({task.engine for task in summary.facts.tasks if task.engine})
    about += [f"engine {', '.join(engines)}"] if engines else []
    said = "".join(f"<dt>{name.capitalize()}</dt><dd>{escape(words)}</dd>" for name, words in verdict.lines)
    steps = "".join(
        f"{paragraph(words[:1].upper() + words[1:]) if words else ''}<pre>{escape(command)}</pre>"
        for words, command in verdict.next
    )
    heading, more = "What to change" if summary.findings else "Findings", len(summary.findings) - MOST_FINDINGS
    rest = f'<p class="quiet"><a href="#findings">{count(more, "more finding")}</a></p>' if more > 0 else ""
    return (
        f'<p class="kicker">badcjobs report</p><h1>{escape(title)}</h1>'
        f'<p class="outcome"><strong class="verdict {verdict.state}">{escape(verdict.word)}</strong>'
        f"{escape(verdict.counts)}</p>{_bar(verdict)}"
        f'<p class="about">{escape(" · ".join(about))}</p><dl class="words">{said}</dl>'
        f'<div class="first"><section aria-label="Findings"><h2>{heading}</h2>'
        f"{_finding_list(summary.findings[:MOST_FINDINGS]) or paragraph(verdict.no_findings, 'well')}{rest}</section>"
        + (f'<section aria-label="Next"><h2>Next</h2>{steps}</section>' if steps else "")
        + "</div>"
    )


def _bar(verdict: Verdict) -> str:
    """Return done, failed and left as a bar; failed is hatched, left is empty, and each has its name."""
    if not verdict.counts:
        return ""
    parts = zip(("done", "failed", "left"), bar(*verdict.chunks, _BAR), strict=True)
    spans = "".join(f'<span class="{name}" style="flex-grow:{many}"></span>' for name, many in parts if many)
    return f'<div class="progress" role="img" aria-label="{escape(verdict.counts)}">{spans}</div>'


def _sections(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Iterable[Section | None]:
    yield _numbers(summary)
    if others := summary.findings[MOST_FINDINGS:]:
        yield Section("findings", "More findings", _finding_list(others), len(others))
    yield _timeline(summary, data, drawn)
    yield _load(summary, drawn)
    yield _durations(summary, drawn)
    slow, compared = tables.straggler_table(summary)
    if slow is None:
        yield Section("stragglers", "Stragglers", paragraph(compared), folded=True)
    else:
        body = paragraph(compared, "quiet") + (table_html(slow) if slow.rows else "")
        yield Section("stragglers", "Stragglers", body, slow.of, folded=True)
    for name, heading, table, empty, words in tables.page_tables(summary):
        body = table_html(table) if table.rows else paragraph(empty)
        body = (paragraph(words, "quiet") if words else "") + body
        yield Section(name, heading, body, table.of or len(table.rows), folded=True)
    yield _settings(summary, data)


def _numbers(summary: Summary) -> Section:
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in headlines(summary))
    stray = tables.stray_table(summary.completeness)
    strays = f"<h3>Rows that do not match</h3>{table_html(stray)}" if stray.rows else ""
    return Section("numbers", "Numbers", f'<dl class="words">{words}</dl>{strays}', folded=True)


def _finding_list(findings: Sequence[Finding]) -> str:
    """Return what was found and its fix; the evidence is folded."""
    items = ""
    for finding in findings:
        evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
        lines = f"<pre>{escape(chr(10).join(finding.lines))}</pre>" if finding.lines else ""
        more = len(finding.subjects) - tables.MOST_ROWS
        words = "; ".join(finding.subjects[: tables.MOST_ROWS])
        words += f" and {more:,} more (--json lists all)" if more > 0 else ""
        subjects = paragraph(words, "quiet") if words else ""
        items += (
            f'<li><article class="finding {escape(finding.severity)}">'
            f'<h3><span class="severity">{escape(finding.severity)}</span>{escape(finding.sentence)}</h3>'
            f"{paragraph(finding.advice) if finding.advice else ''}{lines}"
            f"{folded('Evidence', f'<ul>{evidence}</ul>{subjects}')}</article></li>"
        )
    return f'<ul class="findings">{items}</ul>' if items else ""


def _timeline(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Section | None:
    """Return what each device did over time; without charts, how to get them."""
    if not summary.devices:
        return None
    numbers = table_html(tables.state_table(summary.states)) if summary.states else ""
    if data is None or drawn is None:
        missing = NO_CHARTS if data is not None else ""
        return Section("timeline", "What the devices did", missing + numbers) if missing or numbers else None
    if "timeline" not in drawn.places:
        return Section("timeline", "What the devices did", paragraph("There are no data over time.") + numbers)
    shares = [
        f"{STATE_WORDS[state]} {share_words(found.share_percent)}"
        for state, found in summary.states.items()
        if found.share_percent is not None
    ]
    from badcjobs.report.chart_figures import STATE_COLORS

    legend = "".join(
        f'<li><span style="background:{color}"></span>{escape(STATE_WORDS[state])}</li>'
        for state, color in STATE_COLORS.items()
        if state in summary.states
    )
    words = f"Timeline of {devices_words(summary.devices)}. Share of the time: {', '.join(shares)}."
    find = _FIND if len(summary.devices) > _MANY_ROWS else ""
    body = (
        f'<div class="bar controls">{_TIME}{_ROWS}{find}</div>'
        f'<ul class="legend" aria-label="Colours of the timeline">{legend}</ul>'
        + figure("timeline", drawn.places["timeline"], words, _HOW_TO_ZOOM, over_time=True)
        + "".join(paragraph(note, "quiet") for note in drawn.notes)
        + numbers
    )
    return Section("timeline", "What the devices did", body)


def _load(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return utilization, memory, temperature and power over time."""
    if drawn is None or "timeline" not in drawn.places:
        return None
    if not any(metric in drawn.places for metric in CHARTED):
        return Section("load", "Load", paragraph("There are no readings: this job has no telemetry."))
    figures = ""
    for metric in CHARTED:
        name = tables.SPOKEN[metric][0].capitalize()
        words = f"{name} over time; see the table “The same in numbers” below the charts."
        place = drawn.places.get(metric)
        chart = paragraph("Not available.", "quiet") if place is None else figure(metric, place, words, over_time=True)
        figures += f"<div><h3>{escape(name)}</h3>{chart}</div>"
    table = tables.reading_table(summary)
    body = (
        f'<div class="bar controls"><label>Show <select id="pick"></select></label>{_TIME}</div>'
        + paragraph(_HOW_TO_READ + (_OF_ALL if len(summary.devices) > 1 else ""), "quiet")
        + f'<div class="charts">{figures}</div>'
        + (folded("The same in numbers", table_html(table)) if table.rows else "")
    )
    return Section("load", "Load", body)


def _durations(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return how long chunks took."""
    took = summary.chunk_s
    if took is None:
        return None
    p50, p95, longest = (f"{number(value, 1 if value >= 10 else 2)} s" for value in (took.p50, took.p95, took.maximum))
    words = (
        f"{count(took.samples, 'successful try', 'successful tries')}: median {p50}; 95 % took at most {p95}, the "
        f"longest {longest}."
    )
    body = paragraph(words)
    if drawn is not None and drawn.histogram is not None:
        bars = tables.bar_table(drawn.histogram.edges_s, drawn.histogram.counts)
        body += figure("histogram", drawn.places["histogram"], f"Histogram of the time for one chunk. {words}")
        body += folded("The same in numbers", table_html(bars))
    return Section("durations", "How long chunks took", body)


def _settings(summary: Summary, data: ChartData | None) -> Section:
    table = tables.setting_table(summary.facts.last_settings)
    if not table.rows:
        return Section("settings", "Settings", paragraph("The tasks have not recorded their settings."), folded=True)
    sets, versions = (0, ()) if data is None else (data.sets_of_settings, data.versions)
    same = f"the tasks of this job have {sets:,} different sets" if sets > 1 else "all tasks have the same"
    words = f"The settings of the task that started last{f'; {same}' if sets else ''}."
    words += f" The tasks ran badcjobs {', '.join(versions)}." if versions else ""
    return Section("settings", "Settings", paragraph(words, "quiet") + table_html(table), folded=True)


# --- the parts of every page ------------------------------------------------------------------------------------------

ASSETS = Path(__file__).parent / "assets"
ChartParts = tuple[str, str, Mapping[str, Any]]  # BokehJS, and a script that draws the charts from the data
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
NO_CHARTS = (
    "<p>This page has no charts, because Bokeh was not installed. Install it, then make the page again:"
    "</p><pre>pip install 'badcjobs[report]'</pre>"
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with its own heading."""

    name: str  # stable: the anchor #name
    heading: str
    body: str  # HTML
    many: int | None = None  # number in the list of sections
    folded: bool = False  # the reader opens it


def whole_page(
    title: str, header: str, sections: Sequence[Section], footer: str, charts: ChartParts | None, more: str = ""
) -> str:
    """Return a page; ``more``: before the header."""
    code, script, data = charts or ("", "", None)
    scripts = [*_SCRIPT.findall(code), *([script] if script else []), (ASSETS / "page.js").read_text(encoding="utf-8")]
    links = "".join(
        f'<li><a href="#{escape(s.name)}"><span>{escape(s.heading)}</span>'
        + ("" if s.many is None else f'<span class="many">{s.many:,}</span>')
        + "</a></li>"
        for s in sections
    )
    # The data for page.js; '<' is escaped, so that no text in it can end the element.
    sent = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (
        _head(title, scripts)
        + f'{more}<div class="frame">\n<header>{header}</header>\n'
        + f'<nav aria-label="Parts of this report"><ul>{links}</ul></nav>\n<main>'
        + "\n".join(
            f'<section id="{escape(s.name)}" aria-labelledby="{escape(s.name)}-heading">{_opened(s)}</section>'
            for s in sections
        )
        + f"</main>\n<footer>Made by badcjobs {escape(__version__)}{footer}</footer>\n</div>\n"
        + ("" if data is None else f'<script type="application/json" id="chart-data">{sent}</script>\n')
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


def _opened(section: Section) -> str:
    heading = f'<h2 id="{escape(section.name)}-heading">{escape(section.heading)}</h2>'
    if not section.folded:
        return heading + section.body
    many = "" if section.many is None else f'<span class="many">{section.many:,}</span>'
    return f"<details><summary>{heading}{many}</summary>{section.body}</details>"


def _head(title: str, scripts: Iterable[str]) -> str:
    """Return the head; its policy forbids all requests, and all scripts except those with the listed checksums."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in scripts]
    sums = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; script-src {sums}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    style = (ASSETS / "page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}; form-action \'none\'">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} – badcjobs</title>\n<style>{style}</style>\n"
        "<noscript><style>tr[hidden] { display: table-row } .controls { display: none }</style></noscript>\n"
        "</head>\n<body>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def folded(summary: str, body: str) -> str:
    """Return a part that the reader can open."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figure(name: str, place: str, words: str, caption: str = "", *, over_time: bool = False) -> str:
    """Return a chart; ``words`` describe it to screen readers."""
    kind = " data-time" if over_time else ""
    return (
        f'<figure><div class="chart" id="chart-{name}"{kind} tabindex="0" role="group" aria-roledescription="chart" '
        f'aria-label="{escape(words)}">{place}</div>'
        + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )
