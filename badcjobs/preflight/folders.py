"""Judges places: where results go, where the job is submitted from, what lies on which filesystem, whose clock."""

from __future__ import annotations

import math
import posixpath
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from badcjobs.preflight.facts import FolderFacts, ScriptFacts
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.preflight.site import Site

FILES_PER_TASK = 10  # what one attempt leaves at most, by contract
_FILES_PER_JOB = 10  # run.toml, job.sqlite, report.html, …
_LITTLE_ROOM_BYTES = 2**30
_SKEW_SEEN_S, _SKEW_BAD_S = 2.0, 60.0


def judge_out(out: FolderFacts, site: Site | None, home: str, *, on_cluster: bool) -> Iterator[Finding]:
    """Judge the folder for the results, from here and from the compute nodes."""
    elsewhere = f"--out {_example(site)}"
    if out.refusal is not None:
        yield problem("out", f"{out.path} cannot be written here: {out.refusal}", elsewhere)
    if (rule := below_any(out.real, site.read_only, home) if site else None) is not None:
        assert site is not None
        where = _seen_as(out)
        yield problem("out", f"{where} is below {rule}, which compute nodes of {site.name} cannot write", elsewhere)
    elif site and site.writable and below_any(out.real, site.writable, home) is None:
        only = " and ".join(site.writable)
        text = f"{_seen_as(out)} is not below {only}, the only shared place that jobs on {site.name} can write"
        yield problem("out", text, elsewhere)
    elif on_cluster and not out.shared and not (site and site.writable):  # the site file knows its own folders
        text = f"{_seen_as(out)} is on a disk of this machine ({out.filesystem}), which other nodes may not see"
        yield warning("out", text, f"{elsewhere}   (a folder that all nodes see)")
    elif out.refusal is None:
        made = ", and will be made" if out.missing else ""
        yield fine("out", f"{_seen_as(out)} can be written here ({out.filesystem}){made}")
    yield from _judge_clock(out)
    if out.free_bytes is not None and out.free_bytes < _LITTLE_ROOM_BYTES:
        text = f"only {out.free_bytes / 2**20:,.0f} MiB are free where {out.path} lies"
        yield warning("room", text, f"df -h {out.path}   (or {elsewhere})")


def judge_files(out: FolderFacts | None, site: Site | None, tasks: int) -> Iterator[Finding]:
    """Compare the files that a run leaves with the quota and with what the filesystem has left."""
    most = tasks * FILES_PER_TASK + _FILES_PER_JOB
    said = f"{tasks:,} tasks × {FILES_PER_TASK} files + {_FILES_PER_JOB} = {most:,} files at most"
    limits = []
    if site and site.files:
        limits.append((site.files, f"the quota of {site.name}"))
    if out and out.free_files is not None:
        limits.append((out.free_files, "what its filesystem has left"))
    if not limits:
        yield fine("files", f"{said}; nobody says how many are allowed")
        return
    limit, whose = min(limits)
    if most > limit:
        fewer = max(1, (limit - _FILES_PER_JOB) // FILES_PER_TASK)
        yield problem("files", f"{said}, but {whose} is {limit:,}", f"#SBATCH --array=0-{fewer - 1}")
    else:
        yield fine("files", f"{said}; {whose} is {limit:,}")


def judge_submit(submit: FolderFacts, site: Site | None, home: str, script: ScriptFacts | None) -> Iterator[Finding]:
    """Judge the folder that the job is submitted from, and where Slurm would write its log."""
    go = f"cd {_example(site)} && sbatch …"
    refused = below_any(submit.real, site.no_submit, home) if site else None
    if site and refused is not None:
        yield problem("submit folder", f"{site.name} refuses jobs from below {refused}; this is {submit.path}", go)
    elif site and site.no_submit:
        yield fine("submit folder", f"{site.name} takes jobs from {submit.path}")
    if script is None or site is None:
        return
    log = posixpath.join(submit.real, script.chdir or "", script.output or "slurm-%A_%a.out")
    yield from _judge_log(posixpath.normpath(log), site, home)


def _judge_log(log: str, site: Site, home: str) -> Iterator[Finding]:
    fix = f"#SBATCH --output={_example(site)}/%x-%A_%a.log"
    rule = below_any(log, site.read_only, home)
    if rule is not None:
        text = f"Slurm would write {log}, below {rule}, which compute nodes cannot write: the job fails without a word"
        yield problem("log folder", text, fix)
    elif site.writable and not log.startswith("/dev/") and below_any(log, site.writable, home) is None:
        text = f"Slurm would write {log}, which is not below {' or '.join(site.writable)}: nobody may find it again"
        yield warning("log folder", text, fix)


def judge_log_folder(folder: FolderFacts, script: ScriptFacts) -> Iterator[Finding]:
    """Judge whether the folder of Slurm's log is there: where it is not, no task comes as far as its first line."""
    if folder.missing:
        text = f"{script.name} writes its log into {folder.path}, which is not there: Slurm does not make it"
        details = ("every task would fail without a word",)
        yield problem("log folder", text, f"mkdir -p {shlex.quote(folder.path)}", details)


def judge_live(temporary: FolderFacts | None, site: Site | None, *, live_mode: str) -> Iterator[Finding]:
    """Judge where live databases would lie: SQLite's WAL is safe on a disk of the node alone.

    ``temporary`` is what TMPDIR names here; sbatch hands the variable on to the job.
    """
    if site and site.node_local:
        yield fine("live files", f"on the node's own disk, ${site.node_local.lstrip('$')}, published whole")
    elif temporary is None:
        yield fine("live files", "in /tmp of the node, unless it sets SLURM_TMPDIR; published whole")
    elif not temporary.shared:
        yield fine("live files", f"in TMPDIR={temporary.path} ({temporary.filesystem}), published whole")
    elif live_mode == "local":
        text = f"TMPDIR={temporary.path} is {temporary.filesystem}: a live database (WAL) is not safe there"
        yield problem("live files", text, "export TMPDIR=/tmp   (or leave --live-mode local out)")
    else:
        text = (
            f"TMPDIR={temporary.path} is {temporary.filesystem}, where WAL is not safe: live files would lie in --out,"
            " in the slower safe mode"
        )
        yield warning("live files", text, "unset TMPDIR   (in the job script, before badcjobs)")


def _judge_clock(out: FolderFacts) -> Iterator[Finding]:
    if out.skew_s is not None:
        yield from judge_skew(out.skew_s, f"the clock of the filesystem under {out.path}")


def judge_skew(skew_s: float, whose: str) -> Iterator[Finding]:
    """Judge another clock by its distance from this machine's: times of tasks are compared with each other."""
    apart_s = math.fabs(skew_s)
    if apart_s < _SKEW_SEEN_S:
        yield fine("clock", f"{whose} agrees with this machine's ({apart_s:.1f} s apart)")
        return
    text = f"{whose} is {apart_s:,.1f} s {'ahead of' if skew_s > 0 else 'behind'} this machine's"
    fix = "timedatectl   (is the clock synchronised? tell the administrators)"
    yield problem("clock", text, fix) if apart_s >= _SKEW_BAD_S else warning("clock", text, fix)


def below_any(path: str, folders: tuple[str, ...], home: str) -> str | None:
    """Return the first of a site's folders that a path lies in; ``~`` is the user's home."""
    for folder in folders:
        full = home + folder[1:] if folder == "~" or folder.startswith("~/") else folder
        if PurePosixPath(path).is_relative_to(full):
            return folder if folder == full else f"{folder} ({full})"
    return None


def _seen_as(folder: FolderFacts) -> str:
    return folder.path if folder.path == folder.real else f"{folder.path} (really {folder.real})"


def _example(site: Site | None) -> str:
    return site.example if site and site.example else "/a/folder/that/all/nodes/can/write"
