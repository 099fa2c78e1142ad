"""Findings about array tasks that were killed or are missing, and about chunks that failed or were done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from badcjobs.model import TaskKey, not_none
from badcjobs.model.decisions import Code
from badcjobs.paths import shell_line
from badcjobs.report.progress import KILLED, RUNNING, SILENT
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, Cases, Figures, Rule, severity_of, share, topic
from badcjobs.report.rules_requests import needed_more
from badcjobs.report.summary import Summary, chunk_name
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import FailedChunk, JobFacts, TaskFacts
from badcjobs.words import count, number

_LOST_S = 60.0  # of GPU time
_LOST = 0.02  # of the GPU time, as well
_AGAIN = 0.1  # of the chunks
_LIMITS = (Code.LIMIT_LEARNED, Code.LIMIT_PROBED, Code.LIMIT_MET)
_LISTED = 3  # files, or remarks of an emulation, in the evidence
_READ_LOG = "Read the task log or the Slurm output file, then do what is under “next”."


# --- tasks whose database is damaged or missing -----------------------------------------------------------------------


@topic(
    Rule(
        "damaged_files",
        PROBLEM,
        says="{s.facts.lossy_files:count task_database} could not be read completely.",
        evidence=("{files}",),
        fix="Rows may be missing. If chunks are left, do what is under “next”: it repeats only those without a result.",
    )
)
def _damaged(facts: JobFacts, summary: Summary) -> Cases:
    if facts.lossy_paths:
        remarks = dict(facts.file_remarks)
        yield {"files": [f"{path}: {remarks[path]}" for path in facts.lossy_paths[:_LISTED]]}


@topic(
    Rule(
        "tasks_missing",
        PROBLEM,
        says="{missing:count array_task} left no database.",
        evidence=("array index {which:indices}", "{notes}", "{s.tasks:count task} left a database"),
        fix="{missing:It|They} never started, or could not write. " + _READ_LOG,
    )
)
def _missing(facts: JobFacts, summary: Summary) -> Cases:
    queued = summary.queue is not None and summary.queue.waiting
    if queued or summary.tasks_by_verdict.get(RUNNING) or facts.merged.closed:
        return  # the missing ones may still be in the queue, or in a folder that cannot be read
    damaged = not_none(TaskKey.parse(Path(path).stem) for path in facts.lossy_paths)
    missing = sorted({*summary.completeness.missing_indices} - {key.array_index for key in damaged})
    if missing:
        notes = dict.fromkeys(summary.completeness.missing_notes)  # by an emulation
        yield {"missing": len(missing), "which": tuple(missing), "notes": [*notes][:_LISTED]}


# --- tasks that did not end by themselves -----------------------------------------------------------------------------

_CONTINUED = "Nothing to do about these tasks: other attempts have taken over their work."


def _unended(tasks: Sequence[TaskFacts], facts: JobFacts, summary: Summary) -> Figures:
    """Return what is left of the work of these tasks, and whether other tasks continue it."""
    return {
        "unfinished": summary.verdict == "stopped" and not _followed(tasks, facts),
        "left": sum(task.pending for task in tasks),
        "subjects": [task.name for task in tasks],
    }


def _followed(tasks: Sequence[TaskFacts], facts: JobFacts) -> bool:
    """Say whether another attempt has started on the same part of the source since, or on all of it."""
    starts_ms = grouped((task.array_index, task.started_at_ms) for task in facts.tasks)
    all_of_it_ms = max((task.started_at_ms for task in facts.tasks if task.shard_count == 1), default=0)
    for task in tasks:
        if task.pending or max(*starts_ms[task.array_index], all_of_it_ms) <= task.last_sign_ms:
            return False
    return True


_SILENT = Rule(
    "tasks_silent",
    PROBLEM,
    says="{many:whole} of {s.tasks:count task} went silent before the end.",
    evidence=(
        "{left:count chunk?} left",
        "last update: {heard:moment}",
        "a task counts as silent after {after_s:duration} without an update",
    ),
    fix=f"Possible causes: a node failure, a hanging disk, or a kill that ended the recorder, too. {_READ_LOG}",
    when="unfinished",
)


@topic(_SILENT, _SILENT._replace(severity=NOTE, when="", fix=_CONTINUED))
def _silent(facts: JobFacts, summary: Summary) -> Cases:
    silent = [task for task in facts.tasks if task.state == SILENT]
    if silent:
        yield {
            **_unended(silent, facts, summary),
            "heard": max(not_none(task.heard_at_ms for task in silent)),
            "after_s": max(task.silent_after_s or 0.0 for task in silent),
        }


_WHY_KILLED = {  # by Slurm state
    "TIMEOUT": "The time limit was reached: submit again to do the rest.",
    "OUT_OF_MEMORY": "More memory was used than requested: request more, then submit again.",
    "NODE_FAIL": "A node failed: submit again to do the rest.",
    "PREEMPTED": "A job with higher priority took the node: submit again; with #SBATCH --requeue Slurm does that by"
    " itself.",
    "CANCELLED": "The task was cancelled: submit again to do the rest.",
}
_KILLED = Rule(
    "tasks_killed",
    PROBLEM,
    says="{many:whole} of {s.tasks:count task} {many:was|were} killed.",
    evidence=("{left:count chunk?} left", "Slurm state: {states}", "run time: {ran_s:duration}{many:| at most}"),
    fix="{why}",
    when="unfinished",
)


@topic(_KILLED, _KILLED._replace(severity=NOTE, when="", fix=_CONTINUED))
def _killed(facts: JobFacts, summary: Summary) -> Cases:
    killed = [task for task in facts.tasks if task.state == KILLED and not needed_more(task)]
    if not killed:
        return
    states = Counter(task.slurm_state.split(" by ")[0] for task in killed if task.slurm_state).most_common(4)
    most_common = states[0][0] if states else ""
    yield {
        **_unended(killed, facts, summary),
        "states": [f"{state} ({count(many, 'task')})" for state, many in states],
        "ran_s": max(task.wall_s for task in killed),
        "why": _WHY_KILLED.get(most_common, f"The reason is not known. {_READ_LOG}"),
    }


# --- work that was lost, or done twice --------------------------------------------------------------------------------


@topic(
    Rule(
        "lost_work",
        WARNING,
        says="Work in progress was lost because workers were killed.",
        evidence=("{cost_s:gpu_time}, {of_time} of the GPU time", "{tries:count try tries} interrupted"),
        fix="Find out why in the task log. In Slurm, request a signal before the end and start badcjobs with exec,"
        " so that it can stop in order.",
        lines=("#SBATCH --signal=B:USR1@300",),
    )
)
def _lost(facts: JobFacts, summary: Summary) -> Cases:
    """Yield lost work, unless another finding says why it was lost."""
    broken = any(device.work.gave_up == "gpu_lost" for device in facts.devices)
    if broken or facts.chunks.get("poison") or any(task.state in (SILENT, KILLED) for task in facts.tasks):
        return
    tries = sum(device.work.lost for device in facts.devices)  # tries of running tasks are not lost
    cost_s = facts.lost_gpu_s
    if tries and cost_s >= max(_LOST_S, _LOST * 3600 * summary.gpu_hours):
        yield {"cost_s": cost_s, "tries": tries}


@topic(
    Rule(
        "done_again",
        "{severity}",
        says="{many:count chunk} {many:was|were} done more than once.",
        evidence=(
            "{many:whole} of {s.done:count chunk}; {s.facts.tries:count try tries} in total",
            "{cost_s:gpu_time}, {of_time} of the GPU time",
            "{restarted:whole?} by tasks that Slurm restarted after a node failure",
        ),
        fix="A run skips chunks that it finds done. Use the same --out without --no-resume, let one job end before you"
        " start another on the same source, and do not change the audio files.",
    )
)
def _again(facts: JobFacts, summary: Summary) -> Cases:
    """Yield chunks that were done more than once; a few are normal: their task was killed before it recorded them."""
    many = facts.conflicts
    cost_s = facts.again_gpu_s
    resumed = facts.last_settings.get("resume") is not False
    if facts.restarted == many and resumed:
        return  # results that had not left a node when it failed are made again
    if cost_s < max(_LOST_S, _LOST * 3600 * summary.gpu_hours) and many < _AGAIN * summary.done:
        return
    yield {
        "severity": severity_of(cost_s),
        "many": many,
        "restarted": facts.restarted,
        "cost_s": cost_s or None,
    }


# --- chunks that failed -----------------------------------------------------------------------------------------------

_MOST_CLASSES = 5
_MANY = 0.01  # of the chunks: more than chance
_COSTLY_S = 300.0  # GPU time of failed tries whose chunks were done in the end
_COSTLY = 0.05  # of the GPU time, as well
_OOM = "out_of_memory"
USUAL_ADVICE = "Read the engine error; the next run tries failed chunks again."
ADVICE = {  # by error class
    "empty_file": "These files have no audio. Restore them from the recorder's card, or remove them.",
    "not_audio": "These files are not audio, whatever their names say. Restore or remove them, then run again.",
    "broken_audio": "These files are truncated, or their headers are wrong. Restore them, then run again.",
    "unreadable_file": "The job may not read these files. Give it permission (chmod a+r), then run again.",
    "bad_audio": "These files cannot be read, or end before their rows do. Compare one of them with its start_ms and"
    " end_ms; correct the rows, restore or remove the files, then run again.",
    "missing_audio": "These files are missing. Fetch or restore them, then run again.",
    "no_space": "A disk was full. Free space (or quota) on the node or in the run folder, then run again.",
    "host_memory": "The node ran out of memory. Request more memory, or run fewer workers.",
    "configuration": "The engine does not work with these settings. Check its models and options, then run again.",
    _OOM: "Make the chunks shorter, use GPUs with more memory, or run fewer workers per GPU.",
    "gpu_error": "CUDA failed. If it is always the same node, exclude it; if always these chunks, make them shorter.",
}


def _names(chunks: Sequence[FailedChunk]) -> list[str]:
    return [chunk_name(chunk.recording_id, chunk.chunk_id) for chunk in chunks]


def _failures(facts: JobFacts) -> dict[str, list[FailedChunk]]:
    """Return the failed chunks by error class, without the classes that have a finding of their own."""
    own_findings = {_OOM, "ran_on_cpu"}
    if any(task.memory_limit_bytes for task in facts.tasks):
        own_findings.add("host_memory")
    failed = (chunk for chunk in facts.failed if chunk.status == "failed" and chunk.error_class not in own_findings)
    return grouped((chunk.error_class, chunk) for chunk in failed)


@topic(
    Rule(
        "poison_chunks",
        WARNING,
        says="{many:count chunk} crashed the engine twice and {many:was|were} given up.",
        evidence=("{many:whole} of {s.chunks:count chunk}",),
        fix="Check {many:this file|one of these files}. The next run tries {many:it|them} again.",
    )
)
def _poison(facts: JobFacts, summary: Summary) -> Cases:
    many = facts.chunks.get("poison", 0)
    if not many:
        return
    yield {"many": many, "subjects": _names([chunk for chunk in facts.failed if chunk.status == "poison"])}


@topic(
    Rule(
        _OOM,
        "{severity}",
        says="{tries.chunks:count chunk} did not fit into GPU memory.",
        evidence=(
            "{for_good:count chunk?} failed for good",
            "{tries.tries:count try tries} ran out of memory",
            "{tries.rescued:whole} of {tries.chunks:count chunk} done in the end, in pieces or with more free memory",
        ),
        fix="Make the chunks {shorter}, use GPUs with more memory, or run fewer workers per GPU.",
        wants=("-workers", "-length"),
    )
)
def _out_of_memory(facts: JobFacts, summary: Summary) -> Cases:
    for_good = [chunk for chunk in facts.failed if (chunk.status, chunk.error_class) == ("failed", _OOM)]
    decisions = [decision for decision in facts.decisions if decision.code in _LIMITS]
    limits_s = [decision.figures["limit_s"] for decision in decisions if "limit_s" in decision.figures]
    shorter = f"shorter than {number(min(limits_s), 0)} s" if limits_s else "shorter"
    for error in facts.errors:
        if error.error_class == _OOM:
            yield {
                "severity": PROBLEM if for_good else NOTE,
                "tries": error,
                "for_good": len(for_good),
                "shorter": shorter,
                "subjects": _names(for_good),
            }


@topic(
    Rule(
        "failed_chunks",
        "{severity}",
        says="{many:count chunk} failed for good: {class}.",
        evidence=(
            "{of_chunks} of {s.chunks:count chunk}",
            "engine error: {error:last_line}",
            "the errors of {unread:count more_chunk?} are in job.sqlite",
        ),
        fix="{advice}",
    )
)
def _failed(facts: JobFacts, summary: Summary) -> Cases:
    largest_first = sorted(_failures(facts).items(), key=lambda pair: -len(pair[1]))
    for error_class, chunks in largest_first[:_MOST_CLASSES]:
        many = len(chunks)
        yield {
            "severity": PROBLEM if many > _MANY * summary.chunks else WARNING,
            "class": (error_class or "unknown error").replace("_", " "),
            "of_chunks": share(many, summary.chunks),
            "error": chunks[0].error,
            "advice": ADVICE.get(error_class, USUAL_ADVICE),
            "cost_s": facts.failed_gpu_s,
            "unread": summary.failed - len(facts.failed),  # only the first thousand are read
            "subjects": _names(chunks),
        }


@topic(
    Rule(
        "failed_chunks",
        NOTE,
        says="No chunk failed for good, but failed tries took {of_time} of the GPU time.",
        evidence=(
            "{cost_s:gpu_time} of {all_s:gpu_time}",
            "{worst.tries:count try tries}: {worst.error_class}",
            "engine error: {worst.example:last_line}",
        ),
        fix="{advice}",
    )
)
def _failed_tries(facts: JobFacts, summary: Summary) -> Cases:
    worst = max(facts.errors, key=lambda error: error.tries, default=None)
    cost_s = facts.failed_gpu_s
    all_s = 3600 * summary.gpu_hours
    if worst is None or worst.error_class == _OOM or cost_s < max(_COSTLY_S, _COSTLY * all_s):
        return
    if _failures(facts):
        return
    yield {
        "cost_s": cost_s,
        "all_s": all_s,
        "worst": worst,
        "advice": ADVICE.get(worst.error_class, USUAL_ADVICE),
    }


@topic(
    Rule(
        "short_audio",
        WARNING,
        says="{many:count chunk} {many:has|have} less audio than planned: only what is there was analysed.",
        evidence=("{reasons}",),
        fix="Restore {many:the file|the files}, then run again: a changed file is analysed again.",
    )
)
def _short(facts: JobFacts, summary: Summary) -> Cases:
    short = [decision for decision in facts.decisions if decision.code == Code.SHORT_AUDIO]
    if short:
        yield {
            "reasons": [decision.reason for decision in short],
            "subjects": [decision.subject for decision in short],
        }


@topic(
    Rule(
        "gave_up",
        PROBLEM,
        says="{why.tasks:count task} gave up with chunks left.",
        evidence=("{why.reason:last_line}",),
        fix="Correct this first: the same command may give up again.",
    )
)
def _gave_up(facts: JobFacts, summary: Summary) -> Cases:
    for decision in facts.decisions:
        if decision.code == Code.GAVE_UP and summary.verdict != "done":
            yield {"why": decision}


@topic(
    Rule(
        "all_left_out",
        PROBLEM,
        says="No recording has a place, so all are left out.",
        evidence=("{many:count recording} left out",),
        fix="Compare the names in --filelist with those of the recordings.",
        lines=("{check}",),
    )
)
def _all_left_out(facts: JobFacts, summary: Summary) -> Cases:
    places = facts.places
    if places is not None and places.left_out == places.recordings:
        settings = facts.last_settings
        words = (*settings.get("source", ()), "--", "--filelist", settings.get("filelist", "FILE"))
        yield {"many": places.left_out, "check": shell_line("badcjobs", "check", "--quick", *words)}


TOPICS = (
    _damaged,
    _missing,
    _silent,
    _killed,
    _lost,
    _again,
    _poison,
    _out_of_memory,
    _failed,
    _failed_tries,
    _short,
    _gave_up,
    _all_left_out,
)
