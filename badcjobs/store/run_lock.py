"""Who works on a run folder now: one submit after the other looks into it, and one emulation at a time works in it.

An emulation holds ``logs/emulation.lock`` as long as it lives, and leaves in it the command that goes on with its work.
A job of Slurm is known from submitted.json (``submission_record.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from badcjobs.errors import BadInput
from badcjobs.paths import RunFolder


def lock_in(out: Path) -> Path:
    """Return the file that an emulation of this run holds."""
    return out / "logs" / "emulation.lock"


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Let one submit after the other look into a run folder: the second finds what the first has left."""
    if not out.is_dir():
        check_writable(out)
    with ExitStack() as stack:
        with suppress(OSError):  # a folder that is closed to us, or a filesystem without locks
            lock = os.open(out, os.O_RDONLY)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_writable(out: Path) -> None:
    """Make the run folder; refuse one that cannot be written."""
    RunFolder(out).create()
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise BadInput(
            f"--out {out} cannot be written", why=error.strerror, fix="--out a folder you may write to"
        ) from error


def is_emulated_now(out: Path) -> bool:
    """Say whether an emulation is at work on a run; no, as far as anybody knows, where a filesystem has no locks."""
    try:
        with lock_in(out).open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False  # there was none; or it is somebody else's, and he is asked by nobody


def refuse_during_emulation(out: Path) -> None:
    """Refuse to do anything with a run that an emulation is at work on."""
    if is_emulated_now(out):
        raise _at_work(out)


@contextmanager
def emulation_in(out: Path, command: Sequence[str]) -> Iterator[IO[str]]:
    """Keep everybody else away from a run while it is emulated; ``command`` is what goes on with it later."""
    path = lock_in(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+")  # not "w": what its holder has written stays
    except OSError as error:
        line = shlex.join(["ls", "-ld", str(path.parent)])
        raise BadInput(f"{path} cannot be written", why=error.strerror, fix=line) from error
    with opened as file:
        while not _try_lock(file, fcntl.LOCK_EX):
            if not _try_lock(file, fcntl.LOCK_SH):  # else it was somebody who only asked, for a moment
                raise _at_work(out)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "command": list(command)}) + "\n")
        file.flush()
        yield file


def _try_lock(file: IO[str], kind: int) -> bool:
    """Lock a file; say whether nobody has it who does not share it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # this filesystem has no locks
    return True


def _at_work(out: Path) -> BadInput:
    pid = _read(out).get("pid")
    logs = shlex.quote(str(out / "logs"))
    return BadInput(
        f"{out} is being worked on by another emulation" + (f", process {pid}" if pid else ""),
        why="two would do the same chunks",
        fix=f"tail {logs}/*.out   (it says how far that is" + (f"; kill {pid} ends it)" if pid else ")"),
    )


def _read(out: Path) -> dict[str, object]:
    try:
        found = json.loads(lock_in(out).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def emulated_command(out: Path) -> tuple[str, ...]:
    """Return the command that goes on with the last emulation of a run; empty: nobody knows it."""
    words = _read(out).get("command")
    return tuple(map(str, words)) if isinstance(words, list) else ()


@contextmanager
def leaving_nothing(out: Path) -> Iterator[None]:
    """Take the folders away again that were made for something that was then refused."""
    lock = lock_in(out)
    made = [folder for folder in (lock.parent, RunFolder(out).tasks, out) if not os.path.exists(folder)]  # noqa: PTH110
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if lock.parent in made and os.listdir(lock.parent) == [lock.name]:  # noqa: PTH208
                lock.unlink()
        for folder in made:
            with suppress(OSError):  # not there, or not empty: something has begun
                folder.rmdir()
        raise
