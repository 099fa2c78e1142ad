"""The report as plain text and as Markdown, for one job or for two side by side; and the last lines of other commands.

Text fits 100 columns, also in a Slurm log; terminals get colours. A line to paste is never wrapped. Markdown is for a
lab notebook: all text from files is escaped.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from badcjobs.report.compare import Comparison, comparison_tables, news_of
from badcjobs.report.headlines import finish_words, headlines, no_findings_words, verdict_words
from badcjobs.report.job_tables import failure, report_parts
from badcjobs.report.summary import Summary
from badcjobs.report.tables import WIDTH, Table, columns, ending, escaped, table_markdown, table_text
from badcjobs.report.words import count, duration, moment, number, plain

_MOST, _MOST_DEVICES = 10, 16  # entries of a list in text
_NOTEBOOK_MOST, _NOTEBOOK_DEVICES = 100, 40
_MOST_FILES = 20
_MOST_SUBJECTS = 5
_SECOND = "\ue000"  # the second column of a wide character while lines are measured; never in plain text
_COLOURS = {
    "done": "\x1b[32m", "failed": "\x1b[31m", "stopped": "\x1b[33m",
    "problem": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m",
}  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------------------------


def wrap(line: str, *, indent: int, whole_words: bool = True) -> list[str]:
    """Wrap a line; with ``whole_words`` a word that is longer than a line is not cut."""
    line = plain(line)
    measured = line if line.isascii() else "".join(c + _SECOND * (cell_len(c) - 1) for c in line)
    width = WIDTH - (_SECOND in measured)  # a wide character may be cut in the middle; it is restored below
    lines = textwrap.wrap(
        measured, width, subsequent_indent=" " * indent, break_long_words=not whole_words, break_on_hyphens=False
    )
    return [line.replace(_SECOND, "") for line in lines]


def fit(line: str, width: int = WIDTH) -> str:
    """Return a line cut to the width."""
    line = plain(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


# --- one job ----------------------------------------------------------------------------------------------------------


def summary_text(summary: Summary, title: str, *, colour: bool = False) -> str:
    """Return the summary as text; ``colour`` is for terminals."""

    def painted(text: str, kind: str) -> str:
        return f"{_COLOURS[kind]}{text}\x1b[0m" if colour and kind in _COLOURS else text

    verdict = verdict_words(summary)
    lines = [f"{fit(title, WIDTH - len(verdict) - 2)}: {painted(verdict, summary.verdict)}", ""]
    for name, words in headlines(summary):
        lines += wrap(f"  {name:<11} {words}", indent=14)
    lines.append("")
    for finding in summary.findings:
        severity, figures = finding.severity, list(finding.evidence)
        first, *others = wrap(f"  {severity:<8} {finding.sentence}", indent=11)
        lines += [first.replace(severity, painted(severity, severity), 1), *others]
        if finding.subjects:
            more = len(finding.subjects) - _MOST_SUBJECTS
            which = ", ".join(finding.subjects[:_MOST_SUBJECTS]) + (f" and {more:,} more" if more > 0 else "")
            figures.append(f"where: {which}")
        for figure in figures:
            lines += wrap(f"           - {figure}", indent=13, whole_words=False)
        lines += wrap(f"           → {finding.advice}", indent=13) if finding.advice else []
        lines += [f"{'':13}{plain(line)}" for line in finding.lines]
        lines.append("")
    lines += [] if summary.findings else [*wrap(f"  {no_findings_words(summary)}", indent=2), ""]
    for _, part in report_parts(summary, _MOST, _MOST_DEVICES):
        lines += [*_part_lines(part), ""] if part else []
    for words, command in finish_words(summary):
        lines += [*wrap(f"  {words}", indent=2), f"    {plain(command)}", ""]
    return "\n".join(lines).rstrip()


def _part_lines(part: Table | list[str]) -> list[str]:
    if isinstance(part, Table):
        return list(map(fit, table_text(part, shorten="task")))
    # Lines are wrapped, not cut, because the reason is at the end; a path is not split, so that it can be copied.
    return [line for one in part for line in wrap(f"  {one}", indent=4, whole_words=one.startswith("file "))]


def markdown(summary: Summary, title: str) -> str:
    """Return the report as Markdown."""
    parts = [f"# {escaped(title)}: {verdict_words(summary)}"]
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        parts.append(f"From {moment(summary.started_at_ms)} to {moment(summary.last_sign_ms)}.")
    parts += [table_markdown(Table("headlines", "", columns("<", "<"), headlines(summary))), "## Findings"]
    for finding in summary.findings:
        parts.append(f"**{escaped(finding.severity)}**: {escaped(finding.sentence)}")
        advice = [f"- *{escaped(finding.advice)}*"] if finding.advice else []
        parts.append("\n".join([*(f"- {escaped(figure)}" for figure in finding.evidence), *advice]))
        parts += [_code(finding.lines)] if finding.lines else []
    parts += [] if summary.findings else [escaped(no_findings_words(summary))]
    for heading, part in report_parts(summary, _NOTEBOOK_MOST, _NOTEBOOK_DEVICES):
        parts += [f"## {heading}"] if heading and part else []
        if part:
            lines = [] if isinstance(part, Table) else [f"- {escaped(line)}" for line in part]
            parts.append(table_markdown(part) if isinstance(part, Table) else "\n".join(lines))
    for words, command in finish_words(summary):
        parts += [escaped(words[0].upper() + words[1:]), _code([command])]
    return "\n\n".join(parts) + "\n"


def _code(lines: Sequence[str]) -> str:
    """Return lines as a code block; the fence is longer than any run of backticks in them."""
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


# --- two jobs side by side --------------------------------------------------------------------------------------------

_LONGEST_NAME = 20  # of a job, so that the column with the change fits


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as tables with one column for each job."""
    titles = (comparison.this["title"], comparison.other["title"])
    head = [ending(title, _LONGEST_NAME) for title in titles]
    lines = [*map(fit, wrap(comparison.conclusion, indent=2)), ""]
    for words, command in news_of(comparison):
        lines += [*wrap(f"  {words}", indent=2), *([] if command is None else [f"    {plain(command)}"]), ""]
    if head[0] == head[1]:  # the names are long and have the same ending
        lines += [*wrap(f"  this is {titles[0]}, other is {titles[1]}", indent=4), ""]
        head = ["this", "other"]
    for _, part in comparison_tables(comparison, head, _LONGEST_NAME):
        lines += [*_part_lines(part), ""]
    return "\n".join(lines).rstrip()


def comparison_markdown(comparison: Comparison) -> str:
    """Return two jobs side by side as Markdown."""
    head = (comparison.this["title"], comparison.other["title"])
    parts = [f"# {escaped(head[0])} against {escaped(head[1])}", escaped(comparison.conclusion)]
    for words, command in news_of(comparison):
        parts += [escaped(words), *([] if command is None else [_code([command])])]
    for heading, part in comparison_tables(comparison, head):
        parts.append(f"## {heading}")
        parts.append(table_markdown(part) if isinstance(part, Table) else f"({part[0]})")
    return "\n\n".join(parts) + "\n"


# --- the last lines of other commands ---------------------------------------------------------------------------------


def removal_text(removed: Sequence[str], left: Sequence[tuple[str, str]]) -> str:
    """Return what ``badcjobs merge --remove-merged`` removed."""
    lines = [f"  removed     {count(len(removed), 'task database')}; all rows are in the job database"]
    for path, why in left[:_MOST_FILES]:
        lines += wrap(f"  not removed {path}: {why}", indent=14)
    more = len(left) - _MOST_FILES
    return "\n".join([*lines, *([f"  … and {more:,} more (--json has them all)"] if more > 0 else [])])


def task_end_text(end: Mapping[str, Any]) -> str:
    """Return the short summary at the end of ``badcjobs run``."""
    chunks: Mapping[str, int] = end["chunks"]
    settled = ", ".join(f"{many:,} {status}" for status, many in sorted(chunks.items())) or "none"
    rate = f" ({number(end['audio_s'] / end['wall_s'])} × real time)" if end["audio_s"] and end["wall_s"] else ""
    lines = [
        f"task {end['task']}: {end['verdict']} (exit code {end['exit_code']})",
        f"  chunks      {settled} of {sum(chunks.values()):,}",
        f"  audio       {number(end['audio_s'] / 3600, 2)} hours in {duration(end['wall_s'])}{rate}",
        f"  devices     {end['devices']}; telemetry {end['telemetry']}",
        f"  database    {end['database']}",
        *(f"  failed      {failure(**chunk)}" for chunk in end["failed"]),
    ]
    if (more := chunks.get("failed", 0) + chunks.get("poison", 0) - len(end["failed"])) > 0:
        sql = "SELECT recording_id, chunk_id, error FROM chunk WHERE status IN ('failed', 'poison')"
        lines.append(f'  failed      … and {more:,} more: sqlite3 {shlex.quote(end["database"])} "{sql}"')
    lines += [f"  note        {end['note']}"] if end["note"] else []
    return "\n".join(plain(line) for line in (*lines, f"  next        badcjobs merge {shlex.quote(end['out'])}"))
