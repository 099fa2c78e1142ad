"""Rules of ``check`` about places and this machine: folders, files, live databases, clocks, GPUs, Slurm."""

from __future__ import annotations

import math
import posixpath
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from badcjobs.planning.findings import Remark, fine, problem, warning
from badcjobs.planning.preflight_facts import Job
from badcjobs.planning.site import Site
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.words import count, data_size
from badcjobs.workers.staging import MOST_STAGED_BYTES

FILES_PER_TASK = 12  # at most ten by contract, Slurm's log, and the manifest with its rows
FILES_PER_JOB = 12  # run.toml, job.sqlite, report.html, …, the job script and its list
_BYTES_PER_CHUNK = 2000  # with its detections
_BYTES_PER_SECOND = 200  # samples of a GPU and its host
_SLOWEST = 10  # audio-hours per GPU-hour
_SKEW_S = 2.0
_TRY_NVML = "python -c 'import pynvml; pynvml.nvmlInit()'   (look for an error; in a container: apptainer --nv)"


def _is_below(path: str, folders: Sequence[str], home: str) -> str | None:
    """Return the first of a site's folders that a path lies in; ``~`` is the user's home."""
    for folder in folders:
        if PurePosixPath(path).is_relative_to(folder.replace("~", home)):
            return folder
    return None


def _why_lost(path: str, job: Job) -> str | None:
    """Return why jobs cannot write to a path, or what they write there is lost; None: they can, or it is not known."""
    site = job.site
    read_only = _is_below(path, site.read_only, job.home)
    if read_only is not None:
        return f"is below {read_only}, which compute nodes of {site.name} cannot write"
    if site.writable and _is_below(path, site.writable, job.home) is None:
        folders = " and ".join(site.writable)
        return f"is not below {folders}, the only shared place that jobs on {site.name} can write"
    return None


# --- the folder for results -------------------------------------------------------------------------------------------


def check_out(job: Job) -> Iterator[Remark]:
    """Check that all nodes can write to the folder for results."""
    out = job.out
    site = job.site
    if out is None:
        return
    elsewhere = f"--out {site.example}"
    place = out.path
    if out.path != out.real:
        place += f" (real path: {out.real})"
    why_lost = _why_lost(out.real, job)
    if out.refusal is not None:
        yield problem("out", f"{out.path} cannot be written here: {out.refusal}", elsewhere)
    elif why_lost is not None:
        yield problem("out", f"{place} {why_lost}", elsewhere)
    elif job.on_cluster and not out.shared and not site.writable:
        text = f"{place} is on a disk of this machine ({out.filesystem}), which other nodes may not see"
        yield warning("out", text, f"{elsewhere}   (a folder that all nodes see)")
    else:
        created = ", and will be created" if out.missing else ""
        yield fine("out", f"{place} can be written here ({out.filesystem}){created}")


def _lowest_limit(site: Site, quota: float | None, left: int | None) -> tuple[float, str]:
    """Return the smaller of a quota and of what a filesystem has left, and which it is; infinite: not known."""
    limits = [(math.inf, "")]
    if quota:
        limits.append((quota, f"the quota of {site.name}"))
    if left is not None:
        limits.append((left, "what its filesystem has left"))
    return min(limits)


def _check_files(job: Job) -> Iterator[Remark]:
    """Compare the files that a run leaves with the quota and with what the filesystem has left."""
    out = job.out
    tasks = job.request.tasks
    if tasks is None:
        return
    most = tasks * FILES_PER_TASK + FILES_PER_JOB
    text = f"{count(tasks, 'task')} × {FILES_PER_TASK} files + {FILES_PER_JOB} = {most:,} files at most"
    left_files = None if out is None else out.free_files
    limit_files, whose = _lowest_limit(job.site, job.site.files, left_files)
    if whose:
        text += f"; {whose} is {limit_files:,.0f}"
    if most <= limit_files:
        yield fine("files", text)
    else:
        fitting_tasks = int((limit_files - FILES_PER_JOB) // FILES_PER_TASK)
        yield problem("files", text, job.ask_tasks(max(1, fitting_tasks)))


def results_bytes(chunks: int, gpu_hours: float) -> int:
    """Return about what a run writes: rows of chunks and detections, samples; once per task and once merged."""
    return round(2 * (chunks * _BYTES_PER_CHUNK + gpu_hours * 3600 * _BYTES_PER_SECOND))


def _check_space(job: Job) -> Iterator[Remark]:
    """Compare the bytes of the source and of the results with the quota and with what the filesystem has left."""
    source = job.source
    out = job.out
    if source is None or source.lengths is None:
        return
    needs_bytes = results_bytes(source.chunks, (source.audio_s or 0.0) / 3600 / _SLOWEST)
    text = f"the source has {data_size(source.bytes)}; results need about {data_size(needs_bytes)}, copies of audio at"
    text += f" most {data_size(MOST_STAGED_BYTES)} per task, on the disk of the node"
    quota_bytes = 1e12 * (job.site.space_tb or 0)
    left_bytes = None if out is None else out.free_bytes
    limit_bytes, whose = _lowest_limit(job.site, quota_bytes, left_bytes)
    if needs_bytes > limit_bytes:
        text += f"; {whose} is {data_size(limit_bytes)}"
        yield problem("space", text, "df -h DIR   (of the run; or fewer recordings at a time)")
    elif quota_bytes and (source.bytes or 0) > quota_bytes:
        text += f"; the quota of {job.site.name} is {data_size(quota_bytes)}, so the source does not fit there as a"
        fix = f"badcjobs plan SOURCE --site {job.site.name}   (read it where it is, or copy and run it in parts)"
        yield warning("space", f"{text} whole", fix)
    else:
        yield fine("space", text)


# --- other folders ----------------------------------------------------------------------------------------------------


def _check_cache(job: Job) -> Iterator[Remark]:
    """Check the cache of jobs, unless the script sets its own."""
    cache = job.cache
    if not cache or not job.site.cache or (job.script and job.script.sets_cache):
        return
    why_lost = _why_lost(cache, job)
    if why_lost is not None:
        fix = f'export XDG_CACHE_HOME="{job.site.cache}"   (in the job script, or in setup under [submit])'
        yield warning("cache", f"{cache} {why_lost}: what a run learns is lost", fix)


def _check_submit_folder(job: Job) -> Iterator[Remark]:
    site = job.site
    folder = job.submit_folder
    if folder is None or not site.no_submit:
        return
    refused = _is_below(folder.real, site.no_submit, job.home)
    if refused is None:
        yield fine("submit folder", f"{site.name} takes jobs from {folder.path}")
    else:
        text = f"{site.name} refuses jobs from below {refused}; this is {folder.path}"
        yield problem("submit folder", text, f"cd {site.example} && sbatch …")


def _check_log(job: Job) -> Iterator[Remark]:
    """Check where Slurm would write the log of a script."""
    submit = job.submit_folder
    if job.script is None or submit is None:
        return
    for folder in job.log_folders:
        if folder.missing:
            text = f"{job.script.name} writes its log into {folder.path}, which does not exist: Slurm does not create"
            text += " it, and every task would fail without a message"
            yield problem("log folder", text, f"mkdir -p {shlex.quote(folder.path)}")
    output = job.script.options.get("output") or "slurm-%A_%a.out"
    log = posixpath.normpath(posixpath.join(submit.real, job.script.options.get("chdir", ""), output))
    why_lost = _why_lost(log, job)
    if why_lost is not None and not log.startswith("/dev/"):
        text = f"Slurm would write {log}, which {why_lost}: the job fails without a message, or its log is lost"
        yield problem("log folder", text, job.ask("output", f"{job.site.example}/%x-%A_%a.log"))


def _check_live_files(job: Job) -> Iterator[Remark]:
    """Check the folder of live databases, whose WAL is safe on a disk of the node alone.

    sbatch passes TMPDIR on, unless the script sets its own.
    """
    temporary = job.temporary
    if job.script is not None and job.script.sets_tmpdir:
        return
    place = job.site.node_local or "/tmp, unless the node sets SLURM_TMPDIR"
    if temporary is not None and not job.site.node_local:
        place = f"TMPDIR={temporary.path} ({temporary.filesystem})"
        if temporary.shared:
            text = f"in {place}: a live database (WAL) is not safe there"
            fix = "export TMPDIR=/tmp   (in the job script, before badcjobs)"
            severity = PROBLEM if job.settings.live_mode == "local" else WARNING
            yield Remark(severity, "live files", text, fix)
            return
    yield fine("live files", f"on the node's own disk, in {place}; published whole")


# --- this machine -----------------------------------------------------------------------------------------------------


def _check_slurm(job: Job) -> Iterator[Remark]:
    slurm = job.slurm
    if slurm is None:
        yield fine("Slurm", "not on this machine: its limits are not known; submit --cluster local runs jobs here")
    elif slurm.trouble:
        yield warning(
            "Slurm",
            f"not checked: it does not answer ({slurm.trouble})",
            "scontrol ping",
            checked=False,
        )
    else:
        yield fine("Slurm", "it answers here")


def _check_clock(job: Job) -> Iterator[Remark]:
    """Compare the filesystem's clock with this machine's: times of tasks are compared with each other."""
    out = job.out
    if out is not None and abs(out.skew_s or 0.0) >= _SKEW_S:
        text = f"the clock of the filesystem under {out.path} is {out.skew_s:+,.1f} s from this machine's"
        yield warning("clock", text, "timedatectl   (is the clock synchronised? report it to the site)")


def _check_gpus(job: Job) -> Iterator[Remark]:
    """Check the GPUs of this machine; where jobs are submitted from there need not be any."""
    gpus = job.gpus
    if gpus is None:
        return
    text = f"{len(gpus.names)} here ({', '.join(sorted(set(gpus.names)))}), read through {gpus.backend}"
    if gpus.names and gpus.backend in ("nvidia-smi", "none"):
        text += f"; NVML cannot be loaded, so there are fewer metrics or none ({gpus.why})"
        yield warning("GPUs", text, _TRY_NVML)
    elif gpus.names:
        yield fine("GPUs", text)
    elif gpus.in_job:
        yield warning("GPUs", f"this job has none: {gpus.why}", "#SBATCH --gpus-per-node=1")
    elif job.on_cluster or job.settings.cpu_workers:
        yield fine("GPUs", f"none here, and none is needed here: tasks look for their own, or use the CPU ({gpus.why})")
    else:
        fix = "badcjobs run … --cpu-workers 2   (or --simulate 2, to try)"
        yield warning("GPUs", f"none here: {gpus.why}", fix)


RULES = (
    check_out,
    _check_files,
    _check_space,
    _check_cache,
    _check_submit_folder,
    _check_log,
    _check_live_files,
    _check_slurm,
    _check_clock,
    _check_gpus,
)
