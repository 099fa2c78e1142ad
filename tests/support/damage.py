"""Real damage to real SQLite files: what disks, kills and careless copies leave behind.

Every function changes the file in place. Pages count from 1, as SQLite counts them.
"""

import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

PAGE = 4096


def page_count(path: Path) -> int:
    """Return how many pages the file has; a half one counts."""
    return -(-path.stat().st_size // PAGE)


def table_leaves(path: Path) -> list[int]:
    """Return the pages of a healthy file that hold rows, but for the first."""
    content = path.read_bytes()
    return [number for number in range(2, page_count(path) + 1) if content[(number - 1) * PAGE] == 0x0D]


def page_with(path: Path, content: bytes) -> int:
    """Return the first page on which these bytes stand."""
    return path.read_bytes().index(content) // PAGE + 1


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def noise(size_bytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


def zero_page(path: Path, number: int) -> None:
    """Fill one page with zeros: a block that was never written."""
    overwrite(path, (number - 1) * PAGE, bytes(PAGE))


def garbage_page(path: Path, number: int) -> None:
    overwrite(path, (number - 1) * PAGE, noise(PAGE, number + 3))


def garbage_leaf_page(path: Path, number: int) -> None:
    """Fill one page with random bytes that begin like a table leaf with many cells."""
    overwrite(path, (number - 1) * PAGE, b"\x0d\0\0\x01\x00\x02\x10\0" + noise(PAGE - 8, number))


def truncate(path: Path, share: float) -> int:
    """Cut the file off after a share of its bytes, mid-page or not: a full disk. Return what is left."""
    left = int(path.stat().st_size * share)
    os.truncate(path, left)
    return left


def half_copied(path: Path, share: float) -> int:
    """Leave zeros in place of the end: a copy cut short by a program that had made room first. Return what is left."""
    size, left = path.stat().st_size, truncate(path, share)
    os.truncate(path, size)
    return left


def leave_hot_journal(path: Path) -> Path:
    """Kill a writer in mid-transaction, when it has changed the file already: only the journal knows what it was.

    A process that opens the file for writing puts all back; one that reads it without locks sees gaps that never were,
    and samples with wrong values. Return the journal.
    """
    gap = "INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, 0, 0, hex(zeroblob(100)) FROM task"
    before = path.read_bytes()
    _kill_after(
        path, "PRAGMA journal_mode = DELETE", "PRAGMA cache_size = 10", "BEGIN IMMEDIATE",
        "UPDATE chunk SET status = 'pending', detections = NULL, error = hex(zeroblob(200))",
        "UPDATE sample SET utilization_percent = 1, power_w = 0.5, energy_j = 0.5", *[gap] * 2000,
    )  # fmt: skip
    assert path.read_bytes() != before, "most of the change is in the file long before it would be committed"
    return path.with_name(f"{path.name}-journal")


def leave_wal(path: Path, rows: int = 5) -> None:
    """Kill a writer that has committed gaps to a write-ahead log, and not to the file."""
    gap = "INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, started_at_ms, started_at_ms, {} FROM task"
    _kill_after(path, "PRAGMA journal_mode = WAL", "PRAGMA wal_autocheckpoint = 0", *map(gap.format, range(rows)))


def _kill_after(path: Path, *statements: str) -> None:
    """Run statements, and leave all files as they are then: as a process does that is killed."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for sql in statements:
            db.execute(sql)
        left = {one: one.read_bytes() for one in path.parent.glob(f"{path.name}*")}
    for one, content in left.items():
        one.write_bytes(content)
