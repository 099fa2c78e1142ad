"""The seal of a published file: how many rows it holds, and a checksum over its bytes.

SQLite notices a torn page, but not a byte that flipped inside a value, nor rows that went with a deleted journal. The
checksum stands in the file itself, as a row of ``meta``, and counts as dashes when it is computed.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import open_sealed
from badcjobs.store.schema import TABLES

ROWS, SEAL = "rows", "seal"
_DIGITS = 8
_BLANK = b"-" * _DIGITS
_MARK = b"sealcrc32:"  # key and value of a row lie side by side in its record
_BLOCK_BYTES = 1 << 20


def prepare_seal(db: sqlite3.Connection) -> None:
    """Write the row counts of a file that is complete, and leave room for its checksum."""
    tables = [table.name for table in TABLES if table.name != "meta"]
    counts = {name: db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}
    values = {ROWS: json.dumps(counts), SEAL: f"crc32:{_BLANK.decode()}"}
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def read_sealed_rows(db: sqlite3.Connection) -> dict[str, int]:
    """Return the row counts that a file was published with; empty: it does not say."""
    row = db.execute("SELECT value FROM meta WHERE key = ?", (ROWS,)).fetchone()
    try:
        return {str(table): int(many) for table, many in json.loads(row[0]).items()} if row else {}
    except (ValueError, TypeError, AttributeError):
        return {}


class Checksum:
    """The checksum of a file, fed block by block; finds the seal on its way."""

    def __init__(self) -> None:
        self._crc = 0
        self._held = b""  # the end of what came: a seal may begin in it
        self._position = 0  # of the held bytes in the file
        self.seal_at: int | None = None
        self.stated: bytes | None = None

    def feed(self, block: bytes) -> None:
        """Take the next bytes of the file."""
        self._held += block
        if self.stated is None:
            self._look_for_seal()
        keep = 0 if self.stated is not None else len(_MARK) + _DIGITS - 1
        self._take(len(self._held) - keep)

    def digits(self) -> bytes:
        """Return the checksum of all that came, as it stands in a seal."""
        self._take(len(self._held))
        return b"%08x" % self._crc

    def _look_for_seal(self) -> None:
        found = self._held.find(_MARK)
        start = found + len(_MARK)
        if found >= 0 and len(self._held) >= start + _DIGITS:
            self.seal_at = self._position + start
            self.stated = self._held[start : start + _DIGITS]
            self._held = self._held[:start] + _BLANK + self._held[start + _DIGITS :]

    def _take(self, count: int) -> None:
        if count > 0:
            self._crc = zlib.crc32(self._held[:count], self._crc)
            self._held = self._held[count:]
            self._position += count


def read_checksum(path: Path) -> tuple[str | None, str]:
    """Return the checksum that a file states (None: it has no seal), and the one of its bytes."""
    checksum = Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.feed(block)
    computed = checksum.digits().decode()
    stated = checksum.stated
    if stated is None or stated == _BLANK:
        return None, computed
    return stated.decode(errors="replace"), computed


def read_stated(path: Path) -> str | None:
    """Return the checksum that a file states, without a look at its bytes; None: it has no seal, or is no database."""
    try:
        with closing(open_sealed(path)) as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (SEAL,)).fetchone()
    except sqlite3.Error:
        return None
    return str(row[0]).removeprefix("crc32:") if row else None


def seal_is_broken(path: Path) -> bool | None:
    """Say whether the bytes of a file differ from those that were sealed; None: it has no seal."""
    stated, computed = read_checksum(path)
    return None if stated is None else stated != computed
