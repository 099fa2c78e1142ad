"""``badcjobs export``: tables of a task or job database for others."""

from __future__ import annotations

import os
import sys
import time
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.exporting import ExportedFile

_EXAMPLE = "Example: badcjobs export runs/july --format csv --columns recording_id,label,score -o july.csv"


class Form(str, Enum):
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
    form: Annotated[Form, typer.Option("--format", help="badc: the files that BADC reads.")],
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
    json_wanted: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write tables of a task or job database as CSV, JSON or Parquet, or as the files that BADC reads.

    TIME is ISO-8601 (naive: UTC) or UTC milliseconds. JSON into a file that ends in .jsonl is an object per line.
    More, with sqlite-utils, Datasette, pandas and DuckDB: badcjobs guide export.
    """
    from badcjobs.cli.output import log_to_stderr
    from badcjobs.errors import BadInput
    from badcjobs.exporting import ExportOrder
    from badcjobs.exporting import export as carry_out
    from badcjobs.store.exports.window import parse_window

    log_to_stderr(quiet=True)
    to_stdout = str(output) == "-"
    if to_stdout and json_wanted:
        raise BadInput("--json and -o - both want stdout", fix="-o FILE")
    order = ExportOrder(
        source, form.value, None if to_stdout else output, tuple(table or ()), everything,
        None if columns is None else tuple(name.strip() for name in columns.split(",")),
        parse_window(from_text, to_text),
    )  # fmt: skip
    try:
        exported = carry_out(order, sys.stdout.buffer, _Progress())
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing else complains, at exit
        if isinstance(error, BrokenPipeError):  # `| head -1` has seen enough
            return 0
        raise BadInput("stdout cannot be written", why=error.strerror, fix="-o FILE, on a disk with space") from error
    if not to_stdout:
        _tell(form, exported, json_wanted)
    return 0


def _tell(form: Form, exported: list[ExportedFile], json_wanted: bool) -> None:
    from dataclasses import asdict

    from badcjobs.cli.output import print_json, say

    if json_wanted:
        print_json({"format": form.value, "files": [asdict(file) for file in exported]})
        return
    for file in exported:
        rows = "1 row" if file.rows == 1 else f"{file.rows:,} rows"
        say(f"{file.path}: {rows} ({file.table})")


class _Progress:
    """Says on stderr how far a long export is: every second to somebody who watches, now and then to a log."""

    def __init__(self) -> None:
        self._every_s = 1.0 if sys.stderr.isatty() else 10.0
        self._next_s = time.monotonic() + self._every_s

    def __call__(self, table: str, rows: int) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            print(f"badcjobs: {rows:,} rows of {table} written", file=sys.stderr)
