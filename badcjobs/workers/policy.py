"""What happens after a failure to the chunk, its worker and the task: one table, ``POLICY``.

``supervise``, ``worker_loop`` and ``stream_session`` ask it; ``badcjobs guide engines`` prints it. A failure has an
error class, the value of ``attempt.error_class``, and circumstances. How errors are recognised is the topic of
``error_patterns`` and of each engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from badcjobs.model import AUDIO_FAULTS, Chunk, ChunkKey

# --- error classes ----------------------------------------------------------------------------------------------------

MISSING_AUDIO = "missing_audio"  # the file is missing, or ends before this chunk starts: no engine has seen it
BAD_AUDIO = "bad_audio"
BAD_OUTPUT = "bad_output"  # the engine's output cannot be read
NO_OUTPUT = "no_output"  # the engine reported success but wrote nothing
EXIT_CODE = "exit_code"
ENGINE_ERROR = "engine_error"  # an exception that no pattern matches
OUT_OF_MEMORY = "out_of_memory"  # the device's
HOST_MEMORY = "host_memory"
WORKER_DIED = "worker_died"  # SIGKILL, which comes from outside
TERMINATED = "terminated"  # SIGTERM, which Slurm sends to workers too
ENGINE_CRASH = "engine_crash"
HANG = "hang"
GPU_ERROR = "gpu_error"  # CUDA no longer works in this process, because of the device or the chunk
GPU_LOST = "gpu_lost"
RAN_ON_CPU = "ran_on_cpu"  # this worker's device does not work for the engine
NO_PROGRAM = "no_program"
CONFIGURATION = "configuration"  # this engine cannot work with these settings
NO_SPACE = "no_space"
NODE_FAULT = "node_fault"  # I/O error, read-only, too many open files, no permission in our own folders

FILE_FAULTS = (MISSING_AUDIO, *AUDIO_FAULTS)  # the file will be the same at the next try
DEATHS = (ENGINE_CRASH, HANG, GPU_ERROR, WORKER_DIED)  # of the engine process, with the chunk in it
OF_NODE = (NO_SPACE, NODE_FAULT)
OF_DEVICE = (GPU_LOST, RAN_ON_CPU)
# Errors of engines that cannot write to their disk; it may be too full for the message that says so.
MAY_BE_NODE = (BAD_AUDIO, BAD_OUTPUT, NO_OUTPUT, EXIT_CODE, ENGINE_ERROR, ENGINE_CRASH)
ALL = (
    *FILE_FAULTS,
    *MAY_BE_NODE,
    *(HANG, GPU_ERROR, WORKER_DIED, TERMINATED, OUT_OF_MEMORY, HOST_MEMORY),
    *(NO_PROGRAM, *OF_DEVICE, CONFIGURATION, *OF_NODE),
)

# --- circumstances and steps ------------------------------------------------------------------------------------------


class Circumstance(Enum):
    """Something that changes the response; the value is its text in the handbook."""

    STOPPED = "the task is ending, or another task has the chunk"
    STARTING = "the engine was not ready yet"
    MPS_SUSPECT = "the engine was not ready yet, and MPS may be the cause"
    STARTS_SPENT = "too many starts in a row have failed"
    SHARED = "the worker shares its device through MPS"
    UNCERTAIN = "several chunks at once, a process that died under MPS, or a damaged copy"
    NODE_AT_FAULT = "the node has a fault"
    PAUSES_SPENT = "too many pauses, and no chunk done"
    SMALLER_WAY = "the chunk can be tried with less memory"
    SMALLEST_WAY = "it was tried with the least memory"
    CROWDED = "other workers fill the device too"
    FIRST_TIMES = "the first times"
    SECOND_DEATH = "the process died with this chunk before"
    RETRIES_SPENT = "retries are used up"


class ChunkStep(NamedTuple):
    """What happens to a chunk; ``text`` is for the handbook."""

    text: str
    status: str = "pending"
    recorded: bool = True  # as a try, with its end
    rests: bool = False  # before the next try
    alone: bool = False  # the next try has no other chunk in the engine
    apart: bool = False  # alone, and the engine does not share its device through MPS either


LEAVE = ChunkStep("stays pending, no try is recorded", recorded=False)
BACK = ChunkStep("back to the queue")
HALVES = ChunkStep("tried in halves without the others, under MPS one by one", apart=True)
RETRY = ChunkStep("retried", rests=True)
RETRY_ALONE = ChunkStep("retried alone", rests=True, apart=True)
# With one thread, then in pieces: memory_limits. Not counted as a retry.
LESS_MEMORY = ChunkStep("tried with less memory, not a retry", alone=True)
SAME_MEMORY = ChunkStep("tried again with as little memory", rests=True, alone=True)
FAIL = ChunkStep("failed", status="failed")
POISON = ChunkStep("poison", status="poison")


class WorkerStep(Enum):
    """What happens to the worker; one whose engine process has ended always starts another."""

    GO_ON = ""
    NEW_PROCESS = "new process"
    LEAN_PROCESS = "new process, one thread"
    NEW_PROCESSES = "new process, for all workers of the device"
    STOP = "stops, others go on"


class TaskStep(Enum):
    """What happens to the task."""

    GO_ON = ""
    PAUSE = "pauses"
    STOP = "stops, exit code 75"
    GIVE_UP = "stops, exit code 3"


class Rule(NamedTuple):
    """A row of the table: it answers a failure of one of its classes in all of its circumstances."""

    errors: tuple[str, ...]
    circumstances: Set[Circumstance]
    charged: bool  # whether the try counts against the chunk
    chunk: ChunkStep
    worker: WorkerStep = WorkerStep.GO_ON
    task: TaskStep = TaskStep.GO_ON


# --- the table --------------------------------------------------------------------------------------------------------

_WHEN = Circumstance
_ALWAYS: Set[Circumstance] = frozenset()
_CHARGED = True
_FREE = False
# How many ends from outside are excused for a chunk: Slurm sends TERM to workers too, KILL comes from outside, and
# other workers fill the memory.
EXCUSES = {TERMINATED: 3, WORKER_DIED: 2, HOST_MEMORY: 3, OUT_OF_MEMORY: 3}

# The first rule that fits counts.
POLICY = (
    Rule(ALL, {_WHEN.STOPPED}, _FREE, LEAVE),
    # The node and the settings.
    Rule(OF_NODE, {_WHEN.PAUSES_SPENT}, _FREE, BACK, task=TaskStep.STOP),
    Rule(OF_NODE, _ALWAYS, _FREE, BACK, task=TaskStep.PAUSE),
    Rule((CONFIGURATION,), _ALWAYS, _FREE, LEAVE, WorkerStep.STOP, TaskStep.GIVE_UP),
    # The start of an engine, and its device.
    Rule(ALL, {_WHEN.STARTS_SPENT}, _FREE, LEAVE, WorkerStep.STOP),
    Rule((OUT_OF_MEMORY,), {_WHEN.STARTING}, _FREE, LEAVE, WorkerStep.LEAN_PROCESS),
    Rule((GPU_ERROR,), {_WHEN.SHARED}, _FREE, HALVES, WorkerStep.NEW_PROCESSES),
    Rule(ALL, {_WHEN.MPS_SUSPECT}, _FREE, LEAVE, WorkerStep.NEW_PROCESS),
    Rule(OF_DEVICE, _ALWAYS, _FREE, BACK, WorkerStep.STOP),
    Rule(ALL, {_WHEN.STARTING}, _FREE, LEAVE, WorkerStep.NEW_PROCESS),
    # Another chunk, another worker or another program may be the cause.
    Rule((TERMINATED,), {_WHEN.FIRST_TIMES}, _FREE, LEAVE, WorkerStep.NEW_PROCESS),
    Rule(ALL, {_WHEN.UNCERTAIN}, _FREE, HALVES),
    Rule(MAY_BE_NODE, {_WHEN.NODE_AT_FAULT}, _FREE, BACK),
    Rule((WORKER_DIED, HOST_MEMORY), {_WHEN.FIRST_TIMES}, _FREE, RETRY_ALONE, WorkerStep.NEW_PROCESS),
    # The memory of the device: ``memory_limits`` knows which way needs less.
    Rule((OUT_OF_MEMORY,), {_WHEN.SMALLER_WAY}, _CHARGED, LESS_MEMORY),
    Rule((OUT_OF_MEMORY,), {_WHEN.CROWDED, _WHEN.FIRST_TIMES}, _FREE, SAME_MEMORY),
    Rule((OUT_OF_MEMORY,), {_WHEN.SMALLEST_WAY}, _CHARGED, FAIL),
    # The chunk itself.
    Rule(FILE_FAULTS, _ALWAYS, _CHARGED, FAIL),
    Rule(DEATHS, {_WHEN.SECOND_DEATH}, _CHARGED, POISON, WorkerStep.NEW_PROCESS),
    Rule(ALL, {_WHEN.RETRIES_SPENT}, _CHARGED, FAIL),
    Rule(DEATHS, _ALWAYS, _CHARGED, RETRY_ALONE, WorkerStep.NEW_PROCESS),
    Rule((HOST_MEMORY,), _ALWAYS, _CHARGED, RETRY, WorkerStep.NEW_PROCESS),
    Rule(ALL, _ALWAYS, _CHARGED, RETRY),
)


def find_rule(error_class: str, circumstances: Set[Circumstance] = _ALWAYS) -> Rule:
    """Return the first rule that answers a failure of a chunk, or of the engine of a worker."""
    for rule in POLICY:
        if error_class in rule.errors and rule.circumstances <= circumstances:
            return rule
    raise ValueError(f"no rule answers {error_class}")


def ends_process(error_class: str) -> bool:
    """Return whether an engine process is of no use any more after it has reported this error."""
    return find_rule(error_class).worker is not WorkerStep.GO_ON


# --- what is counted --------------------------------------------------------------------------------------------------

GPU_ERRORS_OF_A_LOST_GPU = 3  # in a row, with no chunk done in between: the device is at fault and not the chunks
_KILLED_START_FACTOR = 5  # an engine that another program kills while it starts gets this many times more starts
_STARTS_WITHOUT_MEMORY = 2  # as usual, then lean


class RetryPolicy(NamedTuple):
    """How often something is tried again, and after which delay."""

    retries: int = 2
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    node_pauses: int = 6  # with no chunk done in between; together about a minute
    give_up_after: int = 25  # failed chunks without a single success: the engine does not work here

    def delay_s(self, failures: int) -> float:
        """Return the delay before the next try, after the n-th failure."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** (failures - 1))

    def most_starts(self, error_class: str) -> int:
        """Return how many starts of an engine may fail in a row."""
        if error_class == OUT_OF_MEMORY:
            return _STARTS_WITHOUT_MEMORY
        if error_class in (WORKER_DIED, TERMINATED):
            return _KILLED_START_FACTOR * (self.retries + 1)
        return self.retries + 1


@dataclass
class _History:
    """Counts for a chunk that has failed."""

    tries: int = 0
    retries: int = 0
    deaths: int = 0
    excuses: int = 0


@dataclass(eq=False)
class Retries:
    """Answers the failures of chunks, and keeps the history of each until it is done or failed for good."""

    policy: RetryPolicy
    _histories: defaultdict[ChunkKey, _History] = field(default_factory=lambda: defaultdict(_History))

    def try_number(self, chunk: Chunk) -> int:
        """Return the number of the current try of this chunk, from 1."""
        return self._histories[chunk.key].tries + 1

    def forget(self, chunk: Chunk) -> None:
        """Forget a chunk that is done."""
        self._histories.pop(chunk.key, None)

    def respond(self, chunk: Chunk, error_class: str, circumstances: Set[Circumstance]) -> Rule:
        """Return what happens after this failure of a chunk, which is counted."""
        history = self._histories[chunk.key]
        counted = set()
        if history.excuses < EXCUSES.get(error_class, 0):
            counted.add(Circumstance.FIRST_TIMES)
        if history.deaths:
            counted.add(Circumstance.SECOND_DEATH)
        if history.retries >= self.policy.retries:
            counted.add(Circumstance.RETRIES_SPENT)

        rule = find_rule(error_class, circumstances | counted)
        history.tries += rule.chunk.recorded
        history.excuses += Circumstance.FIRST_TIMES in rule.circumstances
        if rule.charged and rule.chunk is not LESS_MEMORY:
            history.retries += 1
            history.deaths += error_class in DEATHS
        if rule.chunk.status != "pending":
            self.forget(chunk)
        return rule

    def delay_s(self, chunk: Chunk, step: ChunkStep) -> float:
        """Return the delay before the next try of a chunk."""
        return self.policy.delay_s(max(1, self._histories[chunk.key].retries)) if step.rests else 0.0
