"""The rows of a plan on their way to the shards: kept in one file until it is known how many tasks there are.

A path stays as the source has it wherever one --root serves for all of them; otherwise it becomes absolute. Columns
that others have added to a manifest come behind those of BADC, in every shard, and are empty where a row has none.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType

from badcjobs.manifest.badc_csv import HEADER
from badcjobs.manifest.surveying import Row

_LINE_END = "\0"  # in no path; so that a row with a line end in a name is one line here


class RowFile:
    """A file of rows, written once and then read in turn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+", encoding="utf-8", newline="\n")
        self._kinds: dict[tuple[str, int], int] = {}  # base of the path, columns behind those of BADC
        self._further: list[str] = []  # their names
        self._places: dict[tuple[str, ...], list[int]] = {}  # names of a manifest → which of them they are

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, row: Row) -> None:
        """Keep a row."""
        recording_id, chunk_id, path, base, start_ms, end_ms, sha256, _, overlap_ms, notes, further, names, *_ = row
        # A row that ends where it begins is refused; without an end its header is asked, and says the same.
        end = "" if end_ms is None or end_ms <= start_ms else end_ms
        text = f"{recording_id},{chunk_id},{path},{start_ms},{end},{overlap_ms},{sha256},{notes}"
        if further:
            further = self._placed(further, names)
            text = f"{text},{','.join(further)}"
        if text.count(",") == 7 + len(further) and '"' not in text and "\n" not in text and "\r" not in text:
            text += "\n"
        else:
            text = _quoted([recording_id, chunk_id, path, start_ms, end, overlap_ms, sha256, notes, *further])
        kind = self._kinds.setdefault((base, len(further)), len(self._kinds))
        self._file.write(f"{kind}\t{text}")

    def clear(self) -> None:
        """Forget all rows."""
        self._file.seek(0)
        self._file.truncate()
        for known in (self._kinds, self._further, self._places):
            known.clear()

    @property
    def root(self) -> str | None:
        """The folder that all relative paths start from; None: there are none, or they start from several."""
        bases = {base for base, _ in self._kinds if base}
        return bases.pop() if len(bases) == 1 else None

    @property
    def header(self) -> str:
        """The columns of every shard, as the first line of a manifest."""
        return _quoted([*HEADER.split(","), *self._further]).replace(_LINE_END, "\n")

    def rows(self) -> Iterator[str]:
        """Yield all rows from the first, as lines of a manifest."""
        self._file.seek(0)
        kinds, width = list(self._kinds), len(self._further)
        keep = self.root is not None or not any(base for base, _ in kinds)
        for line in self._file:
            number, _, text = line.partition("\t")
            base, columns = kinds[int(number)]
            if columns < width:
                text = f"{text[:-1]}{',' * (width - columns)}\n"
            if _LINE_END in text:
                text = text.replace(_LINE_END, "\n")
            yield text if keep or not base else _absolute(text, base)

    def _placed(self, further: Sequence[str], names: tuple[str, ...]) -> list[str]:
        """Return the fields of further columns, each in the place that its name has in all shards."""
        if names not in self._places:
            self._places[names] = self._find_places(names)
        places = self._places[names]
        fields = [""] * (max(places) + 1 if places else 0)
        for place, field in zip(places, further, strict=True):
            fields[place] = field
        return fields

    def _find_places(self, names: tuple[str, ...]) -> list[int]:
        places: list[int] = []
        for name in names:
            known = [place for place, one in enumerate(self._further) if one == name and place not in places]
            if not known:
                self._further.append(name)
            places.append(known[0] if known else len(self._further) - 1)
        return places


def write_manifest(path: Path, header: str, rows: Iterator[str], many: int) -> None:
    """Write the next rows as a manifest."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(header)
        file.writelines(islice(rows, many))


def _absolute(text: str, base: str) -> str:
    (row,) = csv.reader([text])
    row[2] = base + row[2].removeprefix("./")
    return _quoted(row).replace(_LINE_END, "\n")


def _quoted(row: Sequence[object]) -> str:
    text = io.StringIO()
    csv.writer(text).writerow(row)
    return text.getvalue().removesuffix("\r\n").replace("\n", _LINE_END) + "\n"
