"""What became of the files that a merge has read, and which are new, by their times and sizes.

None is opened but those of tasks that were silent already: in a copy of their run they have new times and old seals.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePath

from badcjobs.model import TaskKey, is_silent, silent_after_s
from badcjobs.store.atomic_write import read_stated
from badcjobs.store.read_model import Freshness, TaskFacts
from badcjobs.store.source_files import HOLDING, SourceFile

_UNENDED = """
    SELECT t.name, t.task_id, m.value FROM task t
    LEFT JOIN task_meta m ON m.task_id = t.task_id AND m.key = 'settings' WHERE t.verdict IS NULL"""


def parse_publish_every_s(settings: str | None) -> float | None:
    """Return how often a task was told to publish its database; ``settings`` are its own, as JSON."""
    try:
        return float(json.loads(settings or "")["publish_every"])
    except (ValueError, TypeError, KeyError):
        return None


def add_last_heard(
    db: sqlite3.Connection, tasks: list[TaskFacts], files: tuple[SourceFile, ...], folder: Path
) -> tuple[list[TaskFacts], Freshness]:
    """Return the tasks, those that had not ended with when they were last heard of and for how long that holds.

    A file that has changed since it was merged, or is gone, may have news that nobody here knows: its task is told as
    of the merge, and counted; so are files that were never merged. ``folder`` is where the paths of the files begin.
    """
    holders = {file.task_id: file for file in files if file.status in HOLDING and file.mtime_ns is not None}
    unended = {name: (holders.get(task_id), settings) for name, task_id, settings in db.execute(_UNENDED)}
    as_of_ms = max((_published_ms(file) for file in holders.values()), default=None)
    known = {path for (path,) in db.execute("SELECT path FROM source_file")}
    there, closed = _list(folder, known)
    new = [key for path in there.keys() - known if (key := _task_of(path)) is not None]
    merged_at_ms, told, gone, copies = _merged_at_ms(db), [], 0, set()
    for task in tasks:
        file, settings = unended.get(task.name, (None, None))
        if file is None:
            told.append(task)
            continue
        now, with_word = there.get(file.path), _with_word(task, file, settings)
        if now is None:
            # Others were heard of long after it: it was silent then already.
            was_silent = is_silent(with_word.heard_at_ms, with_word.silent_after_s, as_of_ms)
            told.append(with_word if was_silent else task)
            gone += not was_silent
        elif _is_same(file, now):
            told.append(with_word)
        elif is_silent(with_word.heard_at_ms, with_word.silent_after_s, merged_at_ms) and _is_copy(file, now, folder):
            told.append(with_word)
            copies.add(file.path)
        else:
            told.append(_with_news(task, with_word, now, settings, merged_at_ms, new))
    open_files = {file.path for file, _ in unended.values() if file is not None} - copies
    changed = sum(_has_news(file, there.get(file.path), ended=file.path not in open_files) for file in files)
    indices = {key.array_index for key in new if not key.job_id.startswith("local")}
    fresh = Freshness(as_of_ms, changed, gone, new=len(new), new_indices=tuple(sorted(indices)), closed=closed)
    return told, fresh


def _list(folder: Path, known: Collection[str]) -> tuple[dict[str, os.stat_result], str | None]:
    """Return what lies in the folders of the merged files, by its path as ``source_file`` has it; each listed once.

    And a folder that is there but cannot be listed, in words.
    """
    found, closed = {}, None
    for parent in {str(PurePath(path).parent) for path in known}:
        try:
            with os.scandir(folder / parent) as entries:
                for entry in entries:
                    name = entry.name.encode("utf-8", "backslashreplace").decode()  # as shown_path has it
                    path = name if parent == "." else f"{parent}/{name}"
                    if path in known or _task_of(path) is not None:
                        with suppress(OSError):  # removed in this moment, or a link to nowhere
                            status = entry.stat()
                            if stat.S_ISREG(status.st_mode):
                                found[path] = status
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue  # what was not seen counts as gone
        except OSError as error:
            closed = f"{folder / parent} cannot be looked into: {error.strerror}"
    return found, closed


def _task_of(path: str) -> TaskKey | None:
    """Return whose database this is, by its name and that of its folder."""
    pure = PurePath(path)
    is_one = pure.suffix == ".sqlite" and pure.parent.name == "tasks" and not pure.name.startswith(".")
    return TaskKey.parse(pure.stem) if is_one else None


def _merged_at_ms(db: sqlite3.Connection) -> int | None:
    """Return when the job database was last written."""
    try:
        return Path(db.execute("PRAGMA database_list").fetchone()[2]).stat().st_mtime_ns // 10**6
    except (OSError, ValueError):
        return None


def _with_word(task: TaskFacts, file: SourceFile, settings: str | None) -> TaskFacts:
    after_s = silent_after_s(file.size_bytes or 0, parse_publish_every_s(settings))
    return replace(task, heard_at_ms=max(task.last_sign_ms, _published_ms(file)), silent_after_s=after_s)


def _with_news(
    task: TaskFacts,
    then: TaskFacts,
    now: os.stat_result,
    settings: str | None,
    merged_at_ms: int | None,
    new: Iterable[TaskKey],
) -> TaskFacts:
    """Return a task whose file has changed; one that was silent, or has a successor, may be published by that one."""
    if is_silent(then.heard_at_ms, then.silent_after_s, merged_at_ms) or any(_follows(key, task) for key in new):
        return replace(then, changed=True)
    after_s = silent_after_s(now.st_size, parse_publish_every_s(settings))
    heard_at_ms = max(task.last_sign_ms, now.st_mtime_ns // 10**6)
    return replace(task, heard_at_ms=heard_at_ms, silent_after_s=after_s, changed=True)


def _follows(key: TaskKey, task: TaskFacts) -> bool:
    """Say whether this is another attempt at the same part of the source; tasks of one step have the same number."""
    return key.array_index == task.array_index and (key.job_id, key.restart) != (task.job_id, task.restart)


def _published_ms(file: SourceFile) -> int:
    return (file.mtime_ns or 0) // 10**6


def _is_same(file: SourceFile, now: os.stat_result) -> bool:
    return (now.st_size, now.st_mtime_ns) == (file.size_bytes, file.mtime_ns)


def _is_copy(file: SourceFile, now: os.stat_result, folder: Path) -> bool:
    """Say whether a file with another time is what was merged, by its seal."""
    same_size = now.st_size == file.size_bytes
    return same_size and file.checksum is not None and read_stated(folder / file.path) == file.checksum


def _has_news(file: SourceFile, now: os.stat_result | None, *, ended: bool) -> bool:
    """Say whether a file is another than when it was merged; one that is not here is not known to have changed.

    Nobody writes into that of an ended task in its ordinary life: a new time alone is that of a copy. So it is of one
    that has not ended, where its seal was looked at.
    """
    if now is None or file.mtime_ns is None:
        return False
    return now.st_size != file.size_bytes if ended else not _is_same(file, now)
