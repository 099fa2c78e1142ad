"""A throw-away Slurm on one machine: real daemons, several nodes, fake GPUs; no root, nothing in /etc.

Some promises only a real Slurm can keep or break: which GPUs a task gets, its environment, which signal arrives.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from support.badcjobs_program import without_charts
from support.waiting import processes, wait_for

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "squeue", "setpriv")
ENDED = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
# What another Slurm, or a shell on a GPU machine, may have left in the caller's environment.
_FOREIGN = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|SINFO|SQUEUE|SCANCEL|SCONTROL|SACCT)_|CUDA_VISIBLE_DEVICES$")
_CGROUPS = Path("/sys/fs/cgroup")
# The daemons live in /usr/sbin, which an ordinary user's PATH often lacks.
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
# slurm.conf: one controller, and nodes that all live on this host. Cores and memory need not exist: Slurm only counts.
# A requeued job waits for cred_expire; there is no slurmdbd, so no sacct; MinJobAge keeps ended jobs in squeue.
_CONF = """ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={self.root}/munge.sock,cred_expire=5
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/spool-%n
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/slurmd-%n.pid
SlurmdTimeout=10
SelectType=select/cons_tres
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
CompleteWait=0
KillWait={self.kill_wait_s}
MinJobAge=86400
MaxArraySize=10001
JobAcctGatherType=jobacct_gather/none
PartitionName=gpu Nodes={self.usual} Default=YES MaxTime=INFINITE State=UP
"""
# Without cgroups, which need root, memory is not counted: else a script without --mem would take a whole node.
_PLAIN = "SelectTypeParameters=CR_Core\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n"
_GUARDED = (
    "SelectTypeParameters=CR_Core_Memory\nDefMemPerCPU=1000\nProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\n"
)


class JobEnd(NamedTuple):
    """How a job, or one of its array tasks, ended."""

    state: str
    exit_code: int
    signal: int = 0


class SlurmCluster:
    """A running Slurm between ``__enter__`` and ``__exit__``; afterwards no process and no file is left.

    ``gpus`` are those of each node, ``usual`` the nodes of the partition that jobs get without asking. Start it from a
    thread that lives as long as the cluster: the daemons end with it, so that not even a killed test run leaves them.
    """

    kill_wait_s = 15  # the end of a task takes a busy machine several seconds; Slurm itself waits 30

    def __init__(self, gpus: Sequence[int], conf: Sequence[str], *, cgroups: bool = False, usual: str = "ALL") -> None:
        self.gpus = {f"gpu{number}": many for number, many in enumerate(gpus)}
        self.usual, self.cgroups, self.extra_conf, self.root = usual, cgroups, conf, Path()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: list[socket.socket] = []

    @staticmethod
    def missing() -> list[str]:
        """Name the programs that are not installed."""
        return [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]

    @staticmethod
    def missing_for_cgroups() -> str | None:
        """Say why devices and memory cannot be constrained here; None: they can. Slurm 22.05 needs cgroups v1."""
        if os.geteuid() != 0:
            return "only root makes cgroups and device files"
        needed = (_CGROUPS / "devices" / "tasks", _CGROUPS / "memory" / "memory.memsw.limit_in_bytes")
        return next((f"no {path}: cgroups v1 that count swap" for path in needed if not os.access(path, os.W_OK)), None)

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a program that talks to this cluster and to no other."""
        kept = {name: value for name, value in os.environ.items() if not _FOREIGN.match(name)}
        ours = {"PATH": _PATH, "PYTHONPATH": without_charts(os.environ.get("PYTHONPATH"))}
        return {**kept, **ours, "SLURM_CONF": str(self.root / "slurm.conf")}

    def run(self, *argv: object, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster; with ``check`` it must not fail."""
        words = [str(word) for word in argv]
        done = subprocess.run(words, **{"env": self.env, **more}, capture_output=True, text=True, timeout=120)
        assert not (check and done.returncode), f"{words} exited with {done.returncode}: {done.stderr}"
        return done

    def sbatch(self, script: Path, *options: str, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """Submit a script from ``cwd`` (where its output lands, too) and return the job's number."""
        done = self.run("sbatch", "--parsable", *options, script.resolve(), cwd=cwd, env=env or self.env)
        return int(done.stdout.split(";")[0])

    def wait(self, job_id: int) -> dict[str, JobEnd]:
        """Wait until every array task has ended; map ``"4821_7"`` (without an array ``"4821"``) to its end."""

        def ends() -> dict[str, JobEnd] | None:
            found = self.query_ends(job_id)
            return found if found and all(end.state in ENDED for end in found.values()) else None

        try:
            return wait_for(ends, f"the end of job {job_id}", 170) or {}
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.query_ends(job_id)}\n{self._log_tails()}") from None

    def query_ends(self, job_id: int | str) -> dict[str, JobEnd]:
        """Ask Slurm where each array task of a job stands now; a state outside ``ENDED`` is still on its way."""
        said = self.run("squeue", "-hr", "-t", "all", "-j", job_id, "-O", "JobArrayID:60,State:40,exit_code:20").stdout
        ends = {}
        for job, state, text in (line.split() for line in said.splitlines()):
            status, signum = int(text), int(text) & 0x7F  # Slurm may set both halves; like scontrol, believe the signal
            ends[job] = JobEnd(state, 0 if signum else status >> 8, signum)
        return ends

    def start_again(self, job_id: int | str, has_begun: Callable[[], bool], *more: str) -> None:
        """Spare us most of the time that Slurm lets pass before it starts a requeued job again.

        Not all: a node refuses a job in the second in which it ended the job's last attempt.
        """
        changed: set[str] = set()

        def begins() -> bool:
            waiting = {task for task, end in self.query_ends(job_id).items() if end.state == "PENDING"}
            for task, change in itertools.product(waiting - changed, (*more, "StartTime=now+2")):
                self.run("scontrol", "update", f"jobid={task}", change, check=False)  # refused if it has begun
            changed.update(waiting)
            time.sleep(0.3)
            return has_begun()

        try:
            wait_for(begins, f"job {job_id} is started again", 150)
        except AssertionError as error:
            logged = self.run("grep", "-w", job_id, *sorted(self.root.glob("*.log"))).stdout
            raise AssertionError(f"{error}\n{self.run('scontrol', 'show', 'job', job_id).stdout}{logged}") from None

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon as if its machine had gone dark: no one tells its jobs, which go on."""
        self._daemons[name].kill()
        self._daemons.pop(name).wait()

    def start_node(self, name: str) -> None:
        """Start the daemon of a node; if it was killed, Slurm then ends what it has given up there."""
        self._launch(name, "slurmd", "-D", "-N", name)

    def _log_tails(self) -> str:
        return self.run("tail", "-n", 15, *sorted(self.root.glob("*.log"))).stdout

    def __enter__(self) -> SlurmCluster:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a unix socket's path has at most 107 bytes
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        # Bound but never listening, and kept until the end: Slurm, which sets SO_REUSEADDR as well, may still listen on
        # these ports, and no one else is given one, another cluster in the same moment included.
        self._ports = [_hold_port() for _ in range(1 + len(self.gpus))]
        ports = [held.getsockname()[1] for held in self._ports]
        self._make_files(ports)
        # A daemon that does not find the one before it tries again only after a second: so one by one.
        files = {"socket": "munge.sock", "key-file": "munge.key", "seed-file": "munge.seed", "pid-file": "munged.pid"}
        options = [f"--{option}={self.root / name}" for option, name in files.items()]
        # --force: a folder under /tmp is not as strictly owned as munged would like it.
        self._launch("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self._await((self.root / "munge.sock").exists, "munged to make its socket")
        self._launch("slurmctld", "slurmctld", "-D", "-c")
        self._await(lambda: _listens(ports[0]), "slurmctld to listen")
        for name in self.gpus:
            self.start_node(name)
        asked, idle = ("sinfo", "-hN", "-o", "%N %T"), {f"{name} idle" for name in self.gpus}
        self._await(lambda: {*self.run(*asked, check=False).stdout.splitlines()} == idle, "every node to be idle")

    def _make_files(self, ports: Sequence[int]) -> None:
        root, host, nodes, devices = self.root, socket.gethostname().split(".")[0], [], []
        for (name, gpus), port in zip(self.gpus.items(), ports[1:], strict=True):
            address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            nodes.append(f"NodeName={name} {address} CPUs=64 RealMemory=180000 Gres=gpu:{gpus} State=UNKNOWN\n")
            devices.append(f"NodeName={name} Name=gpu File={root}/nvidia[0-{gpus - 1}] Flags=nvidia_gpu_env\n")
            (root / f"spool-{name}").mkdir()
        head = _CONF.format(host=host, user=os.getuid(), port=ports[0], self=self)
        conf = [_GUARDED if self.cgroups else _PLAIN, *nodes, head, "\n".join(self.extra_conf), "\n"]
        (root / "slurm.conf").write_text("".join(conf))
        (root / "gres.conf").write_text("".join(devices))
        # Named, or slurmd would look for cgroup v2 and systemd, and stop where it finds neither.
        constrained = "ConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n" if self.cgroups else ""
        (root / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\n{constrained}")
        (root / "munge.key").touch(mode=0o600)
        (root / "munge.key").write_bytes(os.urandom(128))
        (root / "state").mkdir()
        for number in range(max(self.gpus.values())):
            # slurmd wants a character device behind each GPU: a link to one will do. Only cgroups need devices that
            # differ; no driver has major 240: opening one says ENXIO, or EPERM where it is not allowed.
            if self.cgroups:
                os.mknod(root / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(240, number))
            else:
                (root / f"nvidia{number}").symlink_to("/dev/null")

    def _launch(self, name: str, *argv: str) -> None:
        # Step daemons stay in the folder: _processes_of knows them by that. A Ctrl-C in the terminal is for pytest.
        words = ["setpriv", "--pdeathsig", "TERM", "--", *argv]
        with (self.root / f"{name}.log").open("ab") as log:
            files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._daemons[name] = subprocess.Popen(words, env=self.env, cwd=self.root, start_new_session=True, **files)

    def _await(self, true: Callable[[], bool], what: str) -> None:
        def dead() -> list[str]:
            return [name for name, daemon in self._daemons.items() if daemon.poll() is not None]

        wait_for(lambda: true() or dead(), what)
        assert not dead(), f"the cluster did not start; ended: {dead()}\n{self._log_tails()}"

    def __exit__(self, *_: object) -> None:
        # slurmctld first, lest it start or requeue something; munged last, the others cannot talk without it.
        try:
            for name in ("slurmctld", *self.gpus, "munged"):
                if (daemon := self._daemons.pop(name, None)) is not None:
                    daemon.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        daemon.wait(20)
                    daemon.kill()
                    daemon.wait()
            wait_for(lambda: not _kill_processes_of(self.root), f"no process survives the cluster in {self.root}", 30)
            for top in (one for name in self.gpus for one in _CGROUPS.glob(f"*/slurm_{name}") if self.cgroups):
                for folder in (*sorted(top.glob("**/"), reverse=True), top):
                    with suppress(OSError):  # not empty yet, or gone by now: it hurts no one
                        folder.rmdir()
        finally:
            for held in self._ports:
                held.close()
            shutil.rmtree(self.root, ignore_errors=True)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _hold_port() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _kill_processes_of(root: Path) -> set[psutil.Process]:
    """Kill and return what the daemons left: step daemons, jobs that ignore TERM, programs a test has forgotten."""

    def is_left(process: psutil.Process) -> bool:
        # A step daemon writes its title over its environment, but stays in the folder where slurmd was started.
        named = process.environ().get("SLURM_CONF") == str(root / "slurm.conf")
        return named or root in Path(process.cwd(), "_").parents

    ours, found = {psutil.Process(), *psutil.Process().parents()}, set()
    for process in processes(is_left):
        with suppress(psutil.Error):  # it has ended meanwhile
            found |= {process, *process.children(recursive=True)} - ours
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    return found
