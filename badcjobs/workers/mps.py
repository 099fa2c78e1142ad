"""CUDA MPS for workers that share a device: a daemon for each device, of this task alone, with a folder on the node.

Without MPS the driver gives a device to one process after the other. A program that cannot reach its daemon silently
runs without it, so each worker is looked up in the list of clients after its first result. A fault of one client ends
all clients of its server: the workers of other devices have other servers, and a chunk that may be the cause of a fault
never runs under MPS (``supervise``). Every process here has the mark of the task, by which leftovers are found.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from badcjobs.devices.nvml import find_mps_obstacle, list_mps_clients
from badcjobs.errors import BadInput, NotHere
from badcjobs.locks import read_boot_id
from badcjobs.model import Device
from badcjobs.model.decisions import Code, Decision
from badcjobs.paths import LocalFolder
from badcjobs.processes import MPS_PIPE, TASK_MARK, USUAL_MPS_PIPE, bind_to_parent, end_leftovers, last_lines
from badcjobs.store.live_folder import Owner, hold, locked

log = logging.getLogger(__name__)

_CONTROL = "nvidia-cuda-mps-control"
_PID_FILE = f"{_CONTROL}.pid"  # in the folder of the pipes
ONLY_ONE = "only one process may use the device, by its compute mode (nvidia-smi -c 0 changes that)"
MOST_CLIENTS = 48  # of a device, since Volta
_PLACE = Path("/tmp")  # on the node, and short: a socket's path has at most 107 characters
_NAME = "badcjobs-mps-"
_ANSWER_S = 10.0
_END_S = 5.0
_NAP_S = 0.05


def find_obstacle(device: Device, most: int, environ: Mapping[str, str]) -> str | None:
    """Return why ``most`` workers do not share this device through MPS; None: they can."""
    if device.exclusive:  # under MPS a chunk could not be tried without it
        return ONLY_ONE
    if device.uuid is None or device.backend != "nvml":
        return f"the device is not read through NVML ({device.vendor}, {device.backend})"
    if device.uuid.startswith("MIG-"):
        return "the device is a MIG slice"
    if most > MOST_CLIENTS:
        return f"{most} workers per device; the most is {MOST_CLIENTS}"
    if shutil.which(_CONTROL, path=environ.get("PATH")) is None:
        return f"{_CONTROL} is not on PATH"
    return find_mps_obstacle(device.uuid)


def find_site_pipe(environ: Mapping[str, str]) -> str | None:
    """Return the folder of a daemon that this site has started; None: there is none."""
    pipe = Path(environ.get(MPS_PIPE) or USUAL_MPS_PIPE)
    with suppress(OSError, ValueError):
        if psutil.pid_exists(int((pipe / _PID_FILE).read_text())):
            return str(pipe)
    return None


# --- one device -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MpsDaemon:
    """The control daemon of one device, and the server that it starts for its clients."""

    device: Device
    folder: Path
    env: Mapping[str, str]
    control: psutil.Process | None = None  # None: not started
    server: psutil.Process | None = None  # None: not seen yet
    last_code: Code | None = None  # of the last decision about it
    was_used: bool = False  # whether a worker was its client

    def __post_init__(self) -> None:
        self.pipe = self.folder / "pipe"
        self._logs = self.folder / "log"
        self.env = {
            **self.env,
            MPS_PIPE: str(self.pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._logs),
            "CUDA_VISIBLE_DEVICES": self.device.pin,
        }

    def start(self) -> str | None:
        """Start the daemon and its server; return None, or why it failed."""
        start_log = self._logs / "start.log"
        try:
            for folder in (self.pipe, self._logs):
                folder.mkdir(parents=True)
            with start_log.open("wb") as output:  # a pipe would stay open in the daemon
                self._run(
                    _CONTROL,
                    "-d",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            wait_until((self.pipe / _PID_FILE).exists)
            self.control = psutil.Process(int((self.pipe / _PID_FILE).read_text()))
        except (OSError, ValueError, subprocess.SubprocessError, psutil.Error) as error:
            return f"{_CONTROL} does not start: {last_lines(start_log, 200) or error}"
        self._tell(f"start_server -uid {os.geteuid()}")
        return None

    def _run(self, *command: str, **streams: Any) -> subprocess.CompletedProcess[str]:
        """Run a command which Slurm's signals must not end."""
        return subprocess.run(
            command,
            env=self.env,
            text=True,
            check=True,
            timeout=_ANSWER_S,
            start_new_session=True,
            preexec_fn=bind_to_parent,
            **streams,
        )

    def _tell(self, command: str) -> None:
        """Send the daemon a command."""
        with suppress(OSError, subprocess.SubprocessError):
            self._run(
                _CONTROL,
                input=f"{command}\n",
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def has_client(self, pid: int | None) -> bool:
        """Return whether a worker is or was a client, by the server's log; without a process id, whether any was."""
        with suppress(psutil.Error):
            self.server = next(iter(self.control.children()), None) if self.control else None
        server_log = self._logs / "server.log"
        text = server_log.read_text(errors="replace") if server_log.exists() else ""
        clients = {int(client) for client in re.findall(r"Client \{PID: (\d+),", text)}
        return bool(clients if pid is None else clients & family_of(pid))

    def stop(self) -> None:
        """Ask the daemon to end, wait a little for it, and kill what is left."""
        if is_alive(self.control):
            self._tell("quit")
            wait_until(lambda: not (is_alive(self.control) or is_alive(self.server)))
        for process in (self.control, self.server):
            with suppress(psutil.Error):
                if process is not None and is_alive(process):
                    process.kill()


def family_of(pid: int) -> set[int]:
    """Return a worker and its children: with a prefix, HawkEars is one of them."""
    family = {pid}
    with suppress(psutil.Error):
        family.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    return family


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait a little for something that is going to happen."""
    end_s = time.monotonic() + _END_S
    while not is_so() and time.monotonic() < end_s:
        time.sleep(_NAP_S)


def is_alive(process: psutil.Process | None) -> bool:
    """Return whether a process runs; one that has ended may stay visible if its parent does not wait for it."""
    with suppress(psutil.Error):
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# --- all devices of a task --------------------------------------------------------------------------------------------


class MpsDaemons:
    """The daemons of a task by device_id; without ``start`` there are none. The first three methods are thread-safe."""

    def __init__(self) -> None:
        self._daemons: dict[int | None, MpsDaemon] = {}
        self._folder: LocalFolder | None = None
        self._site_pipe: str | None = None
        self._of_site: dict[int | None, Device] = {}  # those that share it, until one of their workers was looked for
        self.decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()  # not written yet
        self._is_required = False  # --mps on
        self._failure: str | None = None  # why --mps on cannot be done

    def pipe_of(self, device_id: int | None) -> str | None:
        """Return the folder through which new workers of a device reach its daemon; None: there is none."""
        daemon = self._daemons.get(device_id)
        if daemon is None:
            return self._site_pipe
        return str(daemon.pipe) if is_alive(daemon.control) else None

    def look_for(self, device_id: int | None, pid: int | None) -> None:
        """Check that a worker that has given a result is a client of its daemon, and record what is new about that."""
        device = self._of_site.pop(device_id, None)
        if device is not None and device.uuid is not None and pid is not None:
            # Its daemon may answer only its own user.
            is_client = bool(family_of(pid) & list_mps_clients(device.uuid))
            code = Code.MPS_CONNECTED if is_client else Code.MPS_NOT_LISTED
            self._record(Decision.of(code, device.name, pid=pid))
        daemon = self._daemons.get(device_id)
        if daemon is None or not is_alive(daemon.control):
            return
        code = Code.MPS_NOT_CONNECTED
        if daemon.has_client(pid):
            code = Code.MPS_CONNECTED
            daemon.was_used = True
        self._note(daemon, code, pid=pid)

    def do_without(self, device_id: int | None, why: str) -> None:
        """Record that a worker gives up MPS because it cannot work with it."""
        daemon = self._daemons.get(device_id)
        if daemon is not None:
            self._note(daemon, Code.MPS_GIVEN_UP, why=why)

    def _note(self, daemon: MpsDaemon, code: Code, **figures: Any) -> None:
        """Record what has become of a daemon, if that is new; with --mps on the first worker must be its client."""
        if code is daemon.last_code:
            return
        daemon.last_code = code
        decision = Decision.of(code, daemon.device.name, **figures)
        self._record(decision)
        if self._is_required and not daemon.was_used:
            self._failure = f"--mps on, but {decision.reason}; --mps auto allows that"

    def start(
        self,
        wanted: str,
        devices: Sequence[tuple[int, Device]],
        *,
        most: int,
        environ: Mapping[str, str],
        mark: str,
        local: LocalFolder,
        hostname: str,
    ) -> None:
        """Start a daemon for each device that can have one; ``wanted`` is auto, on (fail otherwise) or off.

        ``most``: the most workers that a device may get.
        """
        end_left_behind(hostname)
        self._owner = Owner("", mark, False, hostname, read_boot_id())
        self._environ = {**environ, TASK_MARK: mark}
        self._local = local
        self._site_pipe = None if wanted == "off" else find_site_pipe(environ)
        self._is_required = wanted == "on"
        if self._is_required and not devices:
            raise NotHere("--mps on: the task has no device", why="MPS is for GPUs", fix="badcjobs run … --mps auto")
        decisions = list[Decision]()
        for device_id, device in devices:
            if wanted == "off":
                decision = Decision.of(Code.MPS_NOT_USED, device.name, why="--mps off")
            else:
                decision = self._start_one(device_id, device, most)
            if self._is_required and decision.code not in (Code.MPS_SHARED, Code.MPS_OF_SITE):
                name = device.name or device.token
                fix = "badcjobs run … --mps auto"
                raise NotHere(f"--mps on: MPS cannot be used on {name}", why=decision.reason, fix=fix)
            if decision not in decisions:  # devices of one model have one row
                decisions.append(decision)
                self._record(decision)

    def _start_one(self, device_id: int, device: Device, most: int) -> Decision:
        """Start the daemon of a device, if it needs one and can have one."""
        if self._site_pipe is not None and device.backend == "nvml":
            self._of_site[device_id] = device
            return Decision.of(Code.MPS_OF_SITE, device.name, pipe=self._site_pipe)
        if most < 2 and not device.exclusive:
            return Decision.of(Code.MPS_NOT_NEEDED, device.name)
        why = find_obstacle(device, most, self._environ) or self._start_daemon(device_id, device)
        if why is not None:
            return Decision.of(Code.MPS_NOT_USED, device.name, why=why)
        return Decision.of(Code.MPS_SHARED, device.name, most_workers=most)

    def _start_daemon(self, device_id: int, device: Device) -> str | None:
        """Start a daemon in a folder of this task; return None, or why it failed."""
        try:
            if self._folder is None:
                self._folder = LocalFolder.create(_PLACE, _NAME)
                hold(self._folder, self._owner)
                self._local.mps.symlink_to(self._folder.path)  # to remove that folder is to remove this one
        except (BadInput, OSError) as error:
            return f"{_PLACE} cannot be used: {getattr(error, 'why', None) or error}"
        daemon = MpsDaemon(device, self._folder.path / str(device_id), self._environ)
        why = daemon.start()
        if why is None:
            self._daemons[device_id] = daemon
        return why

    def check(self, end_workers: Callable[[int | None], object], give_up: Callable[[str], object]) -> None:
        """Note daemons that have ended, and end the workers of a server that has: they could hang."""
        if self._failure is not None:
            give_up(self._failure)
        for device_id, daemon in list(self._daemons.items()):
            if daemon.server is not None and not is_alive(daemon.server):
                daemon.server = None
                end_workers(device_id)
                self._note(daemon, Code.MPS_SERVER_ENDED)
            if not is_alive(daemon.control):
                self._note(daemon, Code.MPS_DAEMON_ENDED)

    def close(self) -> None:
        """End all daemons and remove their folder; call it after the workers have ended."""
        if self._folder is None:
            return
        for daemon in self._daemons.values():
            daemon.stop()
        self._daemons.clear()
        end_all(self._owner.mark)
        self._folder.remove()
        self._folder = None

    def _record(self, decision: Decision) -> None:
        level = logging.DEBUG if decision.code is Code.MPS_NOT_NEEDED else logging.INFO
        log.log(level, "MPS: %s: %s", decision.subject, decision.reason)
        self.decisions.put(decision)


# --- what killed tasks leave ------------------------------------------------------------------------------------------


def end_left_behind(hostname: str) -> None:
    """End the daemons of tasks that were killed on this node together with their recorder."""
    for folder in map(LocalFolder, _PLACE.glob(f"{_NAME}*")):
        with locked(folder) as owner:
            if owner is not None and owner.is_of(hostname):
                log.warning("an earlier task was killed: ending its MPS daemons in %s", folder.path)
                end_all(owner.mark)
                folder.remove()


def end_all(mark: str) -> None:
    """Kill every process with a mark, and wait until they are gone."""
    wait_until(lambda: not end_leftovers(mark))
