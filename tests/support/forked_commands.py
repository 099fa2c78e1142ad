"""Runs badcjobs commands in processes that inherit what Python has already imported: half of a short command's time.

Everything else is as if a shell had started it. What Python and the linker read only once, when a program starts,
would not be seen: a command whose environment changes that is started as ever. Run as a program, this file imports
badcjobs once and is then forked for every command: who asks connects to a socket and writes one JSON document; the
answers are the pid and, in the end, the exit code.
"""

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
# Left to the commands: a program of its own, and what needs packages that a user may not have.
_APART = ("badcjobs.__main__", "badcjobs.workers.hawkears_worker", "badcjobs.live", "badcjobs.report.chart")


def can_be_forked(changes: dict[str, str]) -> bool:
    """Return whether a command with these changes to the environment is the same when it is forked."""
    return not any(name.startswith(_READ_AT_START) for name in changes)


def run_forked(argv: list[str], env: dict[str, str], cwd: Path, stdout: Path, stderr: Path, timeout_s: float) -> int:
    """Run a command and return its exit code; raise TimeoutError, and end the process, when it does not come."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.settimeout(60)
        talk.connect(_door(env["PYTHONPATH"]))
        order = {"argv": argv, "env": env, "cwd": str(cwd), "stdout": str(stdout), "stderr": str(stderr)}
        talk.sendall(json.dumps(order).encode() + b"\n")
        with talk.makefile("r", encoding="ascii") as answers:
            pid = int(answers.readline())
            talk.settimeout(timeout_s)
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise


@functools.cache
def _door(python_path: str) -> str:
    """Start the process that is forked, once; it ends with us."""
    folder = tempfile.mkdtemp(prefix="forker-")
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    env = {**kept, "LANG": "C.UTF-8", "PYTHONPATH": python_path}
    argv = [sys.executable, __file__, f"{folder}/door"]
    forker = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert forker.stdin is not None and forker.stdout is not None
    assert forker.stdout.readline() == b"open\n", "the forker did not start"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(forker.wait)
    atexit.register(forker.stdin.close)
    return f"{folder}/door"


def import_all() -> None:
    """Import what commands import, wherever it stands, and what the parser imports with its first option."""
    package = importlib.import_module("badcjobs").__path__
    names = [module.name for module in pkgutil.walk_packages(package, "badcjobs.")]
    for name in [*(name for name in names if not name.startswith(_APART)), "submitit"]:
        importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module("badcjobs.cli.program").app(["template", "--json"], standalone_mode=False)


def serve(door: socket.socket) -> None:
    """Fork for each caller, until the other end of our stdin is closed."""
    while 0 not in (ready := select.select([door, 0], [], [])[0]) and ready:
        visitor, _ = door.accept()
        if os.fork() == 0:
            door.close()
            look_after(visitor)
        visitor.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def look_after(visitor: socket.socket) -> NoReturn:
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
    cli = importlib.import_module("badcjobs.cli")
    sys.argv = [str(Path(cli.__path__[0]).parent / "__main__.py"), *order["argv"]]
    cli.main()
    raise SystemExit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which no command would see
    import_all()
    with socket.socket(socket.AF_UNIX) as the_door:
        the_door.bind(sys.argv[1])
        the_door.listen()
        print("open", flush=True)
        serve(the_door)
