"""Merges many task databases into one job database. Read ``merge`` first.

Files that an earlier merge has read and that have not changed since are not opened. The rows of files that are now
gone, damaged or not given stay in the job database. The other modules: source_files (find, examine and salvage files),
merge_writer (write the rows of each task, and choose between several results of one chunk).
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.locks import Holder, Lease, this_process
from badcjobs.model import TaskKey, stable_id
from badcjobs.paths import shell_line
from badcjobs.seams import Clock
from badcjobs.store.atomic_write import (
    read_publication,
    remove_unfinished,
    replacing,
    scratch_folder,
    sync_file,
    unfinished_name,
)
from badcjobs.store.connect import (
    SQLITE_MAGIC,
    UNREADABLE,
    find_damage,
    grouped,
    is_job_database,
    open_sealed,
    read_value,
    refuse_strange_tables,
    schema_problem,
    transaction,
)
from badcjobs.store.job_schema import open_draft
from badcjobs.store.merge_writer import FileChanged, JobWriter, count_rows
from badcjobs.store.read_tasks import parse_settings
from badcjobs.store.schema import APPLICATION_ID, DERIVED
from badcjobs.store.slurm_ends import find_ends, has_new_ends, read_ends, write_ends
from badcjobs.store.source_files import (
    HOLDING,
    STILL_WRITTEN,
    Intake,
    NoTaskDatabases,
    SourceFile,
    check_bytes,
    check_inputs,
    examine,
    find_task_databases,
    full_path,
    read_source_files,
    skipped,
)

log = logging.getLogger(__name__)

# --- one merge at a time ----------------------------------------------------------------------------------------------


class MergeLease(Lease):
    """The lease of the merge that writes a job database; the next one waits for its end."""

    def __init__(self, target: Path, clock: Clock, tell: Callable[[str], None]) -> None:
        super().__init__(target.parent, f"merge-{target.name}", this_process(clock), clock)
        self._tell = tell

    def on_rival(self, holder: Holder | None, name: str) -> None:
        """Say which merge this one waits for."""
        node, pid = ("an unknown node", "unknown") if holder is None else (holder.name, holder.pid)
        self._tell(f"another merge is running on {node}, process {pid}; waiting for it")


@contextmanager
def merge_lock(target: Path, clock: Clock, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the lease of a job database; give a function to call before anything is replaced."""
    lease = MergeLease(target, clock, tell)

    def raise_if_lost() -> None:
        lease.beat()  # a merge that was suspended for a while counts as dead
        if lease.lost:
            raise DatabaseProblem(
                f"another merge has taken over {target.name} while this one was suspended",
                why="this merge has replaced nothing",
                fix="run the same command again",
            )

    lease.wait()
    try:
        yield raise_if_lost
    finally:
        lease.release()


# --- the job database of an earlier merge -----------------------------------------------------------------------------


def read_old_job(target: Path) -> tuple[str, tuple[SourceFile, ...]]:
    """Return the state of the old job database (none, current or damaged), and the files it lists.

    Refuse to replace a file that is not a job database of ours, or has a newer schema.
    """
    if not target.exists():
        return "none", ()
    try:
        with target.open("rb") as file:
            if file.read(16) != SQLITE_MAGIC:
                if target.suffix not in (".sqlite", ".db"):
                    raise _wrong_target(f"{target} is not a database")
                raise sqlite3.DatabaseError("not a SQLite database")  # perhaps its first page is damaged
        with closing(open_sealed(target)) as db:
            if read_value(db, "PRAGMA application_id") != APPLICATION_ID or not is_job_database(db):
                raise _wrong_target(f"{target} is not a job database")
            if complaint := schema_problem(db):
                raise _wrong_target(f"{target} has {complaint}")
            return "current", read_source_files(db)
    except UNREADABLE as error:
        return "damaged", _damaged(target, error)


def _damaged(target: Path, why: object) -> tuple[SourceFile, ...]:
    """Return the list of files of a job database that replaces a damaged one."""
    reason = f"the earlier job database could not be read ({why}); it was renamed, and a new one was made"
    return (SourceFile(damaged_name(target).name, None, "skipped", reason),)


def _find_damage(target: Path) -> str | None:
    with closing(open_sealed(target)) as db:
        return find_damage(db)


def _wrong_target(problem: str) -> DatabaseProblem:
    fix = "badcjobs merge RUN_FOLDER -o another/name.sqlite"
    return DatabaseProblem(problem, why="merge would replace it", fix=fix)


def damaged_name(target: Path) -> Path:
    """Return a free name for a damaged job database, which may have rows of task files that are gone."""
    for number in count(1):
        name = target.with_name(f"{target.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not name.exists():
            break
    return name


# --- the merge ------------------------------------------------------------------------------------------------------

_LOOK_AHEAD = 3
_TRIES = 10
_THREADS = 1  # measured: more threads slow down the copying more than they help


class MergeOrder(NamedTuple):
    """The inputs, the target and the callbacks of a merge."""

    inputs: Sequence[Path]
    target: Path
    mix: bool = False  # files of different runs, and folders that are no run
    progress: Callable[[int, int, int], None] = lambda files, of, rows: None
    tell: Callable[[str], None] = lambda text: None


class MergeOutcome(NamedTuple):
    """What a merge has done."""

    files: tuple[SourceFile, ...]  # all files of the job database
    read: int  # how many files were opened this time
    given: frozenset[str]  # the files that this merge was asked to merge


def merge(order: MergeOrder, clock: Clock) -> MergeOutcome:
    """Bring the job database up to date with the given files; the old one stays until the new one is complete."""
    check_inputs(order.inputs)
    if not order.mix:
        refuse_no_runs(order.inputs)
    if order.target.is_dir():
        raise DatabaseProblem(f"{order.target} is a folder", fix=f"badcjobs merge … -o {order.target}/job.sqlite")
    try:
        order.target.parent.mkdir(parents=True, exist_ok=True)
        with merge_lock(order.target, clock, order.tell) as check:
            return _merge(order, check)
    except (OSError, sqlite3.Error) as error:
        fix = "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        raise DatabaseProblem(f"{order.target} cannot be written", why=str(error), fix=fix) from error


def _merge(order: MergeOrder, check: Callable[[], None]) -> MergeOutcome:
    remove_unfinished(order.target)
    files_found = find_task_databases(order.inputs, order.target)
    state, files = read_old_job(order.target)
    if not files_found and not files:
        why = "task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite"
        fix = "badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)"
        if any(place.joinpath("run.toml").is_file() for place in order.inputs):
            why = "no task of this run has begun to work"
            fix = "the command of this run again: it says why"
        raise NoTaskDatabases("no task database in " + ", ".join(map(str, order.inputs)), why=why, fix=fix)
    known = {file.path: file for file in files}
    changed = [file for file in files_found if _has_changed(file, known.get(file.path))]
    if not order.mix:
        readable = [file.file for file in changed if file.reason is None]
        refuse_different_runs(readable, order.inputs, order.target if state == "current" else None)
    # Forget skipped files that are gone, and skipped folders that can be read now. The rows of other files that are
    # gone stay.
    unread = [(file.path, order.target.parent / file.path) for file in files if file.status == "skipped"]
    gone = {name for name, path in unread if not os.path.lexists(path) or (path.is_dir() and os.access(path, os.R_OK))}
    old = {path: file for path, file in known.items() if state == "damaged" or path not in gone}
    if state != "current" or changed or len(old) < len(known) or has_new_ends(order.target, files):
        try:
            files = _bring_up_to_date(order, state, old, changed, check)
        except UNREADABLE as error:
            if state != "current" or not (damage := _find_damage(order.target)):
                raise
            log.debug("%s: %s", order.target, error)
            old = {file.path: file for file in _damaged(order.target, damage)}
            changed = files_found
            files = _bring_up_to_date(order, "damaged", old, changed, check)
    return MergeOutcome(files, len(changed), frozenset(file.path for file in files_found))


def _has_changed(file: Intake, merged: SourceFile | None) -> bool:
    if merged is None or merged.status == "recovered" or file.reason is not None:
        return True  # a log beside a live file may have changed
    try:
        return not merged.is_same(file.file.stat())
    except OSError:
        return merged.size_bytes is not None  # no longer readable: keep its rows, and record that


def _bring_up_to_date(
    order: MergeOrder,
    state: str,
    old: Mapping[str, SourceFile],
    changed: list[Intake],
    check: Callable[[], None],
) -> tuple[SourceFile, ...]:
    """Write the changed files into a copy of the job database, or into a new one, and let it replace the old one."""
    # In the order of the key of the largest tables, so that rows are appended.
    changed.sort(key=lambda file: stable_id(os.fsencode(file.file.stem).decode(errors="replace")))
    target = order.target
    draft = unfinished_name(target)
    with scratch_folder(target) as scratch, replacing(target, draft):
        if state == "current":
            shutil.copyfile(target, draft)
        with closing(open_draft(draft, new=state != "current")) as db:
            files = _write(db, order, old, _examined(changed, scratch), of=len(changed))
        sync_file(draft)
        check()
        if state == "damaged":
            os.replace(target, damaged_name(target))  # noqa: PTH105
    return files


def _write(
    db: sqlite3.Connection,
    order: MergeOrder,
    old: Mapping[str, SourceFile],
    intakes: Iterable[Intake],
    *,
    of: int,
) -> tuple[SourceFile, ...]:
    ends = read_ends(db)
    writer = JobWriter(db, old)
    rows = 0
    for number, intake in enumerate(intakes, 1):
        _add_file(writer, intake)
        rows += sum(intake.counts.values())
        order.progress(number, of, rows)
    files = writer.finish()
    if not any(file.status in HOLDING for file in files):
        raise DatabaseProblem(
            "none of the given files is a readable task database",
            why="\n".join(f"{file.path}: {file.reason}" for file in files),
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    with transaction(db):
        write_ends(db, ends)  # for tasks whose rows were just written again
        write_ends(db, find_ends(db, files, order.target.parent))
    return files


def _add_file(writer: JobWriter, intake: Intake) -> None:
    """Give a file to the writer; examine it again if it was published meanwhile.

    An isolation boundary: an error in one file does not stop the merge. Its rows are rolled back, and it is skipped.
    """
    for _ in range(_TRIES):
        try:
            writer.add_file(intake)
            break
        except FileChanged:
            same_file = Intake(intake.path, None, "skipped", file=intake.file)
            intake = examine(same_file, intake.scratch)
        except OSError:  # no space for a copy
            raise
        except Exception as error:
            if writer.is_cause(error):
                raise
            intake = skipped(intake, f"damaged: {error}")
    else:
        writer.add_file(replace(skipped(intake, STILL_WRITTEN), size_bytes=None))
    shutil.rmtree(intake.scratch, ignore_errors=True)  # few files need it


def _examined(files: Sequence[Intake], scratch: Path) -> Iterator[Intake]:
    """Examine the files in order, a few ahead of the one that is being merged."""
    waiting: deque[Future[Intake]] = deque()
    with ThreadPoolExecutor(_THREADS, "examine") as pool:
        try:
            for number, file in enumerate(files):
                waiting.append(pool.submit(examine, file, scratch / str(number)))
                if len(waiting) > _LOOK_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


# --- the runs that the given folders and files belong to: only with --mix several ------------------------------------

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


# --- removing merged files --------------------------------------------------------------------------------------------


class Removal(NamedTuple):
    """Which files were removed, and which were kept and why."""

    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def remove_merged_files(job_database: Path, given: Collection[str]) -> Removal:
    """Count the rows of every task in the finished job database; remove the files of tasks that are complete there.

    Remove only files ``given`` to this merge, undamaged, and never the last record of what is done.
    """
    removed = []
    left = []
    try:
        with closing(open_sealed(job_database)) as db:
            files = read_source_files(db)
            holders = {file.task_id: file for file in files if file.status == "merged"}
            for file in (file for file in files if file.path in given):
                path = job_database.parent / file.path
                if not path.exists():
                    continue
                why_not = _why_not(db, file, holders.get(file.task_id), path, job_database)
                if why_not is None:
                    path.unlink()
                    path.with_suffix(".slurm.json").unlink(missing_ok=True)
                    removed.append(file.path)
                else:
                    left.append((file.path, why_not))
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"not all merged files could be removed: {error}") from error
    return Removal(tuple(removed), tuple(left))


def _why_not(
    db: sqlite3.Connection,
    file: SourceFile,
    holder: SourceFile | None,
    path: Path,
    job_database: Path,
) -> str | None:
    if file.status not in ("merged", "copy") or holder is None or file.task_id is None:
        return file.reason or f"it was {file.status}"
    if file.checksum is None or file.checksum != holder.checksum:
        return "it is not the file whose rows are in the job database"
    if read_value(db, "SELECT verdict FROM task WHERE task_id = ?", file.task_id) is None:
        return "its task had not ended when it was merged"
    counted = sum(count_rows(db, file.task_id, leave_out=DERIVED).values())
    if counted != holder.rows:
        return f"{counted:,} of its {holder.rows:,} rows are in the job database"
    if not file.is_same(path.stat()):
        return "it has changed since it was merged"
    run = path.parent.parent
    if path.parent.name == "tasks" and full_path(run / "job.sqlite") != full_path(job_database):
        return f"a later run looks for finished work only in {run}/job.sqlite; merge into that file first"
    return None
