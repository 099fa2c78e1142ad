"""The sections of the page that hold charts, each with the same in words and numbers for those who cannot see it."""

from __future__ import annotations

from html import escape

from badcjobs.model import CHARTED, ChartData
from badcjobs.report import page_tables as tables
from badcjobs.report.charts import Charts
from badcjobs.report.page_parts import Section, folded, paragraph, table_html
from badcjobs.report.states import STATE_WORDS
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, number, share_words

_NO_CHARTS = (
    "<p>The charts are missing, because Bokeh is not installed where this page was made. With it, make the page again:"
    "</p><pre>pip install 'badcjobs[report]'</pre>"
)
_MANY_ROWS = 24
_ROWS = (
    '<label>One row for each <select id="by"><option value="rows">device of an array task</option>'
    '<option value="cards">device, task after task</option></select></label>'
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
    ("all", "Show all of the time", "All"),
)
_HOW_TO_READ = (
    "The line is the mean; the band reaches from the smallest to the largest reading. A dashed line is what the device "
    "has at most."
)
_OF_ALL = " For all devices together, the darker band holds four in five of them."
_HOW_TO_ZOOM = (
    "Drag across a chart to zoom in, double-click for all; or, with a chart in focus: + − ← → and 0. Point at it for "
    "the numbers. All charts over time move together. Times are UTC."
)


def timeline_section(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Section | None:
    """Return what each device did over time; without charts it says how to get them."""
    if not summary.devices:
        return None
    numbers = table_html(tables.states(summary)) if summary.states else ""
    if data is None or drawn is None:
        missing = _NO_CHARTS if data is not None else ""
        return Section("timeline", "What the devices did", missing + numbers) if missing or numbers else None
    if "timeline" not in drawn.places:
        return Section("timeline", "What the devices did", paragraph("Nothing is known of it over time.") + numbers)
    many = len(summary.devices) > _MANY_ROWS
    body = (
        f'<div class="bar controls">{_moves()}{_ROWS}{_FIND if many else ""}</div>{_legend(summary)}'
        + _figure(drawn, "timeline", _timeline_words(summary), _HOW_TO_ZOOM)
        + "".join(paragraph(note, "quiet") for note in drawn.notes)
        + numbers
    )
    return Section("timeline", "What the devices did", body)


def _legend(summary: Summary) -> str:
    from badcjobs.report.chart_figures import STATE_COLORS

    return (
        '<ul class="legend" aria-label="Colours of the timeline">'
        + "".join(
            f'<li><span style="background:{color}"></span>{escape(STATE_WORDS[state])}</li>'
            for state, color in STATE_COLORS.items()
            if state in summary.states
        )
        + "</ul>"
    )


def _timeline_words(summary: Summary) -> str:
    shares = [
        f"{STATE_WORDS[state]} {share_words(found.share_percent)}"
        for state, found in summary.states.items()
        if found.share_percent is not None
    ]
    return f"Timeline of {count(len(summary.devices), 'device')} of array tasks. Of their time: {', '.join(shares)}."


def load_section(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return utilization, memory, temperature and power over time."""
    if drawn is None or "timeline" not in drawn.places:
        return None
    if not any(metric in drawn.places for metric in CHARTED):
        return Section("load", "Load", paragraph("No device was read: there is no telemetry of this job."))
    table = tables.readings(summary)
    figures = "".join(
        f"<div><h3>{escape(drawn.heading(metric))}</h3>{_metric(drawn, metric)}</div>" for metric in CHARTED
    )
    body = (
        f'<div class="bar controls"><label>Show <select id="pick"></select></label>{_moves()}</div>'
        + paragraph(_HOW_TO_READ + (_OF_ALL if len(summary.devices) > 1 else ""), "quiet")
        + f'<div class="charts">{figures}</div>'
        + (folded("The same in numbers", table_html(table)) if table.rows else "")
    )
    return Section("load", "Load", body)


def _metric(drawn: Charts, metric: str) -> str:
    if metric not in drawn.places:
        return paragraph("No device told it.", "quiet")
    return _figure(drawn, metric, _metric_words(drawn, metric))


def _metric_words(drawn: Charts, metric: str) -> str:
    return f"{drawn.heading(metric)} over time; the table “The same in numbers” below the charts has its figures."


def durations_section(summary: Summary, drawn: Charts | None) -> Section | None:
    """Return how long chunks took."""
    took = summary.chunk_s
    if took is None:
        return None
    words = (
        f"{count(took.samples, 'try', 'tries')} that ended well: {_seconds(took.p50)} at the median; 95 % took at most "
        f"{_seconds(took.p95)}, the longest {_seconds(took.maximum)}."
    )
    body = paragraph(words)
    if drawn is not None and drawn.histogram is not None:
        body += _figure(drawn, "histogram", f"Histogram of the time for one chunk. {words}", over_time=False)
        body += folded("The same in numbers", table_html(tables.bars(drawn.histogram.edges_s, drawn.histogram.counts)))
    return Section("durations", "How long chunks took", body)


def _seconds(value: float) -> str:
    return f"{number(value, 1 if value >= 10 else 2)} s"


def _moves() -> str:
    buttons = "".join(
        f'<button type="button" data-move="{move}" title="{words}" aria-label="{words}">{sign}</button>'
        for move, words, sign in _MOVES
    )
    return f'<span class="moves" role="group" aria-label="Time">{buttons}</span>'


def _figure(drawn: Charts, name: str, words: str, caption: str = "", *, over_time: bool = True) -> str:
    """Return a chart; those who cannot see it hear the words."""
    kind = " data-time" if over_time else ""
    return (
        f'<figure><div class="chart" id="chart-{name}"{kind} tabindex="0" role="group" aria-roledescription="chart" '
        f'aria-label="{escape(words)}">{drawn.places[name]}</div>'
        + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
        + "</figure>"
    )
