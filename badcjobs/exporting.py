"""Takes tables out of a task or job database for others: which file, which tables, in which form, to where."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.out_of_date import find_news
from badcjobs.paths import RunFolder
from badcjobs.store.exports.badc_chunks import write_chunks
from badcjobs.store.exports.badc_summary import write_resume_summary
from badcjobs.store.exports.badc_telemetry import write_telemetry
from badcjobs.store.exports.fresh_file import fresh_file, make_folder
from badcjobs.store.exports.parquet import column_types, require_pyarrow
from badcjobs.store.exports.row_writers import batch_size, rows_written_to
from badcjobs.store.exports.tables import (
    Selection,
    check_columns,
    check_tables,
    has_time,
    list_tables,
    open_for_export,
    select,
)
from badcjobs.store.exports.window import Window

Progress = Callable[[str, int], None]  # table, rows so far


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """What somebody wants to have; ``output`` None: on stdout."""

    source: Path
    form: str
    output: Path | None
    tables: tuple[str, ...] = ()
    everything: bool = False
    columns: tuple[str, ...] | None = None
    window: Window = field(default_factory=Window)

    @property
    def needs_folder(self) -> bool:
        return self.everything or len(self.tables) > 1 or self.form == "badc"

    def command_line(self) -> str:
        """Return the command that orders this, ready to paste."""
        words = ["badcjobs", "export", str(self.source), "--format", self.form]
        for option, values in (
            ("--table", self.tables),
            ("--columns", () if self.columns is None else (",".join(self.columns),)),
            ("--from", () if self.window.from_ms is None else (str(self.window.from_ms),)),
            ("--to", () if self.window.to_ms is None else (str(self.window.to_ms),)),
        ):
            words += [word for value in values for word in (option, value)]
        return shlex.join([*words, *(["--all"] if self.everything else []), "-o", str(self.output or "-")])


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """What was written: a file, or for BADC's chunks the folder with all of theirs."""

    path: str
    table: str
    rows: int


def export(
    order: ExportOrder,
    stdout: BinaryIO,
    progress: Progress = lambda table, rows: None,
    note: Callable[[str], None] = lambda remark: None,
) -> list[ExportedFile]:
    """Write what is ordered and say what that was; the database is only read.

    ``note`` is told that task databases have changed since they were merged.
    """
    database = find_database(order.source)
    _check(order, database)
    if order.form == "parquet":
        require_pyarrow()
    with open_for_export(database) as db:
        if news := find_news(db, database):
            note(news)
        if order.form == "badc":
            return _export_badc(db, order, progress)
        return _export_tables(db, order, database, stdout, progress)


def find_database(given: Path) -> Path:
    """Return the job database of a run folder, or the file itself."""
    if given.is_dir():
        database = RunFolder(given).job_database
        if not database.is_file():
            raise DatabaseProblem(
                f"{given} has no job.sqlite", why="it is not a run folder, or not merged", fix=f"badcjobs merge {given}"
            )
        return database
    if not given.exists():
        raise DatabaseProblem(f"{given} does not exist", fix=f"ls {given.parent}")
    return given


def _check(order: ExportOrder, database: Path) -> None:
    several = order.everything or len(order.tables) > 1
    mistakes = []
    if order.form == "badc" and (order.tables or order.everything or order.columns is not None):
        mistakes.append("--format badc has files of its own: it takes no --table, --all or --columns")
    elif order.everything and order.tables:
        mistakes.append("--all and --table exclude each other")
    elif several and order.columns is not None:
        mistakes.append("--columns goes with one table")
    if order.output is None and order.needs_folder:
        mistakes.append("several files do not fit into stdout: -o must be a folder")
    if order.output is not None and order.output.exists() and order.output.samefile(database):
        mistakes.append(f"-o {order.output} is the database itself")
    if mistakes:
        raise BadInput("; ".join(mistakes), fix="badcjobs export --help")
    if order.needs_folder and order.output is not None and order.output.exists() and not order.output.is_dir():
        elsewhere = replace(order, output=order.output.with_name(f"{order.output.name}-tables"))
        raise BadInput(
            f"{order.output} cannot be written", why="it is a file; this needs a folder", fix=elsewhere.command_line()
        )


# --- tables -----------------------------------------------------------------------------------------------------------


def _export_tables(
    db: sqlite3.Connection, order: ExportOrder, database: Path, stdout: BinaryIO, progress: Progress
) -> list[ExportedFile]:
    selections = _select(db, order, database)  # all mistakes before the first file
    if order.output is None:
        return [ExportedFile("-", selections[0].table, _write(db, selections[0], order.form, stdout, progress))]
    if order.needs_folder:
        make_folder(order.output)
    exported = []
    for selection in selections:
        target = order.output
        if target.is_dir():
            target /= f"{selection.table}.{order.form}"
        form = "jsonl" if order.form == "json" and target.suffix == ".jsonl" else order.form
        with fresh_file(target) as out:
            rows = _write(db, selection, form, out, progress)
        exported.append(ExportedFile(str(target), selection.table, rows))
    return exported


def _select(db: sqlite3.Connection, order: ExportOrder, database: Path) -> list[Selection]:
    if order.everything:  # what has no time describes the rest: it comes whole
        windows = {table: order.window if has_time(db, table) else None for table in list_tables(db)}
        return [select(db, table, window=window) for table, window in windows.items()]
    tables = dict.fromkeys(order.tables or ("detection",))
    check_tables(db, list(tables), database)
    if order.columns is not None:
        for table in tables:
            check_columns(db, table, order.columns, replace(order, columns=None).command_line())
    return [select(db, table, order.columns, order.window) for table in tables]


def _write(db: sqlite3.Connection, selection: Selection, form: str, out: BinaryIO, progress: Progress) -> int:
    types = column_types(db, selection) if form == "parquet" else dict.fromkeys(selection.columns, "")
    rows = 0
    with rows_written_to(out, form, types) as write:
        for batch in selection.batches(db, batch_size(form)):
            write(batch)
            rows += len(batch)
            progress(selection.table, rows)
    return rows


# --- BADC -------------------------------------------------------------------------------------------------------------


def _export_badc(db: sqlite3.Connection, order: ExportOrder, progress: Progress) -> list[ExportedFile]:
    folder = order.output
    assert folder is not None  # _check has seen to it
    make_folder(folder)
    telemetry = folder / "telemetry.jsonl"
    chunks = write_chunks(db, folder, order.window, lambda rows: progress("chunk", rows))
    lines = write_telemetry(db, folder, telemetry, order.window, lambda rows: progress("attempt", rows))
    summary, jobs = write_resume_summary(db, folder, telemetry, order.window)
    return [
        ExportedFile(str(folder), "chunk", chunks),
        ExportedFile(str(telemetry), "attempt", lines),
        ExportedFile(str(summary), "chunk", jobs),
    ]
