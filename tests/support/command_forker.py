"""Started by ``forked_commands``: imports badcjobs once, then is forked for every command that is asked for.

Who asks connects to a socket and writes one JSON document; the answers are the pid and, in the end, the exit code.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import select
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import badcjobs

# Left to the commands: a program of its own, and what needs packages that a user may not have.
_APART = ("badcjobs.__main__", "badcjobs.workers.hawkears_worker", "badcjobs.live", "badcjobs.report.chart")


def modules() -> list[str]:
    """Return what commands import, wherever it stands in the package."""
    found = [module.name for module in pkgutil.walk_packages(badcjobs.__path__, "badcjobs.")]
    return [*(name for name in found if not name.startswith(_APART)), "submitit"]


def serve(door: socket.socket) -> None:
    """Fork for whoever knocks, until the other end of our stdin is closed."""
    while True:
        ready, _, _ = select.select([door, 0], [], [])
        if 0 in ready:
            return
        visitor, _ = door.accept()
        if os.fork() == 0:
            door.close()
            look_after(visitor)
        visitor.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def look_after(visitor: socket.socket) -> None:
    """Fork once more: wait for the command and tell how it ended; in the other process, be it."""
    with visitor.makefile("r", encoding="utf-8") as asked:
        order = json.loads(asked.readline())
    pid = os.fork()
    if pid == 0:
        visitor.close()
        be(order)
    with contextlib.suppress(BrokenPipeError):
        visitor.sendall(f"{pid}\n".encode())
        visitor.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def be(order: dict[str, Any]) -> NoReturn:
    """Become the program, as a shell would have started it."""
    os.chdir(order["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, order["stdout"]), (2, order["stderr"])):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    tempfile.tempdir = None
    sys.argv = [str(Path(importlib.import_module("badcjobs.cli").__path__[0]).parent / "__main__.py"), *order["argv"]]
    importlib.import_module("badcjobs.cli").main()
    raise SystemExit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which no command would see
    for name in modules():
        importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()):  # what the parser imports with its first option, it has then
        importlib.import_module("badcjobs.cli.program").app(["template", "--json"], standalone_mode=False)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        print("open", flush=True)
        serve(door)
