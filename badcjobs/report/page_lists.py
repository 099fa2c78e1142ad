"""The lists at the end of the page: what failed, what was heard, gaps, alerts, files, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from badcjobs.report.page_parts import Cell, Row, Table
from badcjobs.report.page_tables import whole
from badcjobs.report.summarize import Summary
from badcjobs.report.words import duration

_LONGEST_MESSAGE, _SHORTEST_MESSAGE = 1000, 300
_ALL_MESSAGES = 300_000  # characters: a page is to stay small enough to be sent around


def failed(summary: Summary) -> Table:
    """Return the chunks that failed for good, with what the engine said."""
    longest = max(_SHORTEST_MESSAGE, min(_LONGEST_MESSAGE, _ALL_MESSAGES // max(1, len(summary.failed_chunks))))
    rows: list[Row] = [
        [c.recording_id, c.chunk_id, c.status, whole(c.attempts), c.error_class, shortened(c.error, longest)]
        for c in summary.failed_chunks
    ]
    caption = "Chunks that failed for good"
    if summary.failed > len(rows):
        caption = f"The first {len(rows):,} of {summary.failed:,} chunks that failed for good; job.sqlite has all"
    heads = ("<recording", "<chunk", "<state", "tries", "<class", "<<what it said")
    return Table("failed-table", caption, heads, rows)


def shortened(message: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Return a message as it is, or its beginning and its end: the reason stands in one of them."""
    left_out = len(message) - longest
    if left_out <= 100:
        return message
    half = longest // 2
    return f"{message[:half]}\n[… {left_out:,} characters are left out; job.sqlite has them …]\n{message[-half:]}"


def labels(summary: Summary) -> Table:
    """Return what was heard."""
    total = sum(many for _, _, many in summary.labels)
    rows: list[Row] = [
        [label, name or "", whole(many), Cell(f"{100 * many / total:.1f} %", 100 * many / total)]
        for label, name, many in summary.labels
    ]
    return Table("label-table", "Detections by label", ("<label", "<name", "detections", "share"), rows)


def gaps(summary: Summary) -> Table:
    """Return the stretches without readings."""
    rows: list[Row] = [
        [g.reason, g.metric or "all readings", whole(g.gaps), Cell(duration(g.seconds), g.seconds), whole(g.tasks)]
        for g in summary.gaps
    ]
    heads = ("<reason", "<what", "gaps", "time", "tasks")
    return Table("gap-table", "Stretches without readings, by reason", heads, rows)


def alerts(summary: Summary) -> Table:
    """Return the alerts by kind."""
    rows: list[Row] = [
        [a.kind.replace("_", " "), a.severity, whole(a.alerts), whole(a.devices),
         Cell(duration(a.longest_s), a.longest_s), a.example]
        for a in summary.alerts
    ]  # fmt: skip
    heads = ("<kind", "<severity", "alerts", "devices", "longest", "<<for example")
    return Table("alert-table", "Alerts, by kind", heads, rows)


def strays(summary: Summary) -> Table:
    """Return rows that are in the source or in the job, but not in both."""
    proof = summary.completeness
    rows: list[Row] = []
    if proof is not None and proof.not_listed_examples:
        rows.append(["in the source, in no task", whole(proof.not_listed), "\n".join(proof.not_listed_examples)])
    if proof is not None and proof.strangers_examples:
        rows.append(["in the job, not in the source", whole(proof.strangers), "\n".join(proof.strangers_examples)])
    return Table("stray-table", "Rows that do not match", ("<where", "rows", "<<the first of them"), rows)


def files(summary: Summary) -> Table:
    """Return the files about which merge had something to say."""
    return Table(
        "file-table", "Files with a remark", ("<file", "<<remark"), [list(row) for row in summary.file_remarks]
    )


def settings(values: Mapping[str, Any]) -> Table:
    """Return the settings that were given; those left to their default are left out."""
    rows: list[Row] = [[name, value] for name, value in _flat(values)]
    return Table("setting-table", "Settings", ("<setting", "<<value"), rows)


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, (list, tuple)):
            if value:
                yield above + name, "\n".join(map(str, value))
        elif value is not None:
            yield (
                above + name,
                {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value),
            )
