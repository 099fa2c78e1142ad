"""The report and the comparison as Markdown, for a lab notebook. All text from files is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from badcjobs.model import Finding
from badcjobs.report.alert_words import alert_lines
from badcjobs.report.cards import rows_words
from badcjobs.report.compare import Comparison, about_rows, news_of
from badcjobs.report.compare_text import no_difference, said
from badcjobs.report.device_tables import least_busy, rank_rows, state_rows, work_rows
from badcjobs.report.headlines import finish_words, headlines, verdict_words, well_words
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, moment, plain

_MOST_DEVICES, _MOST_FAILED, _MOST_LABELS, _MOST_REMARKS = 40, 50, 100, 50
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def markdown(summary: Summary, title: str) -> str:
    """Return the report as Markdown."""
    parts = [f"# {escaped(title)}: {verdict_words(summary)}"]
    if summary.started_at_ms is not None and summary.last_sign_ms is not None:
        parts.append(f"From {moment(summary.started_at_ms)} to {moment(summary.last_sign_ms)}.")
    parts += [_table([("", ""), *headlines(summary)], left=2), "## Findings", *_findings(summary)]
    if summary.states:
        parts += ["## Time and energy", _table(state_rows(summary.states), left=1)]
    if summary.devices:
        shown = least_busy(summary.devices, _MOST_DEVICES)
        some = f": the {len(shown)} least busy of {rows_words(summary.devices)}"
        heading = "" if len(shown) == len(summary.devices) else some
        parts += [f"## Devices{heading}", _table(work_rows(shown), left=3), _table(rank_rows(shown), left=2)]
    return "\n\n".join([*parts, *_heard(summary), *_failed(summary), *_remarks(summary), *_finish(summary)]) + "\n"


def _findings(summary: Summary) -> Iterator[str]:
    for finding in summary.findings:
        yield f"**{escaped(finding.severity)}**: {escaped(finding.sentence)}"
        yield _reasons(finding)
    if not summary.findings:
        yield escaped(well_words(summary))
    if summary.alerts:
        yield "\n".join(f"- alert: {escaped(line)}" for line in alert_lines(summary.alerts))


def _reasons(finding: Finding) -> str:
    lines = [f"- {escaped(figure)}" for figure in finding.evidence]
    lines += [f"- *{escaped(finding.advice)}*"] if finding.advice else []
    return "\n".join([*lines, *([f"\n{_code(finding.lines)}"] if finding.lines else [])])


def _heard(summary: Summary) -> Iterator[str]:
    if summary.labels:
        rows = [(label, name or "", f"{many:,}") for label, name, many in summary.labels[:_MOST_LABELS]]
        yield f"## What was heard ({count(len(summary.labels), 'label')})"
        yield _table([("label", "name", "detections"), *rows], left=2)


def _failed(summary: Summary) -> Iterator[str]:
    if summary.failed_chunks:
        rows = [
            (c.recording_id, c.chunk_id, c.status, c.error_class, c.error.strip().rpartition("\n")[2])
            for c in summary.failed_chunks[:_MOST_FAILED]
        ]
        yield f"## Chunks that failed for good ({summary.failed:,})"
        yield _table([("recording", "chunk", "state", "class", "what it said"), *rows], left=5)


def _remarks(summary: Summary) -> Iterator[str]:
    if summary.file_remarks:
        yield f"## Files with a remark ({len(summary.file_remarks):,})"
        yield _table([("file", "remark"), *summary.file_remarks[:_MOST_REMARKS]], left=2)


def _finish(summary: Summary) -> Iterator[str]:
    for words, command in finish_words(summary):
        yield escaped(words[0].upper() + words[1:])
        yield _code([command])


def comparison_markdown(comparison: Comparison) -> str:
    """Return two jobs side by side as Markdown."""
    head = (comparison.this["title"], comparison.other["title"])
    rows = [("", *head, ""), *((*row, "") for row in about_rows(comparison))]
    rows += [(f.name, f.this_words, f.other_words, f.change) for f in comparison.figures]
    parts = [f"# {escaped(head[0])} against {escaped(head[1])}", escaped(comparison.conclusion)]
    for words, command in news_of(comparison):
        parts += [escaped(words), *([] if command is None else [_code([command])])]
    parts.append(_table(rows, left=1))
    if comparison.states:
        shares = [(f.name, f.this_words, f.other_words, f.change) for f in comparison.states]
        parts += ["## Share of the GPU time", _table([("", *head, ""), *shares], left=1)]
    settings = [(key, said(pair["this"]), said(pair["other"])) for key, pair in comparison.settings.items()]
    differ = _table([("", *head), *settings], left=3) if settings else f"({no_difference(comparison)})"
    return "\n\n".join([*parts, "## Settings that differ", differ]) + "\n"


def escaped(text: str) -> str:
    """Return text from a file so that Markdown shows it as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", plain(" ".join(text.split())))


def _code(lines: Sequence[str]) -> str:
    """Return lines to paste; the fence is longer than any run of backticks in them."""
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}sh\n{text}\n{fence}"


def _table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    head, *others = [[escaped(cell) for cell in row] for row in rows]
    kinds = [":---" if place < left else "---:" for place in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, kinds, *others))
