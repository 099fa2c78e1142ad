"""The Bokeh figures of the page; ``assets/page.js`` adds their data and all text from files.

Do not use CustomJS here: Bokeh would need ``eval``, which the page forbids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import bokeh.models
import bokeh.plotting
import numpy as np
from bokeh.embed import components
from bokeh.resources import Resources

# Bokeh makes its constructors at run time; their types differ between versions.
models: Any = bokeh.models
Figure = Any

# The colours of Okabe and Ito, which are safe for colour-blind readers.
STATE_COLORS = {
    "working": "#0072B2",
    "failed": "#D55E00",
    "lost": "#CC79A7",
    "start_up": "#56B4E9",
    "waiting": "#E69F00",
    "idle": "#A8B2B9",
}
STATES = tuple(STATE_COLORS)
_LINE = "#0072B2"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_CLOCK = models.DatetimeTickFormatter(
    milliseconds="%H:%M:%S",
    seconds="%H:%M:%S",
    minsec="%H:%M:%S",
    minutes="%H:%M",
    hourmin="%H:%M",
    hours="%H:%M",
    days="%d %b",
    months="%b %Y",
    years="%Y",
    context="%d %b %Y",
    context_which="start",
    hide_repeats=True,
)


# Bokeh gives its models and places varying ids; they are renamed, so that one job always gives the same page.
_ID = re.compile(r'"(?:p\d+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"')


def chart_code() -> str:
    """Return BokehJS; the page needs only its first component."""
    return str(Resources(mode="inline", components=["bokeh"]).render_js())


def as_parts(figures: Mapping[str, Figure]) -> tuple[str, dict[str, str]]:
    """Return the script that draws all figures, and the place of each on the page."""
    script, places = components(dict(figures), wrap_script=False)
    names: dict[str, str] = {}

    def renamed(text: str) -> str:
        return _ID.sub(lambda match: names.setdefault(match[0], f'"chart{len(names)}"'), text)

    return renamed(str(script)), {str(name): renamed(str(place)) for name, place in places.items()}


def time_range(from_ms: float, to_ms: float) -> Any:
    """Return the time axis that all figures share, so that they zoom together."""
    spare_ms = max(1000.0, (to_ms - from_ms) * 0.004)
    # Less than ten seconds may contain no sample.
    bounds = (from_ms - spare_ms, to_ms + spare_ms)
    return models.Range1d(*bounds, bounds=bounds, min_interval=10_000, name="time")


Runs = Mapping[str, list[tuple[int, int, int]]]  # state → row (the devices count from 0), begin and end in ms


def timeline(runs: Runs, rows: int, times: Any) -> Figure:
    """Return what each device did over time, one row per device, the first on top."""
    height = min(680, max(150, 24 * rows + 60))
    y_range = models.Range1d(rows - 0.5, -0.5, bounds=(-0.5, rows - 0.5), min_interval=3, name="rows")
    plot = _figure("timeline", times, y_range, height)
    renderers = []
    for state, color in STATE_COLORS.items():
        y, left, right = np.array(runs.get(state, ()), float).reshape(-1, 3).T
        columns = {"y": y.astype(np.uint16), "left": left, "right": right}
        # A line of the same colour closes the gap between two rows, and keeps short runs visible.
        bars = plot.hbar(
            y="y",
            left="left",
            right="right",
            height=0.88 if rows * 4 <= height else 1.0,
            fill_color=color,
            line_color=color,
            line_width=0.5,
            name=state,
            source=models.ColumnDataSource(columns, name=f"runs-{state}"),
        )
        renderers.append(bars)
    tips = [("device", "@device"), ("state", "@state"), *_FROM_TO, ("lasted", "@lasted")]
    plot.add_tools(_hover(renderers, tips, formatters=_DATES, point_policy="follow_mouse"))
    plot.yaxis.ticker = models.BasicTicker(min_interval=1, mantissas=[1, 2, 5], num_minor_ticks=0, desired_num_ticks=24)
    plot.yaxis.name = "device-names"
    plot.ygrid.grid_line_color = None
    return plot


_DATES = {"@left": "datetime", "@right": "datetime"}
_FROM_TO = (("from", "@left{%F %T}"), ("to", "@right{%F %T}"))


def _hover(renderers: list[Any], lines: Iterable[tuple[str, str]], **more: Any) -> Any:
    """Return the hover text; Bokeh escapes the values. Its default table has too little contrast."""
    cells = "".join(
        f'<dt style="color:var(--soft)">{name}</dt><dd style="margin:0">{value}</dd>' for name, value in lines
    )
    grid = "display:grid;grid-template-columns:auto auto;gap:1px 12px;margin:2px 4px"
    return models.HoverTool(renderers=renderers, tooltips=f'<dl style="{grid}">{cells}</dl>', **more)


def _dashed(plot: Figure, location: float | None, dimension: str = "width", dash: str = "dashed") -> None:
    """Draw a line across the plot, if there is a location."""
    if location is not None:
        plot.add_layout(models.Span(location=location, dimension=dimension, line_dash=dash, line_width=1))


class MetricForm(NamedTuple):
    """How one metric is drawn."""

    name: str  # the column of `sample`
    unit: str
    digits: str  # a Bokeh format
    top: float  # of the axis, from 0
    limit: float | None  # the limit of the device; None: not known, or not the same for all
    per_unit: float  # the value of the column that is 1 in the unit


def metric(form: MetricForm, times: Any) -> Figure:
    """Return one metric over time: a line for the mean, and a band from smallest to largest."""
    name = form.name
    plot = _figure(name, times, _from_zero(form.top), 230)
    plot.patch("x", "y", source=_empty(f"{name}-band", "xy"), fill_color=_LINE, fill_alpha=0.2, line_color=None)
    plot.line("x", "y", source=_empty(f"{name}-mean", "xy"), line_color=_LINE, line_width=1.8)
    source = _empty(f"{name}-hover", ("left", "right", "low", "mean", "high", "floor", "roof"))
    bars = plot.quad(
        left="left",
        right="right",
        bottom="floor",
        top="roof",
        source=source,
        fill_color=_LINE,
        fill_alpha=0,
        line_color=None,
        hover_fill_color=_LINE,
        hover_fill_alpha=0.18,
        hover_line_color=None,
    )
    value = f"{{{form.digits}}} {form.unit}"
    tips = [*_FROM_TO, ("largest", f"@high{value}"), ("mean", f"@mean{value}"), ("smallest", f"@low{value}")]
    plot.add_tools(_hover([bars], tips, formatters=_DATES, mode="vline"))
    plot.yaxis.axis_label = form.unit
    _dashed(plot, form.limit)
    return plot


def _empty(name: str, columns: Iterable[str]) -> Any:
    return models.ColumnDataSource({column: [] for column in columns}, name=name)


class Histogram(NamedTuple):
    """How many chunks took how long."""

    edges_s: Sequence[float]
    counts: Sequence[int]


def histogram(durations: Histogram) -> Figure:
    """Return how long the chunks took."""
    edges = np.asarray(durations.edges_s)
    counts = np.asarray(durations.counts)
    x_range = models.Range1d(float(edges[0]), float(edges[-1]), bounds="auto", name="durations")
    plot = _figure("histogram", x_range, _from_zero(float(counts.max()) * 1.06), 260, x_axis_type="linear")
    source = models.ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
    bars = plot.quad(
        left="left",
        right="right",
        bottom=0,
        top="count",
        source=source,
        fill_color=_LINE,
        fill_alpha=0.85,
        line_color=None,
        hover_fill_color="#E69F00",
    )
    tips = [("took", "@left{0,0.[00]} to @right{0,0.[00]} s"), ("chunks", "@count{0,0}")]
    plot.add_tools(_hover([bars], tips, mode="vline"))
    plot.xaxis.axis_label = "seconds for one chunk"
    plot.yaxis.axis_label = "chunks"
    plot.yaxis.formatter = models.NumeralTickFormatter(format="0,0")
    plot.yaxis.ticker = models.BasicTicker(min_interval=1, num_minor_ticks=0)
    return plot


def curve(
    name: str,
    label: str,
    digits: str,
    points: Sequence[tuple[float, float]],
    limit: float | None,
    marks_s: Sequence[float],
) -> Figure:
    """Return a figure over the length of chunks; it contains no text from files.

    ``label``: of the axis; ``digits``: a Bokeh format; ``limit``: of the device, if known; ``marks_s``: lengths to mark
    with vertical lines.
    """
    lengths_s = [length_s for length_s, _ in points]
    values = [value for _, value in points]
    all_lengths_s = [*lengths_s, *marks_s]
    x_range = models.Range1d(min(all_lengths_s) * 0.85, max(all_lengths_s) * 1.15, bounds="auto")
    top = 1.08 * max([*values, limit or 0.0, 1e-9])
    plot = _figure(name, x_range, _from_zero(top), 260, x_axis_type="log")
    source = models.ColumnDataSource({"x": lengths_s, "y": values})
    plot.line("x", "y", source=source, line_color=_LINE, line_width=1.8)
    marks = plot.scatter("x", "y", source=source, size=8, color=_LINE)
    plot.add_tools(_hover([marks], [("chunk", "@x{0,0.[00]} s"), (label, f"@y{{{digits}}}")]))
    plot.xaxis.axis_label = "seconds of audio in a chunk (logarithmic)"
    plot.yaxis.axis_label = label
    plot.xaxis.formatter = models.NumeralTickFormatter(format="0,0")
    _dashed(plot, limit)
    for mark_s in marks_s:
        _dashed(plot, mark_s, "height", "dotted")
    return plot


def _from_zero(top: float) -> Any:
    """Return an axis that cannot be moved or zoomed below 0 or above its top."""
    return models.Range1d(0, top, bounds=(0, top))


def _figure(name: str, x_range: Any, y_range: Any, height: int, x_axis_type: str = "datetime") -> Figure:
    zoomed = "both" if name == "timeline" else "width"
    plot = bokeh.plotting.figure(
        name=name,
        x_range=x_range,
        y_range=y_range,
        height=height,
        sizing_mode="stretch_width",
        toolbar_location=None,
        tools=[models.BoxZoomTool(dimensions=zoomed), models.WheelZoomTool(dimensions=zoomed, modifiers="ctrl")],
        active_scroll="auto",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=56,
        min_border_right=12,
        x_axis_type=x_axis_type,
    )
    plot.axis.major_label_text_font = _FONT
    plot.axis.axis_label_text_font = _FONT
    plot.axis.major_label_text_font_size = "12px"
    plot.axis.axis_label_text_font_size = "12px"
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.minor_tick_line_color = None
    plot.axis.major_tick_in = 0
    plot.xgrid.grid_line_color = None
    plot.xaxis.ticker.desired_num_ticks = 4 if name == "timeline" else 5  # more would overlap on a phone
    if x_axis_type == "datetime":
        plot.xaxis.formatter = _CLOCK.clone()
    return plot
