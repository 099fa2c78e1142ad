"""The files of ``badcjobs submit`` in the run folder: options, number and logs of a job, an interrupted submit.

``submitted.json`` describes the last submission, so that the same command finds its job again. ``.submitting.json`` is
written before sbatch runs, with the name of the script: if submit is killed before it writes the job number, the job is
found in Slurm by that name. An emulation keeps the states of its tasks in ``logs/<job>.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.masking import HIDDEN, mask_words
from badcjobs.model import ArrayOrder, CutShort, Submitted, default_cpus, default_mem
from badcjobs.paths import shell_line
from badcjobs.settings import value_text
from badcjobs.small_files import DamagedFile, parse_fields, parse_json, read_optional, read_small
from badcjobs.store.atomic_write import replace_text
from badcjobs.store.run_lock import emulated_command, is_emulated_now

PENDING = "PENDING"  # states of an emulated task that has not ended
RUNNING = "RUNNING"
NO_NOTE = "no information"
_NOTES = {  # by state, and whether the emulation still runs; a killed emulation has not written how a task ended
    (PENDING, True): "waiting for its turn",
    (PENDING, False): "never started: the emulation was killed",
    (RUNNING, True): "has started",
    (RUNNING, False): "had started when the emulation was killed",
}
_OUT = "--out="
DRAFT = ".submission_file_{}.sh"  # a script whose job has no number yet
Command = tuple[str, ...]  # its words
Document = dict[str, Any]  # of a file


@dataclass(frozen=True)
class Record:
    """One submission."""

    cluster: str
    job: Submitted
    run_arguments: tuple[str, ...]  # secrets are hidden, here and below
    chunks: int | None  # rows of the source
    submitted_at_ms: int
    asked: dict[str, Any] | None = None  # the other options of submit; None: not known
    listed: int | None = None  # number of manifests in its list of manifests; None: not a list, or not known
    left: int | None = None  # number of chunks that were left when it was submitted; None: all, or not known

    def is_of(self, other: Record | None) -> bool:
        """Say whether both are the same submission; the job numbers may differ."""
        return other is not None and other.submitted_at_ms == self.submitted_at_ms


def file_in(out: Path) -> Path:
    """Return the path of a run folder's record."""
    return out / "submitted.json"


def intent_in(out: Path) -> Path:
    """Return the path of the file that describes the submission in progress."""
    return out / ".submitting.json"


def write_record(out: Path, record: Record) -> None:
    """Write the record atomically."""
    _write(file_in(out), asdict(record))


def read_record(out: Path) -> Record | None:
    """Return the last submission; None: there is none."""
    path = file_in(out)
    try:
        return _record_of(parse_json(read_small(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{path} is damaged",
            why=str(error),
            fix=f"{shell_line('mv', path, f'{path}.old')}   (badcjobs then forgets that job)",
        ) from error


def write_intent(out: Path, script: Path, record: Record) -> None:
    """Write the script for sbatch and its record, still without a job number, before sbatch runs."""
    _write(intent_in(out), {"script": str(script), "record": asdict(record)})


def read_intent(out: Path) -> tuple[Path, Record] | None:
    """Return the script and record of a submit that was killed; None: there is none."""
    return read_optional(intent_in(out), lambda values: (Path(values["script"]), _record_of(values["record"])))


def last_submission(out: Path, find: Callable[[Path], str | None]) -> Record | None:
    """Return the last submission; if its job number was not written, ``find`` gets it from Slurm by the script."""
    record = read_record(out)
    intent = read_intent(out)
    if intent is None:
        return record
    script, intended = intent
    if intended.is_of(record):
        return record
    job_id = find(script)
    if job_id is None:
        return record
    return replace(intended, job=replace(intended.job, job_id=job_id))


def forget_intent(out: Path) -> None:
    """Remove the intent and its script after the record is written or the submission is refused."""
    for script in (out / "logs").glob(DRAFT.format("*")):  # not the one it names, which may be any file
        script.unlink()
    intent_in(out).unlink(missing_ok=True)


def _write(path: Path, values: Document) -> None:
    replace_text(path, json.dumps(values, indent=1) + "\n")


def _record_of(values: Document) -> Record:
    record = parse_fields(Record, {**values, "job": parse_fields(Submitted, values["job"])})
    for number in filter(None, (record.job.job_id, record.job.merge_job_id)):
        if not number.isdecimal():  # it becomes a part of paths, and of lines to paste
            raise DamagedFile(f"{number} is not the number of a job")
    if record.asked is not None:
        submit_command(record.cluster, record.run_arguments, record.asked)  # raises an error if it is incomplete
    return record


# --- the options of submit --------------------------------------------------------------------------------------------


def asked_of(order: ArrayOrder) -> Document:
    """Return the options and keys of submit that an order stands for; times are in minutes, as sbatch takes them."""
    return {
        "--sbatch=--array": order.spec,
        "--gpus-per-task": order.gpus_per_task,
        "--cpus": order.cpus,
        "--mem": order.mem,
        "--time": order.time_min,
        "--account": order.account,
        "--constraint": order.constraint,
        "--sbatch": [f"--{key}" if value is True else f"--{key}={value}" for key, value in order.extra_sbatch.items()],
        "--sbatch=--job-name": order.name,
        "submit.setup": mask_words(order.setup),
        "submit.requeues": order.requeues,
        "submit.merge_account": order.merge_account,
        "submit.merge_mem": order.merge_mem,
        "submit.merge_time": order.merge_time_min,
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the options of submit that differ, each with both values; None: the option was not given."""
    return [
        f"{option} was {_option_text(then.get(option))}, now {_option_text(now.get(option))}"
        for option in now
        if then.get(option) != now.get(option)
    ]


def submit_command(cluster: str, run_arguments: Sequence[str], asked: Mapping[str, Any]) -> Command:
    """Return the ``badcjobs submit`` that repeats a submission, without options that have their default value."""
    gpus = asked["--gpus-per-task"]  # the defaults of cores and memory depend on it
    defaults = asked_of(ArrayOrder(Path(), (), tasks=1, cpus=default_cpus(gpus), mem=default_mem(gpus)))
    words, of_run = split_run_words(run_arguments[1:])
    words.append(f"--cluster={cluster}")
    for option, value in asked.items():
        if value is None or value == defaults.get(option):
            continue
        if option.startswith("submit."):
            words.append(f"--config={option}={value_text(value)}")
        elif isinstance(value, list):
            words += [f"{option}={part}" for part in value]
        else:
            words.append(f"{option}={value}")
    if of_run:
        words += ["--", *of_run]
    return ("badcjobs", "submit", *words)


def split_run_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return which words of a ``badcjobs run`` stand before -- (SOURCE, --out, --config), and its options after it."""
    before = [word for word in words if not word.startswith("--") or word.startswith(("--out=", "--config="))]
    return before, [word for word in words if word not in before]


def with_words(command: Sequence[str], *more: str) -> Command:
    """Return a ``badcjobs submit`` with more options of its own: before --."""
    at = command.index("--") if "--" in command else len(command)
    return (*command[:at], *more, *command[at:])


def _option_text(value: Any) -> str:
    if value is None or value == []:
        return "not given"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


# --- the traces of a job ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trace:
    """What the run folder has about one job; empty for a job that was submitted with sbatch directly."""

    emulated: bool = False
    command: Command = ()  # the badcjobs submit command; empty: not known
    logs: Mapping[int, Path] = field(default_factory=dict)  # by array index
    notes: Mapping[int, str] = field(default_factory=dict)  # what an emulation has written about each array index

    def line(self, *more: str) -> str:
        """Return the command to paste, with more options; empty: it is not known."""
        return shell_line(*with_words(self.command, *more)) if self.command else ""

    def log_of(self, index: int) -> str | None:
        """Return the log of an array task; None: not known, or not readable."""
        log = self.logs.get(index)
        return str(log) if log is not None and os.access(log, os.R_OK) else None


def find_trace(out: Path, job_id: str) -> Trace:
    """Return the traces of a job in a run folder; an empty number: of an emulation that has started no task."""
    emulation = read_optional(rows_in(out, job_id), partial(_emulation_of, out))
    if emulation is not None:
        return emulation
    record = _record_in(out)
    command = emulated_command(out)
    if record is None and not job_id:
        return Trace(bool(command), _for_folder(command, out))
    if record is None or record.job.job_id != job_id:
        return Trace()
    logs = {index: out / "logs" / f"{job_id}_{index}_0_log.out" for index in record.job.indices}
    return Trace(False, _command_of(record, out), logs)


def _emulation_of(out: Path, document: Document) -> Trace:
    """Return the trace of an emulation; ``document`` has the states of its tasks."""
    goes_on = is_emulated_now(out)
    logs = {}
    notes = {}
    for row in document["tasks"]:
        index = int(row["index"])
        log = Path(row["log"])  # a script may have put it in another folder, where it stays
        here = out / "logs" / log.name
        logs[index] = here if os.access(here, os.F_OK) else log
        notes[index] = _NOTES.get((str(row["state"]), goes_on)) or str(row.get("note") or NO_NOTE)
    return Trace(True, _for_folder(emulated_command(out), out), logs, notes)


def is_emulation_over(out: Path, job_id: str) -> bool:
    """Say whether this job was emulated and the emulation is over; an empty number: one that has started no task."""
    emulated = os.access(rows_in(out, job_id), os.F_OK) if job_id else bool(emulated_command(out))
    return emulated and not is_emulated_now(out)


def find_unbegun(out: Path) -> CutShort | None:
    """Return what to do when no task of a run has published anything; None: no task is known."""
    unfinished = find_cut_short(out) or find_idle_emulation(out)
    if unfinished is not None:
        return unfinished
    look = shell_line("badcjobs", "monitor", out)
    nothing_yet = "none of its tasks has published anything yet"
    record = _record_in(out)
    if record is not None:
        return CutShort(f"job {record.job.job_id} was submitted; {nothing_yet}", look)
    if is_emulated_now(out):
        return CutShort(f"an emulation is running; {nothing_yet}", look)
    return None


def find_idle_emulation(out: Path) -> CutShort | None:
    """Return the command that repeats an emulation that is over; None: there is none. Use it when no task is known."""
    if not is_emulation_over(out, ""):
        return None
    line = find_trace(out, "").line()
    if not line:
        return None
    return CutShort("no task is running and none will start: the emulation is over", line)


def rows_in(out: Path, job_id: str) -> Path:
    """Return the file in which an emulation keeps the states of its tasks; always in the folder ``logs``."""
    return out / "logs" / f"{PurePath(job_id).name}.json"


def _record_in(out: Path) -> Record | None:
    return read_optional(file_in(out), _record_of)


def find_cut_short(out: Path) -> CutShort | None:
    """Return what an interrupted submit has left undone, from its files, without asking Slurm; None: nothing."""
    intent = read_intent(out)
    if intent is None:
        return None
    _, intended = intent
    text = "a submit was interrupted here, or is still running; the same command does the rest"
    return CutShort(text, shell_line(*_command_of(intended, out)) or "the same badcjobs submit")


def _command_of(record: Record, out: Path) -> Command:
    if record.asked is None:
        return ()
    return _for_folder(submit_command(record.cluster, record.run_arguments, record.asked), out)


# --- run folders that were moved or copied ----------------------------------------------------------------------------


def _for_folder(command: Sequence[str], out: Path) -> Command:
    """Return a command whose ``--out`` is the folder in which it was found, which may have been moved.

    A command whose secrets were hidden is of no use: it is not known.
    """
    if any(HIDDEN in word for word in command):
        return ()

    return tuple(f"{_OUT}{out.absolute()}" if word.startswith(_OUT) else word for word in command)
