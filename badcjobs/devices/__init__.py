"""Find the GPUs of this task and read them: NVML, nvidia-smi, AMD, simulated, replayed."""
