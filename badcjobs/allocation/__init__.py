"""SLURM_* and CUDA_VISIBLE_DEVICES → what this array task has. Pure: variables in, values out."""
