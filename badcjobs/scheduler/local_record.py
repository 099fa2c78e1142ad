"""What the scripts in slurm/ are to Slurm: they ask a badcjobs where its database is, and write beside it how it ended.

The emulation need not guess, as a task epilog must: it has ended the attempt itself, and says so in Slurm's words.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from badcjobs.scheduler.local_environment import Identity

_NOTES = "BADCJOBS_SLURM_NOTES"  # a badcjobs adds the path of its task database to this file


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """One attempt of a task, over."""

    restart: int
    state: str  # REQUEUED, PREEMPTED, … of one that was started again
    exit_code: int | None
    slurm_exit_code: str  # the same as Slurm writes it: code and signal, 75:0 or 0:9
    started_at_s: int
    ended_at_s: int


def invite(folder: Path, who: Identity) -> dict[str, str]:
    """Lay out the notes of an attempt in its own folder; return the variable that tells where they are."""
    notes = _notes(folder, who)
    notes.touch()
    return {_NOTES: str(notes)}


def write_records(folder: Path, who: Identity, node: str, end: AttemptEnd) -> None:
    """Write an end beside the databases that an attempt has told of; merge reads it, and can do without."""
    task = {"job_id": str(who.job_id), "array_index": who.index, "node": node}
    told = {**task, **asdict(end), "exit_code": end.slurm_exit_code, "written_by": "emulation"}
    try:
        for database in map(Path, _notes(folder, who).read_text().splitlines()):
            if database.suffix == ".sqlite" and database.parent.name == "tasks":
                draft = database.with_suffix(".slurm.json.part")
                draft.write_text(json.dumps(told) + "\n")
                draft.replace(database.with_suffix(".slurm.json"))
    except (OSError, ValueError):
        pass  # a full disk, or notes that are none: then nobody knows, and the work goes on


def _notes(folder: Path, who: Identity) -> Path:
    return folder / f"{who.own_id}.notes"  # by the number before the dot a badcjobs knows them for its own
