"""The report as one self-contained page: it opens from disk, sends no requests and runs only its own scripts.

Each chart comes with the same data in words and numbers, for readers who cannot see it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from badcjobs.model import CHARTED, ChartData, not_none
from badcjobs.report import job_tables as tables
from badcjobs.report.summary import STATE_WORDS, Finding, Summary, count_devices
from badcjobs.report.tables import table_html
from badcjobs.report.verdict import MOST_FINDINGS, Verdict, headlines, no_findings_words, verdict_of
from badcjobs.version import __version__
from badcjobs.words import count, duration, escape, period, share_words

if TYPE_CHECKING:
    from badcjobs.report.charts import Charts

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
    f'<button type="button" data-move="{move}" title="{title}" aria-label="{title}">{sign}</button>'
    for move, title, sign in _MOVES
)
_TIME = f'<span class="moves" role="group" aria-label="Time">{_BUTTONS}</span>'
_HOW_TO_READ = (
    "The line is the mean; the band goes from the smallest to the largest reading. A dashed line is the limit of the "
    "device."
)
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
    parts = None
    if drawn is not None and drawn.places:
        parts = (drawn.chart_code, drawn.script, drawn.data)
    return whole_page(title, header, sections, footer, parts, skip)


def _header(summary: Summary, title: str) -> str:
    """Return the first screen: did it work, what did it cost, what is wrong, what to do next."""
    verdict = verdict_of(summary)
    lines = "".join(f"<dt>{name.capitalize()}</dt><dd>{escape(words)}</dd>" for name, words in verdict.lines)
    return (
        f'<p class="kicker">badcjobs report</p><h1>{escape(title)}</h1>'
        f'<p class="outcome"><strong class="verdict {verdict.state}">{escape(verdict.word)}</strong>'
        f"{escape(verdict.counts)}</p>{_bar(verdict)}"
        f'<p class="about">{escape(" · ".join(_about(summary)))}</p><dl class="words">{lines}</dl>'
        f'<div class="first">{_first_findings(summary)}{_next(verdict)}</div>'
    )


def _about(summary: Summary) -> Iterator[str]:
    """Yield how large the job was, when it ran, and its engines."""
    yield count(summary.tasks, "array task")
    yield count(count_devices(summary.devices), "device")
    yield count(len({task.node for task in summary.facts.tasks}), "node")
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        yield period(summary.started_at_ms, summary.last_sign_ms)
    engines = sorted({task.engine for task in summary.facts.tasks if task.engine})
    if engines:
        yield f"engine {', '.join(engines)}"


def _first_findings(summary: Summary) -> str:
    heading = "Findings"
    body = paragraph(no_findings_words(summary), "well")
    if summary.findings:
        heading = "What to change"
        body = _finding_list(summary.findings[:MOST_FINDINGS])
    more = len(summary.findings) - MOST_FINDINGS
    if more > 0:
        body += f'<p class="quiet"><a href="#findings">{count(more, "more finding")}</a></p>'
    return f'<section aria-label="Findings"><h2>{heading}</h2>{body}</section>'


def _next(verdict: Verdict) -> str:
    steps = ""
    for words, command in verdict.next:
        if words:
            steps += paragraph(words[0].upper() + words[1:])
        steps += f"<pre>{escape(command)}</pre>"
    return f'<section aria-label="Next"><h2>Next</h2>{steps}</section>' if steps else ""


def _bar(verdict: Verdict) -> str:
    """Return done, failed and left as a bar; failed is hatched, left is empty, and each has its name."""
    if not verdict.counts:
        return ""
    parts = zip(("done", "failed", "left"), verdict.chunks, strict=True)
    spans = "".join(f'<span class="{name}" style="flex-grow:{many}"></span>' for name, many in parts if many)
    return f'<div class="progress" role="img" aria-label="{escape(verdict.counts)}">{spans}</div>'


def _sections(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Iterator[Section | None]:
    yield _numbers(summary)
    findings = summary.findings[MOST_FINDINGS:]
    if findings:
        yield Section("findings", "More findings", _finding_list(findings), len(findings))
    yield _timeline(summary, data, drawn)
    yield _load(summary, drawn)
    yield _durations(summary, drawn)
    for part in tables.page_tables(summary):
        table = part.table
        body = table_html(table) if table.rows else paragraph(part.empty)
        yield Section(part.section, part.heading, body, table.of or len(table.rows), folded=True)
    yield _settings(summary, data)


def _numbers(summary: Summary) -> Section:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in headlines(summary))
    body = f'<dl class="words">{lines}</dl>'
    stray = tables.stray_table(summary.completeness)
    if stray.rows:
        body += f"<h3>Rows that do not match</h3>{table_html(stray)}"
    return Section("numbers", "Numbers", body, folded=True)


def _finding_list(findings: Sequence[Finding]) -> str:
    """Return what was found and its fix; the evidence is folded."""
    items = "".join(f"<li>{_finding(finding)}</li>" for finding in findings)
    return f'<ul class="findings">{items}</ul>'


def _finding(finding: Finding) -> str:
    severity = escape(finding.severity)
    body = paragraph(finding.advice) if finding.advice else ""
    if finding.lines:
        lines = "\n".join(finding.lines)
        body += f"<pre>{escape(lines)}</pre>"
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    evidence = f"<ul>{evidence}</ul>"
    if finding.subjects:
        subjects = "; ".join(finding.subjects[: tables.MOST_ROWS])
        more = len(finding.subjects) - tables.MOST_ROWS
        if more > 0:
            subjects += f" and {more:,} more (--json lists all)"
        evidence += paragraph(subjects, "quiet")
    return (
        f'<article class="finding {severity}">'
        f'<h3><span class="severity">{severity}</span>{escape(finding.sentence)}</h3>'
        f"{body}{folded('Evidence', evidence)}</article>"
    )


def _timeline(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Section:
    """Return what each device did over time; without charts, how to get them."""
    body = paragraph("There are no data over time.")
    if drawn is not None and "timeline" in drawn.places:
        body = _timeline_chart(summary, drawn)
    elif drawn is None and data is not None:
        body = NO_CHARTS
    if summary.states:
        body += table_html(tables.state_table(summary.states))
    return Section("timeline", "What the devices did", body)


def _timeline_chart(summary: Summary, drawn: Charts) -> str:
    from badcjobs.report.chart_figures import STATE_COLORS

    shares = [
        f"{STATE_WORDS[state]} {share_words(time.share_percent)}"
        for state, time in summary.states.items()
        if time.share_percent is not None
    ]
    legend = "".join(
        f'<li><span style="background:{color}"></span>{escape(STATE_WORDS[state])}</li>'
        for state, color in STATE_COLORS.items()
        if state in summary.states
    )
    spoken = f"Timeline of {count(len(summary.devices), 'device')}. Share of the time: {', '.join(shares)}."
    find = _FIND if len(summary.devices) > _MANY_ROWS else ""
    notes = "".join(paragraph(note, "quiet") for note in drawn.notes)
    return (
        f'<div class="bar controls">{_TIME}{_ROWS}{find}</div>'
        f'<ul class="legend" aria-label="Colours of the timeline">{legend}</ul>'
        f"{figure('timeline', drawn.places['timeline'], spoken, _HOW_TO_ZOOM, over_time=True)}{notes}"
    )


def _load(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return utilization, memory, temperature and power over time."""
    if drawn is None or "timeline" not in drawn.places:
        return None
    if not drawn.places.keys() & set(CHARTED):
        without = paragraph("There are no readings of utilization, memory, temperature or power.")
        return Section("load", "Load", without)
    charts = ""
    for metric in CHARTED:
        name = tables.SPOKEN[metric][0].capitalize()
        chart = paragraph("Not available.", "quiet")
        if metric in drawn.places:
            spoken = f"{name} over time; see the table “The same in numbers” below the charts."
            chart = figure(metric, drawn.places[metric], spoken, over_time=True)
        charts += f"<div><h3>{escape(name)}</h3>{chart}</div>"
    body = (
        f'<div class="bar controls"><label>Show <select id="pick"></select></label>{_TIME}</div>'
        f'{paragraph(_HOW_TO_READ, "quiet")}<div class="charts">{charts}</div>'
    )
    table = tables.reading_table(summary)
    if table.rows:
        body += folded("The same in numbers", table_html(table))
    return Section("load", "Load", body)


def _durations(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return how long chunks took."""
    took = summary.chunk_s
    if took is None:
        return None
    p50, p95, longest = map(duration, (took.p50, took.p95, took.maximum))
    tries = count(took.samples, "successful try", "successful tries")
    about = f"{tries}: median {p50}; 95 % took at most {p95}, the longest {longest}."
    body = paragraph(about)
    if drawn is not None and drawn.histogram is not None:
        bars = tables.bar_table(*drawn.histogram)
        body += figure("histogram", drawn.places["histogram"], f"Histogram of the time for one chunk. {about}")
        body += folded("The same in numbers", table_html(bars))
    return Section("durations", "How long chunks took", body)


def _settings(summary: Summary, data: ChartData | None) -> Section:
    table = tables.setting_table(summary.facts.last_settings)
    if not table.rows:
        return Section("settings", "Settings", paragraph("The tasks have not recorded their settings."), folded=True)
    about = "The settings of the task that started last."
    if data is not None and data.sets_of_settings > 1:
        about += f" The tasks of this job have {data.sets_of_settings:,} different sets."
    if data is not None and data.versions:
        about += f" The tasks ran badcjobs {', '.join(data.versions)}."
    return Section("settings", "Settings", paragraph(about, "quiet") + table_html(table), folded=True)


# --- the parts of every page ------------------------------------------------------------------------------------------

ASSETS = Path(__file__).parent / "assets"
ChartParts = tuple[str, str, Mapping[str, Any]]  # BokehJS, and a script that draws the charts from the data
_SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
NO_CHARTS = (
    "<p>This page has no charts, because Bokeh was not installed. Install it, then make the page again:"
    "</p><pre>pip install 'badcjobs[report]'</pre>"
)


class Section(NamedTuple):
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
    scripts = [*_SCRIPT.findall(code), script, (ASSETS / "page.js").read_text(encoding="utf-8")]
    scripts = [script for script in scripts if script]
    links = ""
    parts = []
    for section in sections:
        name = escape(section.name)
        heading = escape(section.heading)
        many = "" if section.many is None else f'<span class="many">{section.many:,}</span>'
        links += f'<li><a href="#{name}"><span>{heading}</span>{many}</a></li>'
        body = f'<h2 id="{name}-heading">{heading}</h2>'
        if section.folded:
            body = f"<details><summary>{body}{many}</summary>{section.body}</details>"
        else:
            body += section.body
        parts.append(f'<section id="{name}" aria-labelledby="{name}-heading">{body}</section>')
    chart_data = ""
    if data is not None:
        # '<' is escaped, so that no text in it can end the element.
        sent = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        chart_data = f'<script type="application/json" id="chart-data">{sent}</script>\n'
    return (
        f'{_head(title, scripts)}{more}<div class="frame">\n<header>{header}</header>\n'
        f'<nav aria-label="Parts of this report"><ul>{links}</ul></nav>\n<main>'
        + "\n".join(parts)
        + f"</main>\n<footer>Made by badcjobs {escape(__version__)}{footer}</footer>\n</div>\n{chart_data}"
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body></html>\n"
    )


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
    marked = f' class="{kind}"' if kind else ""
    return f"<p{marked}>{escape(text)}</p>"


def folded(summary: str, body: str) -> str:
    """Return a part that the reader can open."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def figure(name: str, place: str, words: str, caption: str = "", *, over_time: bool = False) -> str:
    """Return a chart; ``words`` describe it to screen readers."""
    kind = " data-time" if over_time else ""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return (
        f'<figure><div class="chart" id="chart-{name}"{kind} tabindex="0" role="group" aria-roledescription="chart" '
        f'aria-label="{escape(words)}">{place}</div>{below}</figure>'
    )
