"""The classes of failure, as they stand in ``attempt.error_class``: what follows from them, how they are told apart.

``classify`` is pure: it looks at what a program said last and at how it ended, and at nothing else.
"""

from __future__ import annotations

import re
import signal

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
_SIGNALS: dict[int, str] = {signal.SIGKILL: WORKER_DIED, signal.SIGTERM: TERMINATED}


def classify(text: str, exit_code: int | None = None) -> str:
    """Return the class of a failure; ``exit_code`` is negative for a signal, and None where nothing has ended."""
    signum = signal_of(exit_code)
    evidence = _MACHINE if signum else (*_MACHINE, *_SETTINGS, *_AUDIO)
    for error_class, pattern in evidence:
        if re.search(pattern, text):
            return error_class
    if signum:
        return _SIGNALS.get(signum, ENGINE_CRASH)
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


def signal_name(signum: int) -> str:
    """Return what people call a signal."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"  # a real-time one
