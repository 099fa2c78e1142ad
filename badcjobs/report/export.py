"""Exports tables of a task or job database, and detections in the time of the recordings."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import tzinfo
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import NamePattern, not_none
from badcjobs.paths import run_of, shell_line
from badcjobs.report.completeness import find_remarks
from badcjobs.report.job import find_job_database
from badcjobs.sources.recording_names import NameReader, gap_lines
from badcjobs.store.atomic_write import fresh_file, fresh_folder, make_folder
from badcjobs.store.export_badc import area_names, count_finished, write_chunks, write_resume_summary, write_telemetry
from badcjobs.store.export_labels import LABEL_FORMS, RARITIES, LabelWriter
from badcjobs.store.export_tables import (
    COLUMNS,
    VIEW,
    DetectionFilter,
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
from badcjobs.words import count, first_names

Progress = Callable[[str, int, int | None], None]  # table or "source", rows so far, of how many if that is known
ENDINGS = {".csv": "csv", ".json": "json", ".jsonl": "jsonl", ".parquet": "parquet"}
ALL = "all_study_areas"
NAMELESS = "no_study_area"
_MOST_AREAS = 1000  # more means that the pattern matches something else: the lab has seven
_AREAS_NAMED = 5
_LABELS_NAMED = 5
_FILES_NAMED = 20


class ExportOrder(NamedTuple):
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
    hawkears_root: str | None = None  # with the list of species, if that of the run cannot be read

    @property
    def needs_folder(self) -> bool:
        """Whether several files are wanted."""
        return self.by_study_area or "all" in self.tables or len(self.tables) > 1 or self.form in _OWN_FORMATS

    @property
    def wanted(self) -> DetectionFilter:
        """Which detections to export."""
        return DetectionFilter(self.species, self.min_score)


def form_of(out: Path, *, several: bool) -> str:
    """Return the format that a file's ending stands for; csv for a folder (``several`` files), or without an ending."""
    ending = out.suffix.lower()
    if ending and ending not in ENDINGS and not several and not out.is_dir():
        line = f"--out {shell_line(out.with_suffix('.csv'))}   (or --format csv)"
        raise BadInput(f"--out {out} has an unknown ending", why=f"known endings: {', '.join(ENDINGS)}", fix=line)
    return ENDINGS.get(ending, "csv")


class ExportedFile(NamedTuple):
    """A written file, or the folder of many: BADC's chunks, labels."""

    path: str
    table: str
    rows: int


Exported = tuple[list[ExportedFile], list[str]]  # also notes


class _Job(NamedTuple):
    """An opened database, and where the export goes."""

    db: sqlite3.Connection
    database: Path
    order: ExportOrder
    stdout: BinaryIO
    progress: Progress


def export(order: ExportOrder, stdout: BinaryIO, progress: Progress = lambda table, rows, of: None) -> Exported:
    """Write the files of an export; the database is only read."""
    database = find_job_database(order.source)
    _check(order, database)
    if order.form == "parquet":
        load_pyarrow()
    write = _export_tables if order.tables else _OWN_FORMATS.get(order.form, _export_heard)
    with open_for_export(database) as db:
        remarks = find_remarks(db, database, lambda rows: progress("source", rows, None))
        files, notes = write(_Job(db, database, order, stdout, progress))
        never_heard = order.wanted.never_heard(db) if order.species else []
        if never_heard:
            remarks.append(f"no detections in this job: {', '.join(never_heard)}")
        return files, [*remarks, *notes]


def _export_badc(job: _Job) -> Exported:
    """Write a folder that BADC reads; every .json file in it is a chunk, as `badc infer aggregate` expects."""
    output = job.order.output
    assert output is not None  # see _check
    folder = output / "chunks"
    telemetry = output / "telemetry.jsonl"
    make_folder(folder)
    many = count_finished(job.db)
    job.progress("chunk", 0, many)
    chunks = write_chunks(job.db, folder, job.order.wanted, lambda rows: job.progress("chunk", rows, many))
    lines = write_telemetry(job.db, folder, telemetry, lambda rows: job.progress("attempt", rows, None))
    summary, jobs = write_resume_summary(job.db, folder, telemetry)
    files = [
        ExportedFile(str(folder), "chunk", chunks),
        ExportedFile(str(telemetry), "attempt", lines),
        ExportedFile(str(summary), "chunk", jobs),
    ]
    more = sum(1 for _ in output.rglob("*.json")) - chunks
    if not more:
        return files, []
    note = f"{more:,} more .json in {output}, perhaps from an earlier export: badc infer aggregate reads all"
    return files, [note]


def _export_labels(job: _Job) -> Exported:
    """Write a folder of labels, complete or not at all."""
    order = job.order
    output = order.output
    assert output is not None  # see _check
    _need_view(job, RARITIES)
    files = []
    with fresh_folder(output) as folder:
        labels = LabelWriter(
            job.db, order.form, order.wanted, lambda rows: job.progress(VIEW, rows, None), order.hawkears_root
        )
        if order.form == "hawkears":
            tables = {"scores.csv": VIEW}
            if job.db.execute("SELECT 1 FROM rarity LIMIT 1").fetchone():
                tables["rarities.csv"] = RARITIES
            for name, view in tables.items():
                rows = labels.write_table(folder / name, view)
                files.append(ExportedFile(str(output / name), view, rows))
        else:
            recordings = labels.write_files(folder)
            files.append(ExportedFile(str(output), "recording", recordings))
            files.append(ExportedFile(str(output), VIEW, labels.written))
        _need_empty(order)  # another export may have been faster
    notes = []
    if not labels.written and not labels.left_out:
        notes.append(_NOTHING)
    if labels.species_missing and order.form != "audacity":
        where = f"HawkEars' list of species is not in {labels.species_missing}"
        notes.append(f"species not checked: {where}; try: --config run.hawkears_root=FOLDER")
    for reason, kinds in labels.left_out.items():
        examples = first_names([label for label, _ in kinds.most_common()], _LABELS_NAMED)
        notes.append(f"{count(sum(kinds.values()), 'detection')} left out ({examples}): {reason}; --format csv has all")
    return files, notes


_OWN_FORMATS: dict[str, Callable[[_Job], Exported]] = {
    "badc": _export_badc,
    **dict.fromkeys(LABEL_FORMS, _export_labels),
}


def _check(order: ExportOrder, database: Path) -> None:
    """Refuse options that do not go together, all mistakes in one error."""
    mistakes = list(_find_mistakes(order, database))
    if mistakes:
        raise BadInput("; ".join(mistakes), fix="badcjobs export --help")
    if order.needs_folder:
        _need_folder(order)
    if order.form in LABEL_FORMS:
        _need_empty(order)


def _find_mistakes(order: ExportOrder, database: Path) -> Iterator[str]:
    output = order.output
    if order.tables and (order.by_study_area or order.species or order.min_score is not None):
        yield "--by-study-area, --species and --min-score are for detections: not with --table"
    if order.form in _OWN_FORMATS and (order.tables or order.by_study_area):
        yield f"--format {order.form} has its own files: it takes neither --table nor --by-study-area"
    if "" in order.species:
        yield "--species contains an empty name"
    if order.min_score is not None and not math.isfinite(order.min_score):
        yield f"--min-score {order.min_score} is not a finite number"
    if output is not None and output.exists() and output.samefile(database):
        yield f"--out {output} is the database itself"


def _need_folder(order: ExportOrder) -> None:
    """Refuse one file for an export of several."""
    output = order.output
    if output is not None and (output.is_dir() or not (output.exists() or output.suffix.lower() in ENDINGS)):
        return
    why = "--out must be a folder"
    if order.by_study_area:
        why += f"; {ALL}.{order.form} in it has all detections in one file"
    folder = shell_line(Path(f"{output or 'export'}-files"))
    raise BadInput("this writes several files", why=why, fix=f"--out {folder}")


def _need_empty(order: ExportOrder) -> None:
    """Refuse a folder that has something in it."""
    output = order.output
    if output is not None and output.is_dir() and any(output.iterdir()):
        raise BadInput(
            f"the folder {output} is not empty",
            why="programs that import labels read every file in a folder",
            fix=f"--out {shell_line(Path(f'{output.absolute()}-{order.form}'))}",
        )


_NOTHING = "nothing to export: the job has no detections with these species and scores"


@contextmanager
def _writer(
    order: ExportOrder, target: Path | None, types: Mapping[str, str], stdout: BinaryIO | None = None
) -> Iterator[Write]:
    """Write rows to a file or, without a target, to stdout."""
    with ExitStack() as stack:
        out = stdout if target is None else stack.enter_context(fresh_file(target))
        assert out is not None
        yield stack.enter_context(rows_written_to(out, order.form, types))


def _write_file(
    job: _Job, name: str, table: str, types: Mapping[str, str], batches: Iterable[Sequence[Row]]
) -> ExportedFile:
    """Write a table; ``name``: of the file, if the output is a folder."""
    target = job.order.output
    rows = 0
    if target is not None and target.is_dir():
        target /= f"{name}.{job.order.form}"
    with _writer(job.order, target, types, job.stdout) as write:
        for batch in batches:
            write(batch)
            rows += len(batch)
            job.progress(table, rows, None)
    return ExportedFile(str(target or "-"), table, rows)


# --- tables -----------------------------------------------------------------------------------------------------------


def _export_tables(job: _Job) -> Exported:
    order = job.order
    tables = list(dict.fromkeys(order.tables))
    if "all" in tables:
        tables = list_tables(job.db)
    check_tables(job.db, tables, job.database)
    if order.output is not None and order.needs_folder:
        make_folder(order.output)
    files = []
    for table in tables:
        types, batches = read_table(job.db, table, order.form)
        files.append(_write_file(job, table, table, types, batches))
    return files, []


# --- detections: one file per study area and one for all, or a single file --------------------------------------------


def _need_view(job: _Job, view: str) -> None:
    """Refuse a database without this view of recordings."""
    database = job.database
    if view not in list_tables(job.db):
        raise DatabaseProblem(
            f"{database} has no detections in the time of the recordings",
            why="it is a task database, or was merged by an earlier version of badcjobs",
            fix=f"badcjobs merge {shell_line(run_of(database.parent))}   (then export that folder)",
        )


def _export_heard(job: _Job) -> Exported:
    _need_view(job, VIEW)
    order = job.order
    heard = JobDetections(job.db, order.wanted, order.time_zone)
    if order.patterns:
        heard.rename(NameReader(order.patterns).read)
    if order.needs_folder:
        files = _write_areas(heard, order, job.progress)
    else:
        batches = (batch for _, batch in heard.batches())
        files = [_write_file(job, "detections", VIEW, COLUMNS, batches)]
    return files, list(_notes(heard, order, files))


def _write_areas(heard: JobDetections, order: ExportOrder, progress: Progress) -> list[ExportedFile]:
    """Write each row to the file of its study area and to the file for all, in one pass: rows are sorted by area."""
    folder = order.output
    assert folder is not None
    areas = heard.study_areas()
    if len(areas) > _MOST_AREAS:
        raise BadInput(
            f"{len(areas):,} study areas, and as many files; e.g. {', '.join(map(str, areas[-_AREAS_NAMED:]))}",
            why="the pattern for the paths of the recordings is probably wrong",
            fix="badcjobs guide audio   (then: badcjobs export … --config FILE.toml)",
        )
    names = area_names([None, *not_none(areas)], taken=ALL, nameless=NAMELESS)
    make_folder(folder)
    rows = dict[str | None, int]()
    with _writer(order, folder / f"{ALL}.{order.form}", COLUMNS) as write_all:
        for area, batches in groupby(heard.batches(), key=itemgetter(0)):
            rows[area] = 0
            with _writer(order, folder / f"{names[area]}.{order.form}", COLUMNS) as write:
                for _, batch in batches:
                    write(batch)
                    write_all(batch)
                    rows[area] += len(batch)
                    progress(VIEW, sum(rows.values()), None)
    for area in areas:
        if area not in rows:  # nothing was detected there
            rows[area] = 0
            with _writer(order, folder / f"{names[area]}.{order.form}", COLUMNS):
                pass
    files = [(ALL, sum(rows.values())), *((names[area], many) for area, many in rows.items())]
    return [ExportedFile(str(folder / f"{name}.{order.form}"), VIEW, many) for name, many in files]


def _notes(heard: JobDetections, order: ExportOrder, files: Sequence[ExportedFile]) -> Iterator[str]:
    if not files[0].rows:
        yield f"{_NOTHING}; the file has a header and no rows"
    gaps = heard.gaps()
    folder = order.output if order.needs_folder else None
    yield from gap_lines(gaps, order.patterns, nameless=f"{NAMELESS}.{order.form}" if folder else None)
    if order.time_zone is None and gaps.undated + gaps.untimed < gaps.recordings:
        yield "detected_at_utc is empty: set the recorders' time zone, for example --config recordings.time_zone=-07:00"
    if folder is None:
        return
    ours = {Path(file.path).name for file in files}
    present = sorted(path.name for path in folder.glob(f"*.{order.form}") if path.is_file())
    strange = [name for name in present if name not in ours]
    if strange:
        yield (
            f"{count(len(strange), 'file is', 'files are')} in {folder} that this export did not write, perhaps from an"
            f" earlier one: {first_names(strange, _FILES_NAMED)}; programs that read *.{order.form} will read them, too"
        )
