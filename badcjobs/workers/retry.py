"""The classes of failure, how they are told apart, and what becomes of a chunk: done, again, failed, or poison.

The classes are those of ``attempt.error_class``. Everything here touches nothing: ``classify`` looks at what a program
said last and at how it ended, ``Retries`` remembers the chunks that did not work at once.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass

from badcjobs.model import Chunk, ChunkResult

# The chunk's own fault, or its bad luck.
BAD_AUDIO = "bad_audio"
MISSING_AUDIO = "missing_audio"  # the file is not there, or breaks off before this chunk: no engine has seen it
BAD_OUTPUT = "bad_output"  # the engine's output cannot be read
NO_OUTPUT = "no_output"  # the engine said that all was well, but left nothing
EXIT_CODE = "exit_code"
ENGINE_ERROR = "engine_error"  # an exception that means nothing to us
OUT_OF_MEMORY = "out_of_memory"  # the device's
BATCH_LOST = "batch_lost"  # went down with others; not charged

# The engine process died while it had the chunk. Twice, alone, and the chunk is poison.
WORKER_DIED = "worker_died"  # SIGKILL, which no program sends itself: forgiven, a few times
ENGINE_CRASH = "engine_crash"
HANG = "hang"
GPU_ERROR = "gpu_error"  # CUDA refuses this process from now on: the device's fault or the chunk's; a new process tells
DEATHS = frozenset({WORKER_DIED, ENGINE_CRASH, HANG, GPU_ERROR})

# Not the chunk's fault.
TERMINATED = "terminated"  # somebody outside ended the process: forgiven, a few times
NO_PROGRAM = "no_program"
NO_SPACE = "no_space"
HOST_MEMORY = "host_memory"
RAN_ON_CPU = "ran_on_cpu"  # this worker's device does not work for the engine
GPU_LOST = "gpu_lost"
CONFIGURATION = "configuration"  # nothing this engine tries can work: the task gives up at once
RETIRING = frozenset({RAN_ON_CPU, GPU_LOST})  # the worker ends, its chunks go back, the others go on

_DEATHS_OF_POISON = 2
_MOST_STEPS_DOWN = 16  # as usual, lean, in 2, 4, 8, … pieces; more is a ladder that leads nowhere
# Slurm's TERM reaches workers as well as us, and KILL comes from outside: no chunk is guilty at once.
_FORGIVEN = {TERMINATED: 3, WORKER_DIED: 2}

# First what the machine did, then what the settings did, then what the audio did: a full disk also breaks audio.
_MACHINE = (
    (GPU_LOST, r"GPU is lost|fallen off the bus|fell off the bus|no CUDA-capable device|\bXid\b.*\b79\b"),
    (
        OUT_OF_MEMORY,
        r"(?:CUDA|HIP) out of memory|torch\S*\.OutOfMemoryError|(?:CUDA|HIP) error: out of memory|_ALLOC_FAILED"
        r"|hipErrorOutOfMemory",
    ),
    (
        GPU_ERROR,
        r"device-side assert|CUDA error: (?:unspecified launch failure|an illegal memory access|misaligned address"
        r"|unknown error|uncorrectable ECC|the launch timed out|an illegal instruction|all CUDA-capable devices are)"
        r"|CUDNN_STATUS_EXECUTION_FAILED|CUBLAS_STATUS_EXECUTION_FAILED",
    ),
    (NO_SPACE, r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|database or disk is full"),
    (
        HOST_MEMORY,
        r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
        r"|oom[-_]kill|Out of memory: Killed process",
    ),
)
_SETTINGS = (
    (RAN_ON_CPU, r"HawkEars took the \w+ although this worker has a GPU"),
    (
        CONFIGURATION,
        # An unknown location is here because HawkEars 2 only mentions it, then goes on without the region's filter.
        r"Model checkpoint files not found|(?i:no (?:onnx )?checkpoints found)|No models loaded from|\.yaml not found"
        r"|Error\. invalid |Error: location .* not found|[Nn]o eBird county found|Error: invalid date"
        r"|Error: (?:No such option|Invalid value|Option |Got unexpected|Missing |--rtype|min_score)"
        r"|analyze\.py: error: |(?:^|\n)(?:Import|ModuleNotFound)Error: ",
    ),
)
_AUDIO = (
    (
        BAD_AUDIO,
        r"Caught exception in audio load|Could not load recording|Recording \".*\" (?:not found|is not a file)"
        r"|Invalid data found when processing input|No audio (?:samples|stream) found|audio_error=(?!None)"
        r"|Format not recognised|unknown format|not start with RIFF id|Error opening .*(?:wav|flac|mp3|ogg)\b"
        r"|file is not a supported audio|Header missing",
    ),
)


def classify(text: str, exit_code: int | None = None) -> str:
    """Return the class of a failure; ``exit_code`` is negative for a signal, and None where nothing has ended."""
    signum = signal_of(exit_code)
    evidence = _MACHINE if signum else (*_MACHINE, *_SETTINGS, *_AUDIO)
    for error_class, pattern in evidence:
        if re.search(pattern, text):
            return error_class
    if signum:
        return {int(signal.SIGKILL): WORKER_DIED, int(signal.SIGTERM): TERMINATED}.get(signum, ENGINE_CRASH)
    if exit_code is None:
        return ENGINE_ERROR
    return EXIT_CODE if exit_code else NO_OUTPUT


def signal_of(exit_code: int | None) -> int:
    """Return the signal that ended a program, 0 for none; a shell or a container in between says 128 + n."""
    if exit_code is None:
        return 0
    if exit_code < 0:
        return -exit_code
    return exit_code - 128 if 128 < exit_code <= 128 + signal.SIGRTMAX else 0


def how_ended(exit_code: int | None) -> str:
    """Return how a program ended: by which signal, or with which exit code."""
    if not (signum := signal_of(exit_code)):
        return f"with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"by {names.get(signum, f'signal {signum}')}"  # a real-time one has no name


# --- what becomes of a chunk ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a chunk is tried again."""

    retries: int = 2
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    hopeless_after: int = 25  # chunks failed for good with none done: the engine does not work here

    def rest_s(self, failures: int) -> float:
        """Return how long a chunk rests after its n-th failure."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** (failures - 1))


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """What becomes of a chunk: its state, and for one that is tried again its rest and its company."""

    status: str
    rest_s: float = 0.0
    alone: bool = False
    lean: bool = False  # with as little memory as can be


class Retries:
    """Knows every chunk that did not work at once, until it is settled."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        # How many tries, failures, deaths, forgiven; steps down: out of memory, each time with less than before.
        self._history: dict[tuple[str, str], Counter[str]] = {}

    def try_number(self, chunk: Chunk) -> int:
        """Return which try of this chunk the present one is, from 1."""
        return 1 + self._history.get(chunk.key, Counter())["tries"]

    def decide(self, result: ChunkResult, *, ways_left: bool | None = None) -> RetryDecision:
        """Decide about a result; uncharged ones are tried again in the company that the caller chooses.

        ``ways_left``: whether a chunk that ran out of memory can be tried with less (None: not known). As long as it
        can, that is a step forward and no retry; when it cannot, the same again would be the same again.
        """
        key = result.chunk.key
        if result.ok:
            self._history.pop(key, None)
            return RetryDecision("done")
        history = self._history.setdefault(key, Counter())
        history["tries"] += 1
        if not result.charged:
            return RetryDecision("pending")
        if ways_left and history["steps down"] < _MOST_STEPS_DOWN:
            history["steps down"] += 1
            return RetryDecision("pending", alone=True, lean=True)
        if ways_left is not None:
            del self._history[key]
            return RetryDecision("failed")
        is_death = result.error_class in DEATHS
        history["failures"] += 1
        history["deaths"] += is_death
        if history["deaths"] < _DEATHS_OF_POISON and history["failures"] <= self._policy.retries:
            # What takes its process down, or does not fit beside others, is tried with nothing beside it.
            alone = is_death or result.error_class == OUT_OF_MEMORY
            return RetryDecision("pending", self._policy.rest_s(history["failures"]), alone)
        del self._history[key]
        return RetryDecision("poison" if history["deaths"] >= _DEATHS_OF_POISON else "failed")

    def forgives(self, chunk: Chunk, error_class: str | None) -> bool:
        """Say whether a chunk is innocent of its process' end: not if it happens to the same one again and again."""
        limit = _FORGIVEN.get(error_class or "", 0)
        if not limit:
            return False
        history = self._history.setdefault(chunk.key, Counter())
        history["forgiven"] += 1
        return history["forgiven"] <= limit
