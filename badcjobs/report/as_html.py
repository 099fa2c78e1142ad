"""The report as one self-contained page: opens from disk, asks nobody for anything, runs no script but its own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from badcjobs import __version__
from badcjobs.model import ChartData
from badcjobs.report import page_lists as lists
from badcjobs.report import page_tables as tables
from badcjobs.report.cards import cards
from badcjobs.report.charts import Charts, draw
from badcjobs.report.headlines import finish_words, headlines, measured_words, verdict_words
from badcjobs.report.page_charts import durations_section, load_section, timeline_section
from badcjobs.report.page_findings import findings_section
from badcjobs.report.page_frame import ASSETS, head, scripts_in
from badcjobs.report.page_parts import Section, Table, paragraph, section_html, table_html
from badcjobs.report.page_stragglers import find_stragglers
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, duration, number, period


def page(summary: Summary, title: str, charts: ChartData | None = None) -> str:
    """Return the page; without ``charts``, or without Bokeh, it has all numbers and no charts."""
    drawn = None if charts is None else draw(summary, charts)
    sections = [section for section in _sections(summary, charts, drawn) if section is not None]
    scripts = [*_scripts(drawn), (ASSETS / "page.js").read_text(encoding="utf-8")]
    body = (
        '<a class="skip" href="#numbers">Skip to the numbers</a>\n<div class="frame">\n'
        + _header(summary, title)
        + _navigation(sections)
        + "\n<main>"
        + "\n".join(section_html(section) for section in sections)
        + f"</main>\n<footer>Made by badcjobs {escape(__version__)} from the job database beside it. What every number "
        "means: <code>badcjobs guide report</code>.</footer>\n</div>\n"
    )
    ours = "".join(f"<script>{script}</script>\n" for script in scripts)
    text = head(title, scripts) + body + _data(drawn) + ours + "</body></html>\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # a name of a file may be no text at all


def _scripts(drawn: Charts | None) -> Iterable[str]:
    if drawn is not None and drawn.places:
        yield from scripts_in(drawn.chart_code)
        yield drawn.script


def _data(drawn: Charts | None) -> str:
    """Return what page.js draws; '<' is spelled out, so that no text in it can end the element."""
    if drawn is None or not drawn.places:
        return ""
    text = json.dumps(drawn.data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="chart-data">{text}</script>\n'


def _header(summary: Summary, title: str) -> str:
    about = [count(summary.tasks, "array task")]
    about.append(count(cards(summary.devices), "device"))
    about.append(count(len({task.node for task in summary.task_list}), "node"))
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        about.append(period(summary.started_at_ms, summary.last_sign_ms))
    engines = sorted({task.engine for task in summary.task_list if task.engine})
    about += [f"engine {', '.join(engines)}"] if engines else []
    return (
        f'<header><p class="kicker">badcjobs report</p><h1>{escape(title)}</h1>'
        f'<p class="about"><strong class="verdict {summary.verdict}">{escape(verdict_words(summary))}</strong>'
        f"{escape(' · '.join(about))}</p></header>\n"
    )


def _navigation(sections: Sequence[Section]) -> str:
    links = "".join(
        f'<li><a href="#{escape(s.name)}"><span>{escape(s.heading)}</span>{_many(s.many)}</a></li>' for s in sections
    )
    return f'<nav aria-label="Parts of this report"><ul>{links}</ul></nav>'


def _many(many: int | None) -> str:
    return "" if many is None else f'<span class="many">{many:,}</span>'


def _sections(summary: Summary, data: ChartData | None, drawn: Charts | None) -> Iterable[Section | None]:
    yield _numbers(summary)
    yield findings_section(summary)
    yield timeline_section(summary, data, drawn)
    yield load_section(summary, drawn)
    yield durations_section(summary, drawn)
    yield _stragglers(summary)
    yield _section("failed", "Failed chunks", lists.failed(summary), empty="No chunk failed for good.")
    yield _section("heard", "What was heard", lists.labels(summary), empty="Nothing was heard.")
    yield _section("tasks", "Array tasks", tables.tasks(summary), empty="None.")
    yield _section(
        "devices", "Devices", tables.devices(summary), empty="No device took part.", words=_device_words(summary)
    )
    yield _section("alerts", "Alerts", lists.alerts(summary), empty="None.")
    yield _section("gaps", "Gaps in telemetry", lists.gaps(summary), empty="None.")
    yield _section("files", "Files with a remark", lists.files(summary), empty="None.")
    yield _settings(summary, data)


def _section(name: str, heading: str, table: Table, *, empty: str, words: str = "") -> Section:
    body = table_html(table) if table.rows else paragraph(empty)
    return Section(name, heading, (paragraph(words, "quiet") if words else "") + body, len(table.rows))


def _stragglers(summary: Summary) -> Section:
    """Return who was slow; where nobody could be compared, there is no number of them either."""
    found = find_stragglers(summary)
    if not found.compared:
        return Section("stragglers", "Stragglers", paragraph(found.words or "No device took part."))
    return _section("stragglers", "Stragglers", found.table, empty=found.nobody, words=found.words)


def _numbers(summary: Summary) -> Section:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(figure)} <small>{escape(unit)}</small></dd></div>"
        for name, figure, unit in _tiles(summary)
    )
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in headlines(summary))
    stray = lists.strays(summary)
    finish = "".join(
        f"{paragraph(said[0].upper() + said[1:])}<pre>{escape(command)}</pre>"
        for said, command in finish_words(summary)
    )
    body = f'<dl class="tiles">{tiles}</dl><dl class="words">{words}</dl>{finish}'
    return Section(
        "numbers", "Numbers", body + (f"<h3>Rows that do not match</h3>{table_html(stray)}" if stray.rows else "")
    )


def _tiles(summary: Summary) -> Iterable[tuple[str, str, str]]:
    """Yield (name, figure, unit) of what people ask for first."""
    yield "audio analysed", number(summary.audio_hours, 0 if summary.audio_hours >= 100 else 2), "h"
    yield "real time", number(summary.times_real_time, 0 if (summary.times_real_time or 0) >= 100 else 1), "×"
    yield f"of {summary.chunks:,} chunks done", f"{summary.done:,}", ""
    if summary.devices:
        yield "GPU time", number(summary.gpu_hours, 0 if summary.gpu_hours >= 100 else 2), "GPU-h"
        yield "audio per GPU-hour", number(summary.audio_hours_per_gpu_hour), "h"
        working = summary.states.get("working")
        if working is not None and working.share_percent is not None:
            yield "of the GPU time working", f"{working.share_percent:.0f}", "%"
    if summary.energy_wh is not None:
        kilo = summary.energy_wh >= 1000
        measured = measured_words(summary)
        name = f"energy, {measured}" if measured else "energy"
        yield name, number(summary.energy_wh / (1000 if kilo else 1)), "kWh" if kilo else "Wh"
    yield "wall time", *_hours(summary.wall_s)
    yield "detections", f"{summary.detections:,}", ""
    if summary.failed:
        yield "chunks failed for good", f"{summary.failed:,}", ""


def _hours(seconds: float) -> tuple[str, str]:
    words, unit = duration(seconds).rsplit(" ", 1)
    return words, unit


def _device_words(summary: Summary) -> str:
    backends = sorted({device.backend for device in summary.devices})
    many = cards(summary.devices)
    each = f"{count(many, 'device')}, one row for each array task that had it. "
    each = "" if many == len(summary.devices) else each
    model = tables.one_model(summary)
    said = f"{each}Model: {model}. " if model else each
    return f"{said}Readings come from {', '.join(backends)}." if backends else ""


def _settings(summary: Summary, data: ChartData | None) -> Section:
    table = lists.settings(summary.settings)
    if not table.rows:
        return Section("settings", "Settings", paragraph("The tasks did not write down their settings."))
    sets = 0 if data is None else data.sets_of_settings
    words = "The settings of the task that started last"
    words += (
        f"; there are {sets:,} different sets in this job."
        if sets > 1
        else "; all tasks had the same."
        if sets
        else "."
    )
    versions = () if data is None else data.versions
    words += f" The tasks ran badcjobs {', '.join(versions)}." if versions else ""
    return Section("settings", "Settings", paragraph(words, "quiet") + table_html(table))
