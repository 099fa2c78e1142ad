"""Text files with a row per line: lists, and tables with a header (CSV)."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from badcjobs.paths import shell_line
from badcjobs.sources.mistakes import Mistakes, escape_bytes, quoted
from badcjobs.words import count

Fields = dict[str, str]  # of a row, by column


def read_lines(path: Path, mistakes: Mistakes) -> Iterator[str]:
    """Yield every line with its line end; a line that is not UTF-8 as ``escape_bytes`` returns it."""
    # With "strict" the first invalid byte would end the reading, and later mistakes would not be reported.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                mistakes.add(number, "has a NUL byte", fix=copy_command(path, "tr -d '\\000'", "< "))
                line = line.replace("\0", "")
            yield line if line.isascii() else escape_bytes(line)


def read_list(path: Path, mistakes: Mistakes) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line, without blank lines and comments (#)."""
    for number, line in enumerate(read_lines(path, mistakes), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text


def read_table(
    path: Path, mistakes: Mistakes, missing_of: Callable[[Sequence[str]], Sequence[str]], expected: str
) -> Iterator[tuple[int, Fields]]:
    """Yield line number and fields of every row that has as many fields as the header.

    ``missing_of`` returns the columns that a header lacks; without them no row can be read.
    """
    reader = csv.reader(read_lines(path, mistakes))
    columns: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            mistakes.add(line, f"cannot be read as CSV: {error}")
            continue
        if not row or (not row[0] and not any(row)):  # spreadsheets write lines of commas at the end
            continue
        if not columns:
            columns = column_names(row)
            if not _can_read(path, columns, missing_of(columns), expected, mistakes):
                return
        elif len(row) == len(columns):
            yield line, dict(zip(columns, row, strict=True))
        else:
            text = f"{count(len(row), 'field')} where the header has {len(columns)}"
            if reader.line_num > line:
                text += "; a quote is opened here and not closed"
            mistakes.add(line, text)


def column_names(fields: Sequence[str]) -> list[str]:
    """Return the names of columns as they are written in our code."""
    return [field.strip().strip('"').lower() for field in fields]


def _can_read(path: Path, columns: Sequence[str], missing: Sequence[str], expected: str, mistakes: Mistakes) -> bool:
    """Return whether the rows below a header can be read, or note why not."""
    why = f"its header is {quoted(','.join(columns))}"
    fix = f"head -n 1 {shell_line(path)}   # expected: {expected}"
    for mark in ";\t":
        if len(columns) == 1 and mark in columns[0]:
            why = f"its header has {mark!r} instead of commas"
            fix = copy_command(path, f"tr {',' + mark!r} '.,'", "< ")  # also of decimal commas
    if missing:
        mistakes.add(0, f"lacks columns: {', '.join(missing)}", why=why, fix=fix)
    repeated = dict.fromkeys(name for name in columns if name and columns.count(name) > 1)
    if repeated:
        mistakes.add(0, f"has columns twice: {', '.join(repeated)}", why=why, fix=fix)
    return not missing and not repeated


def copy_command(path: Path, command: str, redirect: str = "") -> str:
    """Return the command that writes a repaired copy of a file."""
    copy = path.with_suffix(f".utf8{path.suffix}")
    return f"{command} {redirect}{shell_line(path)} > {shell_line(copy)}"
