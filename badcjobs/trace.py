"""What ``badcjobs submit`` has left in the run folder: how a job was asked for, its logs, and what was cut short."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import CutShort
from badcjobs.run_lock import emulated_command, is_emulated_now
from badcjobs.scheduler.asked import submit_words
from badcjobs.scheduler.local_state import PENDING, RUNNING
from badcjobs.scheduler.submitted_file import Record, read_intent, read_record

NO_NOTE = "nothing is known of it"


@dataclass(frozen=True, slots=True)
class Trace:
    """The traces of one job; there are none of one that was submitted by hand."""

    emulated: bool = False
    command: tuple[str, ...] = ()  # the badcjobs submit; empty: not known
    logs: Mapping[int, Path] = field(default_factory=dict)  # by array index
    notes: Mapping[int, str] = field(default_factory=dict)  # how an emulation left each array index

    def log_of(self, index: int) -> str | None:
        """Return where to read why an array task has left nothing; None: nobody knows, or there is no such file."""
        log = self.logs.get(index)
        try:
            return str(log) if log is not None and log.exists() else None
        except OSError:  # somebody else's folder
            return None


def find_trace(out: Path, job_id: str) -> Trace:
    """Return what there is of a job in a run folder; without a number, of the emulation that has begun no task."""
    try:
        rows = json.loads(rows_in(out, job_id).read_text())["tasks"]
        logs, goes_on = {row["index"]: Path(row["log"]) for row in rows}, is_emulated_now(out)
        return Trace(True, emulated_command(out), logs, {row["index"]: _note(row, goes_on=goes_on) for row in rows})
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no emulation has written it
    record = _record_in(out)
    if record is None and not job_id:
        command = emulated_command(out)
        return Trace(bool(command), command)
    return Trace() if record is None or record.job.job_id != job_id else _trace_of(record, out / "logs")


def is_emulation_over(out: Path, job_id: str) -> bool:
    """Say whether an emulation worked on this job and is over; cheaply. Without a job: one that has begun no task."""
    try:
        emulated = rows_in(out, job_id).exists() if job_id else bool(emulated_command(out))
    except (OSError, ValueError):  # somebody else's folder, or a number that is no name for a file
        return False
    return emulated and not is_emulated_now(out)


def rows_in(out: Path, job_id: str) -> Path:
    """Return where an emulation keeps what it knows of its tasks; in this folder, whatever the number looks like."""
    return out / "logs" / f"{PurePath(job_id).name}.json"


def _note(row: Mapping[str, Any], *, goes_on: bool) -> str:
    """Return how an emulation left an array task; one that was killed has not written how that was."""
    if row["state"] == PENDING:
        return "waits for its turn" if goes_on else "never started: the emulation was killed"
    if row["state"] == RUNNING:
        return "has begun" if goes_on else "had begun when the emulation was killed"
    return str(row.get("note") or NO_NOTE)


def _record_in(out: Path) -> Record | None:
    try:
        return read_record(out)
    except BadInput:  # somebody has edited it, and is told so by the next submit
        return None


def find_cut_short(out: Path) -> CutShort | None:
    """Return what a submit has left undone, as its files say, nobody is asked; None: nothing."""
    intent = read_intent(out)
    if intent is None:
        return None
    record = _record_in(out)
    what = "a submit was cut short here, or is not over yet; the same command finds its job"
    if record is not None and intent.is_of(record):
        what = (
            f"the submit of job {record.job.job_id} was cut short, or is not over yet; the same command does the rest"
        )
    return CutShort(what, shlex.join(_command_of(intent.record)) or "the same badcjobs submit")


def _command_of(record: Record) -> tuple[str, ...]:
    return () if record.asked is None else submit_words(record.cluster, record.run_arguments, record.asked)


def _trace_of(record: Record, logs: Path) -> Trace:
    names = {index: f"{record.job.job_id}_{index}_0_log.out" for index in record.job.indices}
    return Trace(False, _command_of(record), {index: logs / name for index, name in names.items()})
