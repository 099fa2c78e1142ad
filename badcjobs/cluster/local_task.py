"""One attempt of an emulated array task: its environment, its start, its time limit, the end of all its processes.

As in Slurm: first the early signal to the script; at the time limit CONT and TERM to every process, then KILL after a
grace period. Processes that the script leaves running are ended in the same way.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

from badcjobs.cluster.job_script import JobRequest
from badcjobs.cluster.local_watch import MARK, processes_of, send
from badcjobs.cluster.sbatch_options import parse_positive
from badcjobs.cluster.scheduler import TIMEOUT
from badcjobs.devices.allocation import node_name, without_job
from badcjobs.model import Device
from badcjobs.processes import die_with_parent
from badcjobs.seams import Clock
from badcjobs.task.startup import NO_RESTART_VARIABLE, NOTES_VARIABLE, World

_LOG_LETTERS = re.compile(r"%([%Aajx])")
_SCAN_EVERY_S = 0.25  # listing all processes of the machine takes a few milliseconds


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job on this machine."""

    job_id: int
    name: str
    request: JobRequest
    script: str
    world: World
    folder: Path  # temporary, on this machine

    @property
    def node(self) -> str:
        """The name of this machine; inside a job, its name in Slurm."""
        return node_name(self.world.environ, self.world.hostname)

    @property
    def cores(self) -> int:
        """The cores of each array task: as many as requested, at most those of the machine."""
        return min(self.request.cores, self.world.cores)

    def task_name(self, index: int | None) -> str:
        """Return the name of an array task in Slurm: 4821_7."""
        return str(self.job_id) if index is None else f"{self.job_id}_{index}"

    def own_id(self, index: int | None) -> int:
        """Return the task's own job number; as in Slurm, the last task of an array has that of the array."""
        indices = self.request.indices
        return self.job_id if index == indices[-1] else self.job_id + 1 + indices.index(index)

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
        pattern = self.request.given.get("output", default)
        return self.world.cwd / _LOG_LETTERS.sub(lambda match: values[match[1]], pattern)

    def attempt_folder(self, index: int | None, restart: int) -> Path:
        """Return the folder of one attempt."""
        return self.folder / f"{self.task_name(index)}.r{restart}"

    def _notes(self, index: int | None, restart: int) -> Path:
        # badcjobs run recognises its own file by the number before the dot.
        return self.attempt_folder(index, restart) / f"{self.own_id(index)}.notes"

    def start(
        self, index: int | None, restart: int, devices: Sequence[Device], mark: str, lock_files: Sequence[int]
    ) -> Popen[bytes]:
        """Start the script for a task, which keeps its devices locked; raise OSError if it cannot be started."""
        folder = self.attempt_folder(index, restart)
        (folder / "tmp").mkdir(parents=True)
        script = folder / "slurm_script"  # a copy: editing the original does not change a running task
        script.write_text(self.script)
        notes = self._notes(index, restart)
        notes.touch()
        own_variables = {
            "SLURM_TMPDIR": str(folder / "tmp"),
            MARK: mark,
            NOTES_VARIABLE: str(notes),
            NO_RESTART_VARIABLE: str(folder / NO_RESTART_VARIABLE),
        }
        mode = "ab" if self.request.given.get("open-mode", "").startswith("a") else "wb"
        with self.log(index).open(mode) as log:
            return Popen(
                ["bash", str(script)],
                env=self.variables(index, restart, devices) | own_variables,
                cwd=self.world.cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=lock_files,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def variables(self, index: int | None, restart: int, devices: Sequence[Device]) -> dict[str, str]:
        """Return the environment of one attempt: inherited variables, and those that Slurm 22.05 or newer sets."""
        values = self._of_task(index) | self._of_request(restart)
        if devices:
            physical = [device.token if device.index is None else str(device.index) for device in devices]
            values |= {"SLURM_JOB_GPUS": ",".join(physical), "SLURM_GPUS_ON_NODE": len(devices)}
        set_here = {name: str(value) for name, value in values.items() if value is not None}
        return {**without_job(self.world.environ), **set_here, **visible_lists(devices)}

    def _of_task(self, index: int | None) -> dict[str, object]:
        values: dict[str, object] = {
            "SLURM_JOB_ID": self.own_id(index),
            "SLURM_JOB_NAME": self.name,
            "SLURM_JOB_USER": psutil.Process().username(),
            "SLURM_JOB_NODELIST": self.node,
            "SLURMD_NODENAME": self.node,
            "SLURM_JOB_NUM_NODES": 1,
            "SLURM_NTASKS": 1,
            "SLURM_PROCID": 0,
            "SLURM_SUBMIT_DIR": self.world.cwd,
            "PWD": self.world.cwd,
        }
        array = self.request.array
        if array is not None:
            values |= {
                "SLURM_ARRAY_JOB_ID": self.job_id,
                "SLURM_ARRAY_TASK_ID": index,
                "SLURM_ARRAY_TASK_MIN": array.indices[0],
                "SLURM_ARRAY_TASK_MAX": array.indices[-1],
                "SLURM_ARRAY_TASK_STEP": array.step,
                "SLURM_ARRAY_TASK_COUNT": len(array.indices),
            }
        return values

    def _of_request(self, restart: int) -> dict[str, object]:
        """Return the variables of what was requested; None: Slurm does not set it."""
        asked = self.request.asked
        now_s = self.world.clock.now_ms() // 1000
        memory_mib = math.ceil(1024 * (asked.memory_gb_per_node or 0))
        cpus = parse_positive(self.request.given, "cpus-per-task")
        return {
            "SLURM_JOB_START_TIME": now_s,
            "SLURM_JOB_END_TIME": asked.time_s and now_s + asked.time_s,
            "SLURM_MEM_PER_NODE": memory_mib or None,
            "SLURM_CPUS_ON_NODE": self.cores,
            "SLURM_CPUS_PER_TASK": cpus and min(cpus, self.world.cores),
            "SLURM_RESTART_COUNT": restart or None,
        }

    def write_end(self, index: int | None, end: Mapping[str, Any]) -> None:
        """Write the end of an attempt beside its databases, as the scripts in slurm/ do; merge works without it."""
        task = {"job_id": str(self.job_id), "array_index": index, "node": self.node}
        document = {**task, **end, "exit_code": end["slurm_exit_code"], "written_by": "emulation"}
        with suppress(OSError):  # a full disk: the end is not written, the work continues
            for database in self.databases(index, end["restart"]):
                draft = database.with_suffix(".slurm.json.part")
                draft.write_text(json.dumps(document) + "\n")
                draft.replace(database.with_suffix(".slurm.json"))

    def databases(self, index: int | None, restart: int) -> list[Path]:
        """Return the task databases that an attempt has announced."""
        try:
            lines = self._notes(index, restart).read_text().splitlines()
        except (OSError, ValueError):
            return []  # the attempt has ended, or these are not notes
        paths = map(Path, lines)
        return [path for path in paths if path.suffix == ".sqlite" and path.parent.name == "tasks"]


def visible_lists(devices: Sequence[Device]) -> dict[str, str]:
    """Return the variables that make only these devices visible; for no devices, those that hide all."""
    if not devices:
        # HIP ignores an empty CUDA_VISIBLE_DEVICES and shows every device; ROCR_VISIBLE_DEVICES works.
        return {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    if devices[0].vendor == "amd":
        return {"ROCR_VISIBLE_DEVICES": ",".join(device.pin for device in devices)}
    tokens = [device.token for device in devices]
    if not all(token.isdecimal() for token in tokens):  # CUDA does not accept numbers and UUIDs in one list
        tokens = [device.pin for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(tokens), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class Attempt:
    """A running script; call ``look`` repeatedly until it returns True: all processes have ended."""

    def __init__(self, process: Popen[bytes], mark: str, clock: Clock, request: JobRequest, kill_wait_s: float) -> None:
        self.process = process
        self.started_s = clock.monotonic_s()
        self.ended_by: str | None = None  # TIMEOUT or CANCELLED; None: the script ended by itself
        self._mark = mark
        self._time_s = request.asked.time_s
        self._warning = request.warning
        self._kill_wait_s = kill_wait_s
        self._clock = clock
        self._kill_at_s: float | None = None
        self._next_scan_s = 0.0

    @property
    def exit_code(self) -> int | None:
        """The exit code of the script, 128 + n for signal n; None: it is running."""
        code = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def slurm_exit_code(self) -> str:
        """The exit code in Slurm's notation: code:signal."""
        code = self.process.returncode or 0
        return f"{max(code, 0)}:{max(-code, 0)}"

    def look(self) -> bool:
        """Send the signals that are due; return True when the script and all its processes have ended."""
        now_s = self._clock.monotonic_s()
        runs = self.process.poll() is None
        left_s = math.inf if self._time_s is None else self._time_s - (now_s - self.started_s)
        if runs and self._warning is not None and left_s <= self._warning.lead_s:
            if self._warning.to_script:
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
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)  # not reaped yet, so the pid is still valid

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
        self._kill_at_s = self._clock.monotonic_s() + self._kill_wait_s
        send(processes, signal.SIGCONT, signal.SIGTERM)

    def _processes(self) -> list[psutil.Process]:
        return processes_of(self._mark, session=self.process.pid)
