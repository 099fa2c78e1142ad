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
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from badcjobs.devices.nvml import find_mps_obstacle, list_mps_clients
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Device
from badcjobs.paths import LocalFolder
from badcjobs.processes import MPS_PIPE, TASK_MARK, USUAL_MPS_PIPE, bind_to_parent, end_leftovers, last_lines
from badcjobs.store.live_folder import Owner, hold, locked
from badcjobs.workers.feed import Decision

log = logging.getLogger(__name__)

_CONTROL = "nvidia-cuda-mps-control"
_PID_FILE = f"{_CONTROL}.pid"  # in the folder of the pipes
_ALONE = "one worker per device"
ONLY_ONE = "only one process may use the device, by its compute mode (nvidia-smi -c 0 changes that)"
_MOST_CLIENTS = 48  # of a device, since Volta
_PLACE, _NAME = Path("/tmp"), "badcjobs-mps-"  # on the node, and short: a socket's path has at most 107 characters
_ANSWER_S = 10.0
_END_S, _NAP_S = 5.0, 0.05


def find_obstacle(device: Device, most: int, environ: Mapping[str, str]) -> str | None:
    """Return why ``most`` workers do not share this device through MPS; None: they can."""
    if device.exclusive:  # under MPS a chunk could not be tried without it
        return ONLY_ONE
    if most < 2:
        return _ALONE
    if device.uuid is None or device.backend != "nvml":
        return f"the device is not read through NVML ({device.vendor}, {device.backend})"
    if device.uuid.startswith("MIG-"):
        return "the device is a MIG slice"
    if most > _MOST_CLIENTS:
        return f"{most} workers per device; the most is {_MOST_CLIENTS}"
    if shutil.which(_CONTROL, path=environ.get("PATH")) is None:
        return f"{_CONTROL} is not on PATH"
    return find_mps_obstacle(device.uuid)


def find_site_pipe(environ: Mapping[str, str]) -> str | None:
    """Return the folder of a daemon that this site has started; None: there is none."""
    named = Path(environ.get(MPS_PIPE) or USUAL_MPS_PIPE)
    with suppress(OSError, ValueError):
        pid = int((named / _PID_FILE).read_text())
        with suppress(PermissionError):  # it runs, as another user
            os.kill(pid, 0)
        with suppress(psutil.Error):  # the processes of others may be hidden
            if not psutil.Process(pid).name().startswith(_CONTROL[:15]):  # the kernel keeps so many characters of it
                return None
        return str(named)
    return None


# --- one device -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MpsDaemon:
    """The control daemon of one device, and the server that it starts for its clients."""

    device: Device
    folder: Path
    env: Mapping[str, str]
    is_required: bool  # --mps on, and no worker was found to be a client so far
    server: psutil.Process | None = None  # None: not seen yet
    is_used: bool | None = None  # whether the last worker that was looked for is a client; None: no worker yet

    def __post_init__(self) -> None:
        self.pipe, self._logs = self.folder / "pipe", self.folder / "log"
        places = {MPS_PIPE: str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._logs)}
        self.env = {**self.env, **places, "CUDA_VISIBLE_DEVICES": self.device.pin}
        self.control: psutil.Process | None = None

    def start(self) -> str | None:
        """Start the daemon and its server, which Slurm's signals must not end; return None, or why it failed."""
        said = self._logs / "start.log"
        try:
            for place in (self.pipe, self._logs):
                place.mkdir(parents=True)
            with said.open("wb") as output:  # a pipe would stay open in the daemon
                subprocess.run(
                    [_CONTROL, "-d"], env=self.env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True,
                    timeout=_ANSWER_S, start_new_session=True, preexec_fn=bind_to_parent,
                )  # fmt: skip
            wait_until((self.pipe / _PID_FILE).exists)
            self.control = psutil.Process(int((self.pipe / _PID_FILE).read_text()))
        except (OSError, ValueError, subprocess.SubprocessError, psutil.Error) as error:
            why = f"no answer for {_ANSWER_S:.0f} s" if isinstance(error, subprocess.TimeoutExpired) else str(error)
            why = "it writes no process id" if isinstance(error, (FileNotFoundError, ValueError)) else why
            return f"{_CONTROL} does not start: {last_lines(said, 200) or why}"
        self._ask(f"start_server -uid {os.geteuid()}")
        return None

    def _ask(self, command: str) -> list[int]:
        """Send the daemon a command, which Slurm's signals must not end; return the process ids in its answer."""
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.check_output(
                [_CONTROL], input=f"{command}\n", env=self.env, text=True, stderr=subprocess.DEVNULL,
                timeout=_ANSWER_S, start_new_session=True, preexec_fn=bind_to_parent,
            )  # fmt: skip
            return [int(word) for word in answer.split() if word.isdecimal()]
        return []

    def has_client(self, pid: int | None) -> bool:
        """Return whether a worker is a client; None: it has ended."""
        servers = self._ask("get_server_list")
        with suppress(psutil.Error, IndexError):
            self.server = psutil.Process(servers[-1])
        family = family_of(pid)
        if family & {client for server in servers for client in self._ask(f"get_client_list {server}")}:
            return True
        try:
            said = (self._logs / "server.log").read_text(errors="replace")
        except OSError:
            return False
        return any(("PID: " if one is None else f"PID: {one},") in said for one in family)

    def stop(self) -> None:
        """Ask the daemon to end, wait a little for it, and kill what is left."""
        if is_alive(self.control):
            self._ask("quit")
            wait_until(lambda: not (is_alive(self.control) or is_alive(self.server)))
        for process in (self.control, self.server):
            with suppress(psutil.Error):
                if process is not None and is_alive(process):
                    process.kill()


def family_of(pid: int | None) -> set[int | None]:
    """Return a worker and its children: with a prefix, HawkEars is one of them."""
    family = {pid}
    with suppress(psutil.Error):
        family |= {child.pid for child in psutil.Process(pid).children(recursive=True)} if pid else set()
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
        self._mark = ""
        self._site_pipe: str | None = None
        self._of_site: dict[int | None, Device] = {}  # those that share it, until one of their workers was looked for
        self._decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        self._failure: str | None = None  # why --mps on cannot be done

    def pipe_of(self, device_id: int | None) -> str | None:
        """Return the folder through which new workers of a device reach its daemon; None: there is none."""
        if (daemon := self._daemons.get(device_id)) is None:
            return self._site_pipe
        return str(daemon.pipe) if is_alive(daemon.control) else None

    def look_for(self, device_id: int | None, pid: int | None) -> None:
        """Check that a worker that has given a result is a client of its daemon, and record what is new about that."""
        worker, daemon = f"worker {pid}" if pid else "a worker", self._daemons.get(device_id)
        device = self._of_site.pop(device_id, None)
        if device is not None and device.uuid is not None:  # that daemon may answer only its own user
            listed = family_of(pid) & list_mps_clients(device.uuid)
            how = "is connected to its server" if listed else "may run without it: NVML does not list it as a client"
            self._decide(device, True, f"{worker} {how}")
        if daemon is None or not is_alive(daemon.control) or (found := daemon.has_client(pid)) == daemon.is_used:
            return
        how = "connected to its server" if found else "not connected, and runs without it: its server does not list it"
        self._note(daemon, found, f"{worker} is {how}")

    def do_without(self, device_id: int | None, why: str) -> None:
        """Record that a worker gives up MPS because it cannot work with it."""
        if (daemon := self._daemons.get(device_id)) is not None and daemon.is_used is not False:
            self._note(daemon, False, f"a worker runs without it: {why}")

    def _note(self, daemon: MpsDaemon, is_used: bool, why: str) -> None:
        self._decide(daemon.device, is_used, why)
        if daemon.is_required and not is_used:
            self._failure = f"--mps on, but {why}; --mps auto allows that"
        daemon.is_used, daemon.is_required = is_used, daemon.is_required and not is_used

    def decisions(self) -> Iterator[Decision]:
        """Yield the decisions since the last call."""
        while not self._decisions.empty():
            yield self._decisions.get()

    def start(
        self, wanted: str, devices: Sequence[tuple[int, Device]], *, most: int, environ: Mapping[str, str], mark: str,
        local: LocalFolder, hostname: str,
    ) -> None:  # fmt: skip
        """Start a daemon for each device that can have one; ``wanted`` is auto, on (fail otherwise) or off.

        ``most``: the most workers that a device may get.
        """
        end_left_behind(hostname)
        self._mark, reasons = mark, dict[tuple[str | None, str | None], Device]()
        self._site_pipe = None if wanted == "off" else find_site_pipe(environ)
        if not devices and wanted == "on":
            raise NotHere("--mps on: the task has no device", why="MPS is for GPUs", fix="badcjobs run … --mps auto")
        for device_id, device in devices:
            theirs = self._site_pipe if device.backend == "nvml" else None
            why = "--mps off" if wanted == "off" else theirs or find_obstacle(device, most, environ)
            try:
                if why is None and self._folder is None:
                    self._folder = LocalFolder.create(_PLACE, _NAME)
                    hold(self._folder, Owner.of(Path(), mark, shared=False, hostname=hostname))
                    local.mps.symlink_to(self._folder.path)  # to remove that folder is to remove this one
            except (BadInput, OSError) as error:
                why = f"{_PLACE} cannot be used: {getattr(error, 'why', None) or error}"
            if why is None and self._folder is not None:
                env = {**environ, TASK_MARK: mark}
                daemon = MpsDaemon(device, self._folder.path / str(device_id), env, is_required=wanted == "on")
                if (why := daemon.start()) is None:
                    self._daemons[device_id] = daemon
            if why is not None and why != self._site_pipe and wanted == "on":
                name = device.name or device.token
                raise NotHere(f"--mps on: MPS cannot be used on {name}", why=why, fix="badcjobs run … --mps auto")
            if theirs is not None and why == theirs:
                self._of_site[device_id] = device
            reasons.setdefault((device.name, why), device)  # devices of one model have one row
        how: dict[str | None, str] = {None: f"up to {most} workers share the device through a daemon of ours"}
        how |= {pipe: f"the workers use the daemon of this site, in {pipe}"} if (pipe := self._site_pipe) else {}
        for (_, why), device in reasons.items():
            self._decide(device, why in how, how.get(why, why or ""))

    def check(self, end_workers: Callable[[int | None], object], give_up: Callable[[str], object]) -> None:
        """Note daemons that have ended, and end the workers of a server that has: they could hang."""
        if self._failure is not None:
            give_up(self._failure)
        for device_id, daemon in list(self._daemons.items()):
            if daemon.server is not None and not is_alive(daemon.server):
                daemon.server = daemon.is_used = None
                end_workers(device_id)
                self._decide(daemon.device, False, "its server has ended; its workers start again")
            if not is_alive(daemon.control) and daemon.is_used is not False:
                daemon.is_used = False
                self._decide(daemon.device, False, "the daemon has ended: new workers run without it")

    def close(self) -> None:
        """End all daemons and remove their folder; call it after the workers have ended."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        for daemon in self._daemons.values():
            daemon.stop()
        self._daemons.clear()
        end_all(self._mark)
        folder.remove()

    def _decide(self, device: Device, is_used: bool, reason: str) -> None:
        log.log(logging.DEBUG if reason == _ALONE else logging.INFO, "MPS: %s: %s", device.name, reason)
        self._decisions.put(("mps", device.name, float(is_used), reason))


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
