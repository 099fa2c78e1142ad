"""A throw-away Slurm on one machine: real daemons, several nodes, fake GPUs; no root, nothing in /etc.

Some promises only a real Slurm can keep or break: which GPUs an array task gets, what its environment says,
which signal arrives. This file starts one, asks it and stops it; what a job should have done is for the tests.
Tried with Slurm 22.05.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from support.badcjobs_program import without_charts

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "sinfo", "squeue", "setpriv")

# What another Slurm, or a shell on a GPU machine, may have left in the caller's environment.
FOREIGN = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|SINFO|SQUEUE|SCANCEL|SCONTROL|SACCT)_|CUDA_VISIBLE_DEVICES$")

_DEVICE_CGROUPS = Path("/sys/fs/cgroup/devices")
_MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory")

ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


class ClusterProblem(Exception):
    """The cluster, or a Slurm command sent to it, did not do what was asked; the text says what it said."""


@dataclass(frozen=True)
class JobEnd:
    """How a job, or one of its array tasks, ended."""

    state: str
    exit_code: int
    signal: int = 0


@dataclass(frozen=True)
class Shape:
    """What the cluster pretends to be. Cores and memory need not exist: Slurm only counts them."""

    nodes: int
    gpus: int | tuple[int, ...]  # on every node, or node by node
    cpus: int
    memory_mib: int
    kill_wait_s: int
    extra_conf: tuple[str, ...]
    cgroups: bool = False  # of devices and of memory

    @property
    def node_names(self) -> list[str]:
        return [f"gpu{number}" for number in range(self.nodes)]

    @property
    def gpus_by_node(self) -> dict[str, int]:
        each = (self.gpus,) * self.nodes if isinstance(self.gpus, int) else self.gpus
        return dict(zip(self.node_names, each, strict=True))


class SlurmCluster:
    """A running Slurm between ``__enter__`` and ``__exit__``; afterwards no process and no file is left.

    Start it from a thread that lives as long as the cluster (pytest's main thread does): the daemons end with it,
    so that not even a killed test run leaves them behind.
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        gpus: int | tuple[int, ...] = 4,
        cpus: int = 24,
        memory_mib: int = 180_000,
        kill_wait_s: int = 5,
        extra_conf: Iterable[str] = (),
        cgroups: bool = False,
        start_timeout_s: float = 60,
    ) -> None:
        self.shape = Shape(nodes, gpus, cpus, memory_mib, kill_wait_s, tuple(extra_conf), cgroups)
        self.start_timeout_s = start_timeout_s
        self.root = Path()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: list[socket.socket] = []

    @staticmethod
    def missing() -> list[str]:
        """Name the programs that are not installed."""
        return [program for program in PROGRAMS if shutil.which(program, path=_path(os.environ)) is None]

    @staticmethod
    def missing_for_cgroups() -> str | None:
        """Say why devices and memory cannot be constrained here; None: they can. Slurm 22.05 needs cgroups v1."""
        if os.geteuid() != 0:
            return "only root makes cgroups and device files"
        if not os.access(_DEVICE_CGROUPS / "tasks", os.W_OK):
            return f"no device cgroups (v1) in {_DEVICE_CGROUPS}"
        if not os.access(_MEMORY_CGROUPS / "memory.memsw.limit_in_bytes", os.F_OK):
            return f"no memory cgroups (v1) that count swap in {_MEMORY_CGROUPS}"
        return None

    @property
    def env(self) -> dict[str, str]:
        """The whole environment of a program that talks to this cluster and to no other."""
        kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
        ours = {"PATH": _path(os.environ), "PYTHONPATH": without_charts(os.environ.get("PYTHONPATH"))}
        return {**kept, **ours, "SLURM_CONF": str(self.root / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        # Not tmp_path: a unix socket's path has at most 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop()

    def run(
        self, argv: Sequence[str | Path], *, cwd: Path | None = None, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program against this cluster; with ``check``, a non-zero exit raises what it wrote to stderr."""
        words = [str(word) for word in argv]
        done = subprocess.run(words, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)
        if check and done.returncode:
            raise ClusterProblem(f"{' '.join(words)} exited with {done.returncode}: {done.stderr.strip()}")
        return done

    def sbatch(self, script: Path, *options: str, cwd: Path) -> int:
        """Submit a script from ``cwd`` (where its output lands, too) and return the job's number."""
        printed = self.run(["sbatch", "--parsable", *options, script.resolve()], cwd=cwd).stdout
        return int(printed.split(";")[0])  # "4821" or "4821;cluster"

    def wait(self, job_id: int, timeout_s: float = 120) -> dict[str, JobEnd]:
        """Wait until every array task has ended; map ``"4821_7"`` (without an array ``"4821"``) to its end."""
        ends: dict[str, JobEnd] = {}

        def all_ended() -> bool:
            ends.update(self.query_ends(job_id))
            return bool(ends) and all(end.state in ENDED for end in ends.values())

        if not _wait_until(all_ended, timeout_s):
            raise ClusterProblem(f"job {job_id} has not ended in {timeout_s} s: {ends}\n{self.log_tails()}")
        return ends

    def query_ends(self, job_id: int) -> dict[str, JobEnd]:
        """Ask Slurm where each array task of a job stands now; a state outside ``ENDED`` is still on its way."""
        # squeue, not sacct: there is no accounting here. MinJobAge keeps ended jobs in its answer.
        fields = "JobArrayID:60,State:40,exit_code:20"
        return parse_ends(self.run(["squeue", "-hr", "-t", "all", "-j", str(job_id), "-O", fields]).stdout)

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon as if its machine had gone dark: nobody tells its jobs, which go on."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def heal_node(self, name: str) -> None:
        """Start the daemon of a killed node again; Slurm then ends what it has given up there."""
        self._launch(name, ["slurmd", "-D", "-N", name])

    def log_tails(self, lines: int = 15) -> str:
        """Return the last lines of every daemon's log, for an error message."""
        return "\n".join(f"--- {log.name}\n{_tail(log, lines)}" for log in sorted(self.root.glob("*.log")))

    def _start(self) -> None:
        # Bound but never listening, and kept until the end: Slurm, which sets SO_REUSEADDR as well, may still
        # listen on these ports, and nobody else is given one, another cluster in the same moment included.
        self._ports = [_hold_port() for _ in range(1 + self.shape.nodes)]
        ports = [held.getsockname()[1] for held in self._ports]
        _make_files(self.root, self.shape, ports)
        # A daemon that does not find the one before it tries again only after a second: so one by one.
        self._launch("munged", _munged(self.root))
        self._await(lambda: (self.root / "munge.sock").exists(), "munged to make its socket")
        self._launch("slurmctld", ["slurmctld", "-D", "-c"])
        self._await(lambda: _listens(ports[0]), "slurmctld to listen")
        for name in self.shape.node_names:
            self._launch(name, ["slurmd", "-D", "-N", name])
        self._await(self._all_idle, "every node to be idle")

    def _launch(self, name: str, argv: Sequence[str]) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *argv],
                env=self.env,
                cwd=self.root,  # step daemons stay in it: _belongs_to knows them by that
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal is for pytest, which then stops us in order
            )

    def _await(self, true: Callable[[], bool], what: str) -> None:
        def true_or_dead() -> bool:
            return true() or any(daemon.poll() is not None for daemon in self._daemons.values())

        in_time = _wait_until(true_or_dead, self.start_timeout_s)
        dead = [
            f"{name} exited with {daemon.poll()}" for name, daemon in self._daemons.items() if daemon.poll() is not None
        ]
        if dead or not in_time:
            why = ", ".join(dead) or f"not in {self.start_timeout_s} s"
            raise ClusterProblem(f"the cluster did not start; waited for {what}: {why}\n{self.log_tails()}")

    def _all_idle(self) -> bool:
        nodes = self.run(["sinfo", "-hN", "-o", "%N %T"], check=False).stdout.splitlines()
        return set(nodes) == {f"{name} idle" for name in self.shape.node_names}  # one line per node and partition

    def _stop(self) -> None:
        # slurmctld first, lest it start or requeue something; munged last, the others cannot talk without it.
        order = ["slurmctld", *self.shape.node_names, "munged"]
        try:
            _end([self._daemons[name] for name in order if name in self._daemons])
            _kill_all(self.root)
            if self.shape.cgroups:
                _remove_cgroups(self.shape)
        finally:
            for held in self._ports:
                held.close()
            self._daemons, self._ports = {}, []
            shutil.rmtree(self.root, ignore_errors=True)


def parse_ends(text: str) -> dict[str, JobEnd]:
    """Map job id to its end, from ``squeue -hr -O JobArrayID,State,exit_code`` output."""
    rows = (line.split() for line in text.splitlines())
    return {job: _parse_end(state, int(wait_status)) for job, state, wait_status in rows}


def _parse_end(state: str, wait_status: int) -> JobEnd:
    # Slurm may set both halves; like scontrol, believe the signal then.
    signal = wait_status & 0x7F
    return JobEnd(state, 0 if signal else wait_status >> 8, signal)


def slurm_conf(root: Path, shape: Shape, ports: Sequence[int], *, host: str, user: str) -> str:
    """Write slurm.conf: one controller, ``shape.nodes`` nodes that all live on this host."""
    controller_port, *node_ports = ports
    return "\n".join(
        [
            *_controller(root, host, user, controller_port),
            *_scheduling(shape),
            *_process_tracking(shape),
            *_accounting(),
            *(_node(name, shape, host, port) for name, port in zip(shape.node_names, node_ports, strict=True)),
            "PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
            *shape.extra_conf,
            "",
        ]
    )


def _controller(root: Path, host: str, user: str, port: int) -> list[str]:
    return [
        "ClusterName=throwaway",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={port}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        f"AuthInfo=socket={root}/munge.sock,cred_expire=5",
        f"StateSaveLocation={root}/state",
        f"SlurmdSpoolDir={root}/spool-%n",
        f"SlurmctldPidFile={root}/slurmctld.pid",
        f"SlurmdPidFile={root}/slurmd-%n.pid",
        "SlurmdTimeout=10",
    ]


def _scheduling(shape: Shape) -> list[str]:
    return [
        "SelectType=select/cons_tres",
        # Cores and GPUs are counted, memory is not: else a script without --mem would take a whole node. What is not
        # counted is not limited, either.
        f"SelectTypeParameters={'CR_Core_Memory' if shape.cgroups else 'CR_Core'}",
        *(["DefMemPerCPU=1000"] if shape.cgroups else []),
        "SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0",
        "GresTypes=gpu",
        "SlurmdParameters=config_overrides",  # believe the node lines below, not the machine
        "ReturnToService=2",
        "CompleteWait=0",
        f"KillWait={shape.kill_wait_s}",
        "MinJobAge=86400",  # wait() reads ended jobs from squeue
        "MaxArraySize=10001",
    ]


def _process_tracking(shape: Shape) -> list[str]:
    """No cgroups unless asked for: they need root."""
    if shape.cgroups:
        return ["ProctrackType=proctrack/cgroup", "TaskPlugin=task/cgroup"]
    return ["ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none"]


def _accounting() -> list[str]:
    """No slurmdbd, so no sacct."""
    return ["JobAcctGatherType=jobacct_gather/none"]


def _node(name: str, shape: Shape, host: str, port: int) -> str:
    gpus = shape.gpus_by_node[name]
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
    return f"NodeName={name} {address} CPUs={shape.cpus} RealMemory={shape.memory_mib}{gres} State=UNKNOWN"


def _make_files(root: Path, shape: Shape, ports: Sequence[int]) -> None:
    host = socket.gethostname().split(".")[0]
    (root / "slurm.conf").write_text(slurm_conf(root, shape, ports, host=host, user=_user_name()))
    (root / "gres.conf").write_text(_gres_conf(root, shape))
    # Named, or slurmd would look for cgroup v2 and systemd, and stop where it finds neither.
    constrained = "ConstrainDevices=yes\nConstrainRAMSpace=yes\nConstrainSwapSpace=yes\n" if shape.cgroups else ""
    (root / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\n{constrained}")
    key = root / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    for folder in ["state", *(f"spool-{name}" for name in shape.node_names)]:
        (root / folder).mkdir()
    for number in range(max(shape.gpus_by_node.values())):
        _make_device(root / f"nvidia{number}", number, constrained=shape.cgroups)


def _make_device(path: Path, number: int, *, constrained: bool) -> None:
    """Make what slurmd wants behind each GPU, a character device: a link to one will do, and needs no root.

    Only cgroups need devices that differ. No driver has major 240: opening one says ENXIO, or EPERM where it is not
    allowed.
    """
    if constrained:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(240, number))
    else:
        path.symlink_to("/dev/null")


def _gres_conf(root: Path, shape: Shape) -> str:
    return "".join(
        f"NodeName={node} Name=gpu File={root}/nvidia[0-{gpus - 1}] Flags=nvidia_gpu_env\n"
        for node, gpus in shape.gpus_by_node.items()
        if gpus
    )


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())  # a container's made-up user


def _path(environ: Mapping[str, str]) -> str:
    # The daemons live in /usr/sbin, which an ordinary user's PATH often lacks.
    return os.pathsep.join([environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _munged(root: Path) -> list[str]:
    files = {"socket": "munge.sock", "key-file": "munge.key", "seed-file": "munge.seed", "pid-file": "munged.pid"}
    options = [f"--{option}={root / name}" for option, name in files.items()]
    # --force: a folder under /tmp is not as strictly owned as munged would like it.
    return ["munged", "--foreground", "--force", "--num-threads=2", *options]


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _hold_port() -> socket.socket:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def _wait_until(true: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _tail(log: Path, lines: int) -> str:
    with log.open(errors="replace") as text:
        return "".join(deque(text, maxlen=lines))


def _end(daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    for daemon in daemons:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _kill_all(root: Path, timeout_s: float = 30) -> None:
    """Kill what the daemons left: step daemons, jobs that ignore TERM, programs a test started and forgot."""

    def none_left() -> bool:
        left = _processes_of(root)
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                pass  # ended meanwhile; what cannot be killed is named below
        return not left

    if not _wait_until(none_left, timeout_s):
        raise ClusterProblem(f"these processes survive the cluster in {root}: {_processes_of(root)}")


def _remove_cgroups(shape: Shape) -> None:
    """Remove the groups that the nodes have made, innermost first; they are empty by now."""
    for name in shape.node_names:
        for top in _DEVICE_CGROUPS.parent.glob(f"*/slurm_{name}"):
            for folder in (*sorted(top.glob("**/"), reverse=True), top):
                try:
                    folder.rmdir()
                except OSError:
                    pass  # not empty yet, or gone by now: it hurts nobody


def _processes_of(root: Path) -> list[psutil.Process]:
    ours = {psutil.Process(), *psutil.Process().parents()}
    roots = [process for process in psutil.process_iter() if process not in ours and _belongs_to(process, root)]
    return list({*roots, *(child for process in roots for child in _children(process))} - ours)


def _belongs_to(process: psutil.Process, root: Path) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A step daemon writes its title over its environment, but stays in the folder where slurmd was started.
        return (
            process.environ().get("SLURM_CONF") == str(root / "slurm.conf") or root in Path(process.cwd(), "_").parents
        )
    except psutil.Error:  # ended meanwhile, or somebody else's
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []
