"""Arrays on a cluster: under Slurm (``slurm.py``), or emulated on one machine (``local.py``)."""
