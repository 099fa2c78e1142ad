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
class Mistake:
    """Something that stands in a script and is not as it should be."""

    text: str
    fix: str  # a line to paste


@dataclass(frozen=True, slots=True)
class Start:
    """The line of a script that starts ``badcjobs run``."""

    line: int
    text: str
    by_exec: bool
    by_srun: bool
    flags: dict[str, str] = field(default_factory=dict)  # "--out" → its value, where the script says it plainly
    named: frozenset[str] = frozenset()  # all flags, also those whose value nobody knows
    hidden: bool = False  # more flags may come out of a variable
    within: str | None = None  # what gives it a shell of its own, so that exec ends there: a pipeline, brackets, …
    looped: bool = False
    spread: bool = False  # srun, mpirun and the like start it on other nodes
    contained: bool = False  # it runs in an image, with an engine of its own
    sources: tuple[str, ...] | None = None  # where the script says all of them plainly
    doubt: str | None = None  # why its sources may yet be there when it runs
    keeper: Mistake | None = None  # a program before it that keeps signals to itself, and the line without that


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
    error: str | None = None
    chdir: str | None = None
    other_commands: tuple[str, ...] = ()  # badcjobs merge, report, …
    mistakes: tuple[Mistake, ...] = ()  # what sbatch would refuse, or not see
    wrong_calls: tuple[Mistake, ...] = ()  # of badcjobs, which would refuse them
    near_options: tuple[Mistake, ...] = ()  # comments that look like options
    afterok: Mistake | None = None  # a merge that waits for the success of an array
    starts: tuple[Start, ...] = ()  # all of them; ``start`` is the last
    traps: frozenset[str] = frozenset()  # signals that the script answers itself
    pipefail: bool = False
    venvs: tuple[str, ...] = ()  # virtual environments that it activates
    temporary: str | None = None  # the TMPDIR that it sets; "": it unsets it; with $: nobody knows
    unfollowed: tuple[str, ...] = ()  # commands after which there may be programs that nobody sees from here


@dataclass(frozen=True, slots=True)
class Asked:
    """What the job asks of Slurm: from the flags, else from the script."""

    tasks: int | None = None  # None: no array
    last_index: int | None = None
    array: str | None = None  # as it is written
    array_range: str | None = None  # to write in its place, where tasks could not know their place in the array
    nodes: int | None = None  # of each task; None: not said, so as many as it takes
    gpus_per_task: int | None = None  # on all its nodes
    gpus_per_node: int | None = None  # the most on one of them
    cpus: int | None = None  # on all its nodes
    cpus_per_node: int | None = None
    memory_gb_per_node: float | None = None  # 0: all of the node
    time_s: int | None = None
    no_time_limit: bool = False  # asked for: --time=unlimited; otherwise a time_s of None was not said
    exclusive: bool = False  # whole nodes
    account: str | None = None
    merge_account: str | None = None  # of submit's merge job; None: the same
    partition: str | None = None  # one, or several with commas between
    constraint: str | None = None
    gpu_options: tuple[str, ...] = ()  # as they are written: --gres=gpu:a100:2
    node_names: tuple[str, ...] = ()  # of --nodelist and --exclude, where they stand there one by one


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
class Trial:
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
