"""What ``badcjobs submit`` has left in the run folder: how a job was asked for, its logs, and what was cut short."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import CutShort
from badcjobs.run_lock import emulated_command, is_emulated_now
from badcjobs.scheduler.asked import submit_words
from badcjobs.scheduler.local_state import PENDING, RUNNING
from badcjobs.scheduler.submitted_file import Record, read_intent, read_record

NO_NOTE = "nothing is known of it"
_OUT = "--out"


@dataclass(frozen=True, slots=True)
class Trace:
    """The traces of one job; there are none of one that was submitted by hand."""

    emulated: bool = False
    command: tuple[str, ...] = ()  # the badcjobs submit; empty: not known
    logs: Mapping[int, Path] = field(default_factory=dict)  # by array index
    notes: Mapping[int, str] = field(default_factory=dict)  # how an emulation left each array index

    def line(self, *more: str) -> str:
        """Return the command to paste, with more words at its end; empty: it is not known."""
        return shlex.join([*self.command, *more]) if self.command else ""

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
        logs, goes_on = {row["index"]: _log_here(Path(row["log"]), out) for row in rows}, is_emulated_now(out)
        notes = {row["index"]: _note(row, goes_on=goes_on) for row in rows}
        return replace(_emulation_in(out), emulated=True, logs=logs, notes=notes)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no emulation has written it
    record = _record_in(out)
    if record is None and not job_id:
        return _emulation_in(out)
    return Trace() if record is None or record.job.job_id != job_id else _trace_of(record, out)


def _emulation_in(out: Path) -> Trace:
    """Return what is known of the last emulation in a run folder, without its tasks."""
    command = _for_folder(emulated_command(out), out)
    return Trace(bool(command), command)


def is_emulation_over(out: Path, job_id: str) -> bool:
    """Say whether an emulation worked on this job and is over; cheaply. Without a job: one that has begun no task."""
    try:
        emulated = rows_in(out, job_id).exists() if job_id else bool(emulated_command(out))
    except (OSError, ValueError):  # somebody else's folder, or a number that is no name for a file
        return False
    return emulated and not is_emulated_now(out)


def find_unbegun(out: Path) -> CutShort | None:
    """Return what helps where no task of a run has left anything; None: nobody knows of any task."""
    if (found := find_cut_short(out) or find_idle_emulation(out)) is not None:
        return found
    look = shlex.join(["badcjobs", "monitor", str(out)])
    if (record := _record_in(out)) is not None:
        return CutShort(f"job {record.job.job_id} was submitted, and no task of it has published anything yet", look)
    if is_emulated_now(out):
        return CutShort("an emulation is at work, and no task of it has published anything yet", look)
    return None


def find_idle_emulation(out: Path) -> CutShort | None:
    """Return what repeats an emulation that is over; None: there is none. It is for who has seen no task of it."""
    line = find_trace(out, "").line() if is_emulation_over(out, "") else ""
    what = "no task is running, and nobody is starting any: the emulation is over"
    return CutShort(what, line) if line else None


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
    return CutShort(what, shlex.join(_command_of(intent.record, out)) or "the same badcjobs submit")


def _command_of(record: Record, out: Path) -> tuple[str, ...]:
    if record.asked is None:
        return ()
    return _for_folder(submit_words(record.cluster, record.run_arguments, record.asked), out)


def _trace_of(record: Record, out: Path) -> Trace:
    names = {index: f"{record.job.job_id}_{index}_0_log.out" for index in record.job.indices}
    return Trace(False, _command_of(record, out), {index: out / "logs" / name for index, name in names.items()})


# --- a run folder that was moved or copied since ----------------------------------------------------------------------


def _for_folder(command: Sequence[str], out: Path) -> tuple[str, ...]:
    """Return a command that works on the folder in which it was found, whatever that was called before."""
    words = list(command)
    for at, word in enumerate(command):
        option, equals, value = word.partition("=")
        if option == _OUT and equals and not _is_same(value, out):
            words[at] = f"{_OUT}={out.absolute()}"
        elif at and command[at - 1] == _OUT and not _is_same(word, out):
            words[at] = str(out.absolute())
    return tuple(words)


def _is_same(recorded: str, out: Path) -> bool:
    try:
        return Path(recorded).samefile(out)
    except (OSError, ValueError):  # not there any more, or somebody else's
        return False


def _log_here(recorded: Path, out: Path) -> Path:
    """Return where a log lies now; a script may have put it elsewhere, where it stays."""
    here = out / "logs" / recorded.name
    try:
        return here if here.exists() else recorded
    except OSError:  # somebody else's folder
        return recorded
