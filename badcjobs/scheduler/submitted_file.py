"""submitted.json in the run folder: what was handed in there last, so that the same command finds its job again.

Beside it, for the moment in which Slurm has the array and nobody has written down its number yet, ``.submitting.json``:
who is killed then, has left the name of the script, by which Slurm knows the job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.model import Submitted


@dataclass(frozen=True, slots=True)
class Record:
    """One submission."""

    cluster: str
    job: Submitted
    run_arguments: tuple[str, ...]
    chunks: int  # rows of the source
    submitted_at_ms: int
    asked: dict[str, Any] | None = None  # the other options of submit; None: an earlier version did not keep them
    listed: int | None = None  # how many manifests its list of manifests names; None: it is none, or nobody has kept it
    left: int | None = None  # how many of the chunks were left when it was submitted; None: all, or nobody has counted


@dataclass(frozen=True, slots=True)
class Intent:
    """A submission that is about to be: its record without a number, and the script that sbatch gets."""

    script: Path
    record: Record

    def is_of(self, record: Record | None) -> bool:
        """Say whether this record is of the same submission."""
        return record is not None and record.submitted_at_ms == self.record.submitted_at_ms


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


def write_intent(out: Path, intent: Intent) -> None:
    """Write down what is to be submitted now."""
    _write(intent_in(out), {"script": str(intent.script), "record": asdict(intent.record)})


def read_intent(out: Path) -> Intent | None:
    """Return what was being submitted when somebody was killed; None: nothing was."""
    try:
        values = json.loads(intent_in(out).read_text(encoding="utf-8"))
        return Intent(Path(values["script"]), _record_of(values["record"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # there is none; or its disk was full, and then nothing was submitted


def last_submission(out: Path, find: Callable[[Path], str | None]) -> Record | None:
    """Return what was handed in last, also where nobody has written down its number: ``find`` asks for it by script."""
    record, intent = read_record(out), read_intent(out)
    if intent is None or intent.is_of(record) or (job_id := find(intent.script)) is None:
        return record
    return replace(intent.record, job=replace(intent.record.job, job_id=job_id))


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
