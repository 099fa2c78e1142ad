"""Locks of a run folder: one submit at a time reads it, and one emulation at a time works in it.

Both are leases. An emulation also writes the command that continues its work into ``logs/emulation.lock``. For a Slurm
job see submitted.json (``submission_record.py``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.locks import Held, Lease, find_holder, this_process
from badcjobs.masking import mask_words
from badcjobs.paths import RunFolder, shell_line
from badcjobs.small_files import open_regular, read_optional

_EMULATION = "emulation"


def lock_file_in(out: Path) -> Path:
    """Return the file in which an emulation of this run describes itself; it stays."""
    return out / "logs" / "emulation.lock"


@contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Lock a run folder for one submit: the next one then finds what this one has written."""
    check_writable(out)
    clock = SystemClock()
    lease = Lease(out, "submit", this_process(clock), clock)
    lease.wait()
    try:
        yield
    finally:
        lease.release()


def check_writable(out: Path) -> None:
    """Create the run folder; raise BadInput if it cannot be written."""
    RunFolder(out).create()
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise BadInput(
            f"--out {out} cannot be written",
            why=error.strerror,
            fix="--out FOLDER   (one that you can write to)",
        ) from error


def is_emulated_now(out: Path) -> bool:
    """Say whether an emulation works on a run now."""
    return find_holder(lock_file_in(out).parent, _EMULATION, SystemClock().now_ms()) is not None


def refuse_during_emulation(out: Path) -> None:
    """Raise BadInput if an emulation works on a run now."""
    if is_emulated_now(out):
        raise _busy(out)


@contextmanager
def emulation_lock(out: Path, command: Sequence[str]) -> Iterator[IO[str]]:
    """Hold the lock of a run while it is emulated; ``command`` continues the emulation later."""
    path = lock_file_in(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+")
    except OSError as error:
        line = shell_line("ls", "-ld", path.parent)
        raise BadInput(f"{path} cannot be written", why=error.strerror, fix=line) from error
    clock = SystemClock()
    with opened as file:
        refuse_during_emulation(out)
        try:
            with Lease(path.parent, _EMULATION, this_process(clock), clock):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "command": mask_words(command)}) + "\n")
                file.flush()
                yield file
        except Held:
            raise _busy(out) from None


def _busy(out: Path) -> BadInput:
    pid = _read(out).get("pid")
    logs = shell_line(out / "logs")
    return BadInput(
        "another emulation" + (f", process {pid}," if pid else "") + f" is working on {out}",
        why="both would process the same chunks",
        fix=f"tail {logs}/*.out   (shows its progress" + (f"; kill {pid} ends it)" if pid else ")"),
    )


def _read(out: Path) -> dict[str, object]:
    return read_optional(lock_file_in(out), dict[str, object]) or {}


def emulated_command(out: Path) -> tuple[str, ...]:
    """Return the command that continues the last emulation of a run, without secrets; empty: not known."""
    arguments = _read(out).get("command")
    return tuple(map(str, arguments)) if isinstance(arguments, list) else ()


@contextmanager
def undo_on_error(out: Path) -> Iterator[None]:
    """Remove the new folders of a run if the block raises an exception."""
    lock = lock_file_in(out)
    new_folders = [folder for folder in (lock.parent, RunFolder(out).tasks, out) if not os.path.exists(folder)]  # noqa: PTH110
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if lock.parent in new_folders and os.listdir(lock.parent) == [lock.name]:  # noqa: PTH208
                lock.unlink()
        for folder in new_folders:
            with suppress(OSError):  # not there, or not empty: a task has started
                folder.rmdir()
        raise
