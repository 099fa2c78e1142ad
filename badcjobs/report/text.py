"""The report as plain text and as Markdown, for one job or for two side by side; and the last lines of other commands.

Text fits 100 columns, also in a Slurm log; terminals get colours. A line to paste is never wrapped. Markdown is for a
lab notebook: all text from files is escaped.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from badcjobs.paths import shell_line
from badcjobs.report.compare import Comparison, comparison_tables, news_of
from badcjobs.report.job_tables import failure, report_parts
from badcjobs.report.summary import Finding, Summary, ratio
from badcjobs.report.tables import WIDTH, Table, columns, ending, escaped, table_markdown, table_text
from badcjobs.report.verdict import BAR, MOST_FINDINGS, Verdict, bar, headlines, verdict_of
from badcjobs.report.words import count, duration, moment, number, plain

_MOST = 10  # entries of a list in text
_NOTEBOOK_MOST, _NOTEBOOK_DEVICES = 100, 40
_MOST_FILES = 20
_MOST_SUBJECTS = 5
_BAR = 60  # columns
_SECOND = "\ue000"  # the second column of a wide character while lines are measured; never in plain text
_COLOURS = {
    "done": "\x1b[32m", "failed": "\x1b[31m", "stopped": "\x1b[33m", "running": "\x1b[36m",
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


def summary_text(summary: Summary, title: str, *, colour: bool = False, more: Sequence[str] = ()) -> str:
    """Return the summary as text: the verdict, details, ``more`` lines, and at the end what to do next.

    ``colour`` is for terminals. Tables are in the other forms.
    """
    verdict = verdict_of(summary)
    word = _painted(verdict.word, verdict.state) if colour else verdict.word
    room = WIDTH - len(verdict.outcome) - 2
    lines = [f"{fit(title, max(8, room))}: {verdict.outcome.replace(verdict.word, word, 1)}"]
    if verdict.chunks[0] + verdict.chunks[1]:
        lines.append("".join(sign * many for sign, many in zip(BAR, bar(*verdict.chunks, _BAR), strict=True)))
    lines.append("")
    for name, words in verdict.lines:
        lines += wrap(f"  {name:<11} {words}", indent=14)
    lines.append("")
    for finding in summary.findings[:MOST_FINDINGS]:
        lines += [*_finding_lines(finding, colour=colour), ""]
    lines += [] if summary.findings else [*wrap(f"  {verdict.no_findings}", indent=2), ""]
    for name, words in headlines(summary):
        lines += wrap(f"  {name:<11} {words}", indent=14)
    lines.append("")
    for finding in summary.findings[MOST_FINDINGS:]:
        lines += [*_finding_lines(finding, colour=colour), ""]
    for finding in summary.findings:
        figures, more_subjects = list(finding.evidence), len(finding.subjects) - _MOST_SUBJECTS
        if finding.subjects:
            which = ", ".join(finding.subjects[:_MOST_SUBJECTS])
            figures.append(f"where: {which}" + (f" and {more_subjects:,} more" if more_subjects > 0 else ""))
        lines += wrap(f"  {finding.kind.replace('_', ' ')}: {'; '.join(figures)}", indent=4, whole_words=False)
    lines += [""] if summary.findings else []
    for _, part in report_parts(summary, _MOST):
        # Lines are wrapped, not cut, because the reason is at the end; a path is not split, so that it can be copied.
        for one in part if isinstance(part, list) else ():
            lines += wrap(f"  {one}", indent=4, whole_words=one.startswith("file "))
        lines += [""] if part and isinstance(part, list) else []
    lines += [*more, ""] if more else []
    return "\n".join([*lines, *next_lines(verdict)]).rstrip()


def _painted(text: str, kind: str) -> str:
    return f"{_COLOURS[kind]}{text}\x1b[0m"


def _finding_lines(finding: Finding, *, colour: bool) -> list[str]:
    """Return what was found and its fix; the evidence comes later."""
    severity = finding.severity
    first, *others = wrap(f"  {severity:<8} {finding.sentence}", indent=11)
    lines = [first.replace(severity, _painted(severity, severity), 1) if colour else first, *others]
    lines += wrap(f"           → {finding.advice}", indent=13) if finding.advice else []
    return [*lines, *(f"{'':13}{plain(line)}" for line in finding.lines)]


def next_lines(verdict: Verdict) -> list[str]:
    """Return what to do next; a line to paste is not wrapped."""
    lines = []
    for number_of_step, (words, command) in enumerate(verdict.next):
        begin = "" if number_of_step else "next: "
        lines += [*wrap(f"{begin}{words}:", indent=2), f"  {plain(command)}"] if words else [f"{begin}{plain(command)}"]
    return lines


def markdown(summary: Summary, title: str) -> str:
    """Return the report as Markdown."""
    verdict = verdict_of(summary)
    parts = [f"# {escaped(title)}: {verdict.outcome}"]
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        parts.append(f"From {moment(summary.started_at_ms)} to {moment(summary.last_sign_ms)}.")
    rows = [*verdict.lines, *headlines(summary)]
    parts += [table_markdown(Table("headlines", "", columns("<", "<"), rows)), "## Findings"]
    for finding in summary.findings:
        parts.append(f"**{escaped(finding.severity)}**: {escaped(finding.sentence)}")
        advice = [f"- *{escaped(finding.advice)}*"] if finding.advice else []
        parts.append("\n".join([*(f"- {escaped(figure)}" for figure in finding.evidence), *advice]))
        parts += [_code(finding.lines)] if finding.lines else []
    parts += [] if summary.findings else [escaped(verdict.no_findings)]
    for heading, part in report_parts(summary, _NOTEBOOK_MOST, _NOTEBOOK_DEVICES):
        parts += [f"## {heading}"] if heading and part else []
        if part:
            lines = [] if isinstance(part, Table) else [f"- {escaped(line)}" for line in part]
            parts.append(table_markdown(part) if isinstance(part, Table) else "\n".join(lines))
    parts += ["## Next"] if verdict.next else []
    for words, command in verdict.next:
        parts += [*([escaped(words[0].upper() + words[1:])] if words else []), _code([command])]
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
        lines += [*map(fit, table_text(part)), ""] if isinstance(part, Table) else [f"  {part[0]}", ""]
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
    rate = f" ({number(speed)} × real time)" if (speed := ratio(end["audio_s"], end["wall_s"])) else ""
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
        lines.append(f'  failed      … and {more:,} more: sqlite3 {shell_line(end["database"])} "{sql}"')
    lines += [f"  note        {end['note']}"] if end["note"] else []
    return "\n".join(map(plain, lines))
