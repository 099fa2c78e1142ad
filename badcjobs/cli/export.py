"""``badcjobs export``: tables of a task or job database for others."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.report.export import ExportOrder

_EXAMPLE = "Example: badcjobs export runs/july --format csv --by-study-area --min-score 0.8 -o july-detections"


class ExportForm(str, Enum):
    """In which form the rows are written."""

    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"
    BADC = "badc"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="export", short_help="Write tables for other programs.", epilog=_EXAMPLE)(export)


def export(
    source: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A merged run folder, or a database.")],
    form: Annotated[ExportForm, typer.Option("--format", help="badc: the files that BADC reads.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="A file (- for stdout), or a folder for several files.")
    ],
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A table or view; repeatable.", show_default="detection")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every table and view, a file each.")] = False,
    columns: Annotated[str | None, typer.Option(metavar="A,B,C", help="These columns, in this order.")] = None,
    from_text: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Not before.")] = None,
    to_text: Annotated[str | None, typer.Option("--to", metavar="TIME", help="Before.")] = None,
    by_study_area: Annotated[
        bool, typer.Option("--by-study-area", help="What was heard: a file for each study area, and one for all.")
    ] = False,
    species: Annotated[
        str | None, typer.Option(metavar="ROPT,RUGR", help="What was heard of these species, by code or name.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(metavar="X", help="What was heard with a score from X on.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with a table [recordings]: read places and dates anew.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what was heard in an earlier export.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write tables of a task or job database as CSV, JSON or Parquet, or as the files that BADC reads.

    With --by-study-area, --species, --min-score or --config: detections on the clock of their recordings, with study
    area, location and date. With --by-study-area, or if -o has no ending, -o is a folder with a file per study area;
    else one file (-o x.csv), or stdout (-o -).
    TIME is ISO-8601 (naive: UTC) or UTC milliseconds. JSON into a file that ends in .jsonl is an object per line.
    More, with sqlite-utils, Datasette, pandas and DuckDB: badcjobs guide export.
    """
    from dataclasses import asdict, replace

    from badcjobs.cli.output import log_to_stderr, print_json, remark, say
    from badcjobs.cli.targets import Target, is_stdout, refuse_data, sources_of
    from badcjobs.errors import BadInput
    from badcjobs.report.export import ExportOrder
    from badcjobs.report.export import export as carry_out
    from badcjobs.report.words import count
    from badcjobs.settings import read_name_patterns
    from badcjobs.store.export_tables import Wanted, parse_window

    log_to_stderr(quiet=True)
    to_stdout = is_stdout(output)
    if to_stdout and json_wanted:
        raise BadInput(f"--json and -o {output} both want stdout", fix="-o FILE")
    instead = f"export.{form.value}" if output.suffix and form is not ExportForm.BADC else "exported"
    inputs = [source, *sources_of(source), *([] if config is None else [config])]
    refuse_data([Target("-o", output, instead)], inputs)
    order = ExportOrder(
        source,
        form.value,
        None if to_stdout else output,
        tuple(table or ()),
        everything,
        None if columns is None else tuple(name.strip() for name in columns.split(",")),
        parse_window(from_text, to_text),
        by_study_area,
        Wanted(() if species is None else _listed(species), min_score),
        () if config is None else read_name_patterns(config),
        config,
        force,
    )
    # What was written of several files before it is stopped is of this export, and may be overwritten.
    again = replace(order, force=order.force or (order.heard and order.needs_folder))
    with _careful_output(again):
        exported = carry_out(order, sys.stdout.buffer, _Progress())
        sys.stdout.flush()
        if json_wanted:
            heard = {"never_heard": exported.never_heard} if order.heard else {}
            files = [asdict(file) for file in exported.files]
            print_json({"format": form.value, "files": files, **heard, "notes": exported.notes})
        elif not to_stdout:
            for file in exported.files:
                say(f"{file.path}: {count(file.rows, 'row')} ({file.table})")
        for note in exported.notes:
            remark(note)
    return 0


def _listed(text: str) -> tuple[str, ...]:
    """Return the words of a list with commas, each once; an empty one where there is none."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip())) or ("",)


@contextmanager
def _careful_output(order: ExportOrder) -> Iterator[None]:
    """Say what is wrong with the output; a reader of stdout who has seen enough (`| head -1`) is no failure."""
    import errno
    from dataclasses import replace

    from badcjobs.errors import BadInput

    into_file = order if order.output is not None else replace(order, output=Path(f"export.{order.form}"))
    larger_files = f"ulimit -f unlimited && {into_file.command_line()}"
    try:
        yield
    except BadInput as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG:
            raise BadInput(error.what, why=error.why, fix=larger_files) from error
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing else complains, at exit
        if not isinstance(error, BrokenPipeError):
            fix = larger_files if error.errno == errno.EFBIG else "df -h   (then -o FILE, on a disk with space)"
            raise BadInput("stdout cannot be written", why=error.strerror, fix=fix) from error


class _Progress:
    """Says on stderr how far a long export is: every second to somebody who watches, now and then to a log."""

    def __init__(self) -> None:
        self._every_s = 1.0 if sys.stderr.isatty() else 10.0
        self._next_s = time.monotonic() + self._every_s

    def __call__(self, table: str, rows: int) -> None:
        from badcjobs.cli.output import remark

        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            remark(f"{rows:,} rows of {table} written")
