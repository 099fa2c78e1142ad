"""The report as plain text: fits 100 columns and reads well in a Slurm log; coloured where a terminal shows colours."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from badcjobs.report.compare import Comparison, about_rows, figure_tables, news_of, setting_table
from badcjobs.report.device_summary import rows_words
from badcjobs.report.headlines import alert_lines, finish_words, headlines, verdict_words, well_words
from badcjobs.report.job_tables import least_busy, rank_table, state_table, work_table
from badcjobs.report.progress import state_words
from badcjobs.report.rules import Finding
from badcjobs.report.summary import Summary
from badcjobs.report.tables import WIDTH, Table, columns, ending, table_text
from badcjobs.report.words import UNKNOWN, count, duration, memory, number, percent, plain

_MOST_DEVICES = 16
_MOST_FAILED = 10
_MOST_TASKS = 10
_MOST_FILES = 20
_MOST_LABELS = 8
_MOST_SUBJECTS = 5
_LONGEST_MESSAGE = 200
_SECOND = "\ue000"  # stands for the second column of a wide letter while lines are measured; no plain text has it
_COLOURS = {
    "done": "\x1b[32m", "failed": "\x1b[31m", "stopped": "\x1b[33m",
    "problem": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m",
}  # fmt: skip


# --- lines ------------------------------------------------------------------------------------------------------------


def _paint(text: str, kind: str, *, colour: bool) -> str:
    return f"{_COLOURS[kind]}{text}\x1b[0m" if colour and kind in _COLOURS else text


def wrap(line: str, *, indent: int, whole_words: bool = True) -> list[str]:
    """Return a line as several that fit; a word that is longer than a line is whole, if that is wanted."""
    line = plain(line)
    measured = line if line.isascii() else "".join(c + _SECOND * (cell_len(c) - 1) for c in line)
    width = WIDTH - (_SECOND in measured)  # a wide letter may be cut in its middle, and is whole again afterwards
    lines = textwrap.wrap(
        measured, width, subsequent_indent=" " * indent, break_long_words=not whole_words, break_on_hyphens=False
    )
    return [line.replace(_SECOND, "") for line in lines]


def fit(line: str, width: int = WIDTH) -> str:
    """Return a line cut to the width."""
    line = plain(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def command_lines(command: str, indent: int = 4) -> list[str]:
    r"""Return a command in lines that a shell joins again: cut between words, with a backslash at each end."""
    lines = [" " * indent + plain(command)]
    if cell_len(lines[0]) > WIDTH:
        lines = [" " * (indent - 1)]
        for word in shlex.split(command):
            if cell_len(lines[-1]) + cell_len(shlex.quote(word)) > WIDTH - 3 and lines[-1].strip():
                lines[-1] += " \\"
                lines.append(" " * (indent + 3))
            first, *others = _folded(plain(shlex.quote(word)), WIDTH - 2 - cell_len(lines[-1]))
            lines[-1] += " " + first
            lines += others
    return lines


def _folded(word: str, room: int) -> list[str]:
    r"""Return a long list, 1,3,5,…, as lines that a shell joins again.

    The second and later lines begin at the left edge: blanks there would end the word.
    """
    if cell_len(word) <= room or "'" in word or "," not in word:
        return [word]
    lines = [""]
    for part in word.replace(",", ",\n").split("\n"):
        if lines[-1] and cell_len(lines[-1]) + cell_len(part) > (room if len(lines) == 1 else WIDTH) - 3:
            lines[-1] += "\\"
            lines.append("")
        lines[-1] += part
    return lines


def paste_lines(line: str, indent: int) -> list[str]:
    """Return a line to paste, cut only where it is a plain command; others are whole however long they are."""
    try:
        plain_command = shlex.join(shlex.split(line)) == line
    except ValueError:
        plain_command = False
    return command_lines(line, indent) if plain_command else [" " * indent + plain(line)]


# --- the summary ------------------------------------------------------------------------------------------------------


def summary_text(summary: Summary, title: str, *, colour: bool = False) -> str:
    """Return the whole summary; ``colour`` is for terminals."""
    verdict = verdict_words(summary)
    title = fit(title, WIDTH - len(verdict) - 2)
    lines = [f"{title}: {_paint(verdict, summary.verdict, colour=colour)}", ""]
    for name, words in headlines(summary):
        lines += wrap(f"  {name:<11} {words}", indent=14)
    lines += ["", *_finding_lines(summary, colour=colour)]
    alerts = [part for line in alert_lines(summary.alerts) for part in wrap(f"  alert    {line}", indent=11)]
    for part in (alerts, map(fit, _example_lines(summary)), map(fit, _device_lines(summary)),
                 map(fit, _task_lines(summary)), map(fit, _gap_lines(summary)), _label_lines(summary),
                 map(fit, _failed_lines(summary))):  # fmt: skip
        shown = list(part)
        lines += [*shown, ""] if shown else []
    remarks = summary.facts.file_remarks
    for path, remark in remarks[:_MOST_FILES]:  # whole: the reason stands at the end, behind any path
        lines += wrap(f"  file {path}: {remark}", indent=4)
    lines += _more(len(remarks) - _MOST_FILES, "more files (in job.sqlite, table source_file)")
    lines = ["\n".join(lines).rstrip()]
    for words, command in finish_words(summary):  # whole however long: a shell could not guess the rest
        lines += ["", *wrap(f"  {words}", indent=2), *command_lines(command)]
    return "\n".join(lines)


def _more(many: int, what: str) -> list[str]:
    return [f"  … and {many:,} {what}"] if many > 0 else []


def _finding_lines(summary: Summary, *, colour: bool) -> list[str]:
    """Return what the report finds: each with the figures it rests on and what to do."""
    if not summary.findings:
        return [*wrap(f"  {well_words(summary)}", indent=2), ""]
    lines = []
    for finding in summary.findings:
        first, *others = wrap(f"  {finding.severity:<8} {finding.sentence}", indent=11)
        painted = _paint(finding.severity, finding.severity, colour=colour)
        lines += [first.replace(finding.severity, painted, 1), *others, *_reasons(finding), ""]
    return lines


def _reasons(finding: Finding) -> list[str]:
    figures = list(finding.evidence)
    if finding.subjects:
        more = len(finding.subjects) - _MOST_SUBJECTS
        which = ", ".join(finding.subjects[:_MOST_SUBJECTS]) + (f" and {more:,} more" if more > 0 else "")
        figures.append(f"where: {which}")
    lines = [part for figure in figures for part in wrap(f"           - {figure}", indent=13, whole_words=False)]
    lines += wrap(f"           → {finding.advice}", indent=13) if finding.advice else []
    return lines + [part for line in finding.lines for part in paste_lines(line, 13)]


def _example_lines(summary: Summary) -> list[str]:
    """Return the first rows that only the source has, and the first that only the job has."""
    proof = summary.completeness
    if proof is None:
        return []
    lines = []
    for what, names, many in (
        ("in no task", proof.not_listed_examples, proof.not_listed),
        ("not in the source", proof.strangers_examples, proof.strangers),
    ):
        lines += [f"  {what}: {name}" for name in names]
        lines += _more((many or 0) - len(names), "more") if names else []
    return lines


def _device_lines(summary: Summary) -> list[str]:
    """Return what the devices did with their time and energy, together and each."""
    if not summary.devices:
        return []
    shown = least_busy(summary.devices, _MOST_DEVICES)
    together = (
        [*table_text(state_table(summary.states, compact=True).without("of it busy")), ""] if summary.states else []
    )
    rest = []
    if len(summary.devices) > len(shown):
        words = f"the {len(shown)} least busy of {rows_words(summary.devices)}"
        rest = [f"  ({words}; report.html and --json have them all)"]
    return [*together, *table_text(work_table(shown), shorten=1), *rest, "", *table_text(rank_table(shown), shorten=1)]


def _task_lines(summary: Summary) -> list[str]:
    """Return the tasks that did not end well; the others are in report.html."""
    worth_a_look = [task for task in summary.facts.tasks if task.verdict != "done"]
    lines = [
        f"  task {task.name}: {state_words(task, summary.tasks_silent)}; {task.done:,} done, {task.failed:,} failed,"
        f" {task.pending:,} left"
        for task in worth_a_look[:_MOST_TASKS]
    ]
    return lines + _more(len(worth_a_look) - _MOST_TASKS, "more tasks (report.html and --json have them all)")


def _gap_lines(summary: Summary) -> list[str]:
    missing = sorted({(gap.metric, gap.reason) for gap in summary.facts.gaps if gap.metric is not None})
    return [
        *(f"  gap: {gap.reason} ({count(gap.gaps, 'time')}, {duration(gap.seconds)})"
          for gap in summary.facts.gaps if gap.metric is None),
        *(f"  not given: {metric}: {reason}" for metric, reason in missing),
    ]  # fmt: skip


def _label_lines(summary: Summary) -> list[str]:
    if not summary.facts.labels:
        return []
    shown = ", ".join(f"{label} {many:,}" for label, _, many in summary.facts.labels[:_MOST_LABELS])
    more = len(summary.facts.labels) - _MOST_LABELS
    return wrap(f"  heard: {shown}" + (f", and {more:,} more labels" if more > 0 else ""), indent=9)


def _failed_lines(summary: Summary) -> list[str]:
    lines = [
        f"  {chunk.status}: {_failure(chunk.recording_id, chunk.chunk_id, chunk.error_class, chunk.error)}"
        for chunk in summary.facts.failed[:_MOST_FAILED]
    ]
    return lines + _more(summary.failed - _MOST_FAILED, "more failed chunks (in job.sqlite, table chunk)")


def _failure(recording_id: str, chunk_id: str, error_class: str, error: str) -> str:
    name = recording_id if recording_id == chunk_id else f"{recording_id} {chunk_id}"
    last = error.strip().rpartition("\n")[2][:_LONGEST_MESSAGE]
    return f"{name} ({error_class})" + (f": {last}" if last else "")


# --- two jobs side by side --------------------------------------------------------------------------------------------

_LONGEST_CELL, _LEAST_NAME = 30, 20
_BETWEEN = 8  # blanks between four columns, and before the first


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as tables with one column for each job."""
    titles = (comparison.this["title"], comparison.other["title"])
    short = [ending(title, _LONGEST_CELL) for title in titles]
    about = [(name, ending(this, _LONGEST_CELL), ending(other, _LONGEST_CELL)) for name, this, other in
             about_rows(comparison)]  # fmt: skip
    room = _room(figure_tables(comparison, short, about)[0].cells())
    head = [ending(title, room) for title in titles]
    lines = []
    if head[0] == head[1]:  # so long, and their ends are the same
        lines += [*wrap(f"  this is {titles[0]}, other is {titles[1]}", indent=4), ""]
        head = ["this", "other"]
    about = [(name, ending(this, room), ending(other, room)) for name, this, other in about]
    for table in figure_tables(comparison, head, about):
        lines += [*table_text(table), ""]
    settings = setting_table(comparison, head, _LONGEST_CELL)
    lines += [f"  {settings}"] if isinstance(settings, str) else table_text(settings)
    top = list(map(fit, wrap(comparison.conclusion, indent=2)))
    for words, command in news_of(comparison):
        top += ["", *wrap(f"  {words}", indent=2), *([] if command is None else command_lines(command))]
    return "\n".join([*top, "", *map(fit, lines)]).rstrip()


def _room(rows: Sequence[Sequence[str]]) -> int:
    """Return how long a name may be, so that what became of each figure stands beside it whole."""
    names, this, other, changes = (max(cell_len(row[i]) for row in rows) for i in range(4))
    room = WIDTH - _BETWEEN - names - changes
    return min(_LONGEST_CELL, max(_LEAST_NAME, room // 2, room - min(this, other)))


# --- what other commands end with -------------------------------------------------------------------------------------


def removal_text(removed: Sequence[str], left: Sequence[tuple[str, str]]) -> str:
    """Return what ``badcjobs merge --remove-merged`` has removed."""
    lines = [f"  removed     {count(len(removed), 'task database')}; all rows are in the job database"]
    for path, why in left[:_MOST_FILES]:
        lines += wrap(f"  not removed {path}: {why}", indent=14)
    return "\n".join(lines + _more(len(left) - _MOST_FILES, "more (--json has them all)"))


def task_end_text(end: Mapping[str, Any]) -> str:
    """Return the short summary that ``badcjobs run`` ends with."""
    chunks: Mapping[str, int] = end["chunks"]
    settled = ", ".join(f"{many:,} {status}" for status, many in sorted(chunks.items())) or "none"
    rate = f" ({number(end['audio_s'] / end['wall_s'])} × real time)" if end["audio_s"] and end["wall_s"] else ""
    lines = [
        f"task {end['task']}: {end['verdict']} (exit code {end['exit_code']})",
        f"  chunks      {settled} of {sum(chunks.values()):,}",
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
    lines += [f"  note        {end['note']}"] if end["note"] else []
    return "\n".join(plain(line) for line in (*lines, f"  next        badcjobs merge {shlex.quote(end['out'])}"))


_LONGEST_NAME = 28


def devices_text(listing: Mapping[str, Any], *, processes: bool = False, to_take: bool = False) -> str:
    """Return the devices of ``badcjobs gpus`` with the reasons; on request also their processes or how to take them."""
    devices: Sequence[Mapping[str, Any]] = listing["devices"]
    heads = columns("<index", "<uuid", "<name", "free", "of", "util", "temp", "score", "backend")
    lines = table_text(Table("devices", "Devices", heads, [_device_row(device) for device in devices]))
    lines += ["", *(f"  {_device_name(d)}: {d['why']}" for d in devices)]
    lines += [f"  {_device_name(d)}: no reading: {d['trouble']}" for d in devices if d["trouble"]]
    lines += [f"  granted: {listing['why']}"]
    if listing["backend_why"]:
        lines.append(f"  read through {listing['backend']}: {listing['backend_why']}")
    if processes:
        lines += ["", *_process_lines(devices)]
    if to_take:
        variable = "ROCR_VISIBLE_DEVICES" if devices[0]["vendor"] == "amd" else "CUDA_VISIBLE_DEVICES"
        lines += ["", f"  export {variable}={','.join(device['pin'] for device in devices)}"]
    return "\n".join(plain(line) for line in lines)


def _device_row(device: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        UNKNOWN if device["index"] is None else str(device["index"]),
        device["uuid"] or f"token {device['token']}",
        (device["name"] or UNKNOWN)[:_LONGEST_NAME],
        memory(device["memory_free_bytes"]),
        memory(device["memory_total_bytes"]),
        percent(device["utilization_percent"]),
        UNKNOWN if device["temperature_c"] is None else f"{device['temperature_c']} °C",
        UNKNOWN if device["score"] is None else f"{device['score']:.2f}",
        device["backend"],
    )


def _device_name(device: Mapping[str, Any]) -> str:
    if device["index"] is None:
        return f"token {device['token']}"
    return str(device["uuid"]) if device["parent_uuid"] else f"GPU {device['index']}"  # slices share an index


def _process_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (_device_name(device), str(process["pid"]), process["user"] or UNKNOWN, process["program"] or UNKNOWN,
         memory(process["memory_used_bytes"]))
        for device in devices
        for process in device["processes"] or ()
    ]  # fmt: skip
    silent = [f"  {_device_name(d)}: its processes are not told" for d in devices if d["processes"] is None]
    table = Table("processes", "Processes", columns("<device", "<pid", "<user", "<program", "memory"), rows)
    found = table_text(table) if rows else ["  no process is on these devices"]
    return [*(found if len(silent) < len(devices) else []), *silent]
