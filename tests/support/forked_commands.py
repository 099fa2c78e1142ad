"""Runs badcjobs commands in processes that inherit what Python has already imported: half of a short command's time.

Everything else is as if a shell had started it. What Python and the linker read only once, when a program starts,
would not be seen: a command whose environment changes that is started as ever.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
_CONNECT_S = 60


def can_be_forked(changes: dict[str, str]) -> bool:
    """Return whether a command with these changes to the environment is the same when it is forked."""
    return not any(name.startswith(_READ_AT_START) for name in changes)


class ForkedCommand:
    """A command that runs, of which we know the process and are told the end."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, stdout: Path, stderr: Path) -> None:
        self._talk = socket.socket(socket.AF_UNIX)
        self._talk.settimeout(_CONNECT_S)
        self._talk.connect(_door(env["PYTHONPATH"]))
        order = {"argv": argv, "env": env, "cwd": str(cwd), "stdout": str(stdout), "stderr": str(stderr)}
        self._talk.sendall(json.dumps(order).encode() + b"\n")
        self._answers = self._talk.makefile("r", encoding="ascii")
        self.pid = int(self._answers.readline())

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; raise TimeoutError, and end the process, when it does not come."""
        self._talk.settimeout(timeout_s)
        try:
            return int(self._answers.readline())
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        finally:
            self._talk.close()


@functools.cache
def _door(python_path: str) -> str:
    """Start the process that is forked, once; it ends with us."""
    folder = tempfile.mkdtemp(prefix="forker-")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    forker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("command_forker.py")), f"{folder}/door"],
        env={**kept, "LANG": "C.UTF-8", "PYTHONPATH": python_path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert forker.stdin is not None and forker.stdout is not None
    assert forker.stdout.readline() == b"open\n", "the forker did not start"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(forker.wait)
    atexit.register(forker.stdin.close)
    return f"{folder}/door"
