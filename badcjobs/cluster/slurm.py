"""Slurm as a scheduler: submit an array and its merge job, and parse what the programs of Slurm answer."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from badcjobs.cluster.array_script import WORK, NewTask, merge_script, write_array
from badcjobs.cluster.scheduler import COMPLETED, FAILED, POLL_S, UNFINISHED, TaskOutcome, did_all_chunks
from badcjobs.devices import slurm_programs
from badcjobs.devices.slurm_programs import Answer
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.masking import write_new_text
from badcjobs.model import ArrayOrder, JobStates, Queue, Submitted
from badcjobs.paths import RunFolder
from badcjobs.seams import Clock, Environ, Unanswered
from badcjobs.store import submission_record as records
from badcjobs.store.connect import open_sealed

log = logging.getLogger(__name__)

_STATUS = re.compile(r"[0-9]+(:[0-9]+)?")
# Usual reasons for waiting, which are not shown.
_USUAL = frozenset({"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobArrayTaskLimit"})
_BY_VERDICT = {"done": COMPLETED, "failed": FAILED, "stopped": "STOPPED", "killed": "KILLED"}
_BY_TASK = (
    "SELECT array_index, verdict, exit_code, slurm_state FROM task WHERE job_id = ? ORDER BY restart, started_at_ms"
)


class SlurmRefused(BadcjobsError):
    """Slurm did not accept a job."""

    exit_code = ExitCode.SLURM


class SubmissionUnknown(SlurmRefused):
    """It is not known whether Slurm accepted a job."""


@dataclass(frozen=True)
class Slurm:
    """Slurm, through its programs; implements Scheduler.

    ``task`` makes the work of a task; it is called in this process, and submitit pickles what it returns. Only
    ``submit`` and ``submit_merge`` use the fields.
    """

    task: NewTask | None = None
    environ: Environ | None = None  # of sbatch; None: our own

    def submit(self, order: ArrayOrder, about_to: Callable[[Path], None] = lambda script: None) -> Submitted:
        """Submit an array; ``submit_merge`` submits its merge job.

        ``about_to`` is called with the script right before sbatch: from then on there may be a job, and ``find_array``
        finds its number if it was not recorded.
        """
        assert self.task is not None
        if not slurm_programs.is_here():
            raise NotHere(
                "there is no Slurm here: no program sbatch, or no srun",
                why="a job is submitted from a login node of the cluster",
                fix="the same command with --cluster local, to run the array on this machine",
            )
        script = write_array(order, self.task)
        about_to(script)
        answer = self._call_sbatch(script)
        if answer.job_id is None and answer.sure:
            (order.logs / WORK).unlink()
            fix = "the same command with --dry-run   (shows the script; or fewer, larger tasks: --tasks)"
            raise SlurmRefused("Slurm did not accept the array", why=answer.said, fix=fix)
        if answer.job_id is None:
            raise SubmissionUnknown(
                "it is not known whether Slurm accepted the array",
                why=answer.said,
                fix="the same command in a minute: it looks for that job first",
            )
        rename_script(script, answer.job_id)
        return Submitted(answer.job_id, None, order.indices)

    def states(self, job: Submitted) -> JobStates:
        """Call squeue once.

        Many clusters have no accounting, and Sockeye's login nodes sometimes cannot reach it, so states come from
        squeue. It lists ended tasks only for some minutes (MinJobAge): a task that is missing has ended.
        """
        text = slurm_programs.list_states(",".join(filter(None, [job.job_id, job.merge_job_id])))
        return parse_states(text, job)

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> tuple[TaskOutcome, ...]:
        """Return how each task ended: by squeue, else sacct, else the verdict of its last attempt."""
        final = {index: state for index, state in states.array.items() if state not in UNFINISHED}
        if not all(index in final for index in job.indices):
            final = query_final_states(job) | final
        last_attempts = _last_attempts(run, job.job_id)
        ends = []
        for index in job.indices:
            own_state, exit_code = last_attempts.get(index, (None, None))
            state = final.get(index) or own_state
            if state == FAILED and exit_code is None:  # it failed before it could write its own
                exit_code = states.exit_codes.get(index)
            log_file = run.path / "logs" / f"{job.job_id}_{index}_0_log.out"
            is_done = state != COMPLETED and did_all_chunks(run, job.job_id, index)
            ends.append(TaskOutcome(index, state, exit_code, log_file, is_done))
        return tuple(ends)

    def cancel_line(self, job: Submitted) -> str:
        """Return the scancel for array and merge job."""
        return shlex.join(["scancel", *filter(None, [job.job_id, job.merge_job_id])])

    # --- what only Slurm has: a merge job, and jobs whose number was not recorded ---

    def submit_merge(self, order: ArrayOrder, job_id: str) -> Answer:
        """Submit the merge job of an array, or find it if it may already exist.

        Without a merge job the array continues, and a warning is logged.
        """
        script = order.logs / f"{job_id}_merge.sh"
        answer = _find_by_script(script) if script.exists() else None
        if answer is None:
            script.unlink(missing_ok=True)
            write_new_text(script, merge_script(order))
            answer = self._call_sbatch(script, "--parsable", f"--dependency=afterany:{job_id}")
        if answer.job_id is None:
            merge = "but not its merge job" if answer.sure else "but perhaps not its merge job"
            log.warning("array %s is submitted, %s: %s", job_id, merge, answer.said)
        return answer

    def _call_sbatch(self, script: Path, *options: str) -> Answer:
        """Call sbatch; if its answer was lost, look for the job of the script."""
        answer = slurm_programs.call_sbatch(script, *options, environ=self.environ)
        if answer.sure:
            return answer
        submitted = _find_by_script(script)
        return submitted if submitted is not None and submitted.sure else answer


def parse_states(text: str, job: Submitted) -> JobStates:
    """Parse the answer of squeue; other lines are a banner of the site."""
    array = {}
    exit_codes = {}
    reasons: set[str] = set()
    merge = None
    for line in text.splitlines():
        cells = line.split(maxsplit=3)
        if len(cells) < 3 or not _STATUS.fullmatch(cells[2]):
            continue
        name, state, status, *reason = cells
        index = _index_of(name, job.job_id)
        if name == job.merge_job_id:
            merge = state
        if index is None:
            continue
        array[index] = state
        code = parse_exit_code(status)
        if code and state not in UNFINISHED:
            exit_codes[index] = code
        if state == "PENDING":
            reasons.update(text.strip() for text in reason)
    return JobStates(array, merge, exit_codes, tuple(sorted(reasons - _USUAL)))


def parse_exit_code(status: str) -> int:
    """Parse 768, a status of wait(2), or 3:0 of newer versions of squeue; 128 + n for signal n."""
    first, colon, second = status.partition(":")
    if colon:
        code = int(first)
        signum = int(second)
    else:
        code, signum = divmod(int(first), 256)
    signum %= 128
    return 128 + signum if signum else code


def _index_of(name: str, job_id: str) -> int | None:
    """Return 7 for 4821_7; None: not an array task of this job."""
    number, _, index = name.partition("_")
    if number == job_id and index.isascii() and index.isdecimal():
        return int(index)
    return None


def query_final_states(job: Submitted) -> dict[int, str]:
    """Return the final states by array index; empty without accounting, or if it does not answer."""
    try:
        text = slurm_programs.list_final_states(job.job_id)
    except (NotHere, Unanswered):
        return {}
    states = {}
    for name, state in _split_rows(text, 2):  # 4821_7|CANCELLED by 1000
        index = _index_of(name, job.job_id)
        if index is not None and state and state.split()[0] not in UNFINISHED:
            states[index] = state.split()[0]
    return states


def _split_rows(text: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of each line; other lines are a banner of the site."""
    for line in text.splitlines():
        cells = line.strip().split("|", columns - 1)
        if len(cells) == columns:
            yield cells


def _last_attempts(run: RunFolder, job_id: str) -> dict[int, tuple[str | None, int | None]]:
    """Return state and exit code of the last attempt of each task, from the job database."""
    attempts = {}
    if run.job_database.exists():
        with suppress(sqlite3.Error), closing(open_sealed(run.job_database)) as db:  # else only Slurm's count
            for index, verdict, exit_code, state in db.execute(_BY_TASK, (job_id,)):
                if state in (None, "ENDED"):
                    state = _BY_VERDICT.get(verdict)
                attempts[index] = state, exit_code
    return attempts


# --- what waits and runs ----------------------------------------------------------------------------------------------


@dataclass
class QueueReader:
    """Asks squeue what it has of a run, at most every 30 s, or when the question changes."""

    clock: Clock
    question: object = None  # the last one
    answer: Queue | None = None
    ask_again_s: float = 0.0

    def __call__(self, run: Path, job_ids: Iterable[str]) -> Queue | None:
        """Return what waits and runs of the submitted job and of the jobs that wrote the task databases.

        None: no job is known.
        """
        with suppress(OSError, ValueError, BadInput):
            record = records.read_record(run)
            submitted = Submitted("", None, ()) if record is None else record.job
            numbers = {number for number in (submitted.job_id, *job_ids) if number.isdecimal()}
            numbers -= {number for number in numbers if records.rows_in(run, number).exists()}  # emulated
            question = (run, numbers, submitted.merge_job_id)
            now_s = self.clock.monotonic_s()
            if question != self.question or now_s >= self.ask_again_s:
                self.question = question
                self.ask_again_s = now_s + POLL_S
                self.answer = query_queue(*question) if numbers else None
            return self.answer
        return None


def query_queue(run: Path, job_ids: Collection[str], merge_job_id: str | None) -> Queue:
    """Call squeue once for the jobs of the owner of a run folder; no answer is no error."""
    try:
        text = slurm_programs.list_queue(run.stat().st_uid)
    except (NotHere, Unanswered):
        return Queue(known=False)
    return parse_queue(text, job_ids, merge_job_id)


def parse_queue(text: str, job_ids: Collection[str], merge_job_id: str | None) -> Queue:
    """Parse the answer of squeue: number, state and reason of each task."""
    listed = set()
    jobs = set()
    reasons = []
    running = 0
    for number, state, reason in _split_rows(text, 3):
        listed.add(number)
        if number not in job_ids:
            continue
        jobs.add(number)
        if state == "PENDING":
            reasons.append(reason)
        else:
            running += 1
    unusual = sorted({*reasons} - _USUAL)
    merge = merge_job_id if merge_job_id in listed else None
    return Queue(True, tuple(sorted(jobs)), len(reasons), running, tuple(unusual), merge)


# --- submit -----------------------------------------------------------------------------------------------------------


def _find_by_script(script: Path) -> Answer | None:
    """Look for the job of a script with squeue; None: there is none."""
    try:
        job_id = query_number(script)
    except (Unanswered, NotHere) as error:
        return Answer(None, str(error), sure=False)
    return None if job_id is None else Answer(job_id, "")


def query_number(script: Path) -> str | None:
    """Return the number of the job that was submitted with this script; None: there is no such job.

    The name of the script is unique. If its sbatch is still running because its caller was killed, wait for it; that
    needs a filesystem with locks.
    """
    slurm_programs.wait_for_sbatch(script)
    for number, command in _split_rows(slurm_programs.list_scripts(os.getuid()), 2):
        if command == str(script) and number.isascii() and number.isdecimal():
            return number
    return None


def find_array(script: Path) -> str | None:
    """Return the number of an array that was not recorded; None: it was not accepted, or ended long ago."""
    try:
        return query_number(script)
    except Unanswered as error:
        raise SubmissionUnknown(
            "it is not known whether Slurm accepted the array of an interrupted submit",
            why=f"it was killed, or its answer was lost, and now Slurm does not answer: {error}",
            fix="squeue   (when it answers, the same command)",
        ) from error


def rename_script(script: Path, job_id: str) -> None:
    """Rename the script of an array after its job; until then its unique name identifies the job."""
    if script.exists():
        script.rename(script.with_name(f"{job_id}_submission.sh"))
