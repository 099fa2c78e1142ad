"""Chooses the folder for a task's live files, and how they are written there.

It is on node-local disk if there is one; otherwise next to the published file, in the safe mode for shared filesystems.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadInput
from badcjobs.locks import lock_within, read_boot_id, try_lock_alone
from badcjobs.model import TaskKey
from badcjobs.paths import LIVE_PREFIX, LocalFolder, RunFolder
from badcjobs.processes import end_leftovers
from badcjobs.seams import Clock
from badcjobs.small_files import parse_fields, parse_json, set_aside
from badcjobs.store.atomic_write import remove_unfinished
from badcjobs.store.connect import Filesystem, open_uri, read_filesystem, read_value
from badcjobs.store.live_files import LiveHalf, count_rows, last_reading_ms, left_behind
from badcjobs.store.publish import Gap, publish

_ROOM_BYTES = 256 * 1024  # the size of two empty databases


class LiveFolder(NamedTuple):
    """A task's own folder, and the mode for the databases in it."""

    folder: LocalFolder
    filesystem: Filesystem
    shared: bool
    why: str

    @property
    def is_risky(self) -> bool:
        """Whether the user forces WAL on a filesystem where it is not known to be safe."""
        return self.filesystem.shared and not self.shared

    @property
    def description(self) -> str:
        """The folder, its filesystem, the mode, and the reason; for the log."""
        mode = "safe mode for shared filesystems" if self.shared else "WAL on node-local disk"
        return f"live files: {self.folder.path} ({self.filesystem.description}); {mode}: {self.why}"

    def to_meta(self) -> dict[str, str]:
        """Return the folder, its filesystem and the mode for the table ``meta``."""
        return {
            "live_folder": str(self.folder.path),
            "live_filesystem": self.filesystem.kind,
            "live_mode": "shared" if self.shared else "local",
        }


def choose_live_folder(wanted: str, local_dir: str | None, key: TaskKey, target: Path) -> LiveFolder:
    """Create the folder; ``wanted`` is auto, local or shared, ``target`` is the file to publish later."""
    candidate = Path(local_dir or tempfile.gettempdir())
    name = f"badcjobs-{key.name}-"
    filesystem = read_filesystem(candidate)
    if wanted == "local":
        return LiveFolder(LocalFolder.create(candidate, name), filesystem, False, "run.live_mode = local")
    if wanted == "shared":
        why = "run.live_mode = shared"
    elif filesystem.shared and candidate.exists():
        why = f"{candidate} is not a node-local disk ({filesystem.description})"
    else:
        try:
            folder = LocalFolder.create(candidate, name)
            check_room(folder.path)
            return LiveFolder(folder, filesystem, False, f"{candidate} is local")
        except BadInput as error:
            why = f"there is no node-local folder {candidate} ({error.why})"
        except OSError as error:
            folder.remove()
            why = f"{candidate} cannot be written ({error.strerror})"
    hidden = LocalFolder.create(target.parent, f"{LIVE_PREFIX}{target.stem}-")
    return LiveFolder(hidden, read_filesystem(target.parent), True, why)


def check_room(folder: Path) -> None:
    """Write a test file; raise OSError if that fails: a quota that is used up shows only when data is written."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())


# --- live files of killed tasks ---------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_PATIENCE_S = 60.0  # a publication to a slow filesystem may take that long

Sleep = Callable[[float], None]


@dataclass(frozen=True)
class Owner:
    """The task that writes in a live folder, as the folder's owner file describes it."""

    publish_to: str
    mark: str
    shared: bool
    hostname: str
    boot_id: str  # a lock is valid only on the machine that took it

    def is_of(self, hostname: str) -> bool:
        """Say whether a free lock means that the task has ended: it ran on this machine, possibly before a reboot."""
        same_boot = self.boot_id != "" and self.boot_id == read_boot_id()
        return same_boot or (hostname == self.hostname != "" and not self.shared)


def hold(folder: LocalFolder, owner: Owner) -> int | None:
    """Lock a folder until this process ends; None: it cannot be locked, so no other task can publish its files."""
    try:
        file = os.open(folder.owner_file, _FLAGS | os.O_CREAT, 0o600)
        try_lock_alone(file)
        os.pwrite(file, json.dumps(asdict(owner)).encode(), 0)
    except OSError as error:
        log.debug("the live folder cannot be locked: %s", error)
        return None
    return file


def take_over(folder: LocalFolder, patience_s: float, clock: Clock) -> bool:
    """Lock the folder of a killed wrapper until this process ends; False: another process publishes it, or did so."""
    if not folder.owner_file.exists():  # its disk had no room for it: no other process can take the folder over
        return folder.wrapper_file.exists()
    with suppress(OSError), ExitStack() as opened:
        if _lock_to_publish(folder, opened, patience_s, patience_s, clock.sleep) is not None:
            opened.pop_all()  # they stay open until this process ends
            return True
    return False


def _lock_to_publish(
    folder: LocalFolder, opened: ExitStack, publisher_s: float, owner_s: float, sleep: Sleep
) -> int | None:
    """Lock a folder whose owner has ended, until ``opened`` is closed; return its open owner file.

    ``publisher_s`` and ``owner_s``: how long to wait for a process that publishes the folder, and for its owner. None:
    one of them still runs, or the folder is published.
    """
    owner = os.open(folder.owner_file, _FLAGS)
    opened.callback(os.close, owner)
    if os.fstat(owner).st_uid != os.geteuid():  # in /tmp another user can create a folder that names our run
        return None
    publisher = os.open(folder.publisher_file, _FLAGS | os.O_CREAT, 0o600)
    opened.callback(os.close, publisher)
    if not lock_within(publisher, publisher_s, sleep, try_lock_alone):
        return None
    if not lock_within(owner, owner_s, sleep, try_lock_alone):
        return None
    return owner if folder.owner_file.exists() else None


def publish_left_behind(
    out: RunFolder,
    mine: LocalFolder,
    key: TaskKey,
    *,
    hostname: str,
    replaced: Collection[str] = (),
    sleep: Sleep = time.sleep,
) -> None:
    """Publish the live files that killed tasks of this machine left for this run.

    They are next to our folder or in the run folder; there, those of other tasks of our own array are skipped. If they
    may have chunks of ours and another process publishes them now, wait for it. ``replaced`` are the names of our
    earlier attempts, which may still run.
    """
    for path in sorted((*mine.path.parent.glob("badcjobs-*"), *out.tasks.glob(f"{LIVE_PREFIX}*"))):
        name = path.name.removeprefix("badcjobs-").removeprefix(LIVE_PREFIX).rpartition("-")[0]
        task = TaskKey.parse(name)
        is_sibling = task is not None and task.is_sibling_of(key)
        if path == mine.path or (is_sibling and path.parent == out.tasks):
            continue
        patience_s = 0.0 if is_sibling else _PATIENCE_S
        folder = LocalFolder(path)
        with locked(folder, patience_s, patience_s if name in replaced else 0.0, sleep) as owner:
            if owner is not None and Path(owner.publish_to).parent == out.tasks and owner.is_of(hostname):
                _publish_for(folder, owner)


@contextmanager
def locked(
    folder: LocalFolder, publisher_s: float = 0.0, owner_s: float = 0.0, sleep: Sleep = time.sleep
) -> Iterator[Owner | None]:
    """Lock a folder and yield its owner; None: it still runs, or is not known, or the folder is published."""
    with ExitStack() as opened:
        owner = None
        try:
            file = _lock_to_publish(folder, opened, publisher_s, owner_s, sleep)
            if file is not None:
                owner = parse_fields(Owner, parse_json(os.pread(file, 65536, 0)))
        except ValueError as error:  # incomplete, or not ours
            set_aside(folder.owner_file, str(error))
        except OSError as error:
            log.debug("the live folder cannot be locked: %s", error)
        yield owner


def _publish_for(folder: LocalFolder, owner: Owner) -> None:
    """Publish the live files and remove the folder; without an attempt of a chunk there is nothing to publish."""
    target = Path(owner.publish_to)
    end_leftovers(owner.mark)
    try:
        # The task ended at the time of the last write; to open a file may change its time.
        halves = (folder.wrapper_file, folder.recorder_file)
        written_ns = [file.stat().st_mtime_ns for half in halves for file in folder.path.glob(f"{half.name}*")]
        ended_at_ms = max(written_ns, default=0) // 1_000_000
        work = left_behind(folder.wrapper_file, shared=owner.shared)(folder.path)
        if work is not None and (target.exists() or _has_attempts(work)):
            log.warning(
                "an earlier task and its recorder were killed: publishing its live files in %s",
                folder.path,
            )
            last_ms = last_reading_ms(left_behind(folder.recorder_file, shared=owner.shared)(folder.path))
            gaps = [] if last_ms is None else [(last_ms, max(last_ms, ended_at_ms), "the recorder was killed, too")]
            publish_killed(folder, target, ended_at_ms, gaps, shared=owner.shared)
        folder.remove()
    except (OSError, sqlite3.Error) as error:
        log.warning("they cannot be published and stay there: %s", error)


def publish_killed(folder: LocalFolder, target: Path, ended_at_ms: int, gaps: Sequence[Gap], *, shared: bool) -> None:
    """Publish the live files of a killed task, and remove the unfinished copies that it has left.

    Rows are added and never removed: after a power cut the published file may have more of them, and stays as it is.
    """
    work = left_behind(folder.wrapper_file, shared=shared)
    if count_rows(work, folder.path) >= count_rows(LiveHalf(target, "sealed"), folder.path):
        halves = [work, left_behind(folder.recorder_file, shared=shared)]
        closing = {"ended_at_ms": ended_at_ms, "verdict": "killed"}
        publish(halves, target, workplace=folder.path, closing=closing, gaps=gaps)
    remove_unfinished(target)


def _has_attempts(uri: str) -> bool:
    with closing(open_uri(uri)) as db:
        has_tables = read_value(db, "PRAGMA user_version") != 0
        return has_tables and bool(read_value(db, "SELECT count(*) FROM attempt"))
