"""Array tasks that were killed or left no word, and the work that went with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from badcjobs.model import NOTE, PROBLEM, WARNING, Finding, JobFacts, TaskFacts
from badcjobs.report.finding_rules.device_time import each_once, gpu_time, share
from badcjobs.report.finding_rules.silent_tasks import silent_tasks
from badcjobs.report.finding_rules.taken_over import leave_work, others_words, rest_words
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import RUNNING, was_killed
from badcjobs.report.words import count, duration, indices

_LOST_S, _LOST = 60.0, 0.02
_AGAIN = 0.1  # of the chunks
_NOTES = 3  # of an emulation, in the evidence
_SERIOUS_S = 10 * 3600.0
_REST = "submit again, which does the rest"
_WHY = {  # by Slurm's word: why, of one and of many, and what to do where work is left
    "TIMEOUT": ("Its time was over", "Their time was over", _REST),
    "OUT_OF_MEMORY": ("It used more memory than was asked for", "They used more memory than was asked for",
                      "ask for more, then submit again"),
    "NODE_FAIL": ("Its node failed", "Their nodes failed", _REST),
    "PREEMPTED": ("Somebody else had more right to its node", "Somebody else had more right to their nodes",
                  "submit again; #SBATCH --requeue lets Slurm do that by itself"),
    "CANCELLED": ("Somebody cancelled it", "Somebody cancelled them", _REST),
}  # fmt: skip
_COMMAND = " The command stands under “to finish it”."  # once in every form of the report, not in each finding


def judge_tasks(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield what is to be said about tasks that did not end by themselves."""
    command = _COMMAND if summary.completeness is not None and summary.completeness.finish else ""
    missing = summary.tasks_missing
    waits = summary.tasks_by_verdict.get(RUNNING)  # then they may well wait for their turn
    if missing and not waits and not facts.merged.closed:
        where = _emulated(summary) or (f"array index {indices(missing)}",)
        yield Finding(
            "tasks_missing", PROBLEM, f"There is no word from {count(len(missing), 'array task')}.",
            (*where, f"{count(len(facts.tasks), 'task')} left a database"), _find_out(summary) + command,
        )  # fmt: skip
    yield from silent_tasks(facts, summary, command)
    killed = [task for task in facts.tasks if was_killed(task)]
    if killed:
        yield _killed(killed, facts, summary, command)
    tries = sum(device.work.lost for device in facts.devices)  # those of tasks that still run are under way, not lost
    if tries and facts.lost_gpu_s >= max(_LOST_S, _LOST * 3600 * summary.gpu_hours):
        yield Finding(
            "lost_work", WARNING, "Work in progress was lost when its worker or its task was killed.",
            (
                f"{gpu_time(facts.lost_gpu_s)}, {share(facts.lost_gpu_s, 3600 * summary.gpu_hours)} of the GPU time",
                f"{count(tries, 'try', 'tries')} cut short",
            ),
            "Shorter chunks lose less. Under Slurm, ask for a signal before the end and start badcjobs with exec: then"
            " it ends in order.",
            ("#SBATCH --signal=B:USR1@300",), (), facts.lost_gpu_s / 3600,
        )  # fmt: skip


def _emulated(summary: Summary) -> tuple[str, ...]:
    """Return what an emulation says of the array tasks that left nothing; nothing of one of Slurm."""
    proof = summary.completeness
    by_note: dict[str, list[int]] = {}
    for index, note in zip(proof.missing_indices, proof.missing_notes, strict=False) if proof else ():
        by_note.setdefault(note, []).append(index)
    said = [f"array index {indices(those)}: {note}" for note, those in by_note.items()]
    others = [index for those in list(by_note.values())[_NOTES:] for index in those]
    return (*said[:_NOTES], *([f"array index {indices(others)}: see their logs"] if others else []))


def _find_out(summary: Summary) -> str:
    missing, proof = summary.tasks_missing, summary.completeness
    never, of_it, it = ("it never", "this index", "it") if len(missing) == 1 else ("they never", "these", "them")
    if proof is not None and proof.missing_notes:
        look = f"Look at the log of {of_it}, then start" if proof.missing_logs else "Start"
        return f"{look} the emulation again, which does the rest."
    return (
        f"Unless still in Slurm's queue: {never} started, or could not write. Look at Slurm's output of {of_it},"
        f" then submit {it} again."
    )


def judge_done_again(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield that chunks were done more than once; a few are those whose task was killed before it could say so."""
    gpu_s, many, all_s = facts.again_gpu_s, facts.conflicts, 3600 * summary.gpu_hours
    if not many or (gpu_s < max(_LOST_S, _LOST * all_s) and many < _AGAIN * summary.done):
        return
    spent = [f"{gpu_time(gpu_s)}, {share(gpu_s, all_s)} of the GPU time"] if gpu_s else []
    jobs = len({task.job_id for task in facts.tasks})
    not_resumed = facts.last_settings.get("resume") is False
    tries = count(summary.tries, "try", "tries")
    yield Finding(
        "done_again", PROBLEM if gpu_s >= _SERIOUS_S else WARNING,
        f"{count(many, 'chunk')} had been done already and {'was' if many == 1 else 'were'} done again.",
        (
            f"{many:,} of {count(summary.done, 'chunk')} done more than once, in {tries}",
            *spent,
            f"{count(jobs, 'job')} of {count(len(facts.tasks), 'task')} in this folder"
            + ("; the last one with --no-resume" if not_resumed else ""),
        ),
        "A run skips what it finds done: use the same --out, without --no-resume; let one job end before another starts"
        " on the same source; leave the audio as it is.",
        (), (), gpu_s / 3600 if gpu_s else None,
    )  # fmt: skip


def _killed(killed: list[TaskFacts], facts: JobFacts, summary: Summary, command: str) -> Finding:
    words = Counter(task.slurm_state.split(" by ")[0] for task in killed if task.slurm_state)
    said = ", ".join(f"{many:,} × {word}" for word, many in words.most_common(4))
    left = sum(task.pending for task in killed)
    unfinished = bool(left) or leave_work(killed, facts, summary)
    ran = duration(max(task.wall_s for task in killed))
    some = "" if len(killed) == len(facts.tasks) else f"{len(killed):,} of "
    return Finding(
        "tasks_killed", PROBLEM if unfinished else NOTE,
        f"{some}{count(len(facts.tasks), 'task')} {'was' if len(killed) == 1 else 'were'} killed"
        + (f"; {count(left, 'chunk')} left." if left else "." if unfinished else f"; {others_words(killed, summary)}."),
        (
            *([f"Slurm's word: {said}"] if said else []),
            f"it had run for {ran}" if len(killed) == 1 else f"they had run for {ran} at most",
        ),
        _why_killed(words, killed, summary, unfinished=unfinished) + (command if unfinished else ""), (),
        each_once(task.name for task in killed),
    )  # fmt: skip


def _why_killed(words: Counter[str], killed: list[TaskFacts], summary: Summary, *, unfinished: bool) -> str:
    """Return why, by the word that Slurm said most often, and what to do if anything is to be done."""
    of_one, of_many, remedy = _WHY.get(words.most_common(1)[0][0], ("", "", "")) if words else ("", "", "")
    why = of_one if len(killed) == 1 else of_many
    why = f"Mostly {why[0].lower()}{why[1:]}" if why and len(words) > 1 else why
    if not unfinished:
        rest = rest_words(summary)
        return f"{why}; {rest}." if why else f"{rest.capitalize()}; the task's log ends where it did."
    if why:
        return f"{why}: {remedy}."
    if all(task.job_id.startswith("local") for task in killed):
        return "Look at the end of the task's log, then start the run again, which does the rest."
    return "Look at the end of Slurm's output and of the task's log, then submit again."
