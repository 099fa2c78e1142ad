"""Starts programs so that none of them outlives the task, and ends them with all that they have started.

``--engine-prefix`` puts a program before an engine: a profiler, numactl, a container. Such a program may print on its
stdout, give the engine a session of its own or leave helpers behind. So the pipes of a worker bypass the prefix, and
its processes are found by a mark in their environment.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import WorkerPlan
from badcjobs.seams import Process

if TYPE_CHECKING:
    import psutil

# Every process below a worker carries this variable: how the recorder finds them when the wrapper was killed.
TASK_MARK = "BADCJOBS_TASK"
_PREFIX_MARK = "BADCJOBS_PREFIX"  # and every process behind one prefix this one

_CONTAINERS = ("", "APPTAINERENV_", "SINGULARITYENV_")  # what the program in a container sees without the prefix
_ROCR = "ROCR_VISIBLE_DEVICES"
# A number that was right among four devices names none, or another one, when ROCR leaves only one.
_COUNT_WITHIN_ROCR = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_EXEC_LOOKS, _EXEC_S = 20, 0.001
_LONGEST_END_S = 300.0  # a profiler writes its report when the program has ended, and the report may be large
_END_BYTES = 8 << 20  # are read at each end: a program whole; of a model that is larger, where its checksums are
_BEGIN_WITH_PIPES = 'exec "$@" <"$0/in" >"$0/out"'


# --- starting ---------------------------------------------------------------------------------------------------------


def die_with_parent(signum: signal.Signals = signal.SIGKILL) -> None:
    """Let this process get a signal when its parent is gone, even by SIGKILL; for ``preexec_fn``."""
    _prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def bind_to_parent(*, hears_term: bool = False) -> None:
    """Die when the wrapper is gone, and leave Slurm's signals to it; for ``preexec_fn``.

    Slurm sends its warnings and its TERM to every process of the job: a worker that obeyed would drop the chunk that
    the wrapper still wants to finish. What is ignored here stays ignored after exec. Programs that we do not know may
    end processes of their own with TERM, such as those of a Python pool: deaf to it, they would hang for ever.
    """
    die_with_parent()
    for signum in _WARNINGS if hears_term else (signal.SIGTERM, *_WARNINGS):
        signal.signal(signum, signal.SIG_IGN)


class SubprocessLauncher:
    """Starts programs as our own children, each in a process group of its own, perhaps behind another program.

    Parameters
    ----------
    mark: the name of the task; every process below us carries it.
    prefix: the words of ``--engine-prefix``; ``{worker}`` in it becomes the name of the process, ``MARK-1``, ….
    """

    def __init__(self, mark: str, prefix: Sequence[str] = ()) -> None:
        self._mark = mark
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._behind: dict[int, str] = {}  # by the prefix's pid: the mark of all that it has started

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        stderr: Path,
        pipes: bool = False,
        hears_term: bool = False,
    ) -> Process:
        """Start a program; its stderr (and, without pipes, its stdout) is added to the file ``stderr``.

        The pipes bypass a prefix; what that prints is added to the same file.
        """
        marks = {TASK_MARK: self._mark}

        def spawn(words: Sequence[str], *, pipes: bool = False) -> Process:
            with stderr.open("ab") as log:
                return subprocess.Popen(
                    list(words),
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else log,
                    stderr=log,
                    env={**env, **marks},
                    cwd=cwd,
                    start_new_session=True,
                    preexec_fn=partial(bind_to_parent, hears_term=hears_term),  # no locks
                )

        if not self._prefix:
            return spawn(argv, pipes=pipes)
        number = str(next(self._numbers))
        marks[_PREFIX_MARK] = f"{self._mark}-{number}"
        words = self.prefix_for(number)
        place = stderr.absolute().parent / f"pipes-{self._mark}-{number}"
        shell = ["/bin/sh", "-c", _BEGIN_WITH_PIPES, str(place)]
        process = FifoProcess(place, partial(spawn, [*words, *shell, *argv])) if pipes else spawn([*words, *argv])
        self._behind[process.pid] = marks[_PREFIX_MARK]
        return process

    def kill(self, process: Process) -> None:
        """Kill the whole group of a program that may have ended, and what a prefix has started in another group."""
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it is gone, and that is what we wanted
        if process.pid in self._behind:
            end_leftovers(self._behind[process.pid], _PREFIX_MARK)

    def prefix_for(self, worker: str) -> list[str]:
        """Return the words of the prefix for one process."""
        return [word.replace("{worker}", f"{self._mark}-{worker}") for word in self._prefix]


def worker_environment(environ: Mapping[str, str], plan: WorkerPlan) -> dict[str, str]:
    """Return the environment of a worker: the task's own, but only one device in sight, inside a container too."""
    device, env = plan.device, dict(environ)
    if device is not None and device.vendor == "amd":
        lists = {_ROCR: device.pin}
        for name in _COUNT_WITHIN_ROCR:
            for prefix in _CONTAINERS:
                env.pop(prefix + name, None)
    else:
        lists = {"CUDA_VISIBLE_DEVICES": device.pin if device else "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        # HIP takes an empty CUDA_VISIBLE_DEVICES for none and shows everything; ROCR does as it is told.
        lists |= {} if device else {_ROCR: ""}
    env |= {prefix + name: value for name, value in lists.items() for prefix in _CONTAINERS}
    env["BADCJOBS_DEVICE_UUID"] = (device.uuid or "") if device else ""
    env.setdefault("OMP_NUM_THREADS", str(plan.threads))
    return env


def last_lines(path: Path, limit: int = 2000) -> str:
    """Return the end of a program's log: what it said before it failed."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""


# --- a program before the engine --------------------------------------------------------------------------------------


def parse_prefix(text: str, search_path: str | None) -> list[str]:
    """Return the words of ``--engine-prefix``; its program has to be on this machine."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--engine-prefix {text!r} cannot be read", why=str(error)) from error
    if not words:
        raise BadInput("--engine-prefix is empty", fix="badcjobs run … --engine-prefix 'nsys profile -o OUT/{worker}'")
    if shutil.which(words[0], path=search_path) is None:
        raise NotHere(
            f"the program {words[0]!r} of --engine-prefix was not found",
            why="it is neither a file that can be run nor on PATH",
            fix=f"command -v {shlex.quote(words[0])}   (on the compute node: load its module first)",
        )
    return words


class FifoProcess:
    """A prefix whose program talks to us past it, through two named pipes in a folder (seams.Process).

    Our own copies of the program's ends are kept open until the prefix has ended: without them a pipe that the program
    has not opened yet would look like one that it has closed.
    """

    def __init__(self, place: Path, start: Callable[[], Process]) -> None:
        place.mkdir(parents=True)
        for name in ("in", "out"):
            os.mkfifo(place / name)
        read_out = os.open(place / "out", os.O_RDONLY | os.O_NONBLOCK)
        self._kept = [os.open(place / "in", os.O_RDONLY | os.O_NONBLOCK), os.open(place / "out", os.O_WRONLY)]
        os.set_blocking(read_out, True)
        self.stdin: IO[bytes] | None = os.fdopen(os.open(place / "in", os.O_WRONLY), "wb")
        self.stdout: IO[bytes] | None = os.fdopen(read_out, "rb")
        self.returncode: int | None = None
        try:
            self._process = start()
        except BaseException:
            self._let_go()
            raise
        self.pid = self._process.pid
        threading.Thread(target=self._let_go, args=[self._process.wait], name="prefix", daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code; None: it still runs."""
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, longer than asked for: a profiler writes its report when the program has ended."""
        self.returncode = self._process.wait(None if timeout is None else timeout + _LONGEST_END_S)
        return self.returncode

    def _let_go(self, when: Callable[[], object] = lambda: None) -> None:
        when()
        while self._kept:
            os.close(self._kept.pop())


# --- ending -----------------------------------------------------------------------------------------------------------


def end_leftovers(mark: str, name: str = TASK_MARK) -> int:
    """Kill every process that carries this mark, of a task or of a prefix; return how many there were."""
    import psutil

    ended = 0
    for process in psutil.process_iter():
        try:
            if _environ(process).get(name) == mark:
                process.kill()
                ended += 1
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's
    return ended


def _environ(process: psutil.Process) -> Mapping[str, str]:
    """Return a process's environment, which is empty for a moment while it becomes another program."""
    environ: Mapping[str, str] = process.environ()
    for _ in range(_EXEC_LOOKS):
        if environ or not process.exe():  # the kernel's own have neither
            break
        time.sleep(_EXEC_S)
        environ = process.environ()
    return environ


# --- which program it is ----------------------------------------------------------------------------------------------


def fingerprint_of(files: Iterable[Path], *, content: bool = True) -> str | None:
    """Return a few letters that change when one of the files does; None: there are none. A copy is the same file.

    Without ``content`` nothing is read: it is enough for what has a size of its own in every version.
    """
    import hashlib  # late: it carries a cryptographic library of 4 MB, and the recorder needs none of it

    digest, found = hashlib.sha256(), False
    for path in sorted(files):
        try:
            state = path.stat()
        except OSError:
            continue
        digest.update(f"{path.name}\0{state.st_size}\0".encode(errors="replace"))
        found = True
        if not content:
            continue
        try:
            with path.open("rb") as file:
                digest.update(file.read(_END_BYTES))
                file.seek(max(_END_BYTES, state.st_size - _END_BYTES))
                digest.update(file.read(_END_BYTES))
        except OSError:  # it may be run, but not be read
            digest.update(str(state.st_mtime_ns).encode())
    return digest.hexdigest()[:8] if found else None
