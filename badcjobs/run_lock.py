"""Who works on a run folder now: one submit after the other looks into it, and one emulation at a time works in it.

An emulation holds ``logs/emulation.lock`` as long as it lives, and leaves in it the command that goes on with its work.
A job of Slurm is told from submitted.json, which is ``scheduler``'s business.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from badcjobs.errors import BadInput
from badcjobs.paths import RunFolder


def _file_in(out: Path) -> Path:
    return out / "logs" / "emulation.lock"


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Let one submit after the other look into a run folder: the second finds what the first has left."""
    if not out.is_dir():
        check_writable(out)
    try:
        lock = os.open(out, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # this filesystem has no locks
        yield
    finally:
        os.close(lock)


def check_writable(out: Path) -> None:
    """Make the run folder; refuse one that cannot be written."""
    RunFolder(out).create()
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise BadInput(
            f"--out {out} cannot be written", why=error.strerror, fix="--out a folder you may write to"
        ) from error


def refuse_during_emulation(out: Path) -> None:
    """Refuse to do anything with a run that an emulation is at work on."""
    try:
        with _file_in(out).open() as file:
            _lock(file, out)
    except OSError:
        pass  # there was none; or it is somebody else's, and he is asked by nobody


@contextmanager
def emulation_in(out: Path, command: Sequence[str]) -> Iterator[IO[str]]:
    """Keep everybody else away from a run while it is emulated; ``command`` is what goes on with it later."""
    path = _file_in(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = path.open("a+")  # not "w": whoever holds it keeps his words
    except OSError as error:
        line = shlex.join(["ls", "-ld", str(path.parent)])
        raise BadInput(f"{path} cannot be written", why=error.strerror, fix=line) from error
    with opened as file:
        _lock(file, out)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "command": list(command)}) + "\n")
        file.flush()
        yield file


def _lock(file: IO[str], out: Path) -> None:
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if file.writable() else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _read(out).get("pid")
        logs = shlex.quote(str(out / "logs"))
        raise BadInput(
            f"{out} is being worked on by another emulation" + (f", process {pid}" if pid else ""),
            why="two would do the same chunks",
            fix=f"tail {logs}/*.out   (it says how far that is" + (f"; kill {pid} ends it)" if pid else ")"),
        ) from None
    except OSError:
        pass  # this filesystem has no locks


def _read(out: Path) -> dict[str, object]:
    try:
        found = json.loads(_file_in(out).read_text())
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
    folders = [out / "logs", RunFolder(out).tasks, out]
    made = [folder for folder in folders if not _is_there(folder)]
    try:
        yield
    except BaseException:
        if made and made[0] == folders[0] and _names_in(made[0]) == {_file_in(out).name}:
            _file_in(out).unlink()
        for folder in made:
            try:
                folder.rmdir()
            except OSError:
                pass  # not there, or not empty: something has begun
        raise


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:  # below somebody else's folder
        return True


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
