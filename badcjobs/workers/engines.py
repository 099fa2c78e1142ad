"""The engines by name: the demo engine, HawkEars 2 and HawkEars 1; ``command`` runs any other program.

HawkEars 2 runs through its Python API (since 2.3): our worker program ``hawkears_worker`` runs in HawkEars' Python, and
``stream_session`` talks to it.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from badcjobs import __version__
from badcjobs.errors import BadInput, NotHere, SlowStart
from badcjobs.model import WorkerPlan
from badcjobs.paths import ANOTHER_CACHE, RunFolder, shell_line, user_cache
from badcjobs.processes import PYTHON, ForkParent, Launcher, ParentGone, ParentLate, fingerprint_of, worker_environment
from badcjobs.seams import Clock, Engine
from badcjobs.settings import RunSettings
from badcjobs.workers.command import CommandEngine
from badcjobs.workers.demo_worker import parse_arguments
from badcjobs.workers.stream_session import START_S, EngineStart, HangTimeout, StreamSession

log = logging.getLogger(__name__)

VERSION_NEEDED = "2.3"
WORKER = Path(__file__).with_name("hawkears_worker.py")
_GIVE_PYTHON = "badcjobs run … --hawkears-python /path/to/the/venv/of/hawkears/bin/python"
_QUERY_TRIES = 3
_CACHES = (
    ("NUMBA_CACHE_DIR", "numba"), ("MPLCONFIGDIR", "matplotlib"), ("CUDA_CACHE_PATH", "nv"),
    ("TORCHINDUCTOR_CACHE_DIR", "torchinductor"), ("PYTORCH_KERNEL_CACHE_PATH", "torch-kernels"),
)  # fmt: skip
_NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # Arrow's allocator starts one when it is loaded
_MOST_PARENTS = 3
_THREADS = "OMP_NUM_THREADS"
_DEFAULT_THREADS = 3  # the default of HawkEars
_MOST_OMP_THREADS = 4  # more threads only compete for the cores
_CORES_TO_SPARE = 3  # with fewer cores per HawkEars thread, OpenMP threads slow each other down
# --quiet hides the device, --top stops early, and --filelist names the recordings of one call.
_RESERVED_2 = ("-i", "--input", "-o", "--output", "-r", "--rtype", "--quiet", "--top", "--filelist")
_RESERVED_1 = ("-i", "--input", "-o", "--output", "--rtype", "-d", "--debug", "--filelist", "--recurse")
_BATCH_1 = 256  # results come only at the end of a batch, so it must not be long


def choose_engine(
    settings: RunSettings,
    environ: Mapping[str, str],
    launcher: Launcher,
    clock: Clock,
    *,
    cwd: Path,
    allow_cpu: bool,
    start_s: float = START_S,
) -> Engine:
    """Return the engine that the settings name; relative paths are relative to ``cwd``.

    ``start_s``: how long HawkEars may take to start.
    """
    raw = RunFolder(cwd / settings.out).raw if settings.keep_raw and settings.out else None
    start = EngineStart(settings.engine_args, environ, launcher, clock, raw)
    if settings.engine == "demo":
        return DemoEngine(start)
    if settings.engine == "command":
        return CommandEngine(start, settings.command or "")
    python, root = settings.hawkears_python, cwd / (settings.hawkears_root or "")
    if settings.engine == "hawkears1":
        return HawkEars1Engine(start, python or "python3", root, allow_cpu=allow_cpu)
    script = shutil.which("hawkears", path=environ.get("PATH"))
    python = python or (script and python_of(Path(script)))
    if settings.workers_wanted is None and not allow_cpu:  # a job script may set as many threads as the job has cores
        start = replace(start, environ={name: value for name, value in environ.items() if name != _THREADS})
    limits, forks = HangTimeout(start_s=start_s), settings.workers_wanted != 1
    return HawkEarsEngine(start, python, root, allow_cpu=allow_cpu, hang_timeout=limits, forks=forks)


def chunks_at_once_of(engine: str, args: Sequence[str], plan: WorkerPlan) -> int:
    """Return how many chunks one worker of this engine processes at the same time."""
    return threads_of(sized_arguments(args, plan)) if engine in ("hawkears", "hawkears1") else 1


@dataclass(eq=False)
class DemoEngine:
    """Runs the built-in detector, one process per worker (``demo_worker``).

    It finds loud sounds in WAV files; FLAC files need the extra ``audio``.
    """

    start: EngineStart
    name: str = "demo"
    version: str | None = __version__
    wants: int = 2  # one in progress, one waiting
    hang_timeout: HangTimeout = field(default_factory=HangTimeout)

    def check(self) -> None:
        """Refuse wrong arguments before any worker starts."""
        parse_arguments(self.start.args)

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process; pass whether it is lean, and the memory of the device."""
        place = ["--lean"] if plan.lean else []
        if plan.device is not None and plan.device.memory_total_bytes is not None:
            place += [f"--device={plan.device.pin}", f"--device-bytes={plan.device.memory_total_bytes}"]
        return StreamSession(
            self.start,
            [*PYTHON, "-m", "badcjobs.workers.demo_worker", *self.start.args, *place],
            env=worker_environment(self.start.environ, plan),
            cwd=None,
            log_file=scratch / "demo.log",
            hang_timeout=self.hang_timeout,
        )


@dataclass(eq=False)
class HawkEarsEngine:
    """Runs the user's own HawkEars 2 installation."""

    start: EngineStart
    python: str | None  # the Python that has HawkEars; None: not known from ``hawkears`` on PATH
    root: Path  # the folder with its models and settings, its working folder
    _: KW_ONLY
    allow_cpu: bool
    hang_timeout: HangTimeout = field(default_factory=HangTimeout)
    forks: bool = False  # workers are forked from one process that has imported HawkEars, where that is possible
    name: str = field(default="hawkears", init=False)
    release: str | None = field(default=None, init=False)  # found by ``check``
    _parent: ForkParent | None = field(default=None, init=False)
    _parents: int = field(default=0, init=False)  # started so far
    _facts: Mapping[str, Any] = field(default_factory=dict, init=False)  # what the last one has answered
    _news: str = field(default="", init=False)  # how workers start, for the log
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def _models(self) -> Path:
        return self.root.absolute() / "data" / "ckpt"

    @property
    def version(self) -> str | None:
        """The release, as found by ``check``, and its models; None: not known."""
        models = list(self._models.glob("*.ckpt"))
        parts = [self.release or "", f"{len(models)} models {fingerprint_of(models, content=False)}" if models else ""]
        return ", ".join(filter(None, parts)) or None

    @property
    def wants(self) -> int:
        """One chunk per thread, and two that wait."""
        return threads_of(self.start.args) + 2

    def check(self) -> None:
        """Check HawkEars' Python and its models; let HawkEars parse the options."""
        args = self.start.args
        refuse_arguments(args, _RESERVED_2)
        python = find_python(self.python, self.start)
        if not any(self._models.glob("*.ckpt")):
            raise NotHere(
                f"HawkEars has no models in {self._models}",
                why="it looks for models in its working folder; without models it ends immediately, with exit code 0",
                fix=f"cd {self._models.parent.parent} && hawkears init   (needs the network; or give --hawkears-root)",
            )
        argv = [*self.start.launcher.prefix_for("check"), python]
        cache = user_cache(self.start.environ)
        forks = self.forks and not self.allow_cpu
        if forks and cache and not why_not_writable(cache):  # else only ``open`` knows a place for caches
            self._find_parent(hawkears_environment(self.start.environ, WorkerPlan(0, None, None, 1), args, cache))
        environ = {**self.start.environ, **self.start.launcher.marks}
        answer = self._facts or query_hawkears(
            argv, args, environ=environ, cwd=self.root, limit_s=self.hang_timeout.start_s
        )
        self.release = answer.get("versions", {}).get("hawkears")
        if self.release or (problem := answer.get("error")) is None:
            return
        if problem.startswith("Error: "):
            what = f"HawkEars does not understand --engine-arg {' '.join(args)}"
            raise BadInput(what, why=problem.removeprefix("Error: "), fix="hawkears analyze --help")
        if "No module named 'hawkears'" in problem:
            raise NotHere(f"HawkEars is not installed in {python}", why=problem, fix=_GIVE_PYTHON)
        raise NotHere(
            f"HawkEars in {python} cannot be used: badcjobs needs HawkEars {VERSION_NEEDED} or later",
            why=problem,
            fix=f"{shell_line(python)} -m pip install 'hawkears>={VERSION_NEEDED}'",
        )

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process."""
        args = sized_arguments(self.start.args, plan)
        scratch = scratch.absolute()
        (scratch / "hawkears").mkdir(exist_ok=True)
        env = hawkears_environment(self.start.environ, plan, args, scratch)
        session = partial(
            StreamSession,
            self.start,
            [find_python(self.python, self.start), str(WORKER), str(scratch / "hawkears"), *args],
            env=env,
            cwd=self.root,
            log_file=scratch / "hawkears.log",
            hang_timeout=self.hang_timeout,
            must_use_cuda=has_real_device(plan) and not self.allow_cpu,
            pin=plan.device.pin if plan.device else None,
        )
        while True:
            parent = self._find_parent(env)
            with self._lock:  # said here, not by ``check``, which runs before the task has its log
                said, self._news = self._news, ""
            if said:
                log.info("%s", said)
            try:
                return session(parent=parent)
            except ParentGone as error:
                with self._lock:
                    is_news = self._parent is parent  # else the thread of another worker has noticed it
                    self._parent = None if is_news else self._parent
                if is_news and self._parents < _MOST_PARENTS:
                    log.warning("another process to fork workers is started: %s", error)

    def _find_parent(self, env: Mapping[str, str]) -> ForkParent | None:
        """Return the process that forks workers, a new one if it has ended; None: start them one by one.

        Libraries count their threads when they are loaded: the parent and its workers all have one.
        """
        why = None
        with self._lock:
            if not self.forks:
                return None
            if self.allow_cpu:
                why = "they work on the CPU"
            elif self.start.launcher.prefix_for(""):
                why = "--engine-prefix is set"
            elif env[_THREADS] != "1":
                why = f"{_THREADS} is {env[_THREADS]}"
            elif self._parent is not None:
                return self._parent
            elif self._parents == _MOST_PARENTS:
                why = f"{_MOST_PARENTS} processes that forked them have ended"
            else:
                self._parents += 1
                words, args = [find_python(self.python, self.start), str(WORKER), "--parent"], self.start.args
                env, launcher = {**env, **_NO_THREADS}, self.start.launcher
                try:
                    limit_s = self.hang_timeout.start_s
                    parent = ForkParent(launcher, lambda fd: [*words, str(fd), *args], env, self.root, limit_s=limit_s)
                    self._facts, why = parent.facts, parent.facts.get("unfit") or parent.facts.get("error")
                    self._parent = parent
                    self._news = f"workers are forked from process {parent.pid}, which has imported HawkEars"
                except ParentLate as error:
                    raise slow_start(words[0], limit_s) from error
                except (ParentGone, OSError) as error:
                    why = str(error)
            if why is not None:
                self.forks, self._parent = False, None
                self._news = f"workers are started one by one, not forked: {why}"
            return self._parent


class HawkEars1Engine(CommandEngine):
    """Runs the user's own HawkEars 1: a folder with ``analyze.py``, and a Python that can run it.

    It is a preset of the command engine; the program ``hawkears1`` translates between the two.
    """

    name = "hawkears1"
    is_hawkears = True

    def __init__(self, start: EngineStart, python: str, root: Path, *, allow_cpu: bool, batch: int = _BATCH_1) -> None:
        # It may print only one line per recording, and compiles at its start: allow minutes of silence.
        super().__init__(start, "{inputs} {outputs}", HangTimeout(least_s=600.0), batch)
        self._python, self._root, self._allow_cpu = python, root.absolute(), allow_cpu

    @property
    def version(self) -> str | None:
        """A fingerprint of its program and models, because it has no version number."""
        mark = fingerprint_of([self._root / "analyze.py", *(self._root / "data" / "ckpt").glob("*")], content=False)
        return mark and f"analyze.py {mark}"

    def check(self) -> None:
        """Check Python, analyze.py, and that no option is given that badcjobs sets itself."""
        refuse_arguments(self.start.args, _RESERVED_1)
        find_python(self._python, self.start)
        script = self._root / "analyze.py"
        if not script.is_file():
            raise NotHere(
                f"{script} does not exist",
                why="HawkEars 1 is a folder with analyze.py, its data and its models",
                fix="badcjobs run … --engine hawkears1 --hawkears-root /path/to/HawkEars",
            )

    def argv_template(self, plan: WorkerPlan) -> list[str]:
        """Return the command line: our program ``hawkears1``, then analyze.py with its options."""
        args = self.start.args
        merge = [] if {"-m", "--merge"} & {arg.split("=")[0] for arg in args} else ["--merge", "0"]
        device = "cuda" if has_real_device(plan) and not self._allow_cpu else "any"
        python = find_python(self._python, self.start)
        analyze = [str(self._root), python, "analyze.py", *merge, *sized_arguments(args, plan)]
        own, theirs = ([word.replace("{", "{{").replace("}", "}}") for word in words] for words in (PYTHON, analyze))
        return [*own, "-m", "badcjobs.workers.hawkears1", "{inputs}", "{outputs}", device, *theirs]

    def environment(self, plan: WorkerPlan, scratch: Path) -> dict[str, str]:
        """Return the environment of one worker's programs, with thread limits for its cores."""
        return hawkears_environment(self.start.environ, plan, sized_arguments(self.start.args, plan), scratch)


# --- the Python of HawkEars -------------------------------------------------------------------------------------------


def find_python(python: str | None, start: EngineStart) -> str:
    """Return the absolute path of HawkEars' Python; unchanged if it is not found but a prefix (a container) is set."""
    found = python and shutil.which(python, path=start.environ.get("PATH"))
    if python and not found and start.launcher.prefix_for(""):
        return python
    if not found:
        raise NotHere(
            f"the Python of HawkEars, {python!r}, was not found" if python else "the program 'hawkears' was not found",
            why="it is neither an executable file nor on PATH" if python else "the script hawkears is not on PATH",
            fix=_GIVE_PYTHON,
        )
    return str(Path(found).absolute())  # do not resolve links: the Python of a venv is a link


def python_of(script: Path) -> str | None:
    """Return the Python that runs a script made by pip, from its first lines; None: it is not such a script."""
    try:
        with script.open("rb") as file:
            head = file.read(2048).decode(errors="replace").split("\n")
    except OSError:
        return None
    if not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and words[0].endswith("/sh") and len(head) > 1 and head[1].startswith("'''exec' "):
        words = shlex.split(head[1].removeprefix("'''exec' "))  # pip writes a long path, or one with spaces, like this
    elif words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and "python" in Path(words[0]).name else None


def query_hawkears(
    python: Sequence[str], options: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None, limit_s: float
) -> Mapping[str, Any]:
    """Let HawkEars' own command line parse the options; return its versions or, without them, its error message."""
    argv = [*python, str(WORKER), "--probe", *options]
    for _ in range(_QUERY_TRIES):
        try:
            done = subprocess.run(argv, env=dict(environ), cwd=cwd, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            raise slow_start(python[-1], limit_s) from error
        except OSError as error:
            return {"error": str(error)}
        if done.returncode >= 0:  # negative: killed by a signal, so try again
            break
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"]
    return {"error": lines[-1], **(events[0] if events else {})}


def slow_start(python: str, limit_s: float) -> SlowStart:
    """Return the error for a HawkEars that is not imported in time."""
    venv = shell_line(Path(python).parent.parent)
    copy = f'cp -a {venv} "$TMPDIR/he" && badcjobs run … --hawkears-python "$TMPDIR/he/bin/python"'
    return SlowStart(
        f"HawkEars in {python} is slow to start: it was not imported in {limit_s:,.0f} s",
        why="the filesystem with its files is slow or busy",
        fix=f"{copy}   (or the same command again)",
    )


# --- arguments and environment ----------------------------------------------------------------------------------------


def refuse_arguments(args: Sequence[str], reserved: Sequence[str]) -> None:
    """Refuse options that badcjobs sets itself."""
    wrong = [arg for arg in args if arg.split("=")[0] in reserved]
    if wrong:
        raise BadInput(
            f"--engine-arg {' '.join(wrong)} cannot be used with this engine",
            why="badcjobs sets HawkEars' input and output itself, and reads its messages",
            fix="remove it; options such as --region, --date, --min_score and --threads are allowed",
        )


def hawkears_environment(
    environ: Mapping[str, str], plan: WorkerPlan, extra_args: Sequence[str], scratch: Path
) -> dict[str, str]:
    """Return a worker's environment, with cache folders and a thread limit for its share of the cores.

    The first run compiles for half a minute; later workers and tasks use its result. The caches are in the user's cache
    folder, or in the task's own folder where compute nodes cannot write to home.
    """
    env = worker_environment(environ, plan)
    why = why_not_writable(caches := user_cache(environ))
    if why and plan.slot == 0:  # once per task
        log.warning("%s cannot be written: %s; every task compiles again; %s", caches, why, ANOTHER_CACHE)
    if caches is None or why:
        caches = scratch.absolute().parent
    for name, folder in _CACHES:
        env.setdefault(name, str(caches / f"{folder}-cache"))
    if _THREADS not in environ:
        share = plan.threads // threads_of(extra_args)
        env[_THREADS] = str(min(_MOST_OMP_THREADS, share) if share >= _CORES_TO_SPARE else 1)
    return env


def why_not_writable(folder: Path | None) -> str:
    """Return why a folder, made if it does not exist, cannot be written; "": it can, or there is none."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return "" if folder is None or os.access(folder, os.W_OK) else "it is read-only here"
    except OSError as error:
        return error.strerror or str(error)


def sized_arguments(extra_args: Sequence[str], plan: WorkerPlan) -> list[str]:
    """Return HawkEars' options with a number of threads that fits the worker's cores, unless the user has set it.

    A thread keeps two cores busy: while it waits for the device, the next recording is decoded. A lean worker always
    has one thread, because each thread loads its own models.
    """
    kept = [word for before, word in pairwise(["", *extra_args]) if "--threads" not in (before, word.split("=")[0])]
    if len(kept) < len(extra_args) and not plan.lean:
        return list(extra_args)
    threads = 1 if plan.lean else min(_DEFAULT_THREADS, max(1, (plan.threads + 1) // 2))
    return [*kept, "--threads", str(threads)]


def threads_of(extra_args: Sequence[str]) -> int:
    """Return the number of threads in the options, or the default of HawkEars."""
    words = [word for arg in extra_args for word in arg.split("=", 1)]
    value = dict(pairwise(words)).get("--threads", "")
    return int(value) if value.isdecimal() and int(value) > 0 else _DEFAULT_THREADS


def has_real_device(plan: WorkerPlan) -> bool:
    """Return whether a worker has a real device, not a simulated one."""
    return plan.device is not None and plan.device.backend != "simulated"
