"""Starts engine programs behind NVIDIA's profilers; which of them, and for how long, is up to ``profiled_engine``.

A profiler is no quiet companion: nsys talks on its program's stdout, gives it a session of its own and leaves an agent
with init for a parent. So the program's pipes bypass it, and its processes are found by a mark in their environment.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.seams import Launcher, Process
from badcjobs.workers.fifo_process import FifoProcess, Fifos
from badcjobs.workers.leftovers import end_marked

PROFILE_MARK = "BADCJOBS_PROFILE"
MOST_REPORTS = 5  # engines with a process per chunk leave one for each, and a run folder is no place for hundreds

_KERNELS = 2000  # ncu runs every kernel many times over, and one chunk has thousands
_BEGIN = 'echo $$ >"$0/pid"; exec "$@"'
_BEGIN_WITH_PIPES = _BEGIN + ' <"$0/in" >"$0/out"'
_ENDINGS = {"nsys": (".nsys-rep", ".qdrep", ".qdstrm"), "ncu": (".ncu-rep",)}


@dataclass(frozen=True, slots=True)
class Profiler:
    """A profiler that is here."""

    name: str
    program: str

    def words(self, report: Path) -> list[str]:
        """Return the words to put before a program; the profiler adds an ending to ``report``."""
        if self.name == "ncu":
            return [
                self.program, "--export", str(report), "--force-overwrite", "--target-processes", "all",
                "--launch-count", str(_KERNELS), "--log-file", "stderr",
            ]  # fmt: skip
        # CPU sampling needs rights that few sites give. The last two: it waits for nobody else, and never ends anybody.
        return [
            self.program, "profile", "-o", str(report), "--trace=cuda,nvtx,osrt", "--sample=none", "--cpuctxsw=none",
            "--force-overwrite=true", "--wait=primary", "--kill=none",
        ]  # fmt: skip

    def find_report(self, folder: Path) -> Path | None:
        """Return what the profiler has left; a .qdstrm is one that it could not convert."""
        found = (folder / f"report{ending}" for ending in _ENDINGS[self.name])
        return next((path for path in found if path.is_file()), None)

    def how_to_open(self, report: Path) -> str:
        """Return the line that shows a report."""
        path = shlex.quote(str(report))
        if report.suffix == ".qdstrm":
            return f"QdstrmImporter --input-file {path}"
        return f"ncu --import {path}" if self.name == "ncu" else f"nsys stats {path}"


def find_profiler(name: str, search_path: str | None) -> Profiler:
    """Return the profiler, or say that it is not here."""
    program = shutil.which(name, path=search_path)
    if program is None:
        package = "nsight-compute" if name == "ncu" else "nsight-systems"
        raise NotHere(
            f"--profile {name}: there is no program {name!r} on PATH",
            why=f"it belongs to NVIDIA {package.replace('-', ' ').title()}, which comes with the CUDA toolkit",
            fix=f"module load cuda || module load {package}; command -v {name}   (on the compute node)",
        )
    return Profiler(name, str(Path(program).absolute()))


class ProfilingLauncher:
    """Starts programs behind a profiler, and ends them with all that it has started."""

    def __init__(self, launcher: Launcher, profiler: Profiler, folder: Path) -> None:
        self._launcher = launcher
        self._profiler = profiler
        self._folder = folder.absolute()
        self._places: dict[int, Path] = {}  # by the profiler's pid
        self._started = 0

    @property
    def is_full(self) -> bool:
        """Whether there are reports enough."""
        return self._started >= MOST_REPORTS

    @property
    def reports(self) -> list[Path]:
        """What was left by the programs that have ended."""
        found = [self._profiler.find_report(self._folder / str(n)) for n in range(1, self._started + 1)]
        return [path for path in found if path is not None]

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
        """Start a program behind the profiler, whose own words go to the file ``stderr``."""
        self._started += 1
        place = self._folder / str(self._started)
        place.mkdir(parents=True)
        shell = ["/bin/sh", "-c", _BEGIN_WITH_PIPES if pipes else _BEGIN, str(place)]
        words = [*self._profiler.words(place / "report"), *shell, *argv]
        marked = {**env, PROFILE_MARK: str(place)}
        fifos = Fifos(place) if pipes else None
        try:
            process = self._launcher.start(words, env=marked, cwd=cwd, stderr=stderr, hears_term=hears_term)
        except BaseException:
            if fifos is not None:
                fifos.close()
            raise
        self._places[process.pid] = place
        return process if fifos is None else FifoProcess(process, fifos)

    def signal(self, process: Process, signum: int) -> None:
        """End everything, or tell the program alone: a profiler that is interrupted forgets what it has seen."""
        place = self._places.get(process.pid)
        program = None if place is None else _read_pid(place / "pid")
        if signum != signal.SIGKILL and program is not None:
            _send(program, signum)
            return
        self._launcher.signal(process, signum)
        if place is not None:
            end_marked(PROFILE_MARK, str(place))


def _read_pid(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # it has not begun


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass  # it is gone, and that is what we wanted
