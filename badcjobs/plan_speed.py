"""Where the speed of a plan comes from: a number that somebody gives, a job database, or what a probe has found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from badcjobs.config import RunSettings
from badcjobs.errors import BadInput
from badcjobs.job import find_job_database
from badcjobs.learned import subject_of
from badcjobs.out_of_date import merge_again
from badcjobs.plan.speed import NothingMeasured, Speed, speed_of
from badcjobs.plan_probe import choose_probes, probe_line, version_here
from badcjobs.probed import Damaged, default_store, read_probes
from badcjobs.report.headlines import news_words
from badcjobs.store.job_reader import read_job

_SHOWN = 3


def find_speed(
    rate: float | None, origin: Path | None, settings: RunSettings, environ: Mapping[str, str], cwd: Path
) -> Speed:
    """Return the speed; a rate that is given wins over a job's, whose start-up, memory and cores still count.

    ``origin``: a run folder, a job database, or the file of a probe; without one, what probes have found here.
    """
    if rate is not None:
        check_rate(rate)
    measured = None if origin is None else _of(cwd / origin, str(origin), settings, environ, cwd)
    if rate is not None:
        words = "as --rate says" + ("" if measured is None else f"; the rest is {measured.origin}")
        given = Speed(rate, words)
        return (
            given
            if measured is None
            else replace(measured, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=None, curve=(), doubts=())
        )
    return measured or _learned(settings, environ, cwd)


def check_rate(rate: float) -> None:
    """Refuse a rate that is none."""
    if not 0 < rate < math.inf:
        raise BadInput(
            f"--rate {rate:g} is no speed",
            why="it is the hours of audio that one GPU analyses in an hour, a number above 0",
            fix="--rate 400   (badcjobs report RUN says it: audio-hours per GPU-hour)",
        )


def _of(path: Path, name: str, settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> Speed:
    if path.suffix == ".toml":
        return _of_probes(path, name, settings, environ, cwd)
    database = find_job_database(path)
    job = read_job(database)
    try:
        speed = speed_of(job, name)
    except NothingMeasured as error:
        raise BadInput(f"{name} does not say how fast GPUs are", why=str(error), fix=_how(settings)) from error
    if not (news := news_words(job.merged)):
        return speed
    doubt = f"the merge of {name}: {news}; what was done since is not in this speed"
    return replace(speed, doubts=(doubt,), remedy=merge_again(database, job.file_folders, job.merged))


def _how(settings: RunSettings, store: str | None = None) -> str:
    """Return the ways to a speed."""
    probe = probe_line(settings, settings.workers_wanted, store)
    return f"{probe}   (or --from RUN, a run of one task of such audio; or --rate AUDIO_HOURS_PER_GPU_HOUR)"


def _of_probes(path: Path, store: str | None, settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> Speed:
    """Return what a probe of this engine has found; where it has found several things, somebody has to choose.

    ``store``: the file as it was given; None: it is the one in the user's cache.
    """
    subject = subject_of(settings)
    try:
        if not path.exists():
            raise BadInput(f"{path} does not exist", fix=_how(settings, store))
        there = read_probes(path)
        found = [one for one in there if one.key.settings == subject]
    except (Damaged, OSError) as error:
        raise BadInput(f"{path} cannot be used", why=str(error), fix=_how(settings, store)) from error
    chosen = choose_probes(found, version_here(settings, environ, cwd), settings.workers_wanted)
    if not chosen:
        others = sorted({one.key.settings for one in there if one.key.settings != subject})
        why = "\n".join([f"looked for: {subject}", *(f"it has: {one}" for one in others[:_SHOWN])])
        what = f"{path} has no finished probe of this engine with these options"
        raise BadInput(what, why=why, fix=_how(settings, store))
    if len(chosen) > 1:
        said = [f"{one.device}: {one.speed.audio_hours_per_gpu_hour:,.1f}" for one in chosen]
        raise BadInput(
            f"{path} knows the speed of {len(chosen)} models of GPU, each at its best length", why="\n".join(said),
            fix="the same command with the --rate of the one that you will get",
        )  # fmt: skip
    remedy = probe_line(settings, settings.workers_wanted or chosen[0].workers, store)
    return replace(chosen[0].speed, remedy=remedy)


def _learned(settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> Speed:
    store = default_store(environ)
    if store is not None and store.exists():
        return _of_probes(store, None, settings, environ, cwd)
    raise BadInput(
        "how fast is a GPU? Nobody has measured it",
        why=f"there is neither --from nor --rate, and no probe of this engine ({subject_of(settings)}) is known here",
        fix=_how(settings),
    )
