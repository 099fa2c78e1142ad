"""Looks at what a preflight judges: folders, clocks, Slurm's settings, modules, devices.

What the answers mean is ``preflight/``'s business.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.cluster import query_sinfo
from badcjobs.devices import open_sight
from badcjobs.errors import BadcjobsError
from badcjobs.model import StandIn
from badcjobs.preflight.facts import FolderFacts, GpuFacts, ModuleFacts, NameFacts, NodeFacts, SlurmFacts, Trial
from badcjobs.preflight.names import parse_trial
from badcjobs.scheduler.node_choice import largest_size
from badcjobs.scheduler.sinfo import UNTYPED, Cluster, parse_sinfo
from badcjobs.scheduler.slurm_config import QUESTION, TIME_FORMAT, parse_config
from badcjobs.seams import Clock
from badcjobs.store.filesystem import read_filesystem

_PATIENCE_S = 30.0
_COARSE_MS = 20  # the kernel stamps files with a clock that ticks a hundred times a second
_LIST_FOLLOWS = "--- loaded ---"  # a login shell may print a greeting before it
_NO_MODULES = 97
_LOAD = f'type module >/dev/null 2>&1 || exit {_NO_MODULES}; module load "$@"; echo; echo "{_LIST_FOLLOWS}"; '
_LOAD += "module -t list 2>&1"


def look_at_folder(path: Path, clock: Clock, *, write: bool) -> FolderFacts:
    """Look at a folder that need not exist; ``write``: with a small file, removed at once, there or above it."""
    there = _nearest(path)
    filesystem = read_filesystem(path)
    refusal, skew_s = _try_writing(there, clock) if write else (None, None)
    free_bytes, free_files = _room(there)
    return FolderFacts(
        path=str(path),
        real=os.path.realpath(path),
        filesystem=filesystem.words,
        shared=filesystem.shared,
        refusal=refusal,
        missing=there != path,
        free_bytes=free_bytes,
        free_files=free_files,
        skew_s=skew_s,
    )


def _nearest(path: Path) -> Path:
    """Return the path, or the first above it that exists."""
    return next((one for one in (path, *path.parents) if os.path.lexists(one)), Path("/"))


def _try_writing(folder: Path, clock: Clock) -> tuple[str | None, float | None]:
    """Return why nothing can be written, or how far the filesystem's clock is from ours."""
    before_ms = clock.now_ms()
    try:
        handle, name = tempfile.mkstemp(prefix=".badcjobs-check-", dir=folder)
    except OSError as error:
        return f"{error.strerror or error} ({folder})", None
    try:
        os.write(handle, b"?")
        os.fsync(handle)  # so that a server has put its own time on it
        written_ms = os.fstat(handle).st_mtime_ns / 1e6
    except OSError as error:  # a full disk, a quota
        return error.strerror or str(error), None
    finally:
        os.close(handle)
        Path(name).unlink(missing_ok=True)
    nearest_ms = min(max(written_ms, before_ms - _COARSE_MS), clock.now_ms() + _COARSE_MS)
    return None, (written_ms - nearest_ms) / 1000


def _room(folder: Path) -> tuple[int | None, int | None]:
    """Return free bytes and free files; None where the filesystem counts none."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def ask_slurm(environ: Mapping[str, str], clock: Clock) -> SlurmFacts | None:
    """Ask scontrol for its settings; None: there is no Slurm here."""
    program = shutil.which(QUESTION[0], path=environ.get("PATH"))
    if program is None:
        return None
    before_s = clock.now_ms() / 1000
    try:
        done = _run([program, *QUESTION[1:]], {**environ, **TIME_FORMAT})
    except (OSError, subprocess.SubprocessError) as error:
        return SlurmFacts(trouble=str(error))
    after_s = clock.now_ms() / 1000
    if done.returncode:
        return SlurmFacts(trouble=_last_line(done.stderr) or f"scontrol ended with exit code {done.returncode}")
    config = parse_config(done.stdout)
    skew_s = None
    if config.as_of_s is not None:  # whole seconds, cut off
        skew_s = config.as_of_s - min(max(config.as_of_s, before_s - 1), after_s)
    return SlurmFacts(config.max_array_size, config.kill_wait_s, skew_s)


def ask_nodes(environ: Mapping[str, str], partition: str | None) -> tuple[NodeFacts | None, NameFacts | None]:
    """Ask sinfo once how large nodes are, and what there is by name; None: it does not say."""
    try:
        cluster = parse_sinfo(query_sinfo(environ))
    except BadcjobsError:  # a cluster without sinfo, or too busy to answer: then its limits are not judged
        return None, None
    if not cluster.nodes:  # it shows some users nothing
        return None, None
    whose = f"partition {partition}" if partition else "this Slurm"
    size = largest_size(cluster, partition)
    memory_gb = None if size is None or size.memory_mib is None else size.memory_mib / 1024
    largest = None if size is None else NodeFacts(whose, size.gpus, size.cores, memory_gb)
    return largest, _names(cluster, None if size is None else partition, whose)


def _names(cluster: Cluster, partition: str | None, whose: str) -> NameFacts:
    """Return what there is by name; features and kinds of one partition, or of all."""
    there = cluster.reached(partition)
    features = sorted({word for node in there for word in node.features})
    kinds = sorted({one.kind for node in there for one in node.gpus} - {UNTYPED})
    partitions, nodes = (tuple(one.name for one in names) for names in (cluster.partitions, cluster.nodes))
    whose, all_work = whose if partition else "this Slurm", all(node.works for node in there)
    return NameFacts(whose, partitions, nodes, tuple(features), tuple(kinds), all_work)


def try_script(path: Path, environ: Mapping[str, str], cwd: Path) -> Trial | None:
    """Let sbatch say what it thinks of a script, which submits nothing; None: nobody can ask it."""
    program = shutil.which("sbatch", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        done = _run([program, "--test-only", str(path)], environ, cwd)
    except (OSError, subprocess.SubprocessError):
        return None  # too busy to answer
    return parse_trial(done.returncode, done.stdout + done.stderr)


def try_modules(names: Sequence[str], environ: Mapping[str, str]) -> ModuleFacts:
    """Load modules in a login shell of its own, as a job script would, and see which are loaded then."""
    wanted = tuple(names)
    shell = shutil.which("bash", path=environ.get("PATH"))
    if shell is None:
        return ModuleFacts(wanted, command=False)
    try:
        done = _run([shell, "-lc", _LOAD, "bash", *wanted], environ)
    except (OSError, subprocess.SubprocessError) as error:
        return ModuleFacts(wanted, command=True, said=str(error))
    if done.returncode == _NO_MODULES:
        return ModuleFacts(wanted, command=False)
    loaded = done.stdout.partition(f"{_LIST_FOLLOWS}\n")[2].split()
    said = next((line.strip() for line in done.stderr.splitlines() if "rror" in line or "unknown" in line.lower()), "")
    return ModuleFacts(wanted, command=True, loaded=tuple(loaded), said=said)


def look_at_gpus(environ: Mapping[str, str], clock: Clock) -> GpuFacts:
    """Ask whoever can read the devices of this machine."""
    in_job = parse_allocation(environ, hostname="", pid=0, started_at_ms=0).in_slurm
    with open_sight(environ, clock, StandIn(), in_slurm=in_job) as sight:
        granted = sight.grant.devices if in_job else ()
        names = [device.name or "GPU" for device in granted or (() if in_job else sight.inventory)]
        backend = "none" if sight.trouble else sight.reader.backend
        return GpuFacts(tuple(names), backend, sight.trouble or sight.grant.why, in_job)


def _run(argv: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, env=dict(environ), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=_PATIENCE_S, check=False,
    )  # fmt: skip


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
