"""A job on a machine without Slurm, from a script or an order to the verdict: array → merge → exit code.

The emulation itself is ``scheduler``'s; here it gets this machine's devices, their locks, and eyes for progress.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.device_locks import DeviceLocks, holder_words, lock_folder
from badcjobs.devices import open_sight
from badcjobs.errors import BadcjobsError, BadInput, ExitCode
from badcjobs.job import FinishedJob, finish_job
from badcjobs.model import ArrayOrder, StandIn
from badcjobs.paths import RunFolder
from badcjobs.scheduler.device_pool import DevicePool, Locks
from badcjobs.scheduler.job_script import JobRequest, read_request
from badcjobs.scheduler.local import JobEnd, LocalScheduler, Machine
from badcjobs.scheduler.local_environment import Node, inherited
from badcjobs.scheduler.local_job import Terms
from badcjobs.scheduler.local_state import COMPLETED, FAILED, TaskRow
from badcjobs.store.connect import open_sealed
from badcjobs.store.merging.merge import MergeOrder
from badcjobs.world import World

Tell = Callable[[str], None]

_EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}


@dataclass(frozen=True, slots=True)
class LocalWish:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 5
    kill_wait_s: float = 30.0
    lock: bool = True  # keep other runs off the devices; no need to where they are simulated for us alone


@dataclass(frozen=True, slots=True)
class ScriptOrder:
    """A job script, as ``sbatch OPTIONS SCRIPT ARGUMENTS`` would get it."""

    script: Path
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    source: tuple[str, ...] = ()  # for SOURCE, which our templates read
    out: Path | None = None  # for OUT; None: whatever the environment or --export says


@dataclass(frozen=True, slots=True)
class Emulation:
    """An emulated job that is over."""

    exit_code: int
    verdict: str
    job_id: str
    rows: tuple[TaskRow, ...]
    out: Path | None
    job: FinishedJob | None  # None: nothing was merged

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs submit --cluster local --json``."""
        return {
            "cluster": "local",
            "job_id": self.job_id,
            "out": None if self.out is None else str(self.out),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "tasks": [row.to_dict() for row in self.rows],
            "summary": None if self.job is None else self.job.to_dict(),
        }


def emulate_order(order: ArrayOrder, wish: LocalWish, world: World, tell: Tell) -> Emulation:
    """Run an array to its end and merge it."""
    scheduler = local_scheduler(replace(wish, max_requeues=order.requeues), world, tell, order.out)
    with only_here(order.logs):
        done = scheduler.run_script(scheduler.script(order), name=order.name, state_folder=order.logs)
        return conclude(done, order.out, world, tell)


def emulate_script(order: ScriptOrder, wish: LocalWish, world: World, tell: Tell) -> Emulation:
    """Run somebody's job script to its end; merge where it is known where the results are."""
    text = read_script(order.script, world)
    given = {"SOURCE": " ".join(order.source)} if order.source else {}
    given |= {} if order.out is None else {"OUT": str(world.cwd / order.out)}
    world = replace(world, environ={**world.environ, **given})
    out = find_out(read_request(text, order.options), world)
    scheduler = local_scheduler(wish, world, tell, out or world.cwd / order.script)
    with nullcontext() if out is None else only_here(out / "logs"):
        done = scheduler.run_script(text, name=order.script.name, options=order.options, arguments=order.arguments)
        return conclude(done, out, world, tell)


def read_script(script: Path, world: World) -> str:
    """Return the text of a job script."""
    try:
        return (world.cwd / script).read_bytes().decode()  # with the line ends that it has
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the job script {script} cannot be read", why=str(error)) from error


def find_out(request: JobRequest, world: World) -> Path | None:
    """Return the run folder of a script that keeps it in OUT, as our templates do; None: it does not say."""
    out = inherited(world.environ, request.export).get("OUT")
    return None if not out else world.cwd / (request.chdir or "") / out


@contextmanager
def only_here(logs: Path) -> Iterator[None]:
    """Keep a second emulation of the same run away: it would do the same chunks."""
    logs.mkdir(parents=True, exist_ok=True)
    with (logs / "emulation.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"{logs.parent} is being worked on by another emulation",
                why="two would do the same chunks",
                fix=f"tail {logs}/*.out   (it says how far that is)",
            ) from None
        except OSError:
            pass  # this filesystem has no locks
        yield


# --- the end ----------------------------------------------------------------------------------------------------------


def conclude(done: JobEnd, out: Path | None, world: World, tell: Tell) -> Emulation:
    """Merge what the tasks have left, and judge."""
    stop = world.stop
    if stop.cut_short_by is not None:
        return Emulation(128 + stop.cut_short_by, "stopped", done.job_id, done.rows, out, None)
    if out is None or not any(RunFolder(out).tasks.glob("*.sqlite")):
        if out is not None:
            _complain_of_tasks(done.rows)
        else:
            tell("nothing is merged: the script has no OUT that is known here; badcjobs merge DIR does it")
        return Emulation(_code_of(done.rows), _verdict_of(done.rows), done.job_id, done.rows, out, None)
    if signal.getsignal(signal.SIGINT) == stop.receive:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a merge may be interrupted at any moment
    job = finish_job(MergeOrder([out], RunFolder(out).job_database), world.clock)
    verdict = job.summary.verdict
    if verdict == "done" and (verdict := _verdict_of(done.rows)) != "done":
        _tell_of_tasks(done.rows, tell)  # what lies there is done, but not by these
    code = int(_EXIT_CODES[verdict])
    if code and stop.ended_by is signal.SIGINT:
        code = 128 + signal.SIGINT
    return Emulation(code, verdict, done.job_id, done.rows, out, job)


def _tell_of_tasks(rows: Sequence[TaskRow], tell: Tell) -> None:
    """Name the tasks that did not end well."""
    for row in rows:
        if row.state != COMPLETED:
            tell(f"task {row.index}: {row.state}, exit code {row.exit_code}; see {row.log}")


def _complain_of_tasks(rows: Sequence[TaskRow]) -> None:
    """Say why no task has left anything; the first one speaks for all."""
    row = next((row for row in rows if row.exit_code), None)
    if row is None or row.exit_code is None:
        return
    problem = BadcjobsError(
        f"no array task could begin: {row.log.name} ends with exit code {row.exit_code}",
        why=row.log.read_text(errors="replace").strip()[-2000:] if row.log.exists() else row.note,
        fix=f"less {row.log}",
    )
    problem.exit_code = row.exit_code
    raise problem


def _verdict_of(rows: Sequence[TaskRow]) -> str:
    """Judge by exit codes alone."""
    if all(row.state == COMPLETED for row in rows):
        return "done"
    return "failed" if all(row.state in (COMPLETED, FAILED) and row.exit_code != 75 for row in rows) else "stopped"


def _code_of(rows: Sequence[TaskRow]) -> int:
    return int(_EXIT_CODES[_verdict_of(rows)])


def local_scheduler(wish: LocalWish, world: World, tell: Tell, run: Path) -> LocalScheduler:
    """Return the scheduler of this machine; ``run`` is what its locks tell others, and where progress is looked for."""
    environ = world.environ
    node = Node(
        name=environ.get("SLURMD_NODENAME") or world.hostname,
        cores=world.cores,
        user=environ.get("USER") or environ.get("LOGNAME") or str(os.getuid()),
        submit_dir=world.cwd,
    )
    machine = Machine(
        environ=environ,
        clock=world.clock,
        stop=world.stop,
        node=node,
        open_pool=lambda count: open_pool(count, wish, world, run),
        tell=tell,
    )
    progress = Progress(RunFolder(run).tasks)
    return LocalScheduler(machine, Terms(wish.kill_wait_s, wish.max_requeues, progress.made))


# --- devices ----------------------------------------------------------------------------------------------------------


def open_pool(count: int, wish: LocalWish, world: World, run: Path) -> DevicePool:
    """Return the devices that this process may use, for tasks that ask for ``count`` each."""
    if count == 0:
        return DevicePool((), NoLocks)
    in_job = parse_allocation(world.environ, hostname="", pid=0, started_at_ms=0).in_slurm
    with open_sight(world.environ, world.clock, wish.stand_in, in_slurm=in_job) as sight:
        devices, why = sight.grant.devices, "\n".join(filter(None, [sight.grant.why, sight.trouble]))
    words = holder_words(world.pid, run)
    folder = locks_in_job(world) if in_job else lock_folder(world.environ)

    def new_locks() -> Locks:
        return DeviceLocks(folder, world.clock, words) if wish.lock else NoLocks()

    pool = DevicePool(devices, new_locks, share=wish.share_gpus)
    pool.check(count, why)
    return pool


def locks_in_job(world: World) -> Path:
    """Return where the locks of one job are: others are kept off its devices already, by whoever granted them."""
    private = world.environ.get("SLURM_TMPDIR")
    if private:
        return Path(private) / "badcjobs-locks"
    parent = Path(world.environ.get("TMPDIR") or tempfile.gettempdir())
    return parent / f"badcjobs-locks-{world.environ.get('SLURM_JOB_ID', 'job')}"


class NoLocks:
    """Keeps nobody off."""

    def claim(self, uuid: str) -> str | None:
        """Let everybody have every device."""
        return None

    def release(self) -> None:
        """Do nothing: nothing was taken."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for nobody."""
        yield


# --- progress ---------------------------------------------------------------------------------------------------------


class Progress:
    """Says whether an attempt has settled any chunk, from the task databases that it has published."""

    def __init__(self, tasks: Path) -> None:
        self._tasks = tasks

    def made(self, job_id: int, index: int, restart: int) -> bool | None:
        """Return whether an attempt has got anything done; None: it left no database, or is none of ours."""
        found = [self._settled(path) for path in self._tasks.glob(f"{job_id}_{index}.r{restart}.*.sqlite")]
        known = [settled for settled in found if settled is not None]
        return any(known) if known else None

    def _settled(self, database: Path) -> bool | None:
        try:
            with closing(open_sealed(database)) as db:
                query = "SELECT 1 FROM chunk WHERE status IN ('done', 'failed', 'poison') LIMIT 1"
                return db.execute(query).fetchone() is not None
        except sqlite3.Error:
            return None
