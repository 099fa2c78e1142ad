"""How errors are recognised: by patterns in the last output of a program, by its exit code, or by an OSError.

What follows from an error stands in ``policy``. The patterns here are those of the machine; an engine adds its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from badcjobs.workers import policy

ErrorPattern = tuple[str, str]  # an error class, and a regular expression for the output that shows it

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NODE_ERRORS = (errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ESHUTDOWN)

# They come before those of an engine: a full disk also causes audio errors.
MACHINE_PATTERNS: tuple[ErrorPattern, ...] = (
    (
        policy.GPU_LOST,
        r"GPU is lost|fallen off the bus|fell off the bus|no CUDA-capable device|\bXid\b.*\b79\b",
    ),
    (
        policy.OUT_OF_MEMORY,
        r"(?:CUDA|HIP) out of memory|torch\S*\.OutOfMemoryError|(?:CUDA|HIP) error: out of memory|_ALLOC_FAILED"
        r"|hipErrorOutOfMemory",
    ),
    (
        policy.GPU_ERROR,
        r"device-side assert|CUDA error: (?:unspecified launch failure|an illegal memory access|misaligned address"
        r"|unknown error|uncorrectable ECC|the launch timed out|an illegal instruction|all CUDA-capable devices are"
        r"|CUDA-capable device\(s\) is/are|(?:the )?(?:MPS |remote procedural call|hardware resources required))"
        r"|(?:CUDNN|CUBLAS)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)|CUFFT_(?:EXEC_FAILED|INTERNAL_ERROR)"
        r"|CUDA (?:error|failure):? (?:70[02]|71[0-9]|80[5-9]|810)\b",
    ),
    (
        policy.NO_SPACE,
        r"No space left on device|Disk quota exceeded|\bENOSPC\b|\bEDQUOT\b|database or disk is full",
    ),
    (
        policy.NODE_FAULT,
        "|".join(os.strerror(number) for number in _NODE_ERRORS),
    ),
    (
        policy.HOST_MEMORY,
        r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator: (?:can't|not enough)"
        r"|oom[-_]kill|Out of memory: Killed process",
    ),
)
_BY_SIGNAL = {
    int(signal.SIGKILL): policy.WORKER_DIED,
    int(signal.SIGTERM): policy.TERMINATED,
}


def classify(text: str, exit_code: int | None = None, patterns: Sequence[ErrorPattern] = ()) -> str:
    """Return the error class; ``exit_code`` is negative for a signal, and None where the process still runs.

    ``patterns``: those of the engine, which do not count after a signal: it says more about the end of a program.
    """
    signum = signal_of(exit_code)
    candidates = [*MACHINE_PATTERNS] if signum else [*MACHINE_PATTERNS, *patterns]
    for error_class, pattern in candidates:
        if re.search(pattern, text):
            return error_class
    if signum:
        return _BY_SIGNAL.get(signum, policy.ENGINE_CRASH)
    if exit_code is None:
        return policy.ENGINE_ERROR
    return policy.EXIT_CODE if exit_code else policy.NO_OUTPUT


def state_class(error_class: str) -> str:
    """Return the line by which a program of ours tells the class of its error."""
    return json.dumps({"error_class": error_class})


def stated_class(text: str) -> str | None:
    """Return the class that a program of ours has written to its output; None: it has written no class."""
    for line in text.splitlines():
        if line.startswith('{"error_class":'):
            return str(json.loads(line)["error_class"])
    return None


def fault_of_node(error: OSError, own_folder: Path) -> str | None:
    """Return the class of an error that neither a chunk nor an engine causes; None: it is another error.

    ``own_folder``: a folder of the task, where every error is one of the node.
    """
    if error.errno in _DISK_FULL:
        return policy.NO_SPACE
    if error.errno in _NODE_ERRORS:
        return policy.NODE_FAULT
    if error.filename is not None and own_folder in Path(error.filename).parents:
        return policy.NODE_FAULT
    return None


def signal_of(exit_code: int | None) -> int:
    """Return the signal that ended a program, or 0; a shell or a container in between reports 128 + n."""
    if exit_code is None:
        return 0
    if exit_code < 0:
        return -exit_code
    return exit_code - 128 if 128 < exit_code <= 128 + signal.SIGRTMAX else 0


def describe_exit(exit_code: int | None) -> str:
    """Describe how a program ended: "by SIGKILL" or "with exit code 1"."""
    signum = signal_of(exit_code)
    if not signum:
        return f"with exit code {exit_code}"
    with suppress(ValueError):
        return f"by {signal.Signals(signum).name}"
    return f"by signal {signum}"  # a real-time signal, which has no name
