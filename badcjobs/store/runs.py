"""Says which runs the given folders and files belong to: ``merge`` mixes runs only with ``--mix``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import TaskKey
from badcjobs.paths import shell_line
from badcjobs.store.atomic_write import read_publication
from badcjobs.store.connect import UNREADABLE, grouped, open_sealed, refuse_strange_tables
from badcjobs.store.read_tasks import parse_settings
from badcjobs.store.source_files import check_bytes, full_path

_MOST_RUNS = 20
_FACTS = "SELECT engine, value FROM task, meta WHERE key = 'settings'"
_MERGED = """
    SELECT s.path, t.engine, m.value FROM task t
    JOIN source_file s USING (task_id)
    LEFT JOIN task_meta m ON m.task_id = t.task_id AND m.key = 'settings' GROUP BY t.job_id"""


class _Run(NamedTuple):
    files: Path
    folder: Path | None  # with its run.toml; None: not known
    facts: tuple[str, str, str] | None  # --out, engine and source, as its tasks say; None: not known

    @classmethod
    def of(cls, file: Path, engine: object = None, settings: str | None = None) -> _Run:
        folder = next((above for above in file.parents[:3] if (above / "run.toml").is_file()), None)
        values = parse_settings(settings)
        facts = (
            str(values.get("out")),
            str(engine),
            ", ".join(map(str, values.get("source") or ["not known"])),
        )
        return cls(folder or file.parent, folder and folder.resolve(), facts if values else None)

    def is_other(self, run: _Run) -> bool:
        """Say whether it is another run; a run may have been moved, and files of a run copied."""
        if self.folder is not None and self.folder == run.folder:
            return False
        return self.facts != run.facts if self.facts and run.facts else bool(self.folder and run.folder)


def refuse_no_runs(inputs: Iterable[Path]) -> None:
    """Refuse a folder that is no run; the error names the runs below it."""
    for place in (place for place in inputs if place.is_dir() and not _is_run(place)):
        runs = _find_runs(place)
        if runs or not (any(place.glob("*.sqlite")) or (place / "logs").is_dir()):
            why = f"it has neither run.toml nor tasks/; runs below it: {len(runs) or 'none'}"
            fix = _commands(runs, [place]) if runs else shell_line("ls", _near(place))
            raise BadInput(f"{place} is not a run folder", why=why, fix=fix)


def _is_run(folder: Path) -> bool:
    signs = (folder / name for name in ("run.toml", "tasks", "submitted.json"))
    return folder.absolute().name == "tasks" or any(sign.exists() for sign in signs)


def _find_runs(folder: Path) -> list[Path]:
    """Return the runs up to four folders below."""
    runs = set[Path]()
    for depth in range(1, 5):
        runs |= {file.parent.parent for file in folder.glob("*/" * depth + "tasks/*.sqlite")}
    return sorted(runs)[:_MOST_RUNS]


def refuse_different_runs(files: Iterable[Path], inputs: Sequence[Path], job: Path | None) -> None:
    """Refuse files of different runs, or of other runs than those that the job database has."""
    runs = list[_Run]()
    if job is not None:
        with suppress(*UNREADABLE), closing(open_sealed(job)) as db:
            runs = [_Run.of(full_path(job.parent / path), *facts) for path, *facts in db.execute(_MERGED)]
    most_runs = max(1, len(runs))
    keys = ((file, TaskKey.parse(file.stem)) for file in files)
    of_one_job = grouped(((file.parent, key.job_id if key else file.stem), file) for file, key in keys)
    for run in filter(None, map(_read_run, of_one_job.values())):
        if all(run.is_other(one) for one in runs):
            runs.append(run)
    if len(runs) > most_runs:
        why = [f"{_near(run.files)}: engine {run.facts[1]}, source {run.facts[2]}" for run in runs if run.facts]
        fix = _commands([run.files for run in runs], inputs)
        raise BadInput(f"these are files of {len(runs)} runs", why="\n".join(why), fix=fix)


def _read_run(files: Sequence[Path]) -> _Run | None:
    """Return the run of files of one job; only an undamaged file is believed."""
    for file in (file for file in files if file.is_file()):
        with suppress(OSError, DatabaseProblem, *UNREADABLE):
            check_bytes(file)
            if read_publication(file) is not None:
                with closing(open_sealed(file)) as db:
                    refuse_strange_tables(db)
                    return _Run.of(file, *(db.execute(_FACTS).fetchone() or ()))
    return None


def _commands(runs: Iterable[Path], inputs: Iterable[Path]) -> str:
    """Return a command to paste for each run, and one for all of them together."""
    lines = [shell_line("badcjobs", "merge", _near(run)) for run in runs]
    all_runs = shell_line("badcjobs", "merge", "--mix", *map(_near, inputs), "-o", "all.sqlite")
    return "\n       ".join([*lines, f"{all_runs}   (all in one database)"])


def _near(path: Path) -> Path:
    """Return a path below the working folder as a relative one."""
    near = os.path.relpath(path)
    return path if near.startswith("..") else Path(near)
