"""Looks up what ``check`` judges: folders, clocks, Slurm's settings and nodes, modules, devices.

What the answers mean is said by the rules beside this file. None: not asked, or unknown.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.cluster.job_script import BatchScript, Call
from badcjobs.cluster.nodes import UNTYPED, Cluster, largest_size, parse_sinfo, query_sinfo
from badcjobs.cluster.sbatch_options import Asked
from badcjobs.cluster.slurm_commands import CONFIG_QUESTION, TIME_FORMAT, parse_config
from badcjobs.devices.allocation import parse_allocation
from badcjobs.devices.listing import open_devices
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.model import AS_IT_COMES, Chunk, Cutting, StandIn
from badcjobs.planning.findings import Remark, fine, problem, warning
from badcjobs.planning.site import Site
from badcjobs.report.words import count
from badcjobs.seams import Clock
from badcjobs.sources.mistakes import SHOWN, Remarks, shown
from badcjobs.sources.open import Sources, open_sources
from badcjobs.sources.walk import WHOLE, SeenKeys
from badcjobs.store.filesystem import read_filesystem

_PATIENCE_S = 30.0
_COARSE_MS = 20  # the kernel stamps files with a clock that ticks a hundred times a second
_LIST_FOLLOWS = "--- loaded ---"  # a login shell may print a greeting before it
_NO_MODULES = 97
_NOT_NOW = ("Unable to contact", "ocket timed out", "temporarily unable")  # of the controller, not of the job
_LOAD = f'type module >/dev/null 2>&1 || exit {_NO_MODULES}; module load "$@"; echo; echo "{_LIST_FOLLOWS}"; '
_LOAD += "module -t list 2>&1"


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """A folder as this machine sees it."""

    path: str  # absolute, as it was given
    real: str  # with all links followed
    filesystem: str  # in words: "lustre, shared"
    shared: bool  # seen by other machines, or nobody knows
    refusal: str | None = None  # why nothing can be written there from here
    missing: bool = False  # it would be made
    free_bytes: int | None = None
    free_files: int | None = None
    skew_s: float | None = None  # its filesystem's clock minus ours


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The most that any node of this Slurm has, each for itself."""

    whose: str  # "this Slurm", "partition gpu"
    gpus: int | None = None
    cpus: int | None = None
    memory_gb: float | None = None


@dataclass(frozen=True, slots=True)
class NameFacts:
    """What there is by name, as ``sinfo`` shows it; features and kinds are those of the script's partition."""

    whose: str  # "this Slurm", "partition gpu"
    partitions: tuple[str, ...]
    nodes: tuple[str, ...]
    features: tuple[str, ...]
    kinds: tuple[str, ...]  # of GPUs, in small letters
    all_work: bool = False  # no node is down, drained, reserved, …


@dataclass(frozen=True, slots=True)
class SbatchAnswer:
    """What ``sbatch --test-only`` says to a script."""

    refusal: str | None  # None: it would take it
    details: tuple[str, ...] = ()  # what it says besides


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """What ``scontrol show config`` says."""

    max_array_size: int | None = None
    kill_wait_s: int | None = None
    skew_s: float | None = None  # the controller's clock minus ours
    trouble: str | None = None  # it is installed, but does not answer


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The devices of this machine."""

    names: tuple[str, ...]
    backend: str
    why: str
    in_job: bool = False


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What became of ``module load …`` in a shell of its own."""

    wanted: tuple[str, ...]
    command: bool  # whether there is a module command at all
    loaded: tuple[str, ...] = ()
    said: str = ""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A source that was read to its end."""

    chunks: int
    audio_s: float
    of_unknown_length: int
    manifests_listed: int | None = None
    stats: bool = True  # whether every file was looked at
    empty: int = 0  # files without any audio
    unreadable: int = 0  # files that nobody here may read


@dataclass(frozen=True)
class PreflightFacts:
    """All that ``check`` has found out, which the rules judge; None: not asked, unknown, or there is none."""

    asked: Asked = field(default_factory=Asked)
    site: Site = field(default_factory=lambda: Site(""))  # without a name where none is given
    script: BatchScript | None = None
    start: Call | None = None  # of badcjobs run, in the script
    source: SourceFacts | None = None
    out: FolderFacts | None = None
    submit: FolderFacts | None = None  # the folder that the job is submitted from
    log_folders: tuple[FolderFacts, ...] = ()  # that the script names for Slurm's logs
    temporary: FolderFacts | None = None  # what TMPDIR names here
    home: str = ""
    on_cluster: bool = False
    live_mode: str = "auto"
    grace_s: float = 20.0
    slurm: SlurmFacts | None = None
    nodes: NodeFacts | None = None
    names: NameFacts | None = None
    trial: SbatchAnswer | None = None
    modules: ModuleFacts | None = None
    gpus: GpuFacts | None = None


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
    program = shutil.which(CONFIG_QUESTION[0], path=environ.get("PATH"))
    if program is None:
        return None
    before_s = clock.now_ms() / 1000
    try:
        done = _run([program, *CONFIG_QUESTION[1:]], {**environ, **TIME_FORMAT})
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


def try_script(path: Path, environ: Mapping[str, str], cwd: Path) -> SbatchAnswer | None:
    """Let sbatch say what it thinks of a script, which submits nothing; None: nobody can ask it."""
    program = shutil.which("sbatch", path=environ.get("PATH"))
    if program is None:
        return None
    try:
        done = _run([program, "--test-only", str(path)], environ, cwd)
    except (OSError, subprocess.SubprocessError):
        return None  # too busy to answer
    return parse_trial(done.returncode, done.stdout + done.stderr)


def parse_trial(exit_code: int, said: str) -> SbatchAnswer | None:
    """Read the answer of ``sbatch --test-only``; None where it could not ask the controller either."""
    if exit_code == 0:
        return SbatchAnswer(None)
    lines = [line.strip().removeprefix("sbatch: error: ") for line in said.splitlines() if line.strip()]
    marked = [line.partition("allocation failure: ")[2] for line in lines if "allocation failure: " in line]
    refusal = (marked or lines or [f"it ended with exit code {exit_code}"])[-1]
    if any(words in refusal for words in _NOT_NOW):
        return None
    return SbatchAnswer(refusal, tuple(line for line in lines if refusal not in line))


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
    with open_devices(environ, clock, StandIn(), in_slurm=in_job) as sight:
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


# --- sources ----------------------------------------------------------------------------------------------------------


def check_source(
    paths: Sequence[Path],
    root: Path | None,
    *,
    progress: Callable[[int], None],
    quick: bool = False,
    cutting: Cutting = AS_IT_COMES,
) -> tuple[SourceFacts | None, list[Remark]]:
    """Read every row and look at every file; all mistakes are counted, the first twenty named.

    ``quick``: look at no file. The facts are None when there are mistakes.
    """
    try:
        sources = open_sources(paths, root=root, cutting=cutting)
        odd = OddFiles()
        facts, remarks = _count_rows(sources, progress) if quick else _read_all(sources, progress, odd)
    except BadcjobsError as error:
        look = f"ls -ld {shlex.quote(str(paths[0]))}"
        return None, [problem("source", error.what, error.fix or look, tuple((error.why or "").splitlines()))]
    go_on = "badcjobs run SOURCE --out DIR   (the others are done; restore the files and run it again)"
    passed_over = [fine("source", line) for line in remarks.notes()]
    will_fail = [*odd.findings(go_on), *(warning("audio", line, go_on) for line in remarks.lines())]
    text = f"{facts.chunks:,} chunks; --quick: no audio file was looked at"
    if not quick:
        unknown = f", {facts.of_unknown_length:,} of unknown length" if facts.of_unknown_length else ""
        text = f"{facts.chunks:,} chunks, {facts.audio_s / 3600:,.1f} hours of audio{unknown}; every file is there"
    return facts, [fine("source", text), *passed_over, *will_fail]


class OddFiles:
    """Files that are there, and of which a run would make nothing but a failed chunk; the first twenty are named."""

    def __init__(self) -> None:
        self.empty: dict[str, str] = {}  # path → what is said of it
        self.unreadable: dict[str, str] = {}

    def note(self, chunk: Chunk) -> None:
        """Look at the next chunk."""
        header, name = chunk.fingerprint.header, shown(chunk.source_path)
        if chunk.fingerprint.audio_bytes == 0 or header.duration_s == 0:
            self.empty.setdefault(chunk.audio_path, name)
        elif header.unreadable:
            self.unreadable.setdefault(chunk.audio_path, f"{name}: {header.unreadable}")

    def findings(self, go_on: str) -> Iterator[Remark]:
        """Yield what would fail."""
        if self.unreadable:
            text = f"{count(len(self.unreadable), 'file')} cannot be read from here: what is in there would fail"
            yield problem("audio", text, f"ls -l {shlex.quote(next(iter(self.unreadable)))}", _named(self.unreadable))
        if self.empty:
            many = count(len(self.empty), "file")
            text = f"{many} without any audio; each will fail, for there is nothing to analyse"
            yield warning("audio", text, go_on, _named(self.empty))


def _named(files: Mapping[str, str]) -> tuple[str, ...]:
    names = tuple(files.values())
    return (*names[:SHOWN], f"… and {len(names) - SHOWN:,} more") if len(names) > SHOWN else names


def _read_all(sources: Sources, progress: Callable[[int], None], odd: OddFiles) -> tuple[SourceFacts, Remarks]:
    remarks = Remarks()
    chunks = of_unknown_length = 0
    audio_s = 0.0
    for chunks, chunk in enumerate(sources.chunks(WHOLE, remarks), 1):
        progress(chunks)
        audio_s += chunk.audio_s or 0.0
        of_unknown_length += chunk.audio_s is None
        odd.note(chunk)
    listed = sources.manifests_listed
    facts = SourceFacts(
        chunks, audio_s, of_unknown_length, listed, empty=len(odd.empty), unreadable=len(odd.unreadable)
    )
    return facts, remarks


def _count_rows(sources: Sources, progress: Callable[[int], None]) -> tuple[SourceFacts, Remarks]:
    seen, rows = SeenKeys(), 0

    def note(_row: int, _part: int, key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        seen.add(key)
        progress(rows)

    remarks = sources.read_identities(note)
    if repeats := sum(seen.repeated().values()):
        what = f"{repeats:,} rows have the recording_id and chunk_id of an earlier row"
        raise BadInput(what, fix="badcjobs check SOURCE   (without --quick it names them)")
    return SourceFacts(rows, 0.0, 0, sources.manifests_listed, stats=False), remarks
