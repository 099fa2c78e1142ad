"""Starts engine programs so that none of them outlives the task, and ends whole process groups."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.model import Device, WorkerPlan
from badcjobs.seams import Process

# Every process below a worker carries this variable: how the recorder finds them when the wrapper was killed.
TASK_MARK = "BADCJOBS_TASK"

_CONTAINERS = ("APPTAINERENV_", "SINGULARITYENV_")  # what the program in a container sees without the prefix
_ROCR = "ROCR_VISIBLE_DEVICES"
# A number that was right among four devices names none, or another one, when ROCR leaves only one.
_COUNT_WITHIN_ROCR = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def _obey_only_the_wrapper() -> None:
    """Die when the wrapper is gone, even by SIGKILL; leave Slurm's signals to it.

    Slurm sends its warnings and its TERM to every process of the job: a worker that obeyed would
    drop the chunk that the wrapper still wants to finish. What is ignored here stays ignored after exec.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for signum in (signal.SIGTERM, *_WARNINGS):
        signal.signal(signum, signal.SIG_IGN)


def _obey_the_wrapper_and_term() -> None:
    """Do the same, but let TERM through, for programs that we do not know.

    Theirs may be processes that are ended with TERM, such as those of a Python pool: deaf to it, they hang for ever.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for signum in _WARNINGS:
        signal.signal(signum, signal.SIG_IGN)


class SubprocessLauncher:
    """Starts programs as our own children, each in a process group of its own."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

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
        """Start a program; its stderr (and, without pipes, its stdout) is added to the file ``stderr``."""
        with stderr.open("ab") as log:
            return subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else log,
                stderr=log,
                env={**env, TASK_MARK: self._mark},
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_obey_the_wrapper_and_term if hears_term else _obey_only_the_wrapper,  # no locks
            )

    def signal(self, process: Process, signum: int) -> None:
        """Send a signal to the whole group of a program that may have ended."""
        try:
            os.killpg(process.pid, signum)
        except (ProcessLookupError, PermissionError):
            pass  # it is gone, and that is what we wanted


def worker_environment(environ: Mapping[str, str], plan: WorkerPlan) -> dict[str, str]:
    """Return the environment of a worker: the task's own, but only one device in sight, inside a container too."""
    device = plan.device
    env = dict(environ)
    if device is not None and device.vendor == "amd":
        for name in _COUNT_WITHIN_ROCR:
            for everywhere in _everywhere(name):
                env.pop(everywhere, None)
    for name, value in _visible_lists(device).items():
        env.update(dict.fromkeys(_everywhere(name), value))
    env["BADCJOBS_DEVICE_UUID"] = (device.uuid or "") if device else ""
    env.setdefault("OMP_NUM_THREADS", str(plan.threads))
    return env


def _visible_lists(device: Device | None) -> dict[str, str]:
    """Return the variables that show this device alone, or no device at all."""
    if device is not None and device.vendor == "amd":
        return {_ROCR: device.pin}
    lists = {"CUDA_VISIBLE_DEVICES": device.pin if device else "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # HIP takes an empty CUDA_VISIBLE_DEVICES for none and shows everything; ROCR does as it is told.
    return lists if device else {**lists, _ROCR: ""}


def _everywhere(name: str) -> tuple[str, ...]:
    return (name, *(prefix + name for prefix in _CONTAINERS))


def last_lines(path: Path, limit: int = 2000) -> str:
    """Return the end of a program's log: what it said before it failed."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - limit))
            return log.read().decode(errors="replace").strip()
    except OSError:
        return ""
