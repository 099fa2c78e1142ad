"""The report as plain text: fits 100 columns and reads well in a Slurm log."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from badcjobs.model import Finding
from badcjobs.report.alert_words import alert_lines
from badcjobs.report.cards import rows_words
from badcjobs.report.device_tables import least_busy, rank_rows, state_rows, work_rows
from badcjobs.report.headlines import finish_words, headlines, verdict_words, well_words
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import state_words
from badcjobs.report.text_lines import WIDTH, command_lines, fit, narrow, paint, paste_lines, table, wrap
from badcjobs.report.words import count, duration, number, plain

__all__ = ["removal_text", "summary_text", "table", "task_end_text"]

_MOST_DEVICES = 16
_MOST_FAILED = 10
_MOST_TASKS = 10
_MOST_FILES = 20
_MOST_LABELS = 8
_MOST_SUBJECTS = 5
_LONGEST_MESSAGE = 200


def summary_text(summary: Summary, title: str, *, colour: bool = False) -> str:
    """Return the whole summary; ``colour`` is for terminals."""
    verdict = verdict_words(summary)
    title = fit(title, WIDTH - len(verdict) - 2)
    lines = [f"{title}: {paint(verdict, summary.verdict, colour=colour)}", ""]
    for name, words in headlines(summary):
        lines += wrap(f"  {name:<11} {words}", indent=14)
    lines += [
        "",
        *_finding_lines(summary, colour=colour),
        *_alert_lines(summary),
        *_example_lines(summary),
        *_device_tables(summary),
    ]
    lines += [fit(line) for line in (*_task_lines(summary), *_gap_lines(summary))]
    lines += [*_label_lines(summary), *map(fit, _failed_lines(summary))]
    text = "\n".join([*lines, *_file_lines(summary)]).rstrip()
    return "\n".join([text, *_finish_lines(summary)])


def _finding_lines(summary: Summary, *, colour: bool) -> list[str]:
    """Return what the report finds: each with the figures it rests on and what to do."""
    if not summary.findings:
        return [*wrap(f"  {well_words(summary)}", indent=2), ""]
    lines = []
    for finding in summary.findings:
        first, *others = wrap(f"  {finding.severity:<8} {finding.sentence}", indent=11)
        painted = paint(finding.severity, finding.severity, colour=colour)
        lines += [first.replace(finding.severity, painted, 1), *others, *_reasons(finding), ""]
    return lines


def _reasons(finding: Finding) -> list[str]:
    lines = [
        line for figure in finding.evidence for line in wrap(f"           - {figure}", indent=13, whole_words=False)
    ]
    if finding.subjects:
        more = len(finding.subjects) - _MOST_SUBJECTS
        which = ", ".join(finding.subjects[:_MOST_SUBJECTS]) + (f" and {more:,} more" if more > 0 else "")
        lines += wrap(f"           - where: {which}", indent=13, whole_words=False)
    lines += wrap(f"           → {finding.advice}", indent=13) if finding.advice else []
    return lines + [part for line in finding.lines for part in paste_lines(line, 13)]


def _alert_lines(summary: Summary) -> list[str]:
    lines = [part for line in alert_lines(summary.alerts) for part in wrap(f"  alert    {line}", indent=11)]
    return [*lines, ""] if lines else []


def _example_lines(summary: Summary) -> list[str]:
    """Return the first rows that only the source has, and the first that only the job has."""
    proof = summary.completeness
    if proof is None:
        return []
    lines = [
        *_some("in no task", proof.not_listed_examples, proof.not_listed),
        *_some("not in the source", proof.strangers_examples, proof.strangers),
    ]
    return [*map(fit, lines), ""] if lines else []


def _some(what: str, names: Sequence[str], many: int | None) -> list[str]:
    more = (many or 0) - len(names)
    return [f"  {what}: {name}" for name in names] + ([f"  … and {more:,} more"] if names and more > 0 else [])


def _finish_lines(summary: Summary) -> list[str]:
    """Return the commands that finish the job, whole however long they are: a shell could not guess the rest."""
    lines = []
    for words, command in finish_words(summary):
        lines += ["", *wrap(f"  {words}", indent=2), *command_lines(command)]
    return lines


def _device_tables(summary: Summary) -> list[str]:
    """Return what the devices did with their time and energy, together and each."""
    if not summary.devices:
        return []
    shown = least_busy(summary.devices, _MOST_DEVICES)
    rest = []
    if len(summary.devices) > len(shown):
        words = f"the {len(shown)} least busy of {rows_words(summary.devices)}"
        rest = [f"  ({words}; report.html and --json have them all)"]
    together = [*table(state_rows(summary.states), left=1), ""] if summary.states else []
    work = table(narrow(work_rows(shown), 1), left=3)
    ranks = table(narrow(rank_rows(shown), 1), left=2)
    return [*map(fit, [*together, *work, *rest, "", *ranks]), ""]


def _task_lines(summary: Summary) -> list[str]:
    """Return the tasks that did not end well; the others are in report.html."""
    worth_a_look = [task for task in summary.task_list if task.verdict != "done"]
    lines = [
        f"  task {task.name}: {state_words(task, summary.tasks_silent)}; {task.done:,} done, {task.failed:,} failed,"
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
    return [*wrap(f"  heard: {shown}" + (f", and {more:,} more labels" if more > 0 else ""), indent=9), ""]


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
        lines += wrap(f"  file {path}: {remark}", indent=4)
    if len(summary.file_remarks) > _MOST_FILES:
        lines.append(
            f"  … and {len(summary.file_remarks) - _MOST_FILES:,} more files (in job.sqlite, table source_file)"
        )
    return lines


def removal_text(removed: Sequence[str], left: Sequence[tuple[str, str]]) -> str:
    """Return what ``badcjobs merge --remove-merged`` has removed."""
    lines = [f"  removed     {count(len(removed), 'task database')}; all rows are in the job database"]
    for path, why in left[:_MOST_FILES]:
        lines += wrap(f"  not removed {path}: {why}", indent=14)
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
    if (more := chunks.get("failed", 0) + chunks.get("poison", 0) - len(end["failed"])) > 0:
        sql = "SELECT recording_id, chunk_id, error FROM chunk WHERE status IN ('failed', 'poison')"
        lines.append(f'  failed      … and {more:,} more: sqlite3 {shlex.quote(end["database"])} "{sql}"')
    if end["note"]:
        lines.append(f"  note        {end['note']}")
    lines.append(f"  next        badcjobs merge {shlex.quote(end['out'])}")
    return "\n".join(plain(line) for line in lines)
