"""Merging: many task databases → one job database, built aside and renamed into place.

Every attempt is kept as history; a chunk has one final state. The rule: done beats poison beats failed beats pending
beats skipped; among equals the one that ended last wins. Only the winner's detections are kept. What an earlier merge
had, and no file has any more, stays.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs import __version__
from badcjobs.errors import DatabaseProblem
from badcjobs.store.connect import open_sealed, read_only_uri
from badcjobs.store.look_back import complaint
from badcjobs.store.publish import move_into_place
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION, SOURCE_FILE, TABLES, columns_of
from badcjobs.store.views import VIEWS

_RANK = "CASE {0}.status WHEN 'done' THEN 4 WHEN 'poison' THEN 3 WHEN 'failed' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END"
_STRENGTH = f"({_RANK}, coalesce({{0}}.ended_at_ms, 0), {{0}}.task_id)"

# Read by task, device and time: rows lie in that order, so that a task's samples are neighbours.
_ORDERED_BY = {"sample": "task_id, device_id, at_ms", "host_sample": "task_id, at_ms"}

KEPT = "kept"

_INDEXES = (
    "CREATE INDEX chunk_by_task ON chunk (task_id)",
    "CREATE INDEX gap_by_task ON gap (task_id)",
    "CREATE INDEX detection_by_chunk ON detection (recording_id, chunk_id)",
    "CREATE INDEX attempt_by_chunk ON attempt (recording_id, chunk_id)",
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file that merge looked at."""

    path: str
    status: str
    reason: str | None = None


def find_task_databases(inputs: Iterable[Path], target: Path) -> list[Path]:
    """Return the files to merge: those given, and every ``*.sqlite`` below the folders given, in a stable order."""
    found: set[Path] = set()
    for given in inputs:
        if given.is_dir():
            found.update(path for path in given.rglob("*.sqlite") if not path.name.startswith("."))
        elif given.exists():
            found.add(given)
        else:
            raise DatabaseProblem(f"{given} does not exist", fix="badcjobs merge RUN_FOLDER")
    found = {path for path in found if path.name != "job.sqlite" and path.absolute() != target.absolute()}
    if not found:
        raise DatabaseProblem(
            "no task database in " + ", ".join(str(given) for given in inputs),
            why="task databases are called tasks/<job>_<index>.r<restart>.<node>.sqlite",
            fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
        )
    return sorted(found)


def merge(files: Sequence[Path], target: Path, progress: Callable[[int, int], None]) -> list[SourceFile]:
    """Merge the files into ``target`` and return what became of each; the old target stays until the new is whole."""
    outcome = []
    with tempfile.TemporaryDirectory(prefix="badcjobs-merge-") as folder:
        local = Path(folder) / "job.sqlite"
        try:
            with closing(_create_job_database(local)) as db:
                for number, path in enumerate(files, 1):
                    outcome.append(_merge_one(db, path, target.parent))
                    progress(number, len(files))
                if target.exists():
                    outcome += _keep_what_only_the_old_one_has(db, target)
                _settle(db)
        except sqlite3.Error as error:
            raise DatabaseProblem(
                f"{target} cannot be made", why=f"{error}: {folder}", fix="TMPDIR=/a/folder/with/space badcjobs merge …"
            ) from error
        if not any(file.status == "merged" for file in outcome):
            raise DatabaseProblem(
                "none of the files given is a task database that can be read",
                why="\n".join(f"{file.path}: {file.reason}" for file in outcome),
                fix="badcjobs merge RUN_FOLDER   (the folder given as --out to badcjobs run)",
            )
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            move_into_place(local, target)
        except OSError as error:
            raise DatabaseProblem(
                f"{target} cannot be written",
                why=str(error),
                fix="badcjobs merge … -o /a/folder/you/can/write/job.sqlite",
            ) from error
    return outcome


def _create_job_database(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, uri=True)
    db.execute("PRAGMA page_size = 16384")
    db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file: only a rollback matters
    db.execute("PRAGMA synchronous = OFF")
    db.execute("BEGIN")
    for table in (*TABLES, SOURCE_FILE):
        db.execute(table.ddl(ordered_by=_ORDERED_BY.get(table.name)))
    for view in (*VIEWS.values(), _column_help()):
        db.execute(view)
    db.execute("INSERT INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    db.execute("COMMIT")
    return db


def _column_help() -> str:
    """Return the view that says what every column means; a view, because every table carries ``task_id``."""
    helps = [(t.name, column.name, column.help) for t in (*TABLES, SOURCE_FILE) for column in t.columns]
    lines = ("(" + ", ".join("'" + text.replace("'", "''") + "'" for text in row) + ")" for row in helps)
    return "CREATE VIEW column_help (table_name, column_name, help) AS VALUES\n" + ",\n".join(lines)


def _merge_one(db: sqlite3.Connection, path: Path, folder: Path) -> SourceFile:
    place, folder = path.absolute(), folder.absolute()
    shown = str(place.relative_to(folder)) if place.is_relative_to(folder) else str(path)
    reason = _trouble(db, path)
    task_id = None
    if reason is None:
        db.execute("ATTACH ? AS source", (read_only_uri(path, sealed=True),))
        db.execute("BEGIN")
        try:
            (task_id,) = db.execute("SELECT task_id FROM source.task").fetchone()
            _copy(db)
            db.execute("COMMIT")
        except (sqlite3.Error, TypeError) as error:
            if db.in_transaction:  # a full disk has rolled it back already
                db.execute("ROLLBACK")
            if _is_our_own(error, path):
                raise
            reason = f"damaged: {error}"
        db.execute("DETACH source")
    found = SourceFile(shown, "merged" if reason is None else "skipped", reason)
    stat = path.stat() if path.exists() else None  # None: a link to nothing, or gone since it was listed
    seen = (None, None) if stat is None else (stat.st_size, stat.st_mtime_ns)
    db.execute(
        "INSERT OR REPLACE INTO source_file VALUES (?, ?, ?, ?, ?, ?)",
        (found.path, task_id, found.status, found.reason, *seen),
    )
    return found


def _keep_what_only_the_old_one_has(db: sqlite3.Connection, old: Path) -> list[SourceFile]:
    """Take over tasks of the earlier job database whose files are gone or damaged by now, or were not given."""
    reason = complaint(old)
    if reason is not None:
        return [SourceFile(old.name, "skipped", f"the earlier job database: {reason}")]
    db.execute("ATTACH ? AS source", (read_only_uri(old, sealed=True),))
    db.execute("BEGIN")
    kept = db.execute(
        """SELECT path, task_id, size_bytes, mtime_ns FROM source.source_file
           WHERE task_id IN (SELECT task_id FROM source.task EXCEPT SELECT task_id FROM main.task)"""
    ).fetchall()
    outcome = []
    for path, task_id, size_bytes, mtime_ns in kept:
        _copy(db, task_id)
        now = db.execute("SELECT reason FROM main.source_file WHERE path = ?", (path,)).fetchone()
        reason = f"kept from the earlier merge; the file now: {now[0] if now else 'not given, or gone'}"
        db.execute(
            "INSERT OR REPLACE INTO main.source_file VALUES (?, ?, ?, ?, ?, ?)",
            (path, task_id, KEPT, reason, size_bytes, mtime_ns),
        )
        outcome.append(SourceFile(path, KEPT, reason))
    db.execute("COMMIT")
    db.execute("DETACH source")
    return outcome


def _is_our_own(error: Exception, path: Path) -> bool:
    """Say whether our scratch file failed, not the file being read: then going on would lose every file after it."""
    if "I/O" not in str(error):
        return "disk is full" in str(error)
    try:
        with closing(open_sealed(path)) as source:
            return bool(source.execute("PRAGMA quick_check").fetchone()[0] == "ok")
    except sqlite3.Error:
        return False


def _trouble(db: sqlite3.Connection, path: Path) -> str | None:
    """Return why a file is left out; None: it can be merged."""
    reason = complaint(path)
    if reason is not None:
        return reason
    try:
        with closing(open_sealed(path)) as source:
            row = source.execute("SELECT task_id, name FROM task").fetchone()
    except sqlite3.Error as error:
        return str(error)
    if row is None:
        return "it holds no task"
    twin = db.execute("SELECT path FROM source_file WHERE task_id = ? AND status = 'merged'", (row[0],)).fetchone()
    return f"the same task ({row[1]}) as {twin[0]}" if twin else None


def _copy(db: sqlite3.Connection, task_id: int | None = None) -> None:
    """Copy the rows of the attached file, or of one task in it."""
    which = "true" if task_id is None else f"task_id = {task_id:d}"
    for table in TABLES:
        if table.name in ("meta", "chunk"):
            continue
        names = ", ".join(columns_of(table.name))
        order = _ORDERED_BY.get(table.name, "rowid")
        rows = f"SELECT {names} FROM source.{table.name} WHERE {which} ORDER BY {order}"
        db.execute(f"INSERT OR REPLACE INTO main.{table.name} ({names}) {rows}")
    chunk_columns = columns_of("chunk")
    columns = ", ".join(chunk_columns)
    db.execute(
        f"""INSERT INTO main.chunk ({columns}) SELECT {columns} FROM source.chunk WHERE {which}
            ON CONFLICT (recording_id, chunk_id) DO UPDATE SET
                {", ".join(f"{name} = excluded.{name}" for name in chunk_columns)}
            WHERE {_STRENGTH.format("excluded")} > {_STRENGTH.format("chunk")}"""
    )


def _settle(db: sqlite3.Connection) -> None:
    """Drop the detections of attempts that did not win, then index what is left."""
    db.execute("BEGIN")
    db.execute(
        """DELETE FROM detection WHERE NOT EXISTS (
               SELECT 1 FROM chunk c WHERE c.recording_id = detection.recording_id
                  AND c.chunk_id = detection.chunk_id AND c.task_id = detection.task_id AND c.status = 'done')"""
    )
    for statement in _INDEXES:
        db.execute(statement)
    db.execute("COMMIT")
