"""Waits for what is going to happen, however slow the machine is today, and looks at who is there."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

Found = TypeVar("Found")


def wait_for(look: Callable[[], Found], what: str, timeout_s: float = 60) -> Found:
    """Look again and again until there is something to see, and return it."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
    return found


def processes(wanted: Callable[[psutil.Process], object]) -> list[psutil.Process]:
    """Return the processes that are wanted; none of them is gone meanwhile, or someone else's."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process] * bool(wanted(process) and process.status() != psutil.STATUS_ZOMBIE)
    return found


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and bool(processes(lambda process: process.pid == pid))
