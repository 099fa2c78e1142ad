"""Findings about array tasks that were killed or are missing, and about chunks that failed or were done twice."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from badcjobs.model import TaskKey, not_none
from badcjobs.report.progress import RUNNING, was_killed
from badcjobs.report.rules import NOTE, PROBLEM, SERIOUS_S, WARNING, Cases, Rule, say, share, topic
from badcjobs.report.rules_requests import needed_more
from badcjobs.report.summary import Summary
from badcjobs.report.words import count, indices, moment, number, period
from badcjobs.store.read_model import ErrorFacts, FailedChunk, JobFacts, TaskFacts

_LOST_S, _LOST = 60.0, 0.02  # of GPU time
_AGAIN = 0.1  # of the chunks
_LOSSY = ("salvaged", "kept", "skipped")  # status of files with rows that may be missing
_NOTES = 3  # most notes of an emulation in the evidence
_THEN = "Read {log}, then do what is under “next”."  # which has the command, and whether to wait for the queue


def _log_of(tasks: Sequence[TaskFacts], summary: Summary) -> str:
    """Return where tasks say why they ended: an emulation, or a run without Slurm, has only the task log."""
    proof = summary.completeness
    emulated = proof is not None and (proof.missing_notes or any("--cluster=local" in line for line in proof.finish))
    local = bool(tasks) and all(task.is_local for task in tasks)
    return "the end of the task log" if emulated or local else "the Slurm output file"


# --- tasks whose database is damaged or missing -----------------------------------------------------------------------


@topic(Rule(
    "damaged_files", PROBLEM,
    says="{s.facts.lossy_files:count task_database} could not be read completely{examples}.",
    evidence=("{statuses}",),
    fix="Rows of {s.facts.lossy_files:it|them} may be missing; the reason is at the name of the file. {todo}",
))  # fmt: skip
def _damaged(facts: JobFacts, summary: Summary) -> Cases:
    if facts.lossy_files:
        lossy = [(path, remark.partition(":")[0]) for path, remark in facts.file_remarks if remark.startswith(_LOSSY)]
        more = f" and {facts.lossy_files - 1:,} more" if facts.lossy_files > 1 else ""
        rest = "Do what is under “next”: it repeats only chunks without a result."
        yield {
            "examples": f": {lossy[0][0]}{more}" if lossy else "",
            "statuses": ", ".join(f"{many:,} {status}" for status, many in Counter(dict(lossy).values()).items()),
            "todo": "Every chunk has a result." if summary.verdict == "done" else rest,
        }


@topic(Rule(
    "tasks_missing", PROBLEM,
    says="{missing:count array_task} left no database.",
    evidence=("{where}", "{s.tasks:count task} left a database"),
    fix="{missing:It|They} never started, or could not write. " + _THEN,
))  # fmt: skip
def _missing(facts: JobFacts, summary: Summary) -> Cases:
    damaged = [TaskKey.parse(Path(path).stem) for path, remark in facts.file_remarks if remark.startswith(_LOSSY)]
    known = {key.array_index for key in damaged if key is not None}
    missing, proof = [index for index in summary.tasks_missing if index not in known], summary.completeness
    waits = summary.tasks_by_verdict.get(RUNNING)  # then the missing ones may still be in the queue
    waits = waits or (summary.queue is not None and summary.queue.waiting)
    if not missing or waits or facts.merged.closed:
        return
    by_note: dict[str, list[int]] = {}  # the notes of an emulation about them
    for index, note in zip(proof.missing_indices, proof.missing_notes, strict=False) if proof else ():
        if index in missing:
            by_note.setdefault(note, []).append(index)
    where = [f"array index {indices(those)}: {note}" for note, those in by_note.items()][:_NOTES]
    others = [index for those in list(by_note.values())[_NOTES:] for index in those]
    where += [f"array index {indices(others)}: see their logs"] if others else []
    yield {"missing": len(missing), "where": where or [f"array index {indices(missing)}"], "log": _log_of((), summary)}


# --- tasks that did not end by themselves -----------------------------------------------------------------------------


def _unended(tasks: Sequence[TaskFacts], facts: JobFacts, summary: Summary) -> dict[str, Any]:
    """Return what is left of the work of these tasks, and whether other tasks continue it."""
    left, running = sum(task.pending for task in tasks), summary.tasks_by_verdict.get(RUNNING)
    # Another attempt has started on the same part of the source since, or on all of it.
    last_ms = max((other.started_at_ms for other in facts.tasks if other.shard_count == 1), default=0)
    starts_ms: dict[int, int] = defaultdict(lambda: last_ms)
    for other in facts.tasks:
        starts_ms[other.array_index] = max(starts_ms[other.array_index], other.started_at_ms)
    followed = all(not task.pending and starts_ms[task.array_index] > task.last_sign_ms for task in tasks)
    unfinished = summary.verdict == "stopped" and not followed
    others, todo = "other tasks have done their work", "Nothing is left to do."
    if summary.left and running:
        others = "{many:another attempt has taken over its|other attempts have taken over their} work"
        todo = "There is nothing to do."
    elif summary.left:
        others = "{many:a later attempt continued and has|later attempts continued and have} ended, too"
        todo = "The rest is under “next”."
    rest = "; {left:count chunk} left" if left else "" if unfinished else f"; {others}"
    return {
        "many": len(tasks),
        "left": left,
        "of": f"{len(tasks):,} of " if len(tasks) < len(facts.tasks) else "",
        "unfinished": unfinished,
        "rest": say(rest, {"many": len(tasks), "left": left}),
        "todo": todo,
        "log": _log_of(tasks, summary),
        "subjects": [task.name for task in tasks],
    }


_SILENT_WHY = "Possible causes: a node failure, a hanging disk, or a kill that ended the recorder, too."
_SILENT = Rule(
    "tasks_silent", PROBLEM,
    says="{of}{s.tasks:count task} went silent before the end{rest}.",
    evidence=("last update: {heard}", "a task counts as silent after {after_s:duration} without an update"),
    fix=f"{_SILENT_WHY} {_THEN}",
    when="unfinished",
)  # fmt: skip


@topic(_SILENT, replace(_SILENT, severity=NOTE, when="", fix=f"{_SILENT_WHY} {{todo}}"))
def _silent(facts: JobFacts, summary: Summary) -> Cases:
    gone = frozenset(summary.tasks_silent)
    silent = [task for task in facts.tasks if task.name in gone]
    if silent:
        heard_ms = not_none(task.heard_at_ms for task in silent)
        first_ms, last_ms = min(heard_ms), max(heard_ms)
        yield {
            **_unended(silent, facts, summary),
            "heard": moment(last_ms) if last_ms - first_ms < 60_000 else f"from {period(first_ms, last_ms)}",
            "after_s": max(task.silent_after_s or 0.0 for task in silent),
        }


_WHY = {  # Slurm state → the reason, and what to do if work is left
    "TIMEOUT": ("{many:Its|Their} time limit was reached", "submit again to do the rest"),
    "OUT_OF_MEMORY": ("{many:It|They} used more memory than requested", "request more, then submit again"),
    "NODE_FAIL": ("{many:Its node|Their nodes} failed", "submit again to do the rest"),
    "PREEMPTED": ("A job with higher priority took {many:its node|their nodes}",
                  "submit again; with #SBATCH --requeue Slurm does that by itself"),
    "CANCELLED": ("{many:It was|They were} cancelled", "submit again to do the rest"),
}  # fmt: skip
_WHY_UNKNOWN = ("The reason is not known", "read {log}, then do what is under “next”")
_KILLED = Rule(
    "tasks_killed", PROBLEM,
    says="{of}{s.tasks:count task} {many:was|were} killed{rest}.",
    evidence=("Slurm state: {states}", "run time: {ran_s:duration}{many:| at most}"),
    fix="{why}: {remedy}.",
    when="unfinished",
)  # fmt: skip


@topic(_KILLED, replace(_KILLED, severity=NOTE, when="", fix="{why}. {todo}"))
def _killed(facts: JobFacts, summary: Summary) -> Cases:
    killed = [task for task in facts.tasks if was_killed(task) and not needed_more(task)]
    if not killed:
        return
    states = Counter(task.slurm_state.split(" by ")[0] for task in killed if task.slurm_state)
    unended = _unended(killed, facts, summary)
    why, remedy = (say(text, unended) for text in _WHY.get(states.most_common(1)[0][0] if states else "", _WHY_UNKNOWN))
    yield {
        **unended,
        "unfinished": unended["unfinished"] or unended["left"],
        "states": ", ".join(f"{state} ({count(many, 'task')})" for state, many in states.most_common(4)) or None,
        "ran_s": max(task.wall_s for task in killed),
        "why": f"Mostly {why[0].lower()}{why[1:]}" if len(states) > 1 else why,
        "remedy": remedy,
    }


# --- work that was lost, or done twice --------------------------------------------------------------------------------


@topic(Rule(
    "lost_work", WARNING,
    says="Work in progress was lost because workers were killed.",
    evidence=("{cost_s:gpu_time}, {of_time} of the GPU time", "{tries:count try tries} interrupted"),
    fix="Find out why in the task log. In Slurm, request a signal before the end and start badcjobs with exec, so that"
        " it can stop in order.",
    lines=("#SBATCH --signal=B:USR1@300",),
))  # fmt: skip
def _lost(facts: JobFacts, summary: Summary) -> Cases:
    """Yield lost work, unless another finding says why it was lost."""
    broken = any(device.work.gave_up == "gpu_lost" for device in facts.devices)
    if broken or summary.tasks_silent or facts.chunks.get("poison") or any(map(was_killed, facts.tasks)):
        return
    tries = sum(device.work.lost for device in facts.devices)  # tries of running tasks are not lost
    gpu_s, all_s = facts.lost_gpu_s, 3600 * summary.gpu_hours
    if tries and gpu_s >= max(_LOST_S, _LOST * all_s):
        yield {"cost_s": gpu_s, "of_time": share(gpu_s, all_s), "tries": tries}


_DONE_AGAIN = Rule(
    "done_again", "{severity}",
    says="{many:count chunk} {many:was|were} done more than once.",
    evidence=(
        "{many:whole} of {s.done:count chunk}; {s.facts.tries:count try tries} in total",
        "{cost_s:gpu_time}, {of_time} of the GPU time",
        "{restarted:whole?} by tasks that Slurm restarted after a node failure",
        "{jobs:count job} with {s.tasks:count task} in this folder{how}",
    ),
    fix="A run skips chunks that it finds done. Use the same --out without --no-resume, let one job end before you"
        " start another on the same source, and do not change the audio files.",
)  # fmt: skip


@topic(replace(
    _DONE_AGAIN, kind="repeated", severity=NOTE,
    says="{many:count chunk} {many:was|were} repeated after a node failure.",
    fix="Nothing to correct: results that had not left the node when it failed are made again.",
    when="all_restarted",
), _DONE_AGAIN)  # fmt: skip
def _again(facts: JobFacts, summary: Summary) -> Cases:
    """Yield chunks that were done more than once; a few are normal: their task was killed before it recorded them."""
    gpu_s, many, all_s = facts.again_gpu_s, facts.conflicts, 3600 * summary.gpu_hours
    if many and (gpu_s >= max(_LOST_S, _LOST * all_s) or many >= _AGAIN * summary.done):
        resumed = facts.last_settings.get("resume") is not False
        yield {
            "severity": PROBLEM if gpu_s >= SERIOUS_S else WARNING,
            "many": many,
            "restarted": facts.restarted,
            "all_restarted": facts.restarted == many and resumed,
            "cost_s": gpu_s or None,
            "of_time": share(gpu_s, all_s),
            "jobs": len({task.job_id for task in facts.tasks}),
            "how": "" if resumed else "; the last one with --no-resume",
        }


# --- chunks that failed -----------------------------------------------------------------------------------------------

_MOST_CLASSES = 5
_MANY = 0.01  # of the chunks: more than chance
_COSTLY_S, _COSTLY = 300.0, 0.05  # GPU time of failed tries whose chunks were done in the end
_OOM = "out_of_memory"
_BEYOND = re.compile(r" s of audio and nothing after [\d.]+ s|ends at [\d.]+ s, before the end of the chunk from ")
_ROWS_BEYOND = "bad_audio, a row beyond the end of its file"
USUAL_ADVICE = "Read the engine error; the next run tries failed chunks again."
ADVICE = {  # by error class
    "empty_file": "These files have no audio. Restore them from the recorder's card, or remove them.",
    "not_audio": "These files are not audio, whatever their names say. Restore or remove them, then run again.",
    "broken_audio": "These files are truncated, or their headers are wrong. Restore them, then run again.",
    "unreadable_file": "The job may not read these files. Give it permission (chmod a+r), then run again.",
    "bad_audio": "These files cannot be read. Check one of them, restore or remove them, then run again.",
    "missing_audio": "These files are missing. Fetch or restore them, then run again.",
    "no_space": "A disk was full. Free space (or quota) on the node or in the run folder, then run again.",
    "host_memory": "The node ran out of memory. Request more memory, or run fewer workers.",
    "configuration": "The engine does not work with these settings. Check its models and options, then run again.",
    _OOM: "Make the chunks shorter, use GPUs with more memory, or run fewer workers per GPU.",
    "gpu_error": "CUDA failed. If it is always the same node, exclude it; if always these chunks, make them shorter.",
    _ROWS_BEYOND: "The files are readable but end before these rows do. Compare start_ms and end_ms of a row with the"
                  " length of its file, correct the rows (or restore truncated files), then run again.",
}  # fmt: skip


def _named(chunks: Sequence[FailedChunk], facts: JobFacts) -> dict[str, Any]:
    """Return the names of the chunks, and a remark if some are missing: only the first thousand are read."""
    total, read = facts.chunks.get("failed", 0) + facts.chunks.get("poison", 0), len(facts.failed)
    some = f"only the first {read:,} of {total:,} failed chunks are listed" if read < total else None
    names = [c.recording_id if c.chunk_id == c.recording_id else f"{c.recording_id}/{c.chunk_id}" for c in chunks]
    return {"some_named": some, "subjects": names}


def _by_class(facts: JobFacts) -> dict[str, list[FailedChunk]]:
    """Return the failed chunks by error class."""
    found: dict[str, list[FailedChunk]] = defaultdict(list)
    for chunk in facts.failed:
        beyond = chunk.error_class == "bad_audio" and _BEYOND.search(chunk.error)
        if chunk.status == "failed":
            found[_ROWS_BEYOND if beyond else chunk.error_class].append(chunk)
    return found


@topic(Rule(
    "poison_chunks", WARNING,
    says="{many:count chunk} crashed the engine twice and {many:was|were} given up.",
    evidence=("{many:whole} of {s.chunks:count chunk}", "errors: {how}", "{some_named}"),
    fix="Check {many:this file|one of these files}. The next run tries {many:it|them} again.",
))  # fmt: skip
def _poison(facts: JobFacts, summary: Summary) -> Cases:
    if many := facts.chunks.get("poison", 0):
        chunks = [chunk for chunk in facts.failed if chunk.status == "poison"]
        classes = Counter(chunk.error_class for chunk in chunks)
        how = ", ".join(f"{times} × {name}" for name, times in classes.most_common(3)) or None
        yield {"many": many, "how": how, **_named(chunks, facts)}


@topic(Rule(
    _OOM, "{severity}",
    says="{tries.chunks:count chunk} did not fit into GPU memory; {fate}.",
    evidence=(
        "{tries.tries:count try tries} ran out of memory",
        "{tries.rescued:whole} of {tries.chunks:count chunk} done in the end, in pieces or with more free memory",
        "learned limit on {learned}",
    ),
    fix="Make the chunks {shorter}, use GPUs with more memory, or run fewer workers per GPU.",
    wants=("-workers", "-length"),
))  # fmt: skip
def _out_of_memory(facts: JobFacts, summary: Summary) -> Cases:
    for_good = _by_class(facts).get(_OOM, [])
    tries = next((error for error in facts.errors if error.error_class == _OOM), None)
    if tries is None and not for_good:
        return
    tries = tries or ErrorFacts(_OOM, len(for_good), len(for_good), 0, 0, "")
    limits = [(d, d.value) for d in facts.decisions if d.kind == "memory_limit" and d.value is not None]
    fate = "all were done in the end"
    if for_good:
        fate = f"{len(for_good):,} failed for good"
    elif tries.rescued < tries.chunks:
        fate = f"{tries.chunks - tries.rescued:,} of them not done yet"
    yield {
        "severity": PROBLEM if for_good else NOTE,
        "tries": tries,
        "fate": fate,
        "learned": [f"{d.subject or 'this GPU'}, {number(value, 0)} s: {d.reason}" for d, value in limits],
        "shorter": f"shorter than {number(min(value for _, value in limits), 0)} s" if limits else "shorter",
        **_named(for_good, facts),
    }


@topic(
    Rule(
        "failed_chunks", "{severity}",
        when="for_good",
        says="{about}{many:count chunk} failed for good: {class}.",
        evidence=("{of_chunks} of {s.chunks:count chunk}{tries}", "engine error: {error:last_line}", "{some_named}"),
        fix="{advice}",
    ),
    Rule(
        "failed_chunks", NOTE,
        says="No chunk failed for good, but failed tries took {of_time} of the GPU time.",
        evidence=(
            "{cost_s:gpu_time} of {all_s:gpu_time}",
            "{worst.tries:count try tries}: {worst.error_class}",
            "engine error: {worst.example:last_line}",
        ),
        fix="{advice}",
    ),
)  # fmt: skip
def _failed(facts: JobFacts, summary: Summary) -> Cases:
    by_class, gpu_s, all_s = _by_class(facts), facts.failed_gpu_s, 3600 * summary.gpu_hours
    read, total = sum(map(len, by_class.values())), facts.chunks.get("failed", 0)
    for known in (_OOM, "ran_on_cpu", *(("host_memory",) if any(t.memory_limit_bytes for t in facts.tasks) else ())):
        by_class.pop(known, None)  # it has a finding of its own
    scale = max(1.0, total / read) if read else 1.0  # only the first thousand are read
    took = say("; all failed tries together took {gpu_s:gpu_time}", {"gpu_s": gpu_s}) if gpu_s >= 60 else ""
    for error_class, chunks in sorted(by_class.items(), key=lambda item: -len(item[1]))[:_MOST_CLASSES]:
        many = round(scale * len(chunks))
        yield {
            "for_good": True,
            "severity": PROBLEM if many > _MANY * summary.chunks else WARNING,
            "about": "About " if many > len(chunks) and many != total else "",  # there are other classes as well
            "many": many,
            "class": (error_class or "unknown error").replace("_", " "),
            "of_chunks": share(many, summary.chunks),
            "tries": took,
            "error": chunks[0].error,
            "advice": ADVICE.get(error_class, USUAL_ADVICE),
            "cost_s": gpu_s,
            **_named(chunks, facts),
        }
    worst = max(facts.errors, key=lambda error: error.tries, default=None)
    costly = gpu_s >= max(_COSTLY_S, _COSTLY * all_s)
    if not by_class and costly and worst is not None and worst.error_class != _OOM:
        usual = "Read the engine error; the table attempt in job.sqlite lists every try."
        advice = ADVICE.get(worst.error_class, usual)
        of_time = share(gpu_s, all_s)
        yield {"for_good": False, "cost_s": gpu_s, "all_s": all_s, "of_time": of_time, "worst": worst, "advice": advice}


@topic(Rule(
    "short_audio", WARNING,
    says="{many:count chunk} {many:has|have} less audio than planned: only what is there was analysed.",
    evidence=("{reasons}",),
    fix="Restore {many:the file|the files}, then run again: a changed file is analysed again.",
))  # fmt: skip
def _short(facts: JobFacts, summary: Summary) -> Cases:
    if found := [one for one in facts.decisions if one.kind == "short_audio"]:
        yield {"many": len(found), "reasons": [one.reason for one in found], "subjects": [one.subject for one in found]}


@topic(Rule(
    "gave_up", PROBLEM,
    says="{why.tasks:count task} gave up with chunks left.",
    evidence=("{why.reason:last_line}",),
    fix="Correct this first: the same command may give up again.",
))  # fmt: skip
def _gave_up(facts: JobFacts, summary: Summary) -> Cases:
    if summary.verdict != "done":
        yield from ({"why": one} for one in facts.decisions if one.kind == "gave_up")


TOPICS = (_damaged, _missing, _silent, _killed, _lost, _again, _poison, _out_of_memory, _failed, _gave_up, _short)
