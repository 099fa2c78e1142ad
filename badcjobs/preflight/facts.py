"""What a preflight looks at, as plain values; who looks is ``badcjobs/looking.py``. None: not asked, or unknown."""

from __future__ import annotations

from dataclasses import dataclass, field


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
class Start:
    """The line of a script that starts ``badcjobs run``."""

    line: int
    text: str
    by_exec: bool
    by_srun: bool
    flags: dict[str, str] = field(default_factory=dict)  # "--out" → its value, where the script says it plainly


@dataclass(frozen=True, slots=True)
class WarningSignal:
    """``--signal`` of a script."""

    name: str
    lead_s: int
    to_script: bool  # B: to the batch shell; otherwise srun steps alone hear it


@dataclass(frozen=True, slots=True)
class ScriptFacts:
    """A job script, read."""

    name: str
    start: Start | None
    signal: WarningSignal | None
    append: bool
    modules: tuple[str, ...]
    output: str | None = None  # where Slurm writes the log, as the script says
    chdir: str | None = None
    other_commands: tuple[str, ...] = ()  # badcjobs merge, report, …
    late_options: tuple[int, ...] = ()  # lines with #SBATCH behind the first command
    mistakes: tuple[str, ...] = ()  # what sbatch would refuse
    afterok: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """What the job asks of Slurm: from the flags, else from the script."""

    tasks: int | None = None
    last_index: int | None = None
    gpus_per_task: int | None = None
    cpus: int | None = None
    memory_gb: float | None = None  # of each task; 0: all of the node
    time_s: int | None = None
    account: str | None = None


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
