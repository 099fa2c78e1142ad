"""Which GPUs are ours, and how they are read: NVML, nvidia-smi, AMD, simulated, replayed."""
