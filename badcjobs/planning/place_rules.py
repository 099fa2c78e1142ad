"""Rules of ``check`` about places and this machine: folders, files, live databases, clocks, GPUs, Slurm."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from badcjobs.planning.findings import Remark, fine, problem, warning
from badcjobs.planning.preflight_facts import FolderFacts, GpuFacts, Job, Places, PreflightFacts, SlurmFacts
from badcjobs.planning.site import Site
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.words import count, data_size, memory
from badcjobs.workers.staging import MOST_STAGED_BYTES

FILES_PER_TASK = 10  # what one attempt leaves at most, by contract
_FILES_PER_JOB = 10  # run.toml, job.sqlite, report.html, …
_LITTLE_ROOM_BYTES = 2**30
_BYTES_PER_CHUNK = 2000  # with its detections
_BYTES_PER_SECOND = 200  # samples of a GPU and its host
_SLOWEST = 10  # audio-hours per GPU-hour
_START_UP_H = 0.1  # of each GPU of a task
_SKEW_SEEN_S = 2.0
_SKEW_BAD_S = 60.0


def check_all_places(facts: PreflightFacts) -> Iterator[Remark]:
    """Check the folders that a job uses, and this machine."""
    job = facts.job
    places = facts.places
    yield from check_out(places.out, job.site, places.home, on_cluster=facts.on_cluster)
    yield from _check_files(job, places.out)
    yield from _check_space(job, places.out)
    yield from _check_cache(job, places)
    yield from _check_submit_folder(job.site, places)
    yield from _check_log(job, places)
    yield from _check_live_files(job, places.temporary)
    yield from _check_slurm(facts.slurm, job.site)
    yield from _check_clock(places.out)
    yield from _check_gpus(facts.gpus, job.settings.cpu_workers, on_cluster=facts.on_cluster)


def _below_any(path: str, folders: tuple[str, ...], home: str) -> str | None:
    """Return the first of a site's folders that a path lies in; ``~`` is the user's home."""
    for folder in folders:
        full = re.sub(r"^~(?=/|$)", lambda _tilde: home, folder)
        if PurePosixPath(path).is_relative_to(full):
            return folder if folder == full else f"{folder} ({full})"
    return None


# --- the folder for results -------------------------------------------------------------------------------------------


def check_out(out: FolderFacts | None, site: Site, home: str, *, on_cluster: bool) -> Iterator[Remark]:
    """Check that all nodes can write to the folder for results."""
    if out is None:
        return
    elsewhere = f"--out {site.example}"
    place = out.path if out.path == out.real else f"{out.path} (real path: {out.real})"
    read_only = _below_any(out.real, site.read_only, home)
    if out.refusal is not None:
        yield problem("out", f"{out.path} cannot be written here: {out.refusal}", elsewhere)
    elif read_only is not None:
        text = f"{place} is below {read_only}, which compute nodes of {site.name} cannot write"
        yield problem("out", text, elsewhere)
    elif site.writable and _below_any(out.real, site.writable, home) is None:
        folders = " and ".join(site.writable)
        text = f"{place} is not below {folders}, the only shared place that jobs on {site.name} can write"
        yield problem("out", text, elsewhere)
    elif on_cluster and not out.shared and not site.writable:
        text = f"{place} is on a disk of this machine ({out.filesystem}), which other nodes may not see"
        yield warning("out", text, f"{elsewhere}   (a folder that all nodes see)")
    else:
        created = ", and will be created" if out.missing else ""
        yield fine("out", f"{place} can be written here ({out.filesystem}){created}")
    if out.free_bytes is not None and out.free_bytes < _LITTLE_ROOM_BYTES:
        text = f"only {memory(out.free_bytes)} are free on the disk of {out.path}"
        yield warning("room", text, f"df -h {shlex.quote(out.path)}   (or {elsewhere})")


def _check_files(job: Job, out: FolderFacts | None) -> Iterator[Remark]:
    """Compare the files that a run leaves with the quota and with what the filesystem has left."""
    tasks = job.request.tasks
    if tasks is None:
        return
    most = tasks * FILES_PER_TASK + _FILES_PER_JOB
    text = f"{count(tasks, 'task')} × {FILES_PER_TASK} files + {_FILES_PER_JOB} = {most:,} files at most"
    limit = _limit(job.site, job.site.files, None if out is None else out.free_files)
    if limit is None:
        yield fine("files", f"{text}; the limit is not known")
        return
    limit_files, whose = limit
    text += f"; {whose} is {limit_files:,.0f}"
    if most > limit_files:
        fitting_tasks = max(1, int((limit_files - _FILES_PER_JOB) // FILES_PER_TASK))
        yield problem("files", text, job.ask_tasks(fitting_tasks))
    else:
        yield fine("files", text)


def _limit(site: Site, quota: float | None, left: float | None) -> tuple[float, str] | None:
    """Return the smaller of a quota and of what a filesystem has left, and which it is; None: neither is known."""
    limits = []
    if quota:
        limits.append((quota, f"the quota of {site.name}"))
    if left is not None:
        limits.append((left, "what its filesystem has left"))
    return min(limits, default=None)


def results_bytes(chunks: int, gpu_hours: float) -> int:
    """Return about what a run writes: rows of chunks and detections, samples; once per task and once merged."""
    return round(2 * (chunks * _BYTES_PER_CHUNK + gpu_hours * 3600 * _BYTES_PER_SECOND))


def _check_space(job: Job, out: FolderFacts | None) -> Iterator[Remark]:
    """Compare the bytes of the source and of the results with the quota and with what the filesystem has left."""
    source = job.source
    site = job.site
    if source is None or not source.stats:
        return
    gpus = (job.request.tasks or 1) * (job.request.gpus_per_task or 1)
    needs_bytes = results_bytes(source.chunks, source.audio_s / 3600 / _SLOWEST + gpus * _START_UP_H)
    text = f"the source has {data_size(source.bytes)}; results need about {data_size(needs_bytes)}, copies of audio at"
    text += f" most {data_size(MOST_STAGED_BYTES)} per task, on the disk of the node"
    quota_bytes = site.space_tb and site.space_tb * 1e12
    limit = _limit(site, quota_bytes, None if out is None else out.free_bytes)
    if limit is not None:
        limit_bytes, whose = limit
        if needs_bytes > limit_bytes:
            text += f"; {whose} is {data_size(limit_bytes)}"
            yield problem("space", text, "df -h DIR   (of the run; or fewer recordings at a time)")
            return
    if quota_bytes and (source.bytes or 0) > quota_bytes:
        fix = f"badcjobs plan SOURCE --site {site.name}   (read it where it is, or copy and run it in parts)"
        quota = f"the quota of {site.name} is {data_size(quota_bytes)}"
        yield warning("space", f"{text}; {quota}, so the source does not fit there as a whole", fix)
    else:
        yield fine("space", text)


# --- other folders ----------------------------------------------------------------------------------------------------


def _check_cache(job: Job, places: Places) -> Iterator[Remark]:
    """Check the cache of jobs, unless the script sets its own."""
    site = job.site
    if not places.cache or not site.cache or (job.script is not None and job.script.sets_cache):
        return
    read_only = _below_any(places.cache, site.read_only, places.home)
    if read_only is not None:
        text = f"{places.cache} is below {read_only}, which compute nodes of {site.name} cannot write"
        fix = f'export XDG_CACHE_HOME="{site.cache}"   (in the job script, or in setup under [submit])'
        yield warning("cache", f"{text}: what a run learns is lost", fix)


def _check_submit_folder(site: Site, places: Places) -> Iterator[Remark]:
    if places.submit is None or not site.no_submit:
        return
    refused = _below_any(places.submit.real, site.no_submit, places.home)
    if refused is None:
        yield fine("submit folder", f"{site.name} takes jobs from {places.submit.path}")
    else:
        text = f"{site.name} refuses jobs from below {refused}; this is {places.submit.path}"
        yield problem("submit folder", text, f"cd {site.example} && sbatch …")


def _check_log(job: Job, places: Places) -> Iterator[Remark]:
    """Check where Slurm would write the log of a script."""
    script = job.script
    site = job.site
    if script is None:
        return
    for folder in places.log_folders:
        if folder.missing:
            text = f"{script.name} writes its log into {folder.path}, which does not exist: Slurm does not create it"
            fix = f"mkdir -p {shlex.quote(folder.path)}"
            yield problem("log folder", f"{text}, and every task would fail without a message", fix)
    if places.submit is None:
        return
    output = script.options.get("output") or "slurm-%A_%a.out"
    log = posixpath.normpath(posixpath.join(places.submit.real, script.options.get("chdir", ""), output))
    read_only = _below_any(log, site.read_only, places.home)
    fix = job.ask("output", f"{site.example}/%x-%A_%a.log")
    if read_only is not None:
        text = f"Slurm would write {log}, below {read_only}, which compute nodes cannot write"
        yield problem("log folder", f"{text}: the job fails without a message", fix)
    elif site.writable and not log.startswith("/dev/") and _below_any(log, site.writable, places.home) is None:
        text = f"Slurm would write {log}, which is not below {' or '.join(site.writable)}: it may be lost"
        yield warning("log folder", text, fix)


def _check_live_files(job: Job, temporary: FolderFacts | None) -> Iterator[Remark]:
    """Check the folder of live databases, whose WAL is safe on a disk of the node alone.

    sbatch passes TMPDIR on, unless the script sets its own.
    """
    if job.script is not None and job.script.sets_tmpdir:
        return
    if job.site.node_local:
        yield fine("live files", f"on the node's own disk, {job.site.node_local}, published whole")
    elif temporary is None:
        yield fine("live files", "in /tmp of the node, unless it sets SLURM_TMPDIR; published whole")
    elif not temporary.shared:
        yield fine("live files", f"in TMPDIR={temporary.path} ({temporary.filesystem}), published whole")
    else:
        text = f"TMPDIR={temporary.path} is {temporary.filesystem}: a live database (WAL) is not safe there"
        fix = "export TMPDIR=/tmp   (in the job script, before badcjobs)"
        severity = PROBLEM if job.settings.live_mode == "local" else WARNING
        yield Remark(severity, "live files", text, fix)


# --- this machine -----------------------------------------------------------------------------------------------------


def _check_slurm(slurm: SlurmFacts | None, site: Site) -> Iterator[Remark]:
    if slurm is None:
        instead = "limits come from the site file alone" if site.name else "jobs run with submit --cluster local"
        yield fine("Slurm", f"not on this machine; {instead}")
    elif slurm.trouble:
        yield warning("Slurm", f"not checked: it does not answer ({slurm.trouble})", "scontrol ping", checked=False)
    else:
        yield fine("Slurm", "it answers here")


def _check_clock(out: FolderFacts | None) -> Iterator[Remark]:
    """Compare the filesystem's clock with this machine's: times of tasks are compared with each other."""
    if out is None or out.skew_s is None:
        return
    clock = f"the clock of the filesystem under {out.path}"
    apart_s = abs(out.skew_s)
    if apart_s < _SKEW_SEEN_S:
        yield fine("clock", f"{clock} agrees with this machine's ({apart_s:.1f} s apart)")
        return
    direction = "ahead of" if out.skew_s > 0 else "behind"
    severity = WARNING if apart_s < _SKEW_BAD_S else PROBLEM
    fix = "timedatectl   (is the clock synchronised? report it to the site)"
    yield Remark(severity, "clock", f"{clock} is {apart_s:,.1f} s {direction} this machine's", fix)


def _check_gpus(gpus: GpuFacts | None, cpu_workers: int, *, on_cluster: bool) -> Iterator[Remark]:
    """Check the GPUs of this machine; where jobs are submitted from there need not be any."""
    if gpus is None:
        return
    if gpus.names:
        models = ", ".join(sorted(set(gpus.names)))
        text = f"{len(gpus.names)} here ({models}), read through {gpus.backend}"
        if gpus.backend in ("nvidia-smi", "none"):
            text += f"; NVML cannot be loaded, so there are fewer metrics or none ({gpus.why})"
            fix = "python -c 'import pynvml; pynvml.nvmlInit()'   (look for an error; in a container: apptainer --nv)"
            yield warning("GPUs", text, fix)
        else:
            yield fine("GPUs", text)
    elif gpus.in_job:
        yield warning("GPUs", f"this job has none: {gpus.why}", "#SBATCH --gpus-per-node=1")
    elif on_cluster:
        text = "none here, as usual where jobs are submitted from; tasks look for their own"
        yield fine("GPUs", f"{text} ({gpus.why})")
    elif cpu_workers:
        yield fine("GPUs", f"none here; workers on the CPU: {cpu_workers} ({gpus.why})")
    else:
        fix = "badcjobs run … --cpu-workers 2   (or --simulate 2, to try)"
        yield warning("GPUs", f"none here: {gpus.why}", fix)
