"""The classes of failure, as they stand in ``attempt.error_class``, and what follows from them."""

from __future__ import annotations

# The chunk's own fault, or its bad luck.
BAD_AUDIO = "bad_audio"
BAD_OUTPUT = "bad_output"  # the engine's output cannot be read
NO_OUTPUT = "no_output"  # the engine said that all was well, but left nothing
EXIT_CODE = "exit_code"
OUT_OF_MEMORY = "out_of_memory"
BATCH_LOST = "batch_lost"  # went down with others; not charged

# The engine process died while it had the chunk. Twice, and the chunk is poison.
WORKER_DIED = "worker_died"
ENGINE_CRASH = "engine_crash"
DEATHS = frozenset({WORKER_DIED, ENGINE_CRASH})

# Not the chunk's fault.
TERMINATED = "terminated"  # somebody outside ended the process: forgiven, a few times
NO_PROGRAM = "no_program"
NO_SPACE = "no_space"
RAN_ON_CPU = "ran_on_cpu"  # this worker's device does not work for the engine: the worker retires, others go on
CONFIGURATION = "configuration"  # nothing this engine tries can work: the task gives up at once
