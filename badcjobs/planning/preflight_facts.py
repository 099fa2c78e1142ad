"""Collect the facts of ``check``: folders, clocks, Slurm, modules, devices, sources; None: not asked, or unknown."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.cluster.job_script import BatchScript, Call
from badcjobs.cluster.sbatch_options import OF_SUBMIT, Asked
from badcjobs.devices import slurm_programs
from badcjobs.devices.allocation import VISIBLE, is_in_slurm
from badcjobs.devices.listing import open_devices
from badcjobs.errors import BadcjobsError, BadInput, NotHere
from badcjobs.model import StandIn
from badcjobs.paths import shell_line
from badcjobs.planning.findings import FINE, Remark, fine, problem
from badcjobs.planning.plan_survey import Lengths, Progress, check_places, check_survey, read_sources, to_facts
from badcjobs.planning.site import Site
from badcjobs.report.completeness import open_placed_sources
from badcjobs.seams import Clock, Environ, Unanswered
from badcjobs.settings import SETTINGS, RunSettings
from badcjobs.sources.open import Sources
from badcjobs.sources.places import placing_options
from badcjobs.sources.walk import SeenKeys
from badcjobs.store.connect import read_filesystem
from badcjobs.words import count, data_size, number
from badcjobs.workers.engines import traits_of

_PATIENCE_S = 30.0
_COARSE_MS = 20  # the kernel stamps files with a clock that ticks a hundred times a second
_NOT_FOUND = 127  # exit code of a shell without such a command
_NOT_NOW = ("Unable to contact", "ocket timed out", "temporarily unable")  # of the controller, not of the job


class FolderFacts(NamedTuple):
    """A folder as this machine sees it."""

    path: str  # absolute, as it was given
    real: str  # with all links followed
    filesystem: str  # in words: "lustre, shared"
    shared: bool  # visible on other machines, or not known
    refusal: str | None  # why nothing can be written there from here
    missing: bool  # it would be made
    free_bytes: int | None
    free_files: int | None
    skew_s: float | None  # its filesystem's clock minus ours


class SlurmFacts(NamedTuple):
    """Values of ``scontrol show config``."""

    max_array_size: int | None = None
    kill_wait_s: int | None = None
    trouble: str | None = None  # it is installed, but does not answer


class GpuFacts(NamedTuple):
    """The devices of this machine."""

    names: Sequence[str]
    backend: str
    why: str
    in_job: bool


class ModuleFacts(NamedTuple):
    """The result of ``module load …`` in a shell of its own."""

    names: tuple[str, ...]
    message: str = ""  # why they cannot be loaded; empty: they can
    command: bool = True  # whether there is a module command at all


@dataclass(frozen=True)
class SourceFacts:
    """A source that was read to its end."""

    chunks: int
    manifests_listed: int | None
    has_places: bool
    document: Mapping[str, Any]  # for JSON
    audio_s: float | None = None
    bytes: int | None = None
    lengths: Lengths | None = field(default=None, repr=False)  # None: no file was looked at


@dataclass(frozen=True)
class Job:
    """The job that is checked, and everything that the rules know about it; None: not asked, unknown, or not there."""

    request: Asked  # of Slurm
    site: Site  # without a name: no site is given
    settings: RunSettings
    script: BatchScript | None = None
    source: SourceFacts | None = None
    has_begun: bool = False  # the run: then its tasks know their shares

    out: FolderFacts | None = None
    submit_folder: FolderFacts | None = None  # the folder that the job is submitted from
    log_folders: Sequence[FolderFacts] = ()  # that the script names for Slurm's logs
    temporary: FolderFacts | None = None  # what TMPDIR names here
    home: str = ""
    cache: str | None = None  # our folder in the user's cache, with all links followed

    needed_gb: int = 0  # memory on a node that the workers of a task need
    workers: int = 0  # in any case: as many as asked for, or one of HawkEars on each GPU; 0: not known
    workers_gb: int = 0  # memory of these

    slurm: SlurmFacts | None = None
    trial: tuple[str, ...] | None = None  # why sbatch --test-only refuses the script; (): it accepts it
    modules: ModuleFacts | None = None
    gpus: GpuFacts | None = None

    @property
    def on_cluster(self) -> bool:
        """Whether it runs on other machines than this one."""
        return bool(self.site.name) or (self.slurm is not None and self.slurm.trouble is None)

    @property
    def start(self) -> Call | None:
        """The call of ``badcjobs run`` in the script."""
        if self.script is None:
            return None
        return self.script.start

    @property
    def merges(self) -> bool:
        """Whether the script calls ``badcjobs merge``."""
        return self.script is not None and self.script.call is not None and self.script.call.command == "merge"

    def ask(
        self,
        name: str,
        value: object,
        note: str = "",
    ) -> str:
        """Return the line that asks Slurm for a value: of the script, else as an option of submit."""
        setting = SETTINGS["submit"].get(OF_SUBMIT.get(name, name))
        if self.script is not None:
            line = f"#SBATCH --{name}={value}"
        elif setting is not None:
            line = f"{setting.option} {value}"
        else:
            line = f"--sbatch=--{name}={value}"
        if note:
            return f"{line}   ({note})"
        return line

    def ask_tasks(self, tasks: int, note: str = "") -> str:
        """Return the line that asks for so many array tasks."""
        if self.script is not None:
            return self.ask("array", f"0-{tasks - 1}", note)
        return self.ask("tasks", tasks, note)


def look_at_folder(path: Path, clock: Clock | None = None) -> FolderFacts:
    """Look at a folder that need not exist; ``clock``: compare it with that of a small file, there or above it."""
    there = next((folder for folder in (path, *path.parents) if os.path.lexists(folder)), Path("/"))
    filesystem = read_filesystem(path)
    refusal = skew_s = None
    if clock is not None:
        refusal, skew_s = _try_writing(there, clock)
    try:
        room = os.statvfs(there)
    except OSError:
        room = None
    return FolderFacts(
        path=str(path),
        real=os.path.realpath(path),
        filesystem=filesystem.description,
        shared=filesystem.shared,
        refusal=refusal,
        missing=there != path,
        free_bytes=None if room is None else room.f_bavail * room.f_frsize,
        free_files=room.f_favail if room and room.f_files else None,  # some filesystems count none
        skew_s=skew_s,
    )


def home_folder(environ: Environ) -> str:
    """Return the user's home, with all links followed."""
    return os.path.realpath(environ.get("HOME") or "/nonexistent")


def _try_writing(folder: Path, clock: Clock) -> tuple[str | None, float | None]:
    """Return why nothing can be written, or how far the filesystem's clock is from ours."""
    before_ms = clock.now_ms()
    try:
        with tempfile.NamedTemporaryFile(
            prefix=".badcjobs-check-",
            dir=folder,
            buffering=0,
        ) as file:
            file.write(b"?")
            os.fsync(file.fileno())  # so that a server has put its own time on it
            written_ms = os.fstat(file.fileno()).st_mtime_ns / 1e6
    except OSError as error:  # also a full disk, a quota
        return f"{error.strerror or error} ({folder})", None
    nearest_ms = min(max(written_ms, before_ms - _COARSE_MS), clock.now_ms() + _COARSE_MS)
    return None, (written_ms - nearest_ms) / 1000


def query_slurm(environ: Environ) -> SlurmFacts | None:
    """Ask scontrol for its settings; None: there is no Slurm here."""
    try:
        text = slurm_programs.show_settings(environ)
    except NotHere:
        return None
    except Unanswered as error:
        return SlurmFacts(trouble=str(error).splitlines()[-1])
    numbers = {name: int(value) for name, value in re.findall(r"^(\w+)\s*= (\d+)", text, re.MULTILINE)}
    return SlurmFacts(numbers.get("MaxArraySize"), numbers.get("KillWait"))


def parse_trial(exit_code: int, said: str) -> tuple[str, ...] | None:
    """Return why ``sbatch --test-only`` refuses a script, with its other messages; None: no controller."""
    if exit_code == 0:
        return ()
    lines = [line.strip().removeprefix("sbatch: error: ") for line in said.splitlines() if line.strip()]
    marked = [line.partition("allocation failure: ")[2] for line in lines if "allocation failure: " in line]
    refusal = (marked or lines or [f"it ended with exit code {exit_code}"])[-1]
    if any(message in refusal for message in _NOT_NOW):
        return None
    return (refusal, *(line for line in lines if refusal not in line))


def load_modules(names: tuple[str, ...], environ: Environ) -> ModuleFacts:
    """Load modules in a login shell of its own, as a job script would."""
    try:
        done = slurm_programs.run_to_end(["bash", "-lc", 'module load "$@"', "bash", *names], environ, _PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return ModuleFacts(names, str(error), command=not isinstance(error, OSError))
    if done.returncode == 0:
        return ModuleFacts(names)
    errors = [line.strip() for line in done.stderr.splitlines() if "rror" in line or "unknown" in line.lower()]
    message = "".join(errors[:1]) or f"exit code {done.returncode}"
    return ModuleFacts(names, message, command=done.returncode != _NOT_FOUND)


def look_at_gpus(environ: Environ, clock: Clock, stand_in: StandIn) -> GpuFacts:
    """Read the devices of this machine, or those that replace them."""
    in_job = is_in_slurm(environ)
    with open_devices(environ, clock, stand_in) as sight:
        listed = sight.grant.devices if in_job else sight.inventory
        names = [device.name or "GPU" for device in listed if device.vendor in VISIBLE]
        backend = "none" if sight.trouble else sight.reader.backend
        return GpuFacts(names, backend, sight.trouble or sight.grant.why, in_job)


# --- sources ----------------------------------------------------------------------------------------------------------


def check_source(
    settings: RunSettings,
    cwd: Path,
    *,
    progress: Progress,
    quick: bool,
) -> tuple[SourceFacts | None, list[Remark]]:
    """Read every row and look at every file, as a plan does; ``quick``: look at no file.

    The facts are None when the source cannot be used.
    """
    try:
        sources = open_placed_sources(settings, cwd)
        facts, remarks = (_count_chunks if quick else _look_at_files)(sources, progress)
    except BadcjobsError as error:
        look = f"ls -ld {shell_line(cwd / settings.source[0])}"
        return None, [
            problem(
                "source",
                error.what,
                error.fix or look,
                (error.why or "").splitlines(),
            )
        ]
    return facts, remarks + _filter_is_off(settings, sources)


def _count_chunks(sources: Sources, progress: Progress) -> tuple[SourceFacts, list[Remark]]:
    """Read every row, but look at no file."""
    keys = SeenKeys()
    rows = 0

    def note(key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        keys.add(key)
        progress(rows)

    notes = sources.read_identities(note).notes()
    repeats = sum(keys.repeated().values())
    if repeats:
        text = f"{repeats:,} rows have the recording_id and chunk_id of an earlier row"
        raise BadInput(text, fix="badcjobs check SOURCE   (without --quick it names them)")
    document = {"chunks": rows, "stats": False, "places": sources.places and asdict(sources.places)}
    facts = SourceFacts(
        rows,
        sources.manifests_listed,
        sources.places is not None,
        document,
    )
    text = f"{count(rows, 'chunk')}; --quick: no audio file was opened"
    remarks = [fine("source", line) for line in (text, *notes)]
    return facts, [*remarks, *check_places(sources.places, FINE)]


def _look_at_files(sources: Sources, progress: Progress) -> tuple[SourceFacts | None, list[Remark]]:
    """Read every row and look at every file; the facts are None without any chunk."""
    survey = read_sources(sources, progress, needs_audio=True)
    lengths = survey.lengths
    size = survey.walk.size
    audio_s = None if lengths.longest_s is None else lengths.total_ms / 1000
    hours = number(audio_s and audio_s / 3600)
    text = f"{count(lengths.rows, 'chunk')}, {hours} hours of audio in {count(size.files, 'file')}"
    if size.total_bytes is not None:
        text += f", {data_size(size.total_bytes)}"
    remarks = [fine("source", f"{text}; every file was looked at"), *check_survey(survey, FINE)]
    if not lengths.rows:
        return None, remarks
    facts = SourceFacts(
        lengths.rows,
        sources.manifests_listed,
        sources.places is not None,
        {"stats": True, "audio_s": audio_s, **to_facts(survey)},
        audio_s=audio_s,
        bytes=size.total_bytes,
        lengths=lengths,
    )
    return facts, remarks


def _filter_is_off(settings: RunSettings, sources: Sources) -> list[Remark]:
    """Say how to switch on HawkEars' filter of species, if nothing does."""
    has_places = sources.places is not None and sources.places.placed
    has_one_place = any(not option.startswith("--d") for option in placing_options(settings))  # a date is no place
    if has_places or has_one_place or not traits_of(settings.engine).reads_places:
        return []
    off = "is off"
    if any(arg.startswith(("--cfg", "-c")) for arg in settings.engine_args):
        off += ", unless the file of --cfg has one"
    how = '--filelist FILE, or [recordings] region = "CA-NT" in badcjobs.toml (badcjobs guide audio)'
    return [fine("places", f"without places HawkEars' filter of species {off}; switch it on: {how}")]
