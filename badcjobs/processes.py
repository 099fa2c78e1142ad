"""Start programs that never outlive the task, and end them with all their descendants.

``--engine-prefix`` puts a program before an engine: a profiler, numactl, a container. Such a program may print on its
stdout, start the engine in a new session or leave helpers running. So the pipes of a worker bypass the prefix, and its
processes are found by a mark in their environment. Without a prefix, workers can be forked from one process that has
imported everything.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import WorkerPlan
from badcjobs.seams import Environ
from badcjobs.small_files import open_regular

if TYPE_CHECKING:
    import psutil

# Python 3.10 has no -P. Without it, a module in the working folder, perhaps of another user, would replace ours.
PYTHON = (sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []))
Process: TypeAlias = "subprocess.Popen[bytes] | FifoProcess | ForkedProcess"
Pipe = IO[bytes] | None

# Every process of a worker has this variable: the recorder finds them by it when the wrapper was killed.
TASK_MARK = "BADCJOBS_TASK"
_PREFIX_MARK = "BADCJOBS_PREFIX"  # every process started by one prefix has this one

MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
USUAL_MPS_PIPE = Path("/tmp/nvidia-mps")  # CUDA looks there without the variable
_NO_PIPE = "/nonexistent"
_CONTAINERS = ("", "APPTAINERENV_", "SINGULARITYENV_")  # the container removes the prefix inside
_ROCR = "ROCR_VISIBLE_DEVICES"
# Their numbers count only the devices that ROCR shows, so they would be wrong with one device.
_COUNT_WITHIN_ROCR = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_EXEC_TRIES = 20
_EXEC_S = 0.001
_LONGEST_END_S = 300.0  # a profiler writes its report after the program has ended, and the report may be large
_END_BYTES = 8 << 20  # read at each end of a file: all of a program; in larger models the parts with checksums
_ANSWER_S = 60.0  # a fork takes milliseconds
_POLL_S = 0.01
_CONNECT_PIPES = 'exec "$@" <"$0/in" >"$0/out"'


# --- starting ---------------------------------------------------------------------------------------------------------


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent dies, even by SIGKILL; for ``preexec_fn``."""
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def bind_to_parent(*, receives_term: bool = False) -> None:
    """Die when the wrapper dies; ignore Slurm's signals, which are for the wrapper; for ``preexec_fn``.

    Slurm sends its warnings and TERM to every process of the job: a worker that reacted would drop the chunk that the
    wrapper still wants to finish. Ignored signals stay ignored after exec. An unknown program may end its own processes
    with TERM (a Python pool does); if they ignored it, they would hang forever.
    """
    die_with_parent()
    for signum in _WARNINGS if receives_term else (signal.SIGTERM, *_WARNINGS):
        signal.signal(signum, signal.SIG_IGN)


class Launcher:
    """Starts programs as child processes, each in its own process group, with ``--engine-prefix`` before them.

    Parameters
    ----------
    mark: the name of the task; every process started here has it in its environment.
    prefix: the words of ``--engine-prefix``; ``{worker}`` in it is replaced by the name of the process, ``MARK-1``, ….
    """

    def __init__(self, mark: str, prefix: Sequence[str] = ()) -> None:
        self._mark = mark
        self.marks = {TASK_MARK: mark}  # in the environment of all its programs
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._behind: dict[int, str] = {}  # pid of a prefix → the mark of all its processes

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Environ,
        cwd: Path | None,
        stderr: Path,
        pipes: bool = False,
        receives_term: bool = False,
        keep: Sequence[int] = (),
    ) -> Process:
        """Start a program; append its stderr (and, without pipes, its stdout) to the file ``stderr``.

        The pipes bypass a prefix; its own output is appended to the same file. It keeps the files ``keep`` open.
        """
        env = {**env, **self.marks}
        spawn = partial(_spawn, cwd=cwd, stderr=stderr, receives_term=receives_term, keep=keep)
        if not self._prefix:
            return spawn(argv, env, pipes=pipes)

        number = str(next(self._numbers))
        prefix = self.prefix_for(number)
        env[_PREFIX_MARK] = f"{self._mark}-{number}"
        process: Process
        if pipes:
            place = stderr.absolute().parent / f"pipes-{self._mark}-{number}"
            shell = ["/bin/sh", "-c", _CONNECT_PIPES, str(place)]
            process = FifoProcess(place, partial(spawn, [*prefix, *shell, *argv], env))
        else:
            process = spawn([*prefix, *argv], env)
        self._behind[process.pid] = env[_PREFIX_MARK]
        return process

    def kill(self, process: Process) -> None:
        """Kill the whole group of a program that may have ended, and what a prefix has started in another group."""
        with suppress(ProcessLookupError, PermissionError):  # already gone
            os.killpg(process.pid, signal.SIGKILL)
        if process.pid in self._behind:
            end_leftovers(self._behind[process.pid], _PREFIX_MARK)

    def prefix_for(self, worker: str) -> list[str]:
        """Return the prefix for one process, as words."""
        return [word.replace("{worker}", f"{self._mark}-{worker}") for word in self._prefix]


def _spawn(
    argv: Sequence[str],
    env: Environ,
    *,
    cwd: Path | None,
    stderr: Path,
    receives_term: bool,
    keep: Sequence[int],
    pipes: bool = False,
) -> subprocess.Popen[bytes]:
    with stderr.open("ab") as log:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else log,
            stderr=log,
            env=env,
            cwd=cwd,
            start_new_session=True,
            pass_fds=keep,
            preexec_fn=partial(bind_to_parent, receives_term=receives_term),  # no locks
        )


def worker_environment(environ: Environ, plan: WorkerPlan) -> dict[str, str]:
    """Return the environment of a worker: the task's own, with only one visible device, even in a container."""
    device = plan.device
    env = dict(environ)
    env["BADCJOBS_DEVICE_UUID"] = (device and device.uuid) or ""
    env.setdefault("OMP_NUM_THREADS", str(plan.threads))

    variables = show_only(None, "")
    if device is not None:
        variables = show_only(device.vendor, device.pin)
    if device is not None and device.vendor == "amd":
        for name in _COUNT_WITHIN_ROCR:
            for prefix in _CONTAINERS:
                env.pop(prefix + name, None)
    elif plan.pipe:
        variables[MPS_PIPE] = plan.pipe
    elif MPS_PIPE in environ or USUAL_MPS_PIPE.exists():  # a daemon that this worker shall not use
        variables[MPS_PIPE] = _NO_PIPE

    for name, value in variables.items():
        for prefix in _CONTAINERS:
            env[prefix + name] = value
    return env


def show_only(vendor: str | None, names: str) -> dict[str, str]:
    """Return the variables that show a program only these devices, separated by commas; without a vendor, none."""
    if vendor == "amd":
        return {_ROCR: names}
    variables = {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if vendor is None:
        variables[_ROCR] = ""  # HIP ignores an empty CUDA_VISIBLE_DEVICES and shows all devices
    return variables


def last_lines(path: Path, limit: int = 2000) -> str:
    """Return the end of a program's log, for an error message."""
    try:
        with os.fdopen(open_regular(path), "rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""


# --- a program before the engine --------------------------------------------------------------------------------------


def parse_prefix(text: str, search_path: str | None) -> list[str]:
    """Split ``--engine-prefix`` into words; raise NotHere if its program is not on this machine."""
    example = "badcjobs run … --engine-prefix 'nsys profile -o OUT/{worker}'"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--engine-prefix {text!r} cannot be read", why=str(error), fix=example) from error
    if not words:
        raise BadInput("--engine-prefix is empty", fix=example)
    require_program(words[0], "--engine-prefix", search_path)
    return words


def require_program(program: str, option: str, search_path: str | None) -> None:
    """Raise NotHere if the program of an option is not on this machine."""
    if shutil.which(program, path=search_path) is None:
        raise NotHere(
            f"the program {program!r} of {option} was not found",
            why="it is neither an executable file nor on PATH",
            fix=f"command -v {shlex.quote(program)}   (on the compute node: load its module first)",
        )


class FifoProcess:
    """A prefix whose program exchanges data with us through two named pipes in a folder.

    We keep the program's ends of the pipes open until the prefix has ended: otherwise a pipe that the program has not
    opened yet would look closed.
    """

    def __init__(self, place: Path, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        place.mkdir(parents=True)
        for name in ("in", "out"):
            os.mkfifo(place / name)
        read_out = os.open(place / "out", os.O_RDONLY | os.O_NONBLOCK)
        self._kept = [os.open(place / "in", os.O_RDONLY | os.O_NONBLOCK), os.open(place / "out", os.O_WRONLY)]
        os.set_blocking(read_out, True)
        self.stdin: Pipe = os.fdopen(os.open(place / "in", os.O_WRONLY), "wb")
        self.stdout: Pipe = os.fdopen(read_out, "rb")
        self.returncode: int | None = None
        try:
            self._process = start()
        except BaseException:
            self._close_pipes()
            raise
        self.pid = self._process.pid
        threading.Thread(target=self._close_pipes, args=[self._process.wait], name="prefix", daemon=True).start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, longer than ``timeout``: a profiler writes its report after the program has ended."""
        self.returncode = self._process.wait(None if timeout is None else timeout + _LONGEST_END_S)
        return self.returncode

    def _close_pipes(self, when: Callable[[], object] = lambda: None) -> None:
        when()
        while self._kept:
            os.close(self._kept.pop())


# --- a parent that forks ----------------------------------------------------------------------------------------------


class ParentGone(Exception):
    """The parent has ended, or cannot fork; the text is the reason."""


class ParentLate(ParentGone):
    """The parent has given no answer in time."""


class ForkParent:
    """A program that has imported an engine and forks workers, with the same ``start`` as Launcher.

    Its workers end with it. It ends with the thread that has started it, so it gets a thread of its own.
    ``argv`` makes its command line, with the number of its end of the socket. ``limit_s`` is for its imports.
    """

    def __init__(
        self,
        launcher: Launcher,
        argv: Callable[[int], Sequence[str]],
        env: Environ,
        cwd: Path,
        *,
        limit_s: float,
    ) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._why = "the process that forks workers has ended"  # if it gives no answer
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        started: Future[Process] = Future()

        def hold() -> None:
            fd = theirs.fileno()
            try:
                process = launcher.start(argv(fd), env=env, cwd=cwd, stderr=Path(os.devnull), keep=[fd])
            except BaseException as error:
                started.set_exception(error)
                return
            started.set_result(process)
            process.wait()

        with theirs:
            threading.Thread(target=hold, name="fork parent", daemon=True).start()
            self.pid = started.result().pid
        self.facts = self._ask(None, limit_s=limit_s)

    def start(self, argv: Sequence[str], *, env: Environ, cwd: Path | None, stderr: Path, pipes: bool) -> ForkedProcess:
        """Fork a worker; the program in ``argv``, the folder and the mark of the task are those of the parent."""
        order = {
            "args": argv[2:],
            "env": {name: value for name, value in env.items() if self._env.get(name) != value},
            "unset": [name for name in self._env if name not in env],
        }
        with ExitStack() as theirs:
            read_in, write_in = os.pipe()
            read_out, write_out = os.pipe()
            for fd in (read_in, write_out):
                theirs.callback(os.close, fd)
            stdin = os.fdopen(write_in, "wb")
            stdout = os.fdopen(read_out, "rb")
            log = theirs.enter_context(stderr.open("ab"))
            pid = self._ask(order, [read_in, write_out, log.fileno()])["pid"]
            return ForkedProcess(pid, stdin, stdout, self)

    def reap(self, pid: int) -> int | None:
        """Return the exit code of a worker; None: it still runs."""
        try:
            code: int | None = self._ask({"reap": pid})["code"]
            return code
        except ParentGone:
            return -signal.SIGKILL  # by the kernel

    def _ask(self, order: object, fds: Sequence[int] = (), *, limit_s: float = _ANSWER_S) -> dict[str, Any]:
        """Send an order and return the answer; end a parent that gives none."""
        answer = b""
        gone = ParentGone
        with self._lock:
            try:
                self._socket.settimeout(limit_s)
                if order is not None:
                    socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
                answer = self._socket.recv(1 << 16)
            except TimeoutError:
                gone = ParentLate
                self._why = f"the process that forks workers has not answered for {limit_s:.0f} s"
            except OSError:  # it has ended
                pass
            if not answer:
                self._socket.close()
                with suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
        facts: dict[str, Any] = json.loads(answer or "{}")
        if not answer or (order is not None and "error" in facts):
            raise gone(facts.get("error", self._why))
        return facts


@dataclass(eq=False)
class ForkedProcess:
    """A worker that a parent has forked; only the parent can wait for it."""

    pid: int
    stdin: Pipe
    stdout: Pipe
    _parent: ForkParent
    returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code."""
        started_s = time.monotonic()
        while self.returncode is None:
            self.returncode = self._parent.reap(self.pid)
            if self.returncode is not None:
                break
            if timeout is not None and time.monotonic() - started_s > timeout:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(_POLL_S)
        return self.returncode


# --- ending -----------------------------------------------------------------------------------------------------------


def end_leftovers(mark: str, name: str = TASK_MARK) -> int:
    """Kill every process with this mark, of a task or of a prefix; return how many there were."""
    import psutil

    ended = 0
    for process in psutil.process_iter():
        try:
            if _environ(process).get(name) == mark:
                process.kill()
                ended += 1
        except (psutil.Error, OSError):
            continue  # it has ended, or belongs to another user
    return ended


def _environ(process: psutil.Process) -> Environ:
    """Return the environment of a process; it is empty for a moment during exec."""
    environ = process.environ()
    for _ in range(_EXEC_TRIES):
        if environ or not process.exe():  # kernel threads have neither
            break
        time.sleep(_EXEC_S)
        environ = process.environ()
    return environ


# --- the version of a program -----------------------------------------------------------------------------------------


def fingerprint_of(files: Iterable[Path], *, content: bool = True) -> str | None:
    """Return eight characters that change when one of the files changes; None: no file exists. A copy gives the same.

    Without ``content`` only sizes count, which is enough for files whose size differs in every version.
    """
    import hashlib  # late: it loads a cryptographic library of 4 MB, which the recorder does not need

    digest = hashlib.sha256()
    file_exists = False
    for path in sorted(files):
        try:
            state = path.stat()
        except OSError:
            continue
        digest.update(f"{path.name}\0{state.st_size}\0".encode(errors="replace"))
        file_exists = True
        if content:
            with suppress(OSError), path.open("rb") as file:  # it may be executable, but not readable
                digest.update(file.read(_END_BYTES))
                file.seek(max(_END_BYTES, state.st_size - _END_BYTES))
                digest.update(file.read(_END_BYTES))
    return digest.hexdigest()[:8] if file_exists else None
