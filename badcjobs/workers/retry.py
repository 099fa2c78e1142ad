"""Error classes, how to recognise them, and the decision about each chunk: done, retry, failed, or poison.

The classes are the values of ``attempt.error_class``. Nothing here reads or writes files: ``classify`` looks at the
last output and the exit code of a program, ``Retries`` keeps the history of chunks that failed at least once.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AUDIO_FAULTS, Chunk, ChunkKey, ChunkResult

# Caused by the chunk, or charged to it.
BAD_AUDIO = "bad_audio"
MISSING_AUDIO = "missing_audio"  # the file is missing, or ends before this chunk starts: no engine has seen it
PERMANENT = frozenset({MISSING_AUDIO, *AUDIO_FAULTS})  # tried once: the file will be the same
BAD_OUTPUT = "bad_output"  # the engine's output cannot be read
NO_OUTPUT = "no_output"  # the engine reported success but wrote nothing
EXIT_CODE = "exit_code"
ENGINE_ERROR = "engine_error"  # an exception that no pattern below matches
OUT_OF_MEMORY = "out_of_memory"  # the device's
BATCH_LOST = "batch_lost"  # failed together with other chunks; not charged

# The engine process died while it processed the chunk. After two deaths with the chunk alone, the chunk is poison.
WORKER_DIED = "worker_died"  # SIGKILL, which comes from outside: the first few are not counted
ENGINE_CRASH = "engine_crash"
HANG = "hang"
GPU_ERROR = "gpu_error"  # CUDA no longer works in this process, because of the device or the chunk
DEATHS = frozenset({WORKER_DIED, ENGINE_CRASH, HANG, GPU_ERROR})

# Not caused by the chunk.
TERMINATED = "terminated"  # SIGTERM from outside: the first few are not counted
NO_PROGRAM = "no_program"
HOST_MEMORY = "host_memory"
RAN_ON_CPU = "ran_on_cpu"  # this worker's device does not work for the engine
GPU_LOST = "gpu_lost"
CONFIGURATION = "configuration"  # this engine cannot work with these settings: the task gives up immediately
NO_SPACE = "no_space"
NODE_FAULT = "node_fault"  # I/O error, read-only, too many open files, no permission in our own folders
OF_NODE = frozenset({NO_SPACE, NODE_FAULT})  # never charged: the task pauses, and at last stops with the rest pending
# Errors of engines that cannot write to their disk; it may be too full for the message that says so.
MAY_BE_NODE = frozenset({BAD_AUDIO, BAD_OUTPUT, NO_OUTPUT, EXIT_CODE, ENGINE_ERROR, ENGINE_CRASH})
RETIRING = frozenset({RAN_ON_CPU, GPU_LOST})  # the worker stops and returns its chunks; the other workers continue

_FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_NODE = (errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ESHUTDOWN)
_DEATHS_OF_POISON = 2
_MOST_STEPS_DOWN = 16  # usual, lean, in 2, 4, 8, … pieces
# Slurm sends TERM to workers too, KILL comes from outside, and other workers fill the memory: the first few are not
# charged to a chunk.
_EXCUSED = {TERMINATED: 3, WORKER_DIED: 2, HOST_MEMORY: 3, OUT_OF_MEMORY: 3}

# In this order: a full disk (machine) also causes audio errors.
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
        r"|unknown error|uncorrectable ECC|the launch timed out|an illegal instruction|all CUDA-capable devices are"
        r"|CUDA-capable device\(s\) is/are|(?:the )?(?:MPS |remote procedural call|hardware resources required))"
        r"|(?:CUDNN|CUBLAS)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)|CUFFT_(?:EXEC_FAILED|INTERNAL_ERROR)"
        r"|CUDA (?:error|failure):? (?:70[02]|71[0-9]|80[5-9]|810)\b",
    ),
    (NO_SPACE, r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|database or disk is full"),
    (NODE_FAULT, "|".join(map(os.strerror, _OF_NODE))),
    (
        HOST_MEMORY,
        r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
        r"|oom[-_]kill|Out of memory: Killed process",
    ),
)
_PROGRAM = (  # not after a signal, which says more about the end of a program
    (RAN_ON_CPU, r"HawkEars uses the \w+ although this worker has a GPU"),
    (
        CONFIGURATION,
        # HawkEars 2 only logs an unknown location, then continues without the filter of the region.
        r"Model checkpoint files not found|(?i:no (?:onnx )?checkpoints found)|No models loaded from|\.yaml not found"
        r"|Error\. invalid |Error: location .* not found|[Nn]o eBird county found|Error: invalid date"
        r"|Error: (?:No such option|Invalid value|Option |Got unexpected|Missing |--rtype|min_score)"
        r"|analyze\.py: error: |(?:^|\n)(?:Import|ModuleNotFound)Error: ",
    ),
    (
        BAD_AUDIO,
        r"Caught exception in audio load|Could not load recording|Recording \".*\" (?:not found|is not a file)"
        r"|Invalid data found when processing input|No audio (?:samples|stream) found|audio_error=(?!None)"
        r"|Format not recognised|unknown format|not start with RIFF id|Error opening .*(?:wav|flac|mp3|ogg)\b"
        r"|file is not a supported audio|Header missing",
    ),
)


def classify(text: str, exit_code: int | None = None) -> str:
    """Return the error class; ``exit_code`` is negative for a signal, and None where the process still runs."""
    signum = signal_of(exit_code)
    evidence = _MACHINE if signum else _MACHINE + _PROGRAM
    for error_class, pattern in evidence:
        if re.search(pattern, text):
            return error_class
    if signum:
        return {int(signal.SIGKILL): WORKER_DIED, int(signal.SIGTERM): TERMINATED}.get(signum, ENGINE_CRASH)
    if exit_code is None:
        return ENGINE_ERROR
    return EXIT_CODE if exit_code else NO_OUTPUT


def fault_of_node(error: OSError, ours: Path) -> str | None:
    """Return the class of an error that neither a chunk nor an engine causes; None: it is another error.

    ``ours``: a folder of the task, where every error is one of the node.
    """
    if error.errno in _FULL:
        return NO_SPACE
    in_ours = error.filename is not None and ours in Path(error.filename).parents
    return NODE_FAULT if in_ours or error.errno in _OF_NODE else None


def signal_of(exit_code: int | None) -> int:
    """Return the signal that ended a program, or 0; a shell or a container in between reports 128 + n."""
    if exit_code is None:
        return 0
    if exit_code < 0:
        return -exit_code
    return exit_code - 128 if 128 < exit_code <= 128 + signal.SIGRTMAX else 0


def describe_exit(exit_code: int | None) -> str:
    """Describe how a program ended: "by SIGKILL" or "with exit code 1"."""
    if not (signum := signal_of(exit_code)):
        return f"with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"by {names.get(signum, f'signal {signum}')}"  # a real-time signal has no name


# --- retries ----------------------------------------------------------------------------------------------------------


class RetryPolicy(NamedTuple):
    """How often a chunk is tried again, and after which delay."""

    retries: int = 2
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    node_pauses: int = 6  # at faults of the node with no chunk done in between; together about a minute
    give_up_after: int = 25  # failed chunks without a single success: the engine does not work here

    def delay_s(self, failures: int) -> float:
        """Return the delay before the next try, after the n-th failure."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** (failures - 1))


class RetryDecision(NamedTuple):
    """The new state of a chunk and, for a retry, its delay and how it runs."""

    status: str
    delay_s: float = 0.0
    alone: bool = False  # with no other chunk in the engine
    lean: bool = False  # with as little device memory as possible


class Retries:
    """Keeps the history of every chunk that failed, until it is done or failed for good."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        # Counts of tries, failures, deaths, excused; steps down: out of memory, the next try needs less.
        self._history: dict[ChunkKey, Counter[str]] = {}

    def try_number(self, chunk: Chunk) -> int:
        """Return the number of the current try of this chunk, from 1."""
        return 1 + self._history.get(chunk.key, Counter())["tries"]

    def decide(self, result: ChunkResult, *, ways_left: bool | None) -> RetryDecision:
        """Decide about a result; the caller decides how an uncharged chunk is tried again.

        ``ways_left``: whether a chunk that ran out of memory can be tried with less (None: not known). A try with less
        memory is not counted as a retry; without a way left the chunk fails, because another try would fail too.
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
        if ways_left is not None or result.error_class in PERMANENT:
            del self._history[key]
            return RetryDecision("failed")
        is_death = result.error_class in DEATHS
        history["failures"] += 1
        history["deaths"] += is_death
        if history["deaths"] < _DEATHS_OF_POISON and history["failures"] <= self._policy.retries:
            # A chunk that kills its process or does not fit beside others runs alone.
            alone = is_death or result.error_class == OUT_OF_MEMORY
            return RetryDecision("pending", self._policy.delay_s(history["failures"]), alone)
        del self._history[key]
        return RetryDecision("poison" if history["deaths"] >= _DEATHS_OF_POISON else "failed")

    def is_excused(self, chunk: Chunk, error_class: str) -> bool:
        """Return whether the end of the process is not counted against the chunk; true for the first few times only."""
        history = self._history.setdefault(chunk.key, Counter())
        history["excused"] += 1
        return history["excused"] <= _EXCUSED[error_class]
