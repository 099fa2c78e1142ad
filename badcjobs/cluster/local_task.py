"""A task of an emulated array, and one attempt at it: its environment, start, time limit, the end of its processes.

As in Slurm: first the early signal to the script; at the time limit CONT and TERM to every process, then KILL after a
grace period. Processes that the script leaves running are ended in the same way.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

from badcjobs.cluster.local_watch import MARK, processes_of, send
from badcjobs.cluster.sbatch_options import Request, count_processes, parse_positive
from badcjobs.cluster.scheduler import TIMEOUT, TaskOutcome
from badcjobs.devices.allocation import node_name, without_job
from badcjobs.model import Device, StandIn
from badcjobs.processes import die_with_parent, show_only
from badcjobs.task.startup import NO_RESTART_VARIABLE, NOTES_VARIABLE, World

_LOG_LETTERS = re.compile(r"%([%Aajx])")
_SCAN_EVERY_S = 0.25  # listing all processes of the machine takes a few milliseconds
_KILL_WAIT_S = 30.0  # as Slurm's default


@dataclass(frozen=True)
class LocalSettings:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 0  # of a task that exits with 75; Slurm itself does not start it again
    kill_wait_s: float = _KILL_WAIT_S
    again: bool = False  # the user states that the Slurm job of the same folder has ended
    chunks: int = 0  # of all tasks; 0: not known before they begin

    @property
    def options(self) -> list[str]:
        """The same as options of ``badcjobs submit``."""
        options = []
        if self.share_gpus:
            options.append("--config=submit.share_gpus=true")
        if self.kill_wait_s != _KILL_WAIT_S:
            options.append(f"--config=submit.kill_wait_s={self.kill_wait_s:g}")
        return options


@dataclass
class TaskRow(TaskOutcome):
    """One array task, from its submission to its end."""

    restarts: int = 0
    ends: list[dict[str, Any]] = field(default_factory=list)  # of all attempts that have ended

    def to_dict(self) -> dict[str, object]:
        """Return the row as ``--json`` shows it."""
        more = {"restarts": self.restarts, "attempts": self.ends, "note": self.note or None}
        return {**TaskOutcome.to_dict(self), **more}


@dataclass(frozen=True)
class LocalJob:
    """A job on this machine."""

    job_id: int
    name: str
    request: Request
    script: str
    world: World
    settings: LocalSettings

    @property
    def mark(self) -> str:
        """What every process of this job has in its environment."""
        return f"{self.job_id}-{self.world.pid}"

    @property
    def folder(self) -> Path:
        """Its temporary folder on this machine."""
        return Path(self.world.environ.get("TMPDIR") or tempfile.gettempdir()) / f"slurm-emulation-{self.mark}"

    @property
    def node(self) -> str:
        """The name of this machine; inside a job, its name in Slurm."""
        return node_name(self.world.environ, self.world.hostname)

    @property
    def indices(self) -> tuple[int | None, ...]:
        """The indices of the array; without an array, one task with index None."""
        array = self.request.array
        return (None,) if array is None else array.indices

    @property
    def parallel(self) -> int | None:
        """How many tasks may run at a time; None: no limit."""
        array = self.request.array
        return None if array is None else array.parallel

    @property
    def gpus(self) -> int:
        """The GPUs of each array task."""
        return self.request.asked.gpus_per_task or 0

    @property
    def cores(self) -> int:
        """The cores of each array task: as many as requested, at most those of the machine."""
        return min(self.request.asked.cpus or 1, self.world.cores)

    def task_name(self, index: int | None) -> str:
        """Return the name of an array task in Slurm: 4821_7."""
        return str(self.job_id) if index is None else f"{self.job_id}_{index}"

    def own_id(self, index: int | None) -> int:
        """Return the task's own job number; as in Slurm, the last task of an array has that of the array."""
        return self.job_id if index == self.indices[-1] else self.job_id + 1 + self.indices.index(index)

    def log(self, index: int | None) -> Path:
        """Return the file of a task's output: Slurm's pattern, filled in."""
        values = {
            "A": str(self.job_id),
            "a": str(index or 0),
            "j": str(self.own_id(index)),
            "x": self.name,
            "%": "%",
        }
        default = "slurm-%j.out" if index is None else "slurm-%A_%a.out"
        pattern = self.request.options.get("output", default)
        return self.world.cwd / _LOG_LETTERS.sub(lambda match: values[match[1]], pattern)


def visible_lists(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that make only these devices visible; for no devices, those that hide all."""
    if not devices:
        return show_only(None, "")
    names = [device.token for device in devices]
    if devices[0].vendor == "amd" or not all(name.isdecimal() for name in names):
        names = [device.pin for device in devices]  # CUDA does not accept numbers and UUIDs in one list
    return show_only(devices[0].vendor, ",".join(names))


@dataclass
class Attempt:
    """One start of the script for a task; call ``look`` repeatedly until it returns True: all processes have ended.

    The script inherits ``lock_files``, which keeps its devices locked. Raises OSError if it cannot be started.
    """

    job: LocalJob
    row: TaskRow
    devices: Sequence[Device]
    lock_files: Sequence[int]
    ended_by: str | None = None  # TIMEOUT or CANCELLED; None: the script ended by itself

    def __post_init__(self) -> None:
        job = self.job
        self.started_s = job.world.clock.monotonic_s()
        self.folder = job.folder / f"{job.task_name(self.row.index)}.r{self.row.restarts}"
        self._clock = job.world.clock
        self._mark = f"{job.mark}/{self.folder.name}"
        # badcjobs run recognises its own file by the number before the dot.
        self._notes = self.folder / f"{job.own_id(self.row.index)}.notes"
        early = job.request.signal
        self._warning = early if early is not None and early.to_script else None
        self._kill_at_s: float | None = None
        self._next_scan_s = 0.0
        self._process = self._start()

    def _start(self) -> Popen[bytes]:
        job = self.job
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True)
        script = self.folder / "slurm_script"  # a copy: editing the original does not change a running task
        script.write_text(job.script)
        self._notes.touch()
        own_variables = {
            "SLURM_TMPDIR": str(temporary),
            MARK: self._mark,
            NOTES_VARIABLE: str(self._notes),
            NO_RESTART_VARIABLE: str(self.folder / NO_RESTART_VARIABLE),
        }
        mode = "ab" if job.request.options.get("open-mode", "").startswith("a") else "wb"
        with self.row.log.open(mode) as log:
            return Popen(
                ["bash", str(script)],
                env=self._variables() | own_variables,
                cwd=job.world.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=self.lock_files,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def _variables(self) -> dict[str, str]:
        """Return the environment of the script: inherited variables, and those that Slurm 22.05 or newer sets."""
        job = self.job
        now_s = self._clock.now_ms() // 1000
        asked = job.request.asked
        memory_mib = math.ceil(1024 * (asked.memory_gb_per_node or 0))
        cpus = parse_positive(job.request.options, "cpus-per-task")
        values: dict[str, object] = {  # None: Slurm does not set it
            "SLURM_JOB_ID": job.own_id(self.row.index),
            "SLURM_JOB_NAME": job.name,
            "SLURM_JOB_USER": psutil.Process().username(),
            "SLURM_JOB_NODELIST": job.node,
            "SLURMD_NODENAME": job.node,
            "SLURM_JOB_NUM_NODES": 1,
            "SLURM_NTASKS": count_processes(job.request.options),
            "SLURM_PROCID": 0,
            "SLURM_SUBMIT_DIR": job.world.cwd,
            "PWD": job.world.cwd,
            "SLURM_JOB_START_TIME": now_s,
            "SLURM_JOB_END_TIME": asked.time_s and now_s + asked.time_s,
            "SLURM_MEM_PER_NODE": memory_mib or None,
            "SLURM_CPUS_ON_NODE": job.cores,
            "SLURM_CPUS_PER_TASK": cpus and min(cpus, job.world.cores),
            "SLURM_RESTART_COUNT": self.row.restarts or None,
        }
        array = job.request.array
        if array is not None:
            values |= {
                "SLURM_ARRAY_JOB_ID": job.job_id,
                "SLURM_ARRAY_TASK_ID": self.row.index,
                "SLURM_ARRAY_TASK_MIN": array.indices[0],
                "SLURM_ARRAY_TASK_MAX": array.indices[-1],
                "SLURM_ARRAY_TASK_STEP": array.step,
                "SLURM_ARRAY_TASK_COUNT": len(array.indices),
            }
        if self.devices:
            physical = [device.token if device.index is None else str(device.index) for device in self.devices]
            values |= {"SLURM_JOB_GPUS": ",".join(physical), "SLURM_GPUS_ON_NODE": len(physical)}
        set_here = {name: str(value) for name, value in values.items() if value is not None}
        return {**without_job(job.world.environ), **set_here, **visible_lists(self.devices)}

    def databases(self) -> list[Path]:
        """Return the task databases that it has announced."""
        try:
            lines = self._notes.read_text().splitlines()
        except (OSError, ValueError):
            return []  # these are not notes
        paths = map(Path, lines)
        return [path for path in paths if path.suffix == ".sqlite" and path.parent.name == "tasks"]

    def write_end(self, state: str) -> None:
        """Record its end, also beside its databases, as the scripts in slurm/ do; then remove its folder."""
        now_s = self._clock.now_ms() // 1000
        end = {
            "restart": self.row.restarts,
            "state": state,  # REQUEUED: it was restarted
            "exit_code": self.exit_code,
            "slurm_exit_code": self.slurm_exit_code,
            "started_at_s": now_s - round(self._clock.monotonic_s() - self.started_s),
            "ended_at_s": now_s,
        }
        self.row.ends.append(end)
        task = {"job_id": str(self.job.job_id), "array_index": self.row.index, "node": self.job.node}
        document = {**task, **end, "exit_code": self.slurm_exit_code, "written_by": "emulation"}
        with suppress(OSError):  # a full disk: merge works without it
            for database in self.databases():
                draft = database.with_suffix(".slurm.json.part")
                draft.write_text(json.dumps(document) + "\n")
                draft.replace(database.with_suffix(".slurm.json"))
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def exit_code(self) -> int:
        """The exit code of the script, which has ended; 128 + n for signal n."""
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    @property
    def slurm_exit_code(self) -> str:
        """The exit code in Slurm's notation: code:signal."""
        code = self._process.returncode
        return f"{max(code, 0)}:{max(-code, 0)}"

    def look(self) -> bool:
        """Send the signals that are due; return True when the script and all its processes have ended."""
        now_s = self._clock.monotonic_s()
        runs = self._process.poll() is None
        limit_s = self.job.request.asked.time_s or math.inf
        left_s = limit_s - (now_s - self.started_s)
        if runs and self._warning is not None and left_s <= self._warning.lead_s:
            self.warn(self._warning.signum)
            self._warning = None
        if runs and left_s <= 0:
            self.end(TIMEOUT)
        if (runs and self._kill_at_s is None) or now_s < self._next_scan_s:
            return False
        self._next_scan_s = now_s + _SCAN_EVERY_S
        left = self._processes()
        if left and self._kill_at_s is None:
            self._terminate(left)
        elif self._kill_at_s is not None and now_s >= self._kill_at_s:
            send(left, signal.SIGKILL)
        return not left and not runs

    def warn(self, signum: signal.Signals) -> None:
        """Send a signal to the script alone."""
        if self._process.poll() is None:
            os.kill(self._process.pid, signum)  # not reaped yet, so the pid is still valid

    def end(self, why: str) -> None:
        """Send TERM to all processes, and KILL after the grace period; a second call changes nothing."""
        self.ended_by = self.ended_by or why
        if self._kill_at_s is None:
            self._terminate(self._processes())

    def kill(self, why: str) -> None:
        """Kill all processes immediately."""
        self.ended_by = self.ended_by or why
        self._kill_at_s = self._clock.monotonic_s()
        send(self._processes(), signal.SIGKILL)

    def _terminate(self, processes: Sequence[psutil.Process]) -> None:
        self._kill_at_s = self._clock.monotonic_s() + self.job.settings.kill_wait_s
        send(processes, signal.SIGCONT, signal.SIGTERM)

    def _processes(self) -> list[psutil.Process]:
        return processes_of(self._mark, session=self._process.pid)
