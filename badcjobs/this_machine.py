"""The emulation's scheduler, with this machine's devices, their locks, and eyes for progress."""

from __future__ import annotations

import os
import pwd
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.device_locks import DeviceLocks, holder_words, lock_folder
from badcjobs.devices import open_sight
from badcjobs.job_numbers import claim_numbers
from badcjobs.model import StandIn
from badcjobs.paths import RunFolder
from badcjobs.scheduler.device_pool import DevicePool, Locks
from badcjobs.scheduler.local import LocalScheduler, Machine
from badcjobs.scheduler.local_environment import Node
from badcjobs.scheduler.local_job import Terms
from badcjobs.store.connect import open_sealed
from badcjobs.world import World

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LocalWish:
    """How to emulate."""

    stand_in: StandIn = field(default_factory=StandIn)
    share_gpus: bool = False  # several tasks on one device
    max_requeues: int = 5
    kill_wait_s: float = 30.0
    lock: bool = True  # keep other runs off the devices; no need to where they are simulated for us alone
    again: bool = False  # somebody says that the job of Slurm in the same folder has ended

    @property
    def options(self) -> tuple[str, ...]:
        """The same as options of ``badcjobs submit``, as far as ``run`` has no such option."""
        usual = LocalWish()
        sharing = ("--share-gpus",) if self.share_gpus else ()
        waiting = () if self.kill_wait_s == usual.kill_wait_s else (f"--kill-wait={self.kill_wait_s}",)
        return *sharing, *waiting


def local_scheduler(wish: LocalWish, world: World, tell: Tell, run: Path) -> LocalScheduler:
    """Return the scheduler of this machine; ``run`` is what its locks tell others, and where progress is looked for."""
    environ = world.environ
    node = Node(
        name=environ.get("SLURMD_NODENAME") or world.hostname,
        cores=world.cores,
        user=_user_name(environ),
        submit_dir=world.cwd,
    )
    machine = Machine(
        environ=environ,
        clock=world.clock,
        stop=world.stop,
        node=node,
        open_pool=lambda count: open_pool(count, wish, world, run),
        tell=tell,
        claim_numbers=lambda count: claim_numbers(lock_folder(environ), count, world.clock),
    )
    progress = Progress(RunFolder(run).tasks)
    return LocalScheduler(machine, Terms(wish.kill_wait_s, wish.max_requeues, progress.made))


def _user_name(environ: Mapping[str, str]) -> str:
    """Return who runs this, as Slurm says it: by the number, not by a variable, which cron and containers leave out."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return environ.get("USER") or environ.get("LOGNAME") or str(os.getuid())


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
