"""What ``badcjobs submit`` leaves in the run folder: how a job was asked for, its number, its logs, what was cut short.

``submitted.json`` has what was submitted last, so that the same command finds its job again. For the moment in which
Slurm has the array and its number is not written down yet there is ``.submitting.json`` with the name of the script, by
which Slurm knows the job. An emulation keeps the states of its tasks in ``logs/<job>.json``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, CutShort, Submitted, default_cpus, default_mem
from badcjobs.store.run_lock import emulated_command, is_emulated_now

PENDING, RUNNING = "PENDING", "RUNNING"  # states of an emulated task that has not ended
NO_NOTE = "nothing is known of it"
_NOTES = {  # by state, and whether the emulation goes on; one that was killed has not written how a task ended
    (PENDING, True): "waits for its turn",
    (PENDING, False): "never started: the emulation was killed",
    (RUNNING, True): "has begun",
    (RUNNING, False): "had begun when the emulation was killed",
}
_OUT = "--out="


@dataclass(frozen=True, slots=True)
class Record:
    """One submission."""

    cluster: str
    job: Submitted
    run_arguments: tuple[str, ...]
    chunks: int  # rows of the source
    submitted_at_ms: int
    asked: dict[str, Any] | None = None  # the other options of submit; None: not known
    listed: int | None = None  # how many manifests its list of manifests names; None: it is none, or nobody has kept it
    left: int | None = None  # how many of the chunks were left when it was submitted; None: all, or nobody has counted

    def is_of(self, other: Record | None) -> bool:
        """Say whether both are of one submission; only its number, and that of its merge job, may differ."""
        return other is not None and other.submitted_at_ms == self.submitted_at_ms


def file_in(out: Path) -> Path:
    """Return where the record of a run folder is."""
    return out / "submitted.json"


def intent_in(out: Path) -> Path:
    """Return where a run folder has what is about to be submitted."""
    return out / ".submitting.json"


def write_record(out: Path, record: Record) -> None:
    """Put the record in its place, whole or not at all."""
    _write(file_in(out), asdict(record))


def read_record(out: Path) -> Record | None:
    """Return what was handed in last; None: nothing was."""
    path = file_in(out)
    try:
        return _record_of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(
            f"{path} is not as badcjobs wrote it", why=str(error), fix=f"mv {path} {path}.old   (forgets that job)"
        ) from error


def write_intent(out: Path, script: Path, record: Record) -> None:
    """Write down what is to be submitted now: the script that sbatch gets, and its record without a number."""
    _write(intent_in(out), {"script": str(script), "record": asdict(record)})


def read_intent(out: Path) -> tuple[Path, Record] | None:
    """Return script and record of what was being submitted when a submit was killed; None: nothing was."""
    try:
        values = json.loads(intent_in(out).read_text(encoding="utf-8"))
        return Path(values["script"]), _record_of(values["record"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # there is none; or its disk was full, and then nothing was submitted


def last_submission(out: Path, find: Callable[[Path], str | None]) -> Record | None:
    """Return what was handed in last, also where nobody has written down its number: ``find`` asks for it by script."""
    record, intent = read_record(out), read_intent(out)
    if intent is None or intent[1].is_of(record) or (job_id := find(intent[0])) is None:
        return record
    return replace(intent[1], job=replace(intent[1].job, job_id=job_id))


def forget_intent(out: Path) -> None:
    """Say that what was to be submitted is written down, or refused."""
    intent_in(out).unlink(missing_ok=True)


def _write(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _record_of(values: dict[str, Any]) -> Record:
    job = Submitted(**{**values["job"], "indices": tuple(values["job"]["indices"])})
    return Record(**{**values, "job": job, "run_arguments": tuple(values["run_arguments"])})


# --- how it was asked for --------------------------------------------------------------------------------------------


def asked_of(order: ArrayOrder) -> dict[str, Any]:
    """Return the options that an order stands for; times are in minutes, as sbatch takes them."""
    return {
        "--array": order.spec,
        "--gpus-per-task": order.gpus_per_task,
        "--cpus": order.cpus,
        "--mem": order.mem,
        "--time": order.time_min,
        "--account": order.account,
        "--partition": order.partition,
        "--constraint": order.constraint,
        "--sbatch": list(order.extra_sbatch),
        "--job-name": order.name,
        "--setup": list(order.setup),
        "--requeues": order.requeues,
        "--merge-account": order.merge_account,
        "--merge-mem": order.merge_mem,
        "--merge-time": order.merge_time_min,
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the options of submit that differ, each with both values; None: the option was not given."""
    return [
        f"{option} was {_words(then.get(option))}, now {_words(now.get(option))}"
        for option in now
        if then.get(option) != now.get(option)
    ]


def submit_words(cluster: str, run_arguments: Sequence[str], asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ``badcjobs submit`` that asks for the same once more, without what it would do anyway."""
    gpus = asked["--gpus-per-task"]  # cores and memory go by them
    usual = asked_of(ArrayOrder(Path(), (), tasks=1, cpus=default_cpus(gpus), mem=default_mem(gpus)))
    return (
        *("badcjobs", "submit", *run_arguments[1:], f"--cluster={cluster}"),
        *(
            f"{option}={one}"
            for option, value in asked.items()
            if value is not None and value != usual.get(option)
            for one in (value if isinstance(value, list) else [value])
        ),
    )


def _words(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


# --- what is left of a job -------------------------------------------------------------------------------------------


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
        """Return where to read why an array task has left nothing; None: it is not known, or cannot be read."""
        log = self.logs.get(index)
        return str(log) if log is not None and os.access(log, os.R_OK) else None


def find_trace(out: Path, job_id: str) -> Trace:
    """Return what there is of a job in a run folder; without a number, of the emulation that has begun no task."""
    try:
        rows = json.loads(rows_in(out, job_id).read_text())["tasks"]
        logs, notes, goes_on = {}, {}, is_emulated_now(out)
        for row in rows:
            log = Path(row["log"])  # a script may have put it elsewhere, where it stays
            here = out / "logs" / log.name
            logs[row["index"]] = here if os.access(here, os.F_OK) else log
            notes[row["index"]] = _NOTES.get((row["state"], goes_on)) or str(row.get("note") or NO_NOTE)
        return Trace(True, _for_folder(emulated_command(out), out), logs, notes)
    except (OSError, ValueError, TypeError, KeyError):
        pass  # no emulation has written it
    record, emulated = _record_in(out), _for_folder(emulated_command(out), out)
    if record is None and not job_id:
        return Trace(bool(emulated), emulated)
    if record is None or record.job.job_id != job_id:
        return Trace()
    logs = {index: out / "logs" / f"{job_id}_{index}_0_log.out" for index in record.job.indices}
    return Trace(False, _command_of(record, out), logs)


def is_emulation_over(out: Path, job_id: str) -> bool:
    """Say whether an emulation worked on this job and is over; cheaply. Without a job: one that has begun no task."""
    emulated = os.access(rows_in(out, job_id), os.F_OK) if job_id else bool(emulated_command(out))
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
    if record is not None and record.is_of(intent[1]):
        number = record.job.job_id
        what = f"the submit of job {number} was cut short, or is not over yet; the same command does the rest"
    return CutShort(what, shlex.join(_command_of(intent[1], out)) or "the same badcjobs submit")


def _command_of(record: Record, out: Path) -> tuple[str, ...]:
    if record.asked is None:
        return ()
    return _for_folder(submit_words(record.cluster, record.run_arguments, record.asked), out)


# --- a run folder that was moved or copied since ----------------------------------------------------------------------


def _for_folder(command: Sequence[str], out: Path) -> tuple[str, ...]:
    """Return a command that works on the folder in which it was found, whatever that was called before."""
    moved = [word for word in command if word.startswith(_OUT) and not _is_same(word.removeprefix(_OUT), out)]
    return tuple(f"{_OUT}{out.absolute()}" if word in moved else word for word in command)


def _is_same(recorded: str, out: Path) -> bool:
    try:
        return Path(recorded).samefile(out)
    except (OSError, ValueError):  # not there any more, or somebody else's
        return False
