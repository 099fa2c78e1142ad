"""submitted.json in the run folder: what was handed in there last, so that the same command finds its job again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

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


def file_in(out: Path) -> Path:
    """Return where the record of a run folder is."""
    return out / "submitted.json"


def write_record(out: Path, record: Record) -> None:
    """Put the record in its place, whole or not at all."""
    path = file_in(out)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_record(out: Path) -> Record | None:
    """Return what was handed in last; None: nothing was."""
    path = file_in(out)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        job = values["job"]
        values["job"] = Submitted(**{**job, "indices": tuple(job["indices"])})
        return Record(**{**values, "run_arguments": tuple(values["run_arguments"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(
            f"{path} is not as badcjobs wrote it", why=str(error), fix=f"mv {path} {path}.old   (forgets that job)"
        ) from error
