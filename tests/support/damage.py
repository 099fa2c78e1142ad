"""Real damage to real SQLite files: what disks, kills and careless copies leave behind.

Every function changes the file in place. Pages count from 1, as SQLite counts them.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

_KINDS = {0x02: "index interior", 0x05: "table interior", 0x0A: "index leaf", 0x0D: "table leaf"}


# --- looking ----------------------------------------------------------------------------------------------------------


def page_size(path: Path) -> int:
    """Return the size of the file's pages, from its own header; SQLite's usual one where that is damaged already."""
    with path.open("rb") as file:
        header = file.read(18)
    if not header.startswith(b"SQLite format 3\0"):
        return 4096
    size = int.from_bytes(header[16:], "big")
    return 65536 if size == 1 else size


def page_count(path: Path) -> int:
    """Return how many pages the file has; a half one counts."""
    return -(-path.stat().st_size // page_size(path))


def page_kind(path: Path, number: int) -> str:
    """Return what a page of a healthy file is: table or index, leaf or interior; or ``overflow``."""
    with path.open("rb") as file:
        file.seek(_start_of(path, number) + (100 if number == 1 else 0))
        return _KINDS.get(file.read(1)[0], "overflow")


def pages_of_kind(path: Path, kind: str) -> list[int]:
    """Return the numbers of all pages of one kind."""
    return [number for number in range(1, page_count(path) + 1) if page_kind(path, number) == kind]


def page_with(path: Path, content: bytes) -> int:
    """Return the first page on which these bytes stand."""
    size = page_size(path)
    data = path.read_bytes()
    for number in range(1, page_count(path) + 1):
        if content in data[(number - 1) * size : number * size]:
            return number
    raise ValueError(f"{content!r} is nowhere in {path.name}")


# --- bytes ------------------------------------------------------------------------------------------------------------


def truncate(path: Path, share: float) -> int:
    """Cut the file off after a share of its bytes, mid-page or not: a full disk. Return what is left."""
    left = int(path.stat().st_size * share)
    with path.open("r+b") as file:
        file.truncate(left)
    return left


def half_copied(path: Path, share: float) -> int:
    """Leave zeros in place of the end: a copy cut short by a program that had made room first. Return what is left."""
    size = path.stat().st_size
    left = truncate(path, share)
    with path.open("r+b") as file:
        file.truncate(size)
    return left


def overwritten_by(path: Path, other: Path, share: float) -> None:
    """Write the first part of another file over this one: a ``cp`` onto it, cut short."""
    data = other.read_bytes()
    overwrite(path, 0, data[: int(len(data) * share)])


def zero_page(path: Path, number: int) -> None:
    """Fill one page with zeros: a block that was never written."""
    overwrite(path, _start_of(path, number), bytes(page_size(path)))


def garbage_page(path: Path, number: int, seed: int) -> None:
    """Fill one page with random bytes."""
    overwrite(path, _start_of(path, number), random.Random(seed).randbytes(page_size(path)))


def garbage_leaf_page(path: Path, number: int, seed: int) -> None:
    """Fill one page with random bytes that begin like a table leaf with many cells."""
    noise = random.Random(seed).randbytes(page_size(path) - 8)
    overwrite(path, _start_of(path, number), b"\x0d\0\0\x01\x00\x02\x10\0" + noise)


def lose_first_page(path: Path, seed: int | None = None) -> None:
    """Lose the page with the file's header and the list of its tables: zeros, or garbage where there is a seed."""
    if seed is None:
        zero_page(path, 1)
    else:
        garbage_page(path, 1, seed)


def flip_bit_in_cell(path: Path, content: bytes, bit: int = 0) -> int:
    """Flip one bit of the first byte of ``content``, where that stands first; SQLite says nothing. Return the place."""
    at = path.read_bytes().index(content)
    overwrite(path, at, bytes([content[0] ^ (1 << bit)]))
    return at


def overwrite(path: Path, at: int, content: bytes) -> None:
    """Put these bytes at this place."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def make_empty(path: Path) -> None:
    """Leave a file of zero bytes, which SQLite takes for a database without tables."""
    path.write_bytes(b"")


def replace_with_text(path: Path) -> None:
    """Put a text where the database was."""
    path.write_text("slurmstepd: error: *** JOB 4821 ON gpu1 CANCELLED ***\n" * 1000, encoding="utf-8")


def replace_with_noise(path: Path, size_bytes: int, seed: int) -> None:
    """Put random bytes where the database was."""
    path.write_bytes(random.Random(seed).randbytes(size_bytes))


def _start_of(path: Path, number: int) -> int:
    return (number - 1) * page_size(path)


# --- killed writers ---------------------------------------------------------------------------------------------------

# Ten pages of cache: most of the change is in the file long before it would be committed.
_UNFINISHED = """
db.execute("PRAGMA journal_mode = DELETE")
db.execute("PRAGMA cache_size = 10")
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE chunk SET status = 'pending', detections = NULL, error = hex(zeroblob(200))")
db.execute("UPDATE sample SET utilization_percent = 1, power_w = 0.5, energy_j = 0.5")
for number in range(2000):
    db.execute("INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, 0, 0, hex(zeroblob(100)) FROM task")
"""

_COMMITTED = """
db.execute("PRAGMA journal_mode = WAL")
db.execute("PRAGMA wal_autocheckpoint = 0")
for number in range({rows}):
    reason = "only in the WAL " + str(number)
    db.execute(\"\"\"INSERT INTO gap (task_id, from_ms, to_ms, reason)
                  SELECT task_id, started_at_ms, started_at_ms + 1000, ? FROM task\"\"\", (reason,))
"""


def leave_hot_journal(path: Path) -> Path:
    """Kill a writer in mid-transaction, when it has changed the file already: only the journal knows what it was.

    Whoever opens the file for writing puts all back; whoever reads it without locks sees gaps that never were and
    samples with wrong values. Return the journal.
    """
    before = path.read_bytes()
    _run_and_kill(path, _UNFINISHED)
    journal = path.with_name(path.name + "-journal")
    if path.read_bytes() == before or journal.stat().st_size == 0:
        raise RuntimeError("nothing was written before the kill")
    return journal


def leave_wal(path: Path, rows: int = 5) -> Path:
    """Kill a writer that has committed gaps (``only in the WAL 0``, …) to a write-ahead log, and not to the file.

    Return the log.
    """
    _run_and_kill(path, _COMMITTED.format(rows=rows))
    log = path.with_name(path.name + "-wal")
    if log.stat().st_size == 0:
        raise RuntimeError("nothing was written before the kill")
    return log


def _run_and_kill(path: Path, statements: str) -> None:
    """Run statements on the file in a process of their own, which is killed with the file still open."""
    opening = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
    waiting = "print('ready', flush=True)\nsys.stdin.read()\n"
    words = [sys.executable, "-c", opening + statements + waiting, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        answer = writer.stdout.readline()
        writer.kill()
    if answer != "ready\n":
        raise RuntimeError(f"the writer ended before the kill: {answer!r}")
