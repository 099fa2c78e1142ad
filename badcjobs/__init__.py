"""badcjobs: run bird-sound detectors inside Slurm, keep every GPU busy, write down what happened."""

__version__ = "0.1.0"
