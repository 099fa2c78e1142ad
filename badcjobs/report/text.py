"""The report as plain text and as Markdown, for one job or for two side by side; and the last lines of other commands.

Text fits a terminal, which also gets colours, or 100 columns, as in a Slurm log. A line to paste is never wrapped.
Markdown is for a lab notebook: all text from files is escaped.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from badcjobs.paths import shell_line
from badcjobs.report.compare import Comparison, comparison_tables, news_of
from badcjobs.report.job_tables import detail_lists, failure, file_lines, page_tables, state_table, stray_table
from badcjobs.report.summary import Finding, Summary, ratio
from badcjobs.report.tables import WIDTH, Table, beginning, columns, escaped, table_markdown, table_text
from badcjobs.report.verdict import BAR, MOST_FINDINGS, Verdict, bar, headlines, no_findings_words, verdict_of
from badcjobs.words import audio_time, count, duration, first_names, moment, plain, speed

_MOST = 10  # entries of a list in text
_MOST_FILES = 20
_MOST_SUBJECTS = 5
_BAR = 60  # columns
_COLOURS = {
    "done": "\x1b[32m",
    "failed": "\x1b[31m",
    "stopped": "\x1b[33m",
    "running": "\x1b[36m",
    "problem": "\x1b[1;31m",
    "warning": "\x1b[33m",
    "note": "\x1b[36m",
}


# --- lines ------------------------------------------------------------------------------------------------------------


def wrap(line: str, *, indent: int, width: int = WIDTH, whole_words: bool = True) -> list[str]:
    """Wrap a line; with ``whole_words`` a word that is longer than a line is not cut."""
    return textwrap.wrap(
        plain(line),
        width,
        subsequent_indent=" " * indent,
        break_long_words=not whole_words,
        break_on_hyphens=False,
    )


# --- one job ----------------------------------------------------------------------------------------------------------


def summary_text(
    summary: Summary, title: str, *, colour: bool = False, more: Sequence[str] = (), width: int = WIDTH
) -> str:
    """Return the summary as text: the verdict, details, ``more`` lines, and at the end what to do next.

    ``colour`` is for terminals. Tables are in the other forms.
    """
    verdict = verdict_of(summary)
    findings = [_finding_lines(finding, colour=colour, width=width) for finding in summary.findings]
    evidence = []
    for finding in summary.findings:
        figures = f"  {finding.kind.replace('_', ' ')}: {'; '.join(_evidence(finding))}"
        evidence += wrap(figures, indent=4, width=width, whole_words=False)
    return _joined(
        _title_lines(verdict, title, colour=colour, width=width),
        _labelled_lines(verdict.lines, width),
        *(findings[:MOST_FINDINGS] or [wrap(f"  {no_findings_words(summary)}", indent=2, width=width)]),
        _labelled_lines(headlines(summary), width),
        *findings[MOST_FINDINGS:],
        evidence,
        *(_list_lines(texts, width) for texts in detail_lists(summary, _MOST)),
        _list_lines(file_lines(summary, _MOST), width, whole_words=True),
        more,
        next_lines(verdict, width),
    )


def _joined(*blocks: Sequence[str]) -> str:
    """Return blocks of lines as text, with an empty line between two."""
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _title_lines(verdict: Verdict, title: str, *, colour: bool, width: int) -> list[str]:
    """Return the title with the verdict, and a bar of the chunks."""
    room = max(8, width - len(verdict.outcome) - 2)
    lines = wrap(f"{beginning(plain(title), room)}: {verdict.outcome}", indent=2, width=width)
    if colour:
        lines[0] = lines[0].replace(f": {verdict.word}", f": {_painted(verdict.word, verdict.state)}", 1)
    done, failed, left = verdict.chunks
    if done + failed:
        cells = bar(done, failed, left, min(_BAR, width))
        lines.append("".join(sign * many for sign, many in zip(BAR, cells, strict=True)))
    return lines


def _labelled_lines(rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    lines = []
    for name, text in rows:
        lines += wrap(f"  {name:<11} {text}", indent=14, width=width)
    return lines


def _list_lines(texts: Sequence[str], width: int, *, whole_words: bool = False) -> list[str]:
    """Wrap lines, because the reason is at the end; a path is a whole word, so that it can be copied."""
    lines = []
    for text in texts:
        lines += wrap(f"  {text}", indent=4, width=width, whole_words=whole_words)
    return lines


def _painted(text: str, kind: str) -> str:
    return f"{_COLOURS[kind]}{text}\x1b[0m"


def _finding_lines(finding: Finding, *, colour: bool, width: int) -> list[str]:
    """Return what was found and its fix; the evidence comes later."""
    severity = finding.severity
    lines = wrap(f"  {severity:<8} {finding.sentence}", indent=11, width=width)
    if colour:
        lines[0] = lines[0].replace(severity, _painted(severity, severity), 1)
    if finding.advice:
        lines += wrap(f"           → {finding.advice}", indent=13, width=width)
    return [*lines, *(f"{'':13}{plain(line)}" for line in finding.lines)]


def _evidence(finding: Finding) -> list[str]:
    """Return the figures of a finding, and where it was found."""
    if not finding.subjects:
        return list(finding.evidence)
    return [*finding.evidence, f"where: {first_names(finding.subjects, _MOST_SUBJECTS)}"]


def next_lines(verdict: Verdict, width: int = WIDTH) -> list[str]:
    """Return what to do next; a line to paste is not wrapped."""
    lines: list[str] = []
    for explanation, command in verdict.next:
        begin = "" if lines else "next: "
        if explanation:
            lines += [*wrap(f"{begin}{explanation}:", indent=2, width=width), f"  {plain(command)}"]
        else:
            lines.append(f"{begin}{plain(command)}")
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
        parts += _finding_markdown(finding)
    if not summary.findings:
        parts.append(escaped(no_findings_words(summary)))
    tables = [("What the GPUs did", state_table(summary.states)), ("Rows", stray_table(summary.completeness))]
    tables += [(part.heading, part.table) for part in page_tables(summary)]
    for heading, table in tables:
        if table.rows:
            parts += [f"## {heading}", table_markdown(table)]
    if verdict.next:
        parts.append("## Next")
    for explanation, command in verdict.next:
        if explanation:
            parts.append(escaped(explanation[0].upper() + explanation[1:]))
        parts.append(_code([command]))
    return "\n\n".join(parts) + "\n"


def _finding_markdown(finding: Finding) -> list[str]:
    items = [f"- {escaped(figure)}" for figure in finding.evidence]
    if finding.advice:
        items.append(f"- *{escaped(finding.advice)}*")
    parts = [f"**{escaped(finding.severity)}**: {escaped(finding.sentence)}", "\n".join(items)]
    if finding.lines:
        parts.append(_code(finding.lines))
    return parts


def _code(lines: Sequence[str]) -> str:
    return "\n".join(["```sh", *lines, "```"])


# --- two jobs side by side --------------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison, width: int = WIDTH) -> str:
    """Return the comparison as tables with one column for each job."""
    blocks = [wrap(comparison.conclusion, indent=2, width=width, whole_words=False)]
    for news, command in news_of(comparison):
        blocks.append(wrap(f"  {news}", indent=2, width=width))
        if command is not None:
            blocks[-1].append(f"    {plain(command)}")
    for _, table in comparison_tables(comparison):
        blocks.append(list(map(plain, table_text(table, width))))
    return _joined(*blocks)


def comparison_markdown(comparison: Comparison) -> str:
    """Return two jobs side by side as Markdown."""
    titles = f"{comparison.this['title']} against {comparison.other['title']}"
    parts = [f"# {escaped(titles)}", escaped(comparison.conclusion)]
    for news, command in news_of(comparison):
        parts.append(escaped(news))
        if command is not None:
            parts.append(_code([command]))
    for heading, table in comparison_tables(comparison):
        parts += [f"## {heading}", table_markdown(table)]
    return "\n\n".join(parts) + "\n"


# --- the last lines of other commands ---------------------------------------------------------------------------------


def removal_text(removed: Sequence[str], left: Sequence[tuple[str, str]], width: int = WIDTH) -> str:
    """Return what ``badcjobs merge --remove-merged`` removed."""
    lines = [f"  removed     {count(len(removed), 'task database')}; all rows are in the job database"]
    for path, why in left[:_MOST_FILES]:
        lines += wrap(f"  not removed {path}: {why}", indent=14, width=width)
    if len(left) > _MOST_FILES:
        lines.append(f"  … and {len(left) - _MOST_FILES:,} more (--json has them all)")
    return "\n".join(lines)


def task_end_text(end: Mapping[str, Any]) -> str:
    """Return the short summary at the end of ``badcjobs run``."""
    chunks = end["chunks"]
    settled = ", ".join(f"{many:,} {status}" for status, many in sorted(chunks.items())) or "none"
    overlaps = ", with overlaps" if end["overlap"] else ""
    audio = f"{audio_time(end['audio_s'])}{overlaps} in {duration(end['wall_s'])}"
    times_real_time = ratio(end["audio_s"], end["wall_s"])
    if times_real_time:
        audio += f" ({speed(times_real_time)} real time)"
    lines = [
        f"task {end['task']}: {end['verdict']} (exit code {end['exit_code']})",
        f"  chunks      {settled} of {sum(chunks.values()):,}",
        f"  audio       {audio}",
        f"  devices     {end['devices']}; telemetry {end['telemetry']}",
        f"  database    {end['database']}",
        *(f"  failed      {failure(**chunk)}" for chunk in end["failed"]),
    ]
    more = chunks.get("failed", 0) + chunks.get("poison", 0) - len(end["failed"])
    if more > 0:
        command = shell_line("badcjobs", "export", end["database"], "--table", "chunk", "-o", "chunks.csv")
        lines.append(f"  failed      … and {more:,} more: {command}")
    if end["left_out"]:
        lines.append(f"  left out    {count(end['left_out'], 'recording')}: --filelist gives no place")
    if end["note"]:
        lines.append(f"  note        {end['note']}")
    return "\n".join(map(plain, lines))
