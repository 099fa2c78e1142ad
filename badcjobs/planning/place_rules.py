"""Rules of ``check`` about places and this machine: folders, files, live databases, clocks, GPUs, Slurm."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath

from badcjobs.planning.findings import Advice, Cases, fine_if, problem_if, rules, warning_if
from badcjobs.planning.preflight_facts import PreflightFacts
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.words import count, data_size
from badcjobs.workers.staging import MOST_STAGED_BYTES

FILES_PER_TASK = 10  # what one attempt leaves at most, by contract
_FILES_PER_JOB = 10  # run.toml, job.sqlite, report.html, …
_LITTLE_ROOM_BYTES = 2**30
_BYTES_PER_CHUNK, _BYTES_PER_SECOND = 2000, 200  # with its detections; samples of a GPU and its host
_SLOWEST, _START_UP_H = 10, 0.1  # audio-hours per GPU-hour; of each GPU of a task
_SKEW_SEEN_S, _SKEW_BAD_S = 2.0, 60.0


def below_any(path: str, folders: tuple[str, ...], home: str) -> str | None:
    """Return the first of a site's folders that a path lies in; ``~`` is the user's home."""
    for folder in folders:
        full = home + folder[1:] if folder == "~" or folder.startswith("~/") else folder
        if PurePosixPath(path).is_relative_to(full):
            return folder if folder == full else f"{folder} ({full})"
    return None


# --- the folder for results -------------------------------------------------------------------------------------------


def _out(facts: PreflightFacts) -> Cases:
    out, site = facts.out, facts.site
    if out is not None:
        yield {
            "seen": out.path if out.path == out.real else f"{out.path} (real path: {out.real})",
            "read_only": below_any(out.real, site.read_only, facts.home),
            "writable": below_any(out.real, site.writable, facts.home),
            "made": ", and will be created" if out.missing else "",
        }


OUT = (
    rules("out", _out)(
        problem_if(
            "{out.path} cannot be written here: {out.refusal}",
            "--out {site.example}",
            lambda f: f.out.refusal is not None,
        ),
        problem_if(
            "{seen} is below {read_only}, which compute nodes of {site.name} cannot write",
            "--out {site.example}",
            lambda f: f.read_only is not None,
        ),
        problem_if(
            "{seen} is not below {site.writable:and}, the only shared place that jobs on {site.name} can write",
            "--out {site.example}",
            lambda f: f.site.writable and f.writable is None,
        ),
        warning_if(
            "{seen} is on a disk of this machine ({out.filesystem}), which other nodes may not see",
            "--out {site.example}   (a folder that all nodes see)",
            lambda f: f.on_cluster and not f.out.shared and not f.site.writable,
        ),
        fine_if("{seen} can be written here ({out.filesystem}){made}"),
    ),
    rules("room", _out)(
        warning_if(
            "only {out.free_bytes:memory} are free on the disk of {out.path}",
            "df -h {out.path}   (or --out {site.example})",
            lambda f: f.out.free_bytes is not None and f.out.free_bytes < _LITTLE_ROOM_BYTES,
        )
    ),
)


# --- files, logs, live databases --------------------------------------------------------------------------------------


def _files(facts: PreflightFacts) -> Cases:
    """Compare the files that a run leaves with the quota and with what the filesystem has left."""
    out, site, tasks = facts.out, facts.site, facts.asked.tasks
    if tasks is None:
        return
    limits = [(site.files, f"the quota of {site.name}")] if site.files else []
    limits += [(out.free_files, "what its filesystem has left")] if out and out.free_files is not None else []
    limit, whose = min(limits, default=(None, ""))
    most = tasks * FILES_PER_TASK + _FILES_PER_JOB
    said = f"{count(tasks, 'task')} × {FILES_PER_TASK} files + {_FILES_PER_JOB} = {most:,} files at most"
    fitting = max(1, ((limit or 0) - _FILES_PER_JOB) // FILES_PER_TASK)
    yield {"limit": limit, "whose": whose, "most": most, "said": said, "fitting": fitting}


def results_bytes(chunks: int, gpu_hours: float) -> int:
    """Return about what a run writes: rows of chunks and detections, samples; once per task and once merged."""
    return round(2 * (chunks * _BYTES_PER_CHUNK + gpu_hours * 3600 * _BYTES_PER_SECOND))


def _space(facts: PreflightFacts) -> Cases:
    """Compare the bytes of the source and of the results with the quota and with what the filesystem has left."""
    out, site, asked, source = facts.out, facts.site, facts.asked, facts.source
    if source is None or not source.stats:
        return
    tasks, hours = asked.tasks or 1, source.audio_s / 3600
    needs = results_bytes(source.chunks, hours / _SLOWEST + tasks * (asked.gpus_per_task or 1) * _START_UP_H)
    said = f"the source has {data_size(source.bytes)}; results need about {data_size(needs)}, copies of audio at most"
    said += f" {data_size(MOST_STAGED_BYTES)} per task, on the disk of the node"
    quota = site.space_tb and site.space_tb * 1e12
    limits = [(quota, f"the quota of {site.name}")] if quota else []
    limits += [(out.free_bytes, "what its filesystem has left")] if out and out.free_bytes is not None else []
    limit, whose = min(limits, default=(needs, ""))
    place = out.path if out else "."
    yield {"limit": limit, "whose": whose, "needs": needs, "said": said, "quota": quota, "place": place}


def _cache(facts: PreflightFacts) -> Cases:
    """Find the cache of jobs, unless the script sets its own."""
    if facts.cache and facts.site.cache and not (facts.script and facts.script.sets_cache):
        yield {"read_only": below_any(facts.cache, facts.site.read_only, facts.home)}


def _log(facts: PreflightFacts) -> Cases:
    """Find where the job is submitted from, and where Slurm would write its log."""
    script, site = facts.script, facts.site
    if facts.submit is not None:
        options, here = script.options if script else {}, facts.submit.real
        output = options.get("output") or "slurm-%A_%a.out"
        log = posixpath.normpath(posixpath.join(here, options.get("chdir", ""), output))
        read_only, writable = (below_any(log, some, facts.home) for some in (site.read_only, site.writable))
        refused = below_any(here, site.no_submit, facts.home)
        yield {"log": log, "read_only": read_only, "writable": writable, "refused": refused}


def _temporary(facts: PreflightFacts) -> Cases:
    """Yield a case if TMPDIR has an effect: sbatch passes it on, unless the script sets its own."""
    return () if facts.script and facts.script.sets_tmpdir else ({"disk": (facts.site.node_local or "").lstrip("$")},)


PLACES = (
    rules("files", _files)(
        fine_if("{said}; the limit is not known", when=lambda f: f.limit is None),
        problem_if(
            "{said}, but {whose} is {limit:,}", "#SBATCH --array=0-{fitting:before}", lambda f: f.most > f.limit
        ),
        fine_if("{said}; {whose} is {limit:,}"),
    ),
    rules("space", _space)(
        problem_if("{said}, but {whose} is {limit:size}", "df -h {place:quoted}", lambda f: f.needs > f.limit),
        warning_if(
            "{said}; the quota of {site.name} is {quota:size}, so the source does not fit there as a whole",
            "badcjobs plan SOURCE --site {site.name}   (read it where it is, or copy and run it in parts)",
            lambda f: f.quota and (f.source.bytes or 0) > f.quota,
        ),
        fine_if("{said}; the quota of {site.name} is {quota:size}", when="quota"),
        fine_if("{said}"),
    ),
    rules("cache", _cache)(
        warning_if(
            "{cache} is below {read_only}, which compute nodes of {site.name} cannot write: what a run learns is lost",
            'export XDG_CACHE_HOME="{site.cache}"   (in the job script, or in setup under [submit])',
            lambda f: f.read_only is not None,
        )
    ),
    rules("submit folder", _log)(
        problem_if(
            "{site.name} refuses jobs from below {refused}; this is {submit.path}",
            "cd {site.example} && sbatch …",
            lambda f: f.refused is not None,
        ),
        fine_if("{site.name} takes jobs from {submit.path}", when="site.no_submit"),
    ),
    rules("log folder", _log)(
        problem_if(
            "Slurm would write {log}, below {read_only}, which compute nodes cannot write: the job fails without a"
            " message",
            "#SBATCH --output={site.example}/%x-%A_%a.log",
            lambda f: f.script and f.read_only is not None,
        ),
        warning_if(
            "Slurm would write {log}, which is not below {site.writable:or}: it may be lost",
            "#SBATCH --output={site.example}/%x-%A_%a.log",
            lambda f: f.script and f.site.writable and not f.log.startswith("/dev/") and f.writable is None,
        ),
    ),
    rules("log folder", lambda facts: [{"folder": folder} for folder in facts.log_folders])(
        problem_if(
            "{script.name} writes its log into {folder.path}, which does not exist: Slurm does not create it, and every"
            " task would fail without a message",
            "mkdir -p {folder.path:quoted}",
            when="folder.missing",
        )
    ),
    # SQLite's WAL is safe on a disk of the node alone.
    rules("live files", _temporary)(
        fine_if("on the node's own disk, ${disk}, published whole", when="site.node_local"),
        fine_if(
            "in /tmp of the node, unless it sets SLURM_TMPDIR; published whole", when=lambda f: f.temporary is None
        ),
        fine_if(
            "in TMPDIR={temporary.path} ({temporary.filesystem}), published whole",
            when=lambda f: not f.temporary.shared,
        ),
        problem_if(
            "TMPDIR={temporary.path} is {temporary.filesystem}: a live database (WAL) is not safe there",
            "export TMPDIR=/tmp   (or leave run.live_mode=local out)",
            lambda f: f.live_mode == "local",
        ),
        warning_if(
            "TMPDIR={temporary.path} is {temporary.filesystem}, where WAL is not safe: live files would be in"
            " --out, in a slower mode",
            "unset TMPDIR   (in the job script, before badcjobs)",
        ),
    ),
)


# --- this machine -----------------------------------------------------------------------------------------------------


def _gpus(facts: PreflightFacts) -> Cases:
    if gpus := facts.gpus:
        kinds = ", ".join(sorted(set(gpus.names)))
        yield {"said": f"{len(gpus.names)} here ({kinds}), read through {gpus.backend}"}


def _clocks(facts: PreflightFacts) -> Cases:
    """Compare other clocks with this machine's: times of tasks are compared with each other."""
    under = f"the filesystem under {facts.out.path}" if facts.out else ""
    for place, whose in ((facts.out, under), (facts.slurm, "Slurm's controller")):
        if place is not None and place.skew_s is not None:
            apart_s, direction = abs(place.skew_s), "ahead of" if place.skew_s > 0 else "behind"
            severity = WARNING if apart_s < _SKEW_BAD_S else PROBLEM
            yield {"whose": f"the clock of {whose}", "apart_s": apart_s, "direction": direction, "severity": severity}


MACHINE = (
    rules("Slurm")(
        fine_if(
            "not on this machine; limits come from the site file alone", when=lambda f: f.slurm is None and f.site.name
        ),
        fine_if("not on this machine; jobs run with submit --cluster local", when=lambda f: f.slurm is None),
        warning_if(
            "not checked: it does not answer ({slurm.trouble})", "scontrol ping", when="slurm.trouble", checked=False
        ),
        fine_if(
            "it answers here; its nodes are not checked: sinfo shows none",
            when=lambda f: f.cluster is None,
            checked=False,
        ),
        fine_if("it answers here"),
    ),
    rules("clock", _clocks)(
        fine_if("{whose} agrees with this machine's ({apart_s:.1f} s apart)", when=lambda f: f.apart_s < _SKEW_SEEN_S),
        Advice(
            "{severity}",
            "{whose} is {apart_s:,.1f} s {direction} this machine's",
            "timedatectl   (is the clock synchronised? report it to the site)",
        ),
    ),
    # Where jobs are submitted from there need not be any GPU.
    rules("GPUs", _gpus)(
        warning_if(
            "{said}; NVML cannot be loaded: fewer metrics, no energy counter ({gpus.why})",
            "python -c 'import pynvml; pynvml.nvmlInit()'   (look for an error)",
            lambda f: f.gpus.names and f.gpus.backend == "nvidia-smi",
        ),
        warning_if(
            "{said}: telemetry would be one gap ({gpus.why})",
            "nvidia-smi   (look for an error; in a container: apptainer exec --nv …)",
            lambda f: f.gpus.names and f.gpus.backend == "none",
        ),
        fine_if("{said}", when="gpus.names"),
        warning_if("this job has none: {gpus.why}", "#SBATCH --gpus-per-node=1", when="gpus.in_job"),
        fine_if(
            "none here, as usual where jobs are submitted from; tasks look for their own ({gpus.why})",
            when="on_cluster",
        ),
        fine_if("none here; workers on the CPU: {cpu_workers} ({gpus.why})", when="cpu_workers"),
        warning_if("none here: {gpus.why}", "badcjobs run … --cpu-workers 2   (or --simulate 2, to try)"),
    ),
)
