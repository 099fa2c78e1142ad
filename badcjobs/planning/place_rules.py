"""What ``check`` says about places and this machine: folders, files, live databases, clocks, GPUs, Slurm."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath

from badcjobs.planning.findings import Cases, RuleSet, always, fine_if, one_case, problem_if, warning_if
from badcjobs.planning.preflight_facts import PreflightFacts

FILES_PER_TASK = 10  # what one attempt leaves at most, by contract
_FILES_PER_JOB = 10  # run.toml, job.sqlite, report.html, …
_LITTLE_ROOM_BYTES = 2**30
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
            "seen": out.path if out.path == out.real else f"{out.path} (really {out.real})",
            "read_only": below_any(out.real, site.read_only, facts.home),
            "writable": below_any(out.real, site.writable, facts.home),
        }


def _skew(skew_s: float | None, whose: str) -> Cases:
    """Return the distance of another clock from this machine's: times of tasks are compared with each other."""
    if skew_s is not None:
        yield {"apart_s": abs(skew_s), "whose": whose, "direction": "ahead of" if skew_s > 0 else "behind"}


def _clock_of_out(facts: PreflightFacts) -> Cases:
    return _skew(facts.out.skew_s, f"the clock of the filesystem under {facts.out.path}") if facts.out else ()


_CLOCK = (
    fine_if(lambda f: f.apart_s < _SKEW_SEEN_S, "{whose} agrees with this machine's ({apart_s:.1f} s apart)"),
    warning_if(
        lambda f: f.apart_s < _SKEW_BAD_S,
        "{whose} is {apart_s:,.1f} s {direction} this machine's",
        "timedatectl   (is the clock synchronised? tell the administrators)",
    ),
    problem_if(
        always,
        "{whose} is {apart_s:,.1f} s {direction} this machine's",
        "timedatectl   (is the clock synchronised? tell the administrators)",
    ),
)
OUT = (
    RuleSet(
        "out",
        _out,
        problem_if(
            lambda f: f.out.refusal is not None,
            "{out.path} cannot be written here: {out.refusal}",
            "--out {site.example}",
        ),
    ),
    RuleSet(
        "out",
        _out,
        problem_if(
            lambda f: f.read_only is not None,
            "{seen} is below {read_only}, which compute nodes of {site.name} cannot write",
            "--out {site.example}",
        ),
        problem_if(
            lambda f: f.site.writable and f.writable is None,
            "{seen} is not below {site.writable:and}, the only shared place that jobs on {site.name} can write",
            "--out {site.example}",
        ),
        warning_if(
            lambda f: f.on_cluster and not f.out.shared and not f.site.writable,
            "{seen} is on a disk of this machine ({out.filesystem}), which other nodes may not see",
            "--out {site.example}   (a folder that all nodes see)",
        ),
        fine_if(
            lambda f: f.out.refusal is None and f.out.missing,
            "{seen} can be written here ({out.filesystem}), and will be made",
        ),
        fine_if(lambda f: f.out.refusal is None, "{seen} can be written here ({out.filesystem})"),
    ),
    RuleSet("clock", _clock_of_out, *_CLOCK),
    RuleSet(
        "room",
        _out,
        warning_if(
            lambda f: f.out.free_bytes is not None and f.out.free_bytes < _LITTLE_ROOM_BYTES,
            "only {out.free_bytes:memory} are free where {out.path} lies",
            "df -h {out.path}   (or --out {site.example})",
        ),
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
    said = f"{tasks:,} tasks × {FILES_PER_TASK} files + {_FILES_PER_JOB} = {most:,} files at most"
    fitting = max(1, ((limit or 0) - _FILES_PER_JOB) // FILES_PER_TASK)
    yield {"limit": limit, "whose": whose, "most": most, "said": said, "fitting": fitting}


def _log(facts: PreflightFacts) -> Cases:
    """Find where Slurm would write its log."""
    script, site = facts.script, facts.site
    if script is not None and facts.submit is not None:
        output = script.options.get("output") or "slurm-%A_%a.out"
        log = posixpath.normpath(posixpath.join(facts.submit.real, script.options.get("chdir", ""), output))
        read_only, writable = (below_any(log, some, facts.home) for some in (site.read_only, site.writable))
        yield {"log": log, "read_only": read_only, "writable": writable}


def _submit(facts: PreflightFacts) -> Cases:
    if facts.submit is not None:
        yield {"refused": below_any(facts.submit.real, facts.site.no_submit, facts.home)}


def _temporary(facts: PreflightFacts) -> Cases:
    """Say whether TMPDIR counts: sbatch hands it on, unless the script sets its own."""
    return () if facts.script and facts.script.sets_tmpdir else ({"disk": (facts.site.node_local or "").lstrip("$")},)


PLACES = (
    RuleSet(
        "files",
        _files,
        fine_if(lambda f: f.limit is None, "{said}; nobody says how many are allowed"),
        problem_if(
            lambda f: f.most > f.limit, "{said}, but {whose} is {limit:,}", "#SBATCH --array=0-{fitting:before}"
        ),
        fine_if(always, "{said}; {whose} is {limit:,}"),
    ),
    RuleSet(
        "submit folder",
        _submit,
        problem_if(
            lambda f: f.refused is not None,
            "{site.name} refuses jobs from below {refused}; this is {submit.path}",
            "cd {site.example} && sbatch …",
        ),
        fine_if(lambda f: f.site.no_submit, "{site.name} takes jobs from {submit.path}"),
    ),
    RuleSet(
        "log folder",
        _log,
        problem_if(
            lambda f: f.read_only is not None,
            "Slurm would write {log}, below {read_only}, which compute nodes cannot write: the job fails without a"
            " word",
            "#SBATCH --output={site.example}/%x-%A_%a.log",
        ),
        warning_if(
            lambda f: f.site.writable and not f.log.startswith("/dev/") and f.writable is None,
            "Slurm would write {log}, which is not below {site.writable:or}: it may be lost",
            "#SBATCH --output={site.example}/%x-%A_%a.log",
        ),
    ),
    RuleSet(
        "log folder",
        lambda facts: [{"folder": folder} for folder in facts.log_folders],
        problem_if(
            lambda f: f.folder.missing,
            "{script.name} writes its log into {folder.path}, which is not there: Slurm does not make it, and every"
            " task would fail without a word",
            "mkdir -p {folder.path:quoted}",
        ),
    ),
    # SQLite's WAL is safe on a disk of the node alone.
    RuleSet(
        "live files",
        _temporary,
        fine_if(lambda f: f.site.node_local, "on the node's own disk, ${disk}, published whole"),
        fine_if(lambda f: f.temporary is None, "in /tmp of the node, unless it sets SLURM_TMPDIR; published whole"),
        fine_if(
            lambda f: not f.temporary.shared, "in TMPDIR={temporary.path} ({temporary.filesystem}), published whole"
        ),
        problem_if(
            lambda f: f.live_mode == "local",
            "TMPDIR={temporary.path} is {temporary.filesystem}: a live database (WAL) is not safe there",
            "export TMPDIR=/tmp   (or leave --live-mode local out)",
        ),
        warning_if(
            always,
            "TMPDIR={temporary.path} is {temporary.filesystem}, where WAL is not safe: live files would lie in"
            " --out, in the slower safe mode",
            "unset TMPDIR   (in the job script, before badcjobs)",
        ),
    ),
)


# --- this machine -----------------------------------------------------------------------------------------------------


def _gpus(facts: PreflightFacts) -> Cases:
    if gpus := facts.gpus:
        kinds = ", ".join(sorted(set(gpus.names)))
        yield {"said": f"{len(gpus.names)} here ({kinds}), read through {gpus.backend}"}


def _clock_of_slurm(facts: PreflightFacts) -> Cases:
    return _skew(facts.slurm.skew_s if facts.slurm else None, "the clock of Slurm's controller")


MACHINE = (
    RuleSet(
        "Slurm",
        one_case,
        fine_if(lambda f: f.slurm is None and f.site.name, "not on this machine; limits come from the site file alone"),
        fine_if(lambda f: f.slurm is None, "not on this machine; jobs run with submit --cluster local"),
        warning_if(lambda f: f.slurm.trouble, "it does not answer: {slurm.trouble}", "scontrol ping"),
        fine_if(always, "it answers here"),
    ),
    RuleSet("clock", _clock_of_slurm, *_CLOCK),
    # Where jobs are submitted from there need not be any GPU.
    RuleSet(
        "GPUs",
        _gpus,
        warning_if(
            lambda f: f.gpus.names and f.gpus.backend == "nvidia-smi",
            "{said}, for NVML cannot be loaded: fewer metrics, no energy counter ({gpus.why})",
            "python -c 'import pynvml; pynvml.nvmlInit()'   (what does it say?)",
        ),
        warning_if(
            lambda f: f.gpus.names and f.gpus.backend == "none",
            "{said}: telemetry would be one gap ({gpus.why})",
            "nvidia-smi   (what does it say? in a container: apptainer exec --nv …)",
        ),
        fine_if(lambda f: f.gpus.names, "{said}"),
        warning_if(lambda f: f.gpus.in_job, "this job has none: {gpus.why}", "#SBATCH --gpus-per-node=1"),
        fine_if(
            lambda f: f.on_cluster,
            "none here, as usual where jobs are submitted from; tasks look for their own ({gpus.why})",
        ),
        warning_if(always, "none here: {gpus.why}", "badcjobs run … --cpu-workers 2   (or --simulate 2, to try)"),
    ),
)
