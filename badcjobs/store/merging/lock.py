"""One merge at a time per job database, on whatever node it runs: a file that only one of them can create.

No kernel lock, which shared filesystems may not have. The holder touches the file every few seconds; one that is left
alone, or whose process is gone from this machine, belongs to a merge that was killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.seams import Clock

_TOUCH_EVERY_S = 5.0
_LEFT_ALONE_S = 60.0
_LOOK_EVERY_S = 0.2


@contextmanager
def only_merge(target: Path, clock: Clock, *, wait: bool, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold the lock of a job database; wait for another merge to end, or say who it is.

    Gives a check for the moment before anything is replaced: a merge that stood still for a minute may have been taken
    for dead, and another one may be at it.
    """
    lock = target.with_name(f".{target.name}.lock")
    me = f"{os.uname().nodename} {os.getpid()}"
    _take(lock, me, clock, wait=wait, tell=tell)
    over = threading.Event()
    toucher = threading.Thread(target=_touch, args=(lock, over), name="merge lock", daemon=True)
    toucher.start()

    def check() -> None:
        if _read(lock) != me:
            raise DatabaseProblem(
                f"another merge has taken over {target.name} while this one stood still",
                why="nothing was replaced by this one",
                fix="the same command again",
            )

    try:
        yield check
    finally:
        over.set()
        toucher.join()
        if _read(lock) == me:
            lock.unlink(missing_ok=True)


def _take(lock: Path, me: str, clock: Clock, *, wait: bool, tell: Callable[[str], None]) -> None:
    seen, seen_at_s, told = None, clock.monotonic_s(), False
    while not _create(lock, me):
        now = (_read(lock), _mtime_ns(lock))
        if now != seen:
            seen, seen_at_s = now, clock.monotonic_s()
        if now == (None, None):
            continue  # gone this moment
        holder = now[0] or "a place unknown"  # a lock that we may not read, or that is not written yet
        if _is_dead(holder) or clock.monotonic_s() - seen_at_s > _LEFT_ALONE_S:
            _remove(lock, now[0])
            continue
        if not wait:
            raise DatabaseProblem(
                f"another merge is making {lock.name[1:].removesuffix('.lock')}",
                why=f"it runs on {' as process '.join(holder.split())}",
                fix="wait for it, or leave out --no-wait",
            )
        if not told:
            tell(f"another merge is running ({' as process '.join(holder.split())}); waiting for it")
            told = True
        clock.sleep(_LOOK_EVERY_S)


def _create(lock: Path, me: str) -> bool:
    try:
        file = lock.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(me)
    except OSError:
        lock.unlink(missing_ok=True)  # a full disk: an empty lock would keep others waiting
        raise
    return True


def _read(lock: Path) -> str | None:
    try:
        return lock.read_text(encoding="utf-8")
    except OSError:
        return None


def _mtime_ns(lock: Path) -> int | None:
    try:
        return lock.stat().st_mtime_ns
    except OSError:
        return None


def _is_dead(holder: str) -> bool:
    node, _, pid = holder.partition(" ")
    if node != os.uname().nodename or not pid.isdigit():
        return False  # not to be seen from here; or not yet written to the end
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _remove(lock: Path, holder: str | None) -> None:
    """Remove the lock of a dead merge; of several that try, one succeeds, and nobody removes the next one's."""
    aside = lock.with_name(f"{lock.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        os.rename(lock, aside)  # noqa: PTH104
    except OSError:
        return
    if _read(aside) != holder:
        try:
            os.link(aside, lock)
        except OSError:
            pass
    if aside.is_dir():
        aside.rmdir()
    else:
        aside.unlink(missing_ok=True)


def _touch(lock: Path, over: threading.Event) -> None:
    while not over.wait(_TOUCH_EVERY_S):
        try:
            os.utime(lock)
        except OSError:
            pass  # a full or vanished disk; the merge itself will say so
