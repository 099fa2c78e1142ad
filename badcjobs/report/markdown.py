"""The report and the comparison as Markdown, for a lab notebook. All text from files is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from badcjobs.report.compare import Comparison, about_rows, figure_tables, news_of, setting_table
from badcjobs.report.device_summary import rows_words
from badcjobs.report.headlines import alert_lines, finish_words, headlines, verdict_words, well_words
from badcjobs.report.job_tables import (
    failed_table,
    file_table,
    label_table,
    least_busy,
    rank_table,
    state_table,
    work_table,
)
from badcjobs.report.rules import Finding
from badcjobs.report.summary import Summary
from badcjobs.report.tables import Heading, Table, columns, escaped, table_markdown
from badcjobs.report.words import count, moment

_MOST_DEVICES, _MOST_FAILED, _MOST_LABELS, _MOST_REMARKS = 40, 50, 100, 50


def markdown(summary: Summary, title: str) -> str:
    """Return the report as Markdown."""
    return "\n\n".join(_parts(summary, title)) + "\n"


def _parts(summary: Summary, title: str) -> Iterator[str]:
    yield f"# {escaped(title)}: {verdict_words(summary)}"
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        yield f"From {moment(summary.started_at_ms)} to {moment(summary.last_sign_ms)}."
    yield table_markdown(Table("headlines", "", columns("<", "<"), headlines(summary)))
    yield "## Findings"
    for finding in summary.findings:
        yield f"**{escaped(finding.severity)}**: {escaped(finding.sentence)}"
        yield _reasons(finding)
    if not summary.findings:
        yield escaped(well_words(summary))
    if summary.alerts:
        yield "\n".join(f"- alert: {escaped(line)}" for line in alert_lines(summary.alerts))
    if summary.states:
        yield "## Time and energy"
        yield table_markdown(state_table(summary.states, compact=True).without("of it busy"))
    if summary.devices:
        shown = least_busy(summary.devices, _MOST_DEVICES)
        some = f": the {len(shown)} least busy of {rows_words(summary.devices)}"
        yield f"## Devices{'' if len(shown) == len(summary.devices) else some}"
        yield table_markdown(work_table(shown))
        yield table_markdown(rank_table(shown))
    if summary.facts.labels:
        yield f"## What was heard ({count(len(summary.facts.labels), 'label')})"
        yield table_markdown(label_table(summary).without("share").first(_MOST_LABELS))
    if summary.facts.failed:
        last_lines = [replace(c, error=c.error.strip().rpartition("\n")[2]) for c in summary.facts.failed]
        table = failed_table(summary.failed, last_lines[:_MOST_FAILED])
        yield f"## Chunks that failed for good ({summary.failed:,})"
        yield table_markdown(table.without("tries"))
    if summary.facts.file_remarks:
        yield f"## Files with a remark ({len(summary.facts.file_remarks):,})"
        yield table_markdown(file_table(summary).first(_MOST_REMARKS))
    for words, command in finish_words(summary):
        yield escaped(words[0].upper() + words[1:])
        yield _code([command])


def _reasons(finding: Finding) -> str:
    lines = [f"- {escaped(figure)}" for figure in finding.evidence]
    lines += [f"- *{escaped(finding.advice)}*"] if finding.advice else []
    return "\n".join([*lines, *([f"\n{_code(finding.lines)}"] if finding.lines else [])])


def comparison_markdown(comparison: Comparison) -> str:
    """Return two jobs side by side as Markdown."""
    head = (comparison.this["title"], comparison.other["title"])
    parts = [f"# {escaped(head[0])} against {escaped(head[1])}", escaped(comparison.conclusion)]
    for words, command in news_of(comparison):
        parts += [escaped(words), *([] if command is None else [_code([command])])]
    numbers, text = [Heading(title) for title in head], [Heading(title, "text") for title in head]
    about, *states = figure_tables(comparison, head, about_rows(comparison))
    beside = (Heading("", "text"), *numbers, Heading(""))
    parts.append(table_markdown(replace(about, columns=beside)))
    for table in states:
        parts += ["## Share of the GPU time", table_markdown(replace(table, columns=beside))]
    settings = setting_table(comparison, head)
    differ = f"({settings})"
    if not isinstance(settings, str):
        differ = table_markdown(replace(settings, columns=(Heading("", "text"), *text)))
    return "\n\n".join([*parts, "## Settings that differ", differ]) + "\n"


def _code(lines: Sequence[str]) -> str:
    """Return lines to paste; the fence is longer than any run of backticks in them."""
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"
