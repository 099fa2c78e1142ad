"""What else the environment says of devices, to explain a grant: none of these variables ever adds a device.

SLURM_JOB_GPUS and SLURM_STEP_GPUS are physical numbers, stale in steps and wrong on other nodes; NVIDIA_VISIBLE_DEVICES
tells a container runtime what to put into a container.
"""

from __future__ import annotations

from collections.abc import Mapping

_SLURM_LISTS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")  # the nearer one first
_ON_NODE = "SLURM_GPUS_ON_NODE"
_CONTAINER = "NVIDIA_VISIBLE_DEVICES"


def explain(environ: Mapping[str, str], *, visible: str | None, devices: int) -> list[str]:
    """Return remarks on a grant of so many devices through the list ``visible`` (None: there is no list)."""
    remarks = [_slurm_list(environ, visible, devices), _slurm_count(environ, devices), _container(environ, devices)]
    return [remark for remark in remarks if remark]


def _slurm_list(environ: Mapping[str, str], visible: str | None, devices: int) -> str:
    name = next((name for name in _SLURM_LISTS if environ.get(name)), None)
    if name is None or (devices and environ[name] == visible):
        return ""
    if devices:
        return f"Slurm's own list ({name}={environ[name]}) is physical numbering"
    return f"{name} says {environ[name]}, but nothing was granted to this step"


def _slurm_count(environ: Mapping[str, str], devices: int) -> str:
    text = environ.get(_ON_NODE, "")
    if not text or text == str(devices):  # never a number for certain: typed GPUs are counted as a100:1
        return ""
    return f"{_ON_NODE}={text} counts the whole step on this node"


def _container(environ: Mapping[str, str], devices: int) -> str:
    value = environ.get(_CONTAINER)
    if value is None or (devices and value == "all"):  # the images of CUDA set it to all
        return ""
    return f"{_CONTAINER}={value} speaks to container runtimes and grants nothing"
