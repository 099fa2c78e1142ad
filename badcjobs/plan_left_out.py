"""What a plan leaves out: rows and whole sources that ``badcjobs run`` would refuse, counted and, with --write, listed.

What is wrong with them is ``manifest/``'s business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from badcjobs.errors import BadInput
from badcjobs.manifest.badc_manifest import Manifest
from badcjobs.manifest.folder import CLOSED_FOLDER
from badcjobs.manifest.mistakes import SHOWN, Mistakes
from badcjobs.manifest.walk import Source
from badcjobs.plan.survey import Survey


class LeftOut(Mistakes):
    """Mistakes that are told one by one, but counted by the row: one row may have several.

    With a file, each is also written down: with twenty million rows, twenty examples are not all of them.
    """

    def __init__(self, parts: Sequence[Source], path: Path | None = None) -> None:
        super().__init__([part.name for part in parts])
        self.rows = self.folders = 0
        self._parts = parts
        self._whole: set[int] = set()
        self._lines: dict[int, bytearray] = {}  # a bit for each line: every row of a large manifest may be wrong
        self._path = path
        self._file: TextIO | None = None

    @property
    def whole_sources(self) -> int:
        """How many sources have not one row that could be understood."""
        return len(self._whole)

    def __enter__(self) -> LeftOut:
        if self._path is not None:
            self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None and self._path is not None:
            self._file.close()
            if not self.count:
                self._path.unlink()

    def add(self, line: int, text: str, *, why: str = "", fix: str | None = None, missing: bool = False) -> None:
        """Note a mistake, and write it down."""
        super().add(line, text, why=why, fix=fix, missing=missing)
        part = self._parts[self.source]
        if line:
            self.rows += self._is_first_of(line)
        elif isinstance(part, Manifest) or text in (part.without_rows, "cannot be read", f"{CLOSED_FOLDER}: ."):
            self._whole.add(self.source)
        elif text.startswith(CLOSED_FOLDER):
            self.folders += 1  # what is in there, nobody knows
        else:
            self.rows += 1  # a recording in a folder, which has no lines
        if self._file is not None:
            where = f" line {line}:" if line else ""
            self._file.write(f"{part.name}{where} {text}{f' ({why})' if why else ''}\n")

    def add_unseen(self, count: int) -> None:
        """Count rows nobody will look at one by one."""
        super().add_unseen(count)
        self.rows += count

    def tell(self, found: Survey) -> None:
        """Put into a survey how much is left out, the first of it, and a line to paste."""
        found.left_out_missing = self.missing
        found.left_out, found.left_out_folders, found.left_out_sources = self.rows, self.folders, self.whole_sources
        lines, _ = self.examples(SHOWN)
        more = [f"… and {self.count - len(lines):,} more"] if self.count > len(lines) else []
        found.left_out_lines = (*lines, *more)
        try:
            self.raise_any()
        except BadInput as error:
            found.left_out_fix = error.fix

    def _is_first_of(self, line: int) -> bool:
        seen = self._lines.setdefault(self.source, bytearray())
        byte, bit = line >> 3, 1 << (line & 7)
        if len(seen) <= byte:
            seen.extend(bytes(byte + 1 - len(seen)))
        is_first = not seen[byte] & bit
        seen[byte] |= bit
        return is_first
