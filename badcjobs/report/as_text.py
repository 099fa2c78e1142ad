"""The report as plain text: fits 100 columns and reads well in a Slurm log."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from badcjobs.report.headlines import VERDICTS, finish_words, headlines
from badcjobs.report.summarize import DeviceSummary, Summary
from badcjobs.report.words import UNKNOWN, count, duration, energy, memory, number, percent, plain

_WIDTH = 100
_MOST_DEVICES = 16
_MOST_FAILED = 10
_MOST_TASKS = 10
_MOST_FILES = 20
_MOST_LABELS = 8
_LONGEST_MESSAGE = 200


def summary_text(summary: Summary, title: str) -> str:
    """Return the whole summary."""
    lines = [f"{title}: {VERDICTS[summary.verdict]}", ""]
    for name, words in headlines(summary):
        lines += _wrap(f"  {name:<11} {words}", indent=14)
    lines += ["", *_example_lines(summary), *_device_table(summary.devices)]
    lines += _task_lines(summary)
    lines += _gap_lines(summary)
    lines += _label_lines(summary)
    lines += _failed_lines(summary)
    text = "\n".join([*(_fit(line) for line in lines), *_file_lines(summary)]).rstrip()
    return "\n".join([text, *_finish_lines(summary)])


def _example_lines(summary: Summary) -> list[str]:
    """Return the first rows that only the source has, and the first that only the job has."""
    proof = summary.completeness
    if proof is None:
        return []
    lines = [
        *_some("in no task", proof.not_listed_examples, proof.not_listed),
        *_some("not in the source", proof.strangers_examples, proof.strangers),
    ]
    return [*lines, ""] if lines else []


def _some(what: str, names: Sequence[str], many: int | None) -> list[str]:
    more = (many or 0) - len(names)
    return [f"  {what}: {name}" for name in names] + ([f"  … and {more:,} more"] if names and more > 0 else [])


def _finish_lines(summary: Summary) -> list[str]:
    """Return the commands that finish the job, whole however long they are: a shell could not guess the rest."""
    lines = []
    for words, command in finish_words(summary):
        lines += ["", *_wrap(f"  {words}", indent=2), *_command_lines(command)]
    return lines


def _command_lines(command: str) -> list[str]:
    r"""Return a command in lines that a shell joins again: cut between words, with a backslash at each end."""
    lines = ["    " + plain(command)]
    if len(lines[0]) > _WIDTH:
        lines = [" " * 3]
        for word in shlex.split(command):
            if len(lines[-1]) + len(shlex.quote(word)) > _WIDTH - 3 and lines[-1].strip():
                lines[-1] += " \\"
                lines.append(" " * 7)
            lines[-1] += " " + plain(shlex.quote(word))
    return lines


def _device_table(devices: Sequence[DeviceSummary]) -> list[str]:
    if not devices:
        return []
    rows = [("device", "task", "samples", "busy", "util", "p50", "p95", "max", "memory", "energy", "gaps")]
    for d in devices[:_MOST_DEVICES]:
        rows.append(
            (
                f"{d.token if d.index is None else d.index} {d.name or UNKNOWN}"[:16],
                d.task if len(d.task) <= 20 else "…" + d.task[-19:],
                f"{d.samples:,}",
                percent(d.busy_mean_percent),
                percent(d.utilization_mean_percent),
                percent(d.utilization_p50_percent),
                percent(d.utilization_p95_percent),
                percent(d.utilization_max_percent),
                memory(d.memory_peak_bytes),
                energy(None if d.energy_j is None else d.energy_j / 3600),
                duration(d.gap_s) if d.gap_s else "none",
            )
        )
    lines = table(rows, left=2)
    if len(devices) > _MOST_DEVICES:
        lines.append(f"  … and {len(devices) - _MOST_DEVICES:,} more (report.html and --json have them all)")
    return [*lines, ""]


def table(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as aligned lines; the first ``left`` columns are texts, the others numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _task_lines(summary: Summary) -> list[str]:
    """Return the tasks that did not end well; the others are in report.html."""
    worth_a_look = [task for task in summary.task_list if task.verdict != "done"]
    lines = [
        f"  task {task.name}: {task.verdict or 'running'}; {task.done:,} done, {task.failed:,} failed,"
        f" {task.pending:,} left"
        for task in worth_a_look[:_MOST_TASKS]
    ]
    if len(worth_a_look) > _MOST_TASKS:
        lines.append(f"  … and {len(worth_a_look) - _MOST_TASKS:,} more tasks (report.html and --json have them all)")
    return [*lines, ""] if lines else []


def _gap_lines(summary: Summary) -> list[str]:
    lines = []
    for gap in summary.gaps:
        if gap.metric is None:
            lines.append(f"  gap: {gap.reason} ({count(gap.gaps, 'time')}, {duration(gap.seconds)})")
    missing = sorted({(gap.metric, gap.reason) for gap in summary.gaps if gap.metric is not None})
    lines += [f"  not given: {metric}: {reason}" for metric, reason in missing]
    return [*lines, ""] if lines else []


def _label_lines(summary: Summary) -> list[str]:
    if not summary.labels:
        return []
    shown = ", ".join(f"{label} {many:,}" for label, _, many in summary.labels[:_MOST_LABELS])
    more = len(summary.labels) - _MOST_LABELS
    return [f"  heard: {shown}" + (f", and {more} more labels" if more > 0 else ""), ""]


def _failed_lines(summary: Summary) -> list[str]:
    lines = [
        f"  {chunk.status}: {_failure(chunk.recording_id, chunk.chunk_id, chunk.error_class, chunk.error)}"
        for chunk in summary.failed_chunks[:_MOST_FAILED]
    ]
    if summary.failed > _MOST_FAILED:
        lines.append(f"  … and {summary.failed - _MOST_FAILED:,} more failed chunks (in job.sqlite, table chunk)")
    return [*lines, ""] if lines else []


def _failure(recording_id: str, chunk_id: str, error_class: str, error: str) -> str:
    name = recording_id if recording_id == chunk_id else f"{recording_id} {chunk_id}"
    last = error.strip().rpartition("\n")[2][:_LONGEST_MESSAGE]
    return f"{name} ({error_class})" + (f": {last}" if last else "")


def _file_lines(summary: Summary) -> list[str]:
    """Return what became of files, whole: the reason stands at the end, behind a path of any length."""
    lines = []
    for path, remark in summary.file_remarks[:_MOST_FILES]:
        lines += _wrap(f"  file {path}: {remark}", indent=4)
    if len(summary.file_remarks) > _MOST_FILES:
        lines.append(
            f"  … and {len(summary.file_remarks) - _MOST_FILES:,} more files (in job.sqlite, table source_file)"
        )
    return lines


def _wrap(line: str, *, indent: int) -> list[str]:
    return textwrap.wrap(
        plain(line), _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _fit(line: str) -> str:
    line = plain(line)
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def removal_text(removed: Sequence[str], left: Sequence[tuple[str, str]]) -> str:
    """Return what ``badcjobs merge --remove-merged`` has removed."""
    lines = [f"  removed     {count(len(removed), 'task database')}; all rows are in the job database"]
    for path, why in left[:_MOST_FILES]:
        lines += _wrap(f"  not removed {path}: {why}", indent=14)
    if len(left) > _MOST_FILES:
        lines.append(f"  … and {len(left) - _MOST_FILES:,} more (--json has them all)")
    return "\n".join(lines)


def task_end_text(end: Mapping[str, Any]) -> str:
    """Return the short summary that ``badcjobs run`` ends with."""
    chunks: Mapping[str, int] = end["chunks"]
    total = sum(chunks.values())
    settled = ", ".join(f"{many:,} {status}" for status, many in sorted(chunks.items())) or "none"
    rate = f" ({number(end['audio_s'] / end['wall_s'])} × real time)" if end["audio_s"] and end["wall_s"] else ""
    lines = [
        f"task {end['task']}: {end['verdict']} (exit code {end['exit_code']})",
        f"  chunks      {settled} of {total:,}",
        f"  audio       {number(end['audio_s'] / 3600, 2)} hours in {duration(end['wall_s'])}{rate}",
        f"  devices     {end['devices']}; telemetry {end['telemetry']}",
        f"  database    {end['database']}",
    ]
    for chunk in end["failed"]:
        lines.append(
            f"  failed      {_failure(chunk['recording_id'], chunk['chunk_id'], chunk['error_class'], chunk['error'])}"
        )
    if end["note"]:
        lines.append(f"  note        {end['note']}")
    lines.append(f"  next        badcjobs merge {shlex.quote(end['out'])}")
    return "\n".join(plain(line) for line in lines)
