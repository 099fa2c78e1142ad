"""Judges this machine: its GPUs, its Slurm, and the source that was read on it."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import GpuFacts, SlurmFacts, SourceFacts
from badcjobs.preflight.finding import Finding, fine, warning
from badcjobs.preflight.folders import judge_skew


def judge_gpus(gpus: GpuFacts, *, on_cluster: bool) -> Iterator[Finding]:
    """Judge the devices; where jobs are submitted from there need not be any."""
    if gpus.names:
        said = f"{len(gpus.names)} here ({', '.join(sorted(set(gpus.names)))}), read through {gpus.backend}"
        if gpus.backend == "nvidia-smi":
            text = f"{said}, for NVML cannot be loaded: fewer metrics, no energy counter ({gpus.why})"
            yield warning("GPUs", text, "python -c 'import pynvml; pynvml.nvmlInit()'   (what does it say?)")
        elif gpus.backend == "none":
            text = f"{said}: telemetry would be one gap ({gpus.why})"
            yield warning("GPUs", text, "nvidia-smi   (what does it say? in a container: apptainer exec --nv …)")
        else:
            yield fine("GPUs", said)
    elif gpus.in_job:
        text = f"this job has none: {gpus.why}"
        yield warning("GPUs", text, "#SBATCH --gpus-per-node=1")
    elif on_cluster:
        text = f"none here, as usual where jobs are submitted from; tasks look for their own ({gpus.why})"
        yield fine("GPUs", text)
    else:
        yield warning("GPUs", f"none here: {gpus.why}", "badcjobs run … --cpu-workers 2   (or --simulate 2, to try)")


def judge_slurm(slurm: SlurmFacts | None, *, site_named: bool) -> Iterator[Finding]:
    """Say whether Slurm answers here."""
    if slurm is None:
        limits = "limits come from the site file alone" if site_named else "jobs run with submit --cluster local"
        yield fine("Slurm", f"not on this machine; {limits}")
    elif slurm.trouble is not None:
        yield warning("Slurm", f"it does not answer: {slurm.trouble}", "scontrol ping")
    else:
        yield fine("Slurm", "it answers here")
        if slurm.skew_s is not None:
            yield from judge_skew(slurm.skew_s, "the clock of Slurm's controller")


def say_source(source: SourceFacts) -> Finding:
    """Tell what a source without mistakes holds."""
    if not source.stats:
        return fine("source", f"{source.chunks:,} chunks; --quick: no audio file was looked at")
    hours = f"{source.audio_s / 3600:,.1f} hours of audio"
    unknown = f", {source.of_unknown_length:,} of unknown length" if source.of_unknown_length else ""
    return fine("source", f"{source.chunks:,} chunks, {hours}{unknown}; every file is there")
