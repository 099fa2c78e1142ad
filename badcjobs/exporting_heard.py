"""Takes what was heard out of a job database: a file for each study area and one for all, or just one file.

Other tables, and other forms, are exporting.py's business.
"""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.exporting import ExportedFile, Progress, find_database
from badcjobs.manifest.name_patterns import NamePattern
from badcjobs.manifest.recording_names import NameReader
from badcjobs.naming import area_line, gap_lines
from badcjobs.out_of_date import find_news
from badcjobs.store.exports.fresh_file import fresh_file, make_folder
from badcjobs.store.exports.heard import COLUMNS, VIEW, Heard, Wanted
from badcjobs.store.exports.parquet import require_pyarrow
from badcjobs.store.exports.row_writers import batch_size, rows_written_to
from badcjobs.store.exports.safe_names import area_names
from badcjobs.store.exports.tables import list_tables, open_for_export
from badcjobs.store.exports.text import Write

ENDINGS = (".csv", ".json", ".jsonl", ".parquet")
ALL, NAMELESS = "all_study_areas", "no_study_area"
_MOST_AREAS = 1000  # the lab has seven; more are a pattern that reads something else
_NAMED, _OTHERS_NAMED = 5, 20


@dataclass(frozen=True, slots=True)
class HeardOrder:
    """What somebody wants to have; ``output`` None: on stdout."""

    source: Path
    form: str
    output: Path | None
    by_study_area: bool = False
    wanted: Wanted = field(default_factory=Wanted)
    patterns: tuple[NamePattern, ...] = ()  # read the paths of the recordings anew
    config: Path | None = None  # where they are from
    force: bool = False

    @property
    def needs_folder(self) -> bool:
        """Whether a file for each study area is wanted: said so, or by an output that is not called like one file."""
        return self.by_study_area or (self.output is not None and self.output.suffix.lower() not in ENDINGS)

    def command_line(self) -> str:
        """Return the command that orders this, ready to paste."""
        words = ["badcjobs", "export", str(self.source), "--format", self.form, "-o", str(self.output or "-")]
        words += ["--by-study-area"] if self.by_study_area else []
        words += ["--species", ",".join(self.wanted.species)] if self.wanted.species else []
        words += [] if self.wanted.min_score is None else ["--min-score", f"{self.wanted.min_score:g}"]
        words += [] if self.config is None else ["--config", str(self.config)]
        return shlex.join([*words, *(["--force"] if self.force else [])])


@dataclass(frozen=True, slots=True)
class HeardExport:
    """What was written, and what there is to say about it."""

    files: list[ExportedFile]
    never_heard: list[str]
    notes: list[str]


def export_heard(order: HeardOrder, stdout: BinaryIO, progress: Progress) -> HeardExport:
    """Write what is ordered; the database is only read."""
    database = find_database(order.source)
    if order.form == "parquet":
        require_pyarrow()
    with open_for_export(database) as db:
        _check(order, database, db)
        heard, news = Heard(db), find_news(db, database)
        if order.patterns:
            heard.rename(NameReader(order.patterns).read)
        files = (
            _write_areas(heard, order, progress) if order.needs_folder else _write_one(heard, order, stdout, progress)
        )
        never_heard = heard.never_heard(order.wanted.species)
        return HeardExport(files, never_heard, list(_notes(heard, order, files, never_heard, news)))


def _check(order: HeardOrder, database: Path, db: sqlite3.Connection) -> None:
    if VIEW not in list_tables(db):
        folder = database.parent.parent if database.parent.name == "tasks" else database.parent
        raise DatabaseProblem(
            f"{database} does not have the recordings' own clock",
            why="it is a task database, or was merged by an earlier badcjobs",
            fix=f"badcjobs merge {shlex.quote(str(folder))}   (then export that folder)",
        )
    if order.by_study_area and (order.output is None or order.output.suffix.lower() in ENDINGS):
        said = "stdout" if order.output is None else f"one file ({order.output})"
        folder = Path("detections") if order.output is None else order.output.with_suffix("")
        raise BadInput(
            f"--by-study-area makes several files, which do not fit into {said}",
            why=f"-o is a folder then; {ALL}.{order.form} in it has everything in one file",
            fix=replace(order, output=folder).command_line(),
        )
    if order.needs_folder and order.output is not None and order.output.exists() and not order.output.is_dir():
        raise BadInput(f"{order.output} is a file", why="a file per study area needs a folder", fix="-o FOLDER")


def _refuse_to_overwrite(order: HeardOrder, targets: Sequence[Path]) -> None:
    there = [] if order.force else [target for target in targets if target.is_file()]
    if there:
        more = f" and {len(there) - _NAMED} more" if len(there) > _NAMED else ""
        raise BadInput(
            f"{', '.join(map(str, there[:_NAMED]))}{more}: there already",
            why="files of an earlier export are not overwritten unless you say so",
            fix=f"{order.command_line()} --force",
        )


# --- files ------------------------------------------------------------------------------------------------------------


def _write_one(heard: Heard, order: HeardOrder, stdout: BinaryIO, progress: Progress) -> list[ExportedFile]:
    if order.output is not None:
        _refuse_to_overwrite(order, [order.output])
    with ExitStack() as stack:
        out = stdout if order.output is None else stack.enter_context(fresh_file(order.output))
        rows = stack.enter_context(_counted_rows(out, order, order.output))
        for _, batch in heard.batches(order.wanted, batch_size(order.form)):
            rows.write(batch)
            progress(VIEW, rows.count)
    return [ExportedFile(str(order.output or "-"), VIEW, rows.count)]


def _write_areas(heard: Heard, order: HeardOrder, progress: Progress) -> list[ExportedFile]:
    """Write each row to the file of its study area and to that for all, in one pass: they come sorted."""
    assert order.output is not None  # _check has seen to it
    areas = heard.study_areas()
    total_target, targets = _targets(areas, order)
    batches = heard.batches(order.wanted, batch_size(order.form))
    with _opened(total_target, order) as total:
        area, batch = next(batches, (None, None))
        if None not in areas and area is None and batch is not None:
            areas = [None, *areas]  # of a task that an earlier version ran
        files = []
        for current in areas:
            with _opened(targets[current], order) as rows:
                while batch is not None and area == current:
                    rows.write(batch)
                    total.write(batch)
                    progress(VIEW, total.count)
                    area, batch = next(batches, (None, None))
            files.append(ExportedFile(str(targets[current]), VIEW, rows.count))
    return [ExportedFile(str(total_target), VIEW, total.count), *files]


def _targets(areas: Sequence[str | None], order: HeardOrder) -> tuple[Path, Mapping[str | None, Path]]:
    """Return the file for all study areas, and that of each of them."""
    assert order.output is not None
    if len(areas) > _MOST_AREAS:
        raise BadInput(
            f"{len(areas):,} study areas, which would be as many files; e.g. {', '.join(map(str, areas[-_NAMED:]))}",
            why="the paths of the recordings were probably read in the wrong way",
            fix="badcjobs guide recordings   (then: badcjobs export … --config FILE.toml)",
        )
    total = order.output / f"{ALL}.{order.form}"
    names = area_names([None, *(area for area in areas if area is not None)], taken=ALL, nameless=NAMELESS)
    targets = {area: order.output / f"{name}.{order.form}" for area, name in names.items()}
    make_folder(order.output)
    _refuse_to_overwrite(order, [total, *targets.values()])
    return total, targets


class _CountedRows:
    def __init__(self, write: Write) -> None:
        self.count = 0
        self._write = write

    def write(self, rows: Sequence[Sequence[object]]) -> None:
        self._write(rows)
        self.count += len(rows)


@contextmanager
def _opened(target: Path, order: HeardOrder) -> Iterator[_CountedRows]:
    with fresh_file(target) as out, _counted_rows(out, order, target) as rows:
        yield rows


@contextmanager
def _counted_rows(out: BinaryIO, order: HeardOrder, target: Path | None) -> Iterator[_CountedRows]:
    lines = order.form == "json" and target is not None and target.suffix == ".jsonl"
    with rows_written_to(out, "jsonl" if lines else order.form, COLUMNS) as write:
        yield _CountedRows(write)


# --- what there is to say ---------------------------------------------------------------------------------------------


def _notes(
    heard: Heard, order: HeardOrder, files: Sequence[ExportedFile], never_heard: list[str], news: str | None
) -> Iterator[str]:
    if news:
        yield news
    chunks, undone = heard.count_chunks()
    if undone:
        were = "were not done then" if news else "are not done"
        yield f"{undone:,} of {chunks:,} chunks {were}; what they would have heard is not in these files"
    if never_heard:
        yield f"never heard in this job: {', '.join(never_heard)}"
    if not files[0].rows:
        filtered = order.wanted != Wanted()
        what = "no detection is of these species and scores" if filtered else "the job has no detections"
        yield f"nothing to export: {what}; there is a header, and no row"
    gaps = heard.gaps()
    yield from gap_lines(gaps, order.patterns)
    if order.needs_folder and (line := area_line(gaps)):
        yield f"{line}; what was heard there is in {NAMELESS}.{order.form}"
    if order.needs_folder and order.output is not None and (others := _others_in(order.output, order.form, files)):
        more = f" and {len(others) - _OTHERS_NAMED:,} more" if len(others) > _OTHERS_NAMED else ""
        verb = "file is" if len(others) == 1 else "files are"
        yield (
            f"{len(others):,} {verb} in {order.output} that this export did not write, perhaps of an earlier one:"
            f" {', '.join(others[:_OTHERS_NAMED])}{more}; who reads *.{order.form} reads them too"
        )


def _others_in(folder: Path, form: str, files: Sequence[ExportedFile]) -> list[str]:
    """Return the names of files that look as if they were of this export, and are not."""
    ours = {Path(file.path).name for file in files}
    return sorted(path.name for path in folder.glob(f"*.{form}") if path.name not in ours and path.is_file())
