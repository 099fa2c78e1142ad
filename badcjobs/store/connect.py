"""Opens SQLite files: live databases, sealed task databases and the job database."""

from __future__ import annotations

import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from badcjobs.errors import BadcjobsError, DatabaseProblem
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES, ddl_script
from badcjobs.version import __version__

if TYPE_CHECKING:
    from sqlite_utils import Database

# --- filesystems ------------------------------------------------------------------------------------------------------
# Only filesystems that are known to be local count as local. On a shared filesystem, another machine may not see a
# lock; a live database that is opened there without a lock is destroyed.

_MOUNTINFO = Path("/proc/self/mountinfo")
UNKNOWN = "unknown"

LOCAL = frozenset(
    {
        "bcachefs",
        "btrfs",
        "ext2",
        "ext3",
        "ext4",
        "f2fs",
        "jfs",
        "nilfs2",
        "overlay",
        "ramfs",
        "reiserfs",
        "rootfs",
        "tmpfs",
        "ufs",
        "vfat",
        "xfs",
        "zfs",
        "fuse.fuse-overlayfs",
    }
)


class Filesystem(NamedTuple):
    """The filesystem of a folder."""

    kind: str  # as in /proc/self/mountinfo, or "unknown"
    mount: str = ""

    @property
    def shared(self) -> bool:
        """Whether other machines may see it; an unknown filesystem counts as shared."""
        return self.kind not in LOCAL

    @property
    def description(self) -> str:
        """The filesystem and whether it counts as shared, for the log."""
        return f"{self.kind}, {'treated as shared' if self.shared else 'local'}"


def read_filesystem(folder: Path) -> Filesystem:
    """Return the filesystem of a folder, which need not exist yet."""
    try:
        text = _MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
        return parse_mountinfo(text, str(folder.resolve()))
    except (OSError, RuntimeError):  # no /proc, or a loop of links
        return Filesystem(UNKNOWN)


def parse_mountinfo(text: str, path: str) -> Filesystem:
    """Find the filesystem of a resolved absolute path in the text of /proc/self/mountinfo.

    The longest mount point wins. If several filesystems are mounted on it, the last one wins: it hides the others.
    """
    best = Filesystem(UNKNOWN)
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")  # a single hyphen separates the optional fields from the type
        fields = before.split(" ")
        if not separator or len(fields) < 6:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])  # blanks, backslashes
        if PurePosixPath(path).is_relative_to(mount) and len(mount) >= len(best.mount):
            best = Filesystem(after.split(" ")[0], mount)
    return best


# --- opening ----------------------------------------------------------------------------------------------------------

# What SQLite raises for a damaged file; ValueError: text that is not UTF-8, also in a message of its own.
UNREADABLE = (sqlite3.Error, ValueError)
SQLITE_MAGIC = b"SQLite format 3\0"
_Facts = TypeVar("_Facts")
# The name of a chunk in messages, as an SQL expression.
CHUNK_NAME = "CASE WHEN recording_id = chunk_id THEN '' ELSE recording_id || '/' END || chunk_id"
_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables


def create_live(path: Path, *, shared: bool = False) -> sqlite3.Connection:
    """Open (or create) a database with one writer.

    On node-local disk it uses WAL with synchronous=NORMAL: a commit needs no fsync, kill -9 loses nothing that was
    committed, the file survives a power cut, and other processes of this machine can read it. On a ``shared``
    filesystem WAL does not work, because hosts share no memory, and locks are not reliable: it uses a rollback journal
    with fsync, and other processes must not open it (live_files.py).
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise DatabaseProblem(
            f"this Python has SQLite {sqlite3.sqlite_version}; badcjobs needs 3.37 or newer",
            fix="module load python   (or any Python built with a newer SQLite)",
        )
    uri = unshared_uri(path) if shared else file_uri(path, "mode=rwc")
    # Another thread takes snapshots; SQLite serializes the access.
    connection = open_uri(uri, timeout=5, check_same_thread=False)
    if shared:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps the journal open: one fsync less per commit
    connection.execute(f"PRAGMA journal_mode = {'TRUNCATE' if shared else 'WAL'}")
    connection.execute(f"PRAGMA synchronous = {'FULL' if shared else 'NORMAL'}")
    if read_value(connection, "PRAGMA user_version") == 0:
        create_tables(connection)
    return connection


def unshared_uri(path: Path) -> str:
    """Return the URI of a file that only one process opens: SQLite takes no locks.

    SQLite rolls back the journal of a killed writer when it opens the file.
    """
    return file_uri(path, "vfs=unix-none")


def create_scratch(path: Path) -> sqlite3.Connection:
    """Create a task database for which durability does not matter."""
    db = open_uri(unshared_uri(path))
    db.execute("PRAGMA journal_mode = MEMORY")
    db.execute("PRAGMA synchronous = OFF")
    create_tables(db)
    return db


def with_logs(path: Path) -> list[Path]:
    """Return a database and the log or journal that a writer has left beside it."""
    beside = [path.with_name(f"{path.name}{ending}") for ending in ("-wal", "-journal")]
    return [path, *(log for log in beside if log.exists() and log.stat().st_size > 0)]


def create_tables(connection: sqlite3.Connection) -> None:
    """Create every table of a task database, in one transaction."""
    connection.executescript(ddl_script(table.ddl() for table in TABLES.values()))


_PLAIN_TABLE = re.compile(r"CREATE TABLE\b(?!.*\b(AS|CHECK)\b).*", re.IGNORECASE | re.DOTALL)


def refuse_strange_tables(db: sqlite3.Connection) -> None:
    """Raise an error for a task database with views, computed columns and the like, which badcjobs never writes.

    They can do anything when they are read.
    """
    for name, sql in db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):  # not the index of a key
        if not _PLAIN_TABLE.fullmatch(sql):
            raise sqlite3.DatabaseError(f"badcjobs has not written its list of tables: {name}")


def as_sqlite_utils(connection: sqlite3.Connection) -> Database:
    """Return a connection as a sqlite-utils Database: for tables, views, indexes, small writes and users of the API.

    The import is here because it takes 0.16 s, too long for the recorder and ``--help``. Version 3 of sqlite-utils
    commits after each insert: inside a transaction, write rows with plain SQL.
    """
    from sqlite_utils import Database

    return Database(connection)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all that the block writes, or roll it back; inside another transaction, only the block's part of it."""
    db.execute("SAVEPOINT part")  # the outermost one begins and commits a transaction
    try:
        yield
        db.execute("RELEASE part")
    except BaseException:
        if db.in_transaction:  # after a full disk SQLite has rolled back already
            db.execute("ROLLBACK TO part")
            db.execute("RELEASE part")
        raise


def read_value(db: sqlite3.Connection, sql: str, *values: object) -> Any:
    """Return the first value of the first row; None: there is no row."""
    row = db.execute(sql, values).fetchone()
    return row and row[0]


def rows_by_name(db: sqlite3.Connection, sql: str, values: Sequence[object] = ()) -> Iterator[dict[str, Any]]:
    """Yield rows as dictionaries by column name."""
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return map(dict, cursor.execute(sql, values))


def read_as(db: sqlite3.Connection, kind: Callable[..., _Facts], sql: str, *values: object) -> tuple[_Facts, ...]:
    """Return rows as values of one type; its fields have the names of the columns."""
    return tuple(kind(**row) for row in rows_by_name(db, sql, values))


def grouped(rows: Iterable[Sequence[Any]]) -> dict[Any, list[Any]]:
    """Group rows by their first column; a row is then a tuple of the other columns, or the only other one."""
    groups = defaultdict(list)
    for key, *rest in rows:
        groups[key].append(rest[0] if len(rest) == 1 else tuple(rest))
    return groups


def is_database(path: Path) -> bool:
    """Say whether a file is an SQLite database, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False


def read_only_uri(path: Path) -> str:
    """Return the URI that opens a sealed file: it is complete, and replaced, never changed.

    So SQLite needs no locks, which some shared filesystems do not support.
    """
    return file_uri(path, "mode=ro&immutable=1")


def file_uri(path: Path, how: str) -> str:
    """Return the URI that opens a file with these parameters; special characters in its name are quoted."""
    return f"file:{quote(os.fsencode(path.absolute()))}?{how}"


def open_uri(uri: str, **options: Any) -> sqlite3.Connection:
    """Open a database; a transaction begins only with BEGIN."""
    db: sqlite3.Connection = sqlite3.connect(uri, uri=True, isolation_level=None, **options)
    return db


def open_sealed(path: Path) -> sqlite3.Connection:
    """Open a published task database or a job database for reading."""
    return open_uri(read_only_uri(path))


def is_job_database(db: sqlite3.Connection) -> bool:
    """Say whether this is a job database; otherwise it is a task database."""
    return read_value(db, "SELECT 1 FROM sqlite_master WHERE name = 'source_file'") is not None


def find_damage(db: sqlite3.Connection) -> str | None:
    """Check a complete database; return the first thing that is wrong with it, None: nothing."""
    try:
        verdict = str(read_value(db, "PRAGMA quick_check(1)"))
    except UNREADABLE as error:
        return str(error)
    return None if verdict == "ok" else verdict


def schema_problem(connection: sqlite3.Connection) -> str | None:
    """Return why this badcjobs cannot read the schema of a file; None: it can."""
    version = read_value(connection, "PRAGMA user_version")
    if version == SCHEMA_VERSION:
        return None
    writer = None
    with suppress(*UNREADABLE):
        writer = read_value(connection, "SELECT 'badcjobs ' || version FROM task")
    writer = writer or "another badcjobs"
    return f"schema {version}, written by {writer}; this badcjobs ({__version__}) reads schema {SCHEMA_VERSION}"


@contextmanager
def reading(path: Path, suggest_fix: Callable[[str], str | None] = lambda why: None) -> Iterator[sqlite3.Connection]:
    """Open a published task or job database; an SQLite error, also one in the block, becomes a DatabaseProblem.

    So does any other error if the database is damaged. Damaged values reach all code that uses them; only after an
    error is it worth reading the complete file. ``suggest_fix`` returns the command to paste for an error message.
    """
    try:
        with closing(open_sealed(path)) as db:
            if read_value(db, "PRAGMA application_id") != APPLICATION_ID:
                raise sqlite3.DatabaseError("not a badcjobs database" if path.stat().st_size else "the file is empty")
            if problem := schema_problem(db):
                raise sqlite3.DatabaseError(problem)
            if not is_job_database(db):
                refuse_strange_tables(db)
            yield db
    except (OSError, BadcjobsError):
        raise
    except Exception as error:
        damage = str(error) if isinstance(error, sqlite3.Error) else None
        if damage is None or "no such" in damage or "UTF-8" in damage:
            with suppress(*UNREADABLE), closing(open_sealed(path)) as db:
                first_damage = find_damage(db)
                damage = damage if first_damage is None else f"damaged: {first_damage}"
        if damage is None:
            raise
        raise DatabaseProblem(f"{path.name} cannot be read: {damage}", fix=suggest_fix(damage)) from error
