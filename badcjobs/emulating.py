"""A job on a machine without Slurm, from a script or an order to the verdict: array → merge → exit code.

The emulation itself is ``scheduler``'s, the devices that it gets are ``this_machine.py``'s business.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.emulated_script import (
    ScriptOrder,
    find_out,
    read_script,
    submit_words_of,
    tell_of_srun,
    with_devices,
    with_paths,
)
from badcjobs.ends import TaskEnd, has_worked, nobody_began, verdict_of
from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.job import FinishedJob, finish_job
from badcjobs.model import ArrayOrder
from badcjobs.paths import RunFolder
from badcjobs.run_lock import alone_in, check_writable, emulation_in, leaving_nothing, refuse_during_emulation
from badcjobs.scheduler.array_files import Drafts
from badcjobs.scheduler.asked import asked_of, submit_words
from badcjobs.scheduler.job_script import read_request
from badcjobs.scheduler.local import JobEnd
from badcjobs.scheduler.local_state import COMPLETED, TaskRow
from badcjobs.scheduler.squeue import query_number, query_states
from badcjobs.scheduler.submitted_file import Record, forget_intent, last_submission, read_intent, read_record
from badcjobs.scheduler.watch import has_ended
from badcjobs.seams import Unanswered
from badcjobs.store.merging.merge import MergeOrder
from badcjobs.this_machine import LocalWish, Tell, local_scheduler
from badcjobs.world import World

__all__ = [
    "Emulation",
    "LocalWish",
    "ScriptOrder",
    "emulate_order",
    "emulate_script",
    "read_script",
    "refuse_here",
    "refuse_script_here",
]

_EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated job that is over."""

    exit_code: int
    verdict: str
    job_id: str
    rows: tuple[TaskRow, ...]
    out: Path | None
    job: FinishedJob | None  # None: nothing was merged
    ends: tuple[TaskEnd, ...] = ()  # of its tasks, where something was merged

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs submit --cluster local --json``."""
        return {
            "cluster": "local",
            "job_id": self.job_id,
            "out": None if self.out is None else str(self.out),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "tasks": [row.to_dict() for row in self.rows],
            "summary": None if self.job is None else self.job.to_dict(),
        }


def emulate_order(order: ArrayOrder, wish: LocalWish, world: World, tell: Tell) -> Emulation:
    """Run an array to its end and merge it."""
    scheduler = local_scheduler(replace(wish, max_requeues=order.requeues), world, tell, order.out)
    command = (*submit_words("local", order.run_arguments, asked_of(order)), *wish.options)
    with only_here(order.out, command, again=wish.again) as lock:
        text = scheduler.script(order)
        unasked = () if any(word.startswith("--mem=") for word in command) else ("mem",)  # what submit asks by itself
        done = scheduler.run_script(text, name=order.name, state_folder=order.logs, keep=(lock,), unasked=unasked)
        return conclude(done, order.out, world, tell)


def emulate_script(order: ScriptOrder, wish: LocalWish, world: World, tell: Tell) -> Emulation:
    """Run somebody's job script to its end; merge where it is known where the results are."""
    text = read_script(order.script, world)
    command = submit_words_of(order, wish, world)
    world = with_paths(order, world)
    request = read_request(text, order.options)
    world = with_devices(text, request, wish.stand_in, order.script, world)
    out = find_out(text, request, world)
    tell_of_srun(text, world, tell)
    scheduler = local_scheduler(wish, world, tell, out or world.cwd / order.script)
    with nullcontext() if out is None else only_here(out, command, again=wish.again) as lock:
        done = scheduler.run_script(
            text,
            name=order.script.name,
            options=order.options,
            arguments=order.arguments,
            state_folder=None if out is None else out / "logs",
            keep=() if lock is None else (lock,),
        )
        return conclude(done, out, world, tell)


@contextmanager
def only_here(out: Path, command: Sequence[str], *, again: bool) -> Iterator[int]:
    """Keep a second emulation of the same run away, and a job of Slurm: they would do the same chunks.

    The lock's file is to be kept open by whoever ends the tasks if this process is killed.
    """
    with leaving_nothing(out), ExitStack() as held:
        with alone_in(out):
            check_writable(out)
            sure = _refuse_beside_slurm(out, again=again)
            lock = held.enter_context(emulation_in(out, command))
            if sure:
                _forget_lost_submit(out)
        yield lock.fileno()


def refuse_here(out: Path, *, again: bool) -> None:
    """Refuse what an emulation in this run folder would refuse, and change nothing."""
    _refuse_beside_slurm(out, again=again)
    refuse_during_emulation(out)


def refuse_script_here(order: ScriptOrder, world: World, *, again: bool) -> None:
    """Do the same for the run folder of a script, where that is known."""
    text, world = read_script(order.script, world), with_paths(order, world)
    out = find_out(text, read_request(text, order.options), world)
    if out is not None:
        refuse_here(out, again=again)


def _forget_lost_submit(out: Path) -> None:
    """Take away what is left of a submit whose array Slurm has not, as it has just said."""
    intent = read_intent(out)
    if intent is not None and not intent.is_of(read_record(out)):
        if intent.script.parent.is_dir():
            Drafts(intent.script).remove()
        forget_intent(out)


def _refuse_beside_slurm(out: Path, *, again: bool) -> bool:
    """Refuse a run whose job Slurm still has; where nobody can be asked, ``again`` says that it has not.

    Return whether Slurm has said that it knows no array of this run that is not written down.
    """
    record: Record | None = None
    has = f"a submit with --cluster slurm was killed in {out}, or its answer was lost: there may be a job"
    why = "both would do the same chunks"
    try:
        record = last_submission(out, query_number)
        if record is None or has_ended(query_states(record.job)):
            return record == read_record(out)  # else it was found by its script, and has ended
        ending = shlex.join(["scancel", *filter(None, [record.job.job_id, record.job.merge_job_id])])
        fix = f"{ending}   (or wait: the same command with --cluster slurm --wait)"
    except (NotHere, Unanswered) as error:
        if again:
            return False
        why += f"; whether it has ended nobody here can tell: {error.what if isinstance(error, NotHere) else error}"
        fix = "the same command with --again, once that job has ended"
    if record is not None:
        has = f"{out} has a job already, {record.job.job_id} of --cluster {record.cluster}"
    raise BadInput(has, why=why, fix=fix)


# --- the end ----------------------------------------------------------------------------------------------------------


def conclude(done: JobEnd, out: Path | None, world: World, tell: Tell) -> Emulation:
    """Merge what the tasks have left, and judge."""
    stop, ends = world.stop, _ends_of(done, out)
    if stop.cut_short_by is not None:
        return Emulation(128 + stop.cut_short_by, "stopped", done.job_id, done.rows, out, None)
    verdict = verdict_of(ends)
    if out is None or not any(RunFolder(out).tasks.glob("*.sqlite")):
        if out is None:
            tell("nothing is merged: the script has no OUT that is known here; badcjobs merge DIR does it")
        elif verdict != "done" and stop.ended_by is None:
            raise nobody_began(done.job_id, ends, then="the same command")
        return Emulation(_exit_code(verdict, world), verdict, done.job_id, done.rows, out, None)
    if signal.getsignal(signal.SIGINT) == stop.receive:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a merge may be interrupted at any moment
    job = finish_job(MergeOrder([out], RunFolder(out).job_database), world.clock)
    # What lies there may be done, but not by these tasks.
    verdict = verdict if job.summary.verdict == "done" else job.summary.verdict
    return Emulation(_exit_code(verdict, world), verdict, done.job_id, done.rows, out, job, ends)


def _ends_of(done: JobEnd, out: Path | None) -> tuple[TaskEnd, ...]:
    """Return how the tasks have ended, in the words that a job of Slurm has, too."""

    def end_of(row: TaskRow) -> TaskEnd:
        worked = row.state != COMPLETED and out is not None and has_worked(RunFolder(out), done.job_id, row.index)
        return TaskEnd(row.index, row.state, row.exit_code, row.log, worked, row.note)

    return tuple(map(end_of, done.rows))


def _exit_code(verdict: str, world: World) -> int:
    code = int(_EXIT_CODES[verdict])
    return 128 + signal.SIGINT if code and world.stop.ended_by is signal.SIGINT else code
