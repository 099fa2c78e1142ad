"""Exports tables of a task or job database, and detections in the time of the recordings."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import BinaryIO

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import NamePattern, not_none
from badcjobs.paths import shell_line
from badcjobs.report.completeness import find_remarks
from badcjobs.report.job import find_job_database
from badcjobs.sources.recording_names import NameReader, gap_lines
from badcjobs.store.atomic_write import fresh_file, make_folder
from badcjobs.store.export_badc import area_names, count_finished, write_chunks, write_resume_summary, write_telemetry
from badcjobs.store.export_tables import (
    COLUMNS,
    VIEW,
    JobDetections,
    Row,
    Write,
    check_tables,
    list_tables,
    load_pyarrow,
    open_for_export,
    read_table,
    rows_written_to,
)

Progress = Callable[[str, int, int | None], None]  # table or "source", rows so far, of how many if that is known
ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
ALL, NAMELESS = "all_study_areas", "no_study_area"
_MOST_AREAS = 1000  # more means that the pattern matches something else: the lab has seven
_NAMED, _OTHERS_NAMED = 5, 20


@dataclass(frozen=True, slots=True)
class ExportOrder:
    """What to export; ``output`` None: to stdout."""

    source: Path
    form: str
    output: Path | None
    tables: tuple[str, ...] = ()  # as they are; "all": every table and view
    # Without tables: detections in the time of the recordings
    by_study_area: bool = False
    species: tuple[str, ...] = ()  # empty: all species
    min_score: float | None = None
    patterns: tuple[NamePattern, ...] = ()  # of the project file: read the paths of the recordings again
    time_zone: tzinfo | None = None  # of the recorders' clocks

    @property
    def of_detections(self) -> bool:
        """Whether to export detections in the time of the recordings, not tables as they are."""
        return not self.tables and self.form != "badc"

    @property
    def needs_folder(self) -> bool:
        """Whether several files are wanted."""
        return self.by_study_area or "all" in self.tables or len(self.tables) > 1 or self.form == "badc"


def form_of(out: Path, *, several: bool) -> str:
    """Return the format that a file's ending stands for; csv for a folder (``several`` files), or without an ending."""
    if out.suffix and out.suffix.lower() not in ENDINGS and not several and not out.is_dir():
        line = f"--out {shell_line(out.with_suffix('.csv'))}   (or --format csv)"
        raise BadInput(f"--out {out} has an unknown ending", why=f"known endings: {', '.join(ENDINGS)}", fix=line)
    return ENDINGS.get(out.suffix.lower(), "csv")


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A written file, or for BADC chunks the folder with all of their files."""

    path: str
    table: str
    rows: int


Exported = tuple[list[ExportedFile], list[str]]  # also notes


def export(order: ExportOrder, stdout: BinaryIO, progress: Progress = lambda table, rows, of: None) -> Exported:
    """Write the files of an export; the database is only read."""
    database = find_job_database(order.source)
    _check(order, database)
    if order.form == "parquet":
        load_pyarrow()
    with open_for_export(database) as db:
        remarks = find_remarks(db, database, lambda rows: progress("source", rows, None))
        if order.of_detections:
            files, notes = _export_heard(db, order, database, stdout, progress)
        elif order.form == "badc":
            files, notes = _export_badc(db, order, progress)
        else:
            files, notes = _export_tables(db, order, database, stdout, progress), []
        return files, [*remarks, *notes]


def _export_badc(db: sqlite3.Connection, order: ExportOrder, progress: Progress) -> Exported:
    """Write a folder that BADC reads; every .json file in it is a chunk, as `badc infer aggregate` expects."""
    assert order.output is not None  # see _check
    folder, telemetry = order.output / "chunks", order.output / "telemetry.jsonl"
    make_folder(folder)
    many = count_finished(db)
    progress("chunk", 0, many)
    chunks = write_chunks(db, folder, lambda rows: progress("chunk", rows, many))
    lines = write_telemetry(db, folder, telemetry, lambda rows: progress("attempt", rows, None))
    summary, jobs = write_resume_summary(db, folder, telemetry)
    written = ((folder, "chunk", chunks), (telemetry, "attempt", lines), (summary, "chunk", jobs))
    files = [ExportedFile(str(path), table, rows) for path, table, rows in written]
    others = sum(1 for _ in order.output.rglob("*.json")) - chunks
    note = f"{others:,} more .json in {order.output}, perhaps from an earlier export: badc infer aggregate reads all"
    return files, [note] if others > 0 else []


def _check(order: ExportOrder, database: Path) -> None:
    """Refuse options that do not go together, all mistakes in one error."""
    output = order.output
    given = {"--by-study-area": order.by_study_area, "--species": order.species,
             "--min-score": order.min_score is not None}  # fmt: skip
    mistakes = []
    if not order.of_detections:
        of_what = "--table" if order.tables else "--format badc"
        mistakes += [f"{name} is for detections: not with {of_what}" for name in given if given[name]]
    if order.form == "badc" and order.tables:
        mistakes.append("--format badc has its own files: it takes no --table")
    if "" in order.species:
        mistakes.append("--species contains an empty name")
    if order.min_score is not None and not math.isfinite(order.min_score):
        mistakes.append(f"--min-score {order.min_score} is not a finite number")
    if output is not None and output.exists() and output.samefile(database):
        mistakes.append(f"--out {output} is the database itself")
    if mistakes:
        raise BadInput("; ".join(mistakes), fix="badcjobs export --help")
    one_file = output is None or (not output.is_dir() and (output.exists() or output.suffix.lower() in ENDINGS))
    if order.needs_folder and one_file:
        said = "to stdout" if output is None else f"one file ({output})"
        all_in_one = f"; {ALL}.{order.form} in it has all detections in one file" if order.by_study_area else ""
        folder = "FOLDER" if output is None else shell_line(Path(f"{output}-files"))
        raise BadInput(
            f"this writes several files, not {said}", why=f"--out must be a folder{all_in_one}", fix=f"--out {folder}"
        )


@contextmanager
def _writer(
    order: ExportOrder, target: Path | None, types: Mapping[str, str], stdout: BinaryIO | None = None
) -> Iterator[Write]:
    """Write rows to a file or, without a target, to stdout."""
    form = "jsonl" if order.form == "json" and target is not None and target.suffix == ".jsonl" else order.form
    with ExitStack() as stack:
        out = stdout if target is None else stack.enter_context(fresh_file(target))
        assert out is not None
        yield stack.enter_context(rows_written_to(out, form, types))


def _write_file(
    order: ExportOrder, name: str, table: str, types: Mapping[str, str], batches: Iterable[Sequence[Row]],
    stdout: BinaryIO, progress: Progress,
) -> ExportedFile:  # fmt: skip
    """Write a table; ``name``: of the file, if the output is a folder."""
    target, rows = order.output, 0
    if target is not None and target.is_dir():
        target /= f"{name}.{order.form}"
    with _writer(order, target, types, stdout) as write:
        for batch in batches:
            write(batch)
            rows += len(batch)
            progress(table, rows, None)
    return ExportedFile(str(target or "-"), table, rows)


# --- tables -----------------------------------------------------------------------------------------------------------


def _export_tables(
    db: sqlite3.Connection, order: ExportOrder, database: Path, stdout: BinaryIO, progress: Progress
) -> list[ExportedFile]:
    tables = list_tables(db) if "all" in order.tables else list(dict.fromkeys(order.tables))
    check_tables(db, tables, database)
    if order.output is not None and order.needs_folder:
        make_folder(order.output)
    files = []
    for table in tables:
        types, batches = read_table(db, table, order.form)
        files.append(_write_file(order, table, table, types, batches, stdout, progress))
    return files


# --- detections: one file per study area and one for all, or a single file --------------------------------------------


def _export_heard(
    db: sqlite3.Connection, order: ExportOrder, database: Path, stdout: BinaryIO, progress: Progress
) -> Exported:
    if VIEW not in list_tables(db):
        folder = database.parent.parent if database.parent.name == "tasks" else database.parent
        raise DatabaseProblem(
            f"{database} has no detections in the time of the recordings",
            why="it is a task database, or was merged by an earlier version of badcjobs",
            fix=f"badcjobs merge {shell_line(folder)}   (then export that folder)",
        )
    heard = JobDetections(db, order.species, order.min_score, order.time_zone)
    if order.patterns:
        heard.rename(NameReader(order.patterns).read)
    if order.needs_folder:
        files = _write_areas(heard, order, progress)
    else:
        batches = (batch for _, batch in heard.batches(order.form))
        files = [_write_file(order, "detections", VIEW, COLUMNS, batches, stdout, progress)]
    return files, list(_notes(heard, order, files))


def _write_areas(heard: JobDetections, order: ExportOrder, progress: Progress) -> list[ExportedFile]:
    """Write each row to the file of its study area and to the file for all, in one pass: rows are sorted by area."""
    areas, folder = heard.study_areas(), order.output
    assert folder is not None
    if len(areas) > _MOST_AREAS:
        raise BadInput(
            f"{len(areas):,} study areas, and as many files; e.g. {', '.join(map(str, areas[-_NAMED:]))}",
            why="the pattern for the paths of the recordings is probably wrong",
            fix="badcjobs guide audio   (then: badcjobs export … --config FILE.toml)",
        )
    names = area_names([None, *not_none(areas)], taken=ALL, nameless=NAMELESS)
    targets = {area: folder / f"{name}.{order.form}" for area, name in names.items()}
    make_folder(folder)
    all_of_them = folder / f"{ALL}.{order.form}"
    batches = heard.batches(order.form)
    files, total = list[ExportedFile](), 0
    with _writer(order, all_of_them, COLUMNS) as write_all:
        area, batch = next(batches, (None, None))
        if None not in areas and area is None and batch is not None:
            areas = [None, *areas]  # recordings that are in no table
        for current in areas:
            rows = 0
            with _writer(order, targets[current], COLUMNS) as write:
                while batch is not None and area == current:
                    write(batch)
                    write_all(batch)
                    rows, total = rows + len(batch), total + len(batch)
                    progress(VIEW, total, None)
                    area, batch = next(batches, (None, None))
            files.append(ExportedFile(str(targets[current]), VIEW, rows))
    return [ExportedFile(str(all_of_them), VIEW, total), *files]


def _notes(heard: JobDetections, order: ExportOrder, files: Sequence[ExportedFile]) -> Iterator[str]:
    if never_heard := heard.never_heard():
        yield f"no detections in this job: {', '.join(never_heard)}"
    if not files[0].rows:
        filtered = order.species or order.min_score is not None
        what = "no detection has these species and scores" if filtered else "the job has no detections"
        yield f"nothing to export: {what}; the file has a header and no rows"
    gaps = heard.gaps()
    in_folder = order.needs_folder and order.output is not None
    yield from gap_lines(gaps, order.patterns, nameless=f"{NAMELESS}.{order.form}" if in_folder else None)
    if order.time_zone is None and gaps.undated + gaps.untimed < gaps.recordings:
        yield "detected_at_utc is empty: set the recorders' time zone, for example --config recordings.time_zone=-07:00"
    if order.output is None or not in_folder:
        return
    ours = {Path(file.path).name for file in files}
    there = order.output.glob(f"*.{order.form}")
    if others := sorted(path.name for path in there if path.name not in ours and path.is_file()):
        more = f" and {len(others) - _OTHERS_NAMED:,} more" if len(others) > _OTHERS_NAMED else ""
        verb = "file is" if len(others) == 1 else "files are"
        yield (
            f"{len(others):,} {verb} in {order.output} that this export did not write, perhaps from an earlier one:"
            f" {', '.join(others[:_OTHERS_NAMED])}{more}; programs that read *.{order.form} will read them, too"
        )
