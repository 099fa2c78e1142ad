"""SLURM_* and the lists of visible devices → what this array task has. Pure: variables in, values out."""
