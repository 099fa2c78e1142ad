"""Waits for what is going to happen, however slow the machine is today."""

import time
from collections.abc import Callable
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


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
