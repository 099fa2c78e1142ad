"""Where the speed of a plan comes from: a number that somebody gives, a job database, or what a probe has found."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.model import FITS, Probed, ProbeKey, ProbeResult
from badcjobs.processes import SubprocessLauncher
from badcjobs.report.completeness import merge_again
from badcjobs.report.headlines import news_words
from badcjobs.report.job import find_job_database
from badcjobs.report.words import count
from badcjobs.settings import RunSettings
from badcjobs.store.read_job import read_job
from badcjobs.store.read_model import JobFacts, TaskFacts
from badcjobs.workers.engines import choose_engine
from badcjobs.workers.learned import default_store, is_same_memory, read_probes, subject_of

_CPU = "cpu"  # what a probe without a device calls it
_USUAL = "hawkears"  # the engine where none is said
_SHOWN = 3
_ENOUGH_S = 60.0  # of work; a task that had less says little about its node
_SLOWEST_PERCENT = 5
Curve = tuple[tuple[float, float], ...]  # length of the chunks in seconds, times real time; the shortest first
ASSUMED_START_UP_S = 300.0  # models read from a shared filesystem by many tasks at once


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU gets done once it works; None: nobody has measured it."""

    audio_hours_per_gpu_hour: float
    origin: str  # in words
    start_up_s: float | None = None  # of a task, from its start to the first chunk; only one in twenty took longer
    slowness: float | None = None  # so many times as slow as all together were the slowest twentieth of the tasks
    tasks: int = 0  # that was measured on
    gpu_hours: float | None = None
    devices: tuple[str, ...] = ()
    memory_bytes_per_gpu: float | None = None  # the most of any task
    cores_per_gpu: float | None = None  # busy on average, the most of any task
    chunk_s: float | None = None  # the mean length of the chunks that it is the speed of
    curve: Curve = ()  # a probe's trials
    lean_curve: Curve = ()  # with one thread, and nothing beside it
    safe_s: float | None = None  # longer chunks are done with one thread; None: nothing was too long, or nobody tried
    lean_safe_s: float | None = None  # and still longer ones in pieces
    best_s: float | None = None  # the best length that is safe
    doubts: tuple[str, ...] = ()  # why it may be the speed of something else
    remedy: str | None = None  # against these doubts, a line to paste: measure it anew; None: nobody knows one


def find_speed(
    rate: float | None, origin: Path | None, settings: RunSettings, environ: Mapping[str, str], cwd: Path
) -> Speed:
    """Return the speed; a rate that is given wins over a job's, whose start-up, memory and cores still count.

    ``origin``: a run folder, a job database, or the file of a probe; without one, what probes have found here.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise BadInput(
            f"--rate {rate:g} is no speed",
            why="it is the hours of audio that one GPU analyses in an hour, a number above 0",
            fix="--rate 400   (badcjobs report RUN says it: audio-hours per GPU-hour)",
        )
    measured = None if origin is None else _of(cwd / origin, str(origin), settings, environ, cwd)
    if rate is None:
        return measured or _learned(settings, environ, cwd)
    if measured is None:
        return Speed(rate, "as --rate says")
    words = f"as --rate says; the rest is {measured.origin}"
    return replace(measured, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=None, curve=(), doubts=())


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
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be used", why=str(error), fix=_how(settings, store)) from error
    chosen = choose_probes(found, version_here(settings, environ, cwd), settings.workers_wanted)
    if not chosen:
        others = sorted({one.key.settings for one in there if one.key.settings != subject})
        why = "\n".join([f"looked for: {subject}", *(f"it has: {one}" for one in others[:_SHOWN])])
        what = f"{path} has no finished probe of this engine with these options"
        raise BadInput(what, why=why, fix=_how(settings, store))
    if len(chosen) > 1:
        said = [f"{device}: {speed.audio_hours_per_gpu_hour:,.1f}" for device, _, speed in chosen]
        raise BadInput(
            f"{path} knows the speed of {len(chosen)} models of GPU, each at its best length", why="\n".join(said),
            fix="the same command with the --rate of the one that you will get",
        )  # fmt: skip
    _, key, speed = chosen[0]
    return replace(speed, remedy=probe_line(settings, settings.workers_wanted or key.workers, store))


def _learned(settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> Speed:
    store = default_store(environ)
    if store is not None and store.exists():
        return _of_probes(store, None, settings, environ, cwd)
    raise BadInput(
        "how fast is a GPU? Nobody has measured it",
        why=f"there is neither --from nor --rate, and no probe of this engine ({subject_of(settings)}) is known here",
        fix=_how(settings),
    )


# --- as a job has measured it -----------------------------------------------------------------------------------------


class NothingMeasured(Exception):
    """A job says nothing about the speed of GPUs; the text says why."""


def speed_of(job: JobFacts, name: str) -> Speed:
    """Return what a job has measured; start-up is counted apart, so that a short first job is no slander."""
    start_up_s = _start_ups(job)
    worked = [task for task in job.tasks if task.devices and task.audio_s > 0]
    if not worked:
        why = "none of its tasks had a GPU" if any(task.audio_s > 0 for task in job.tasks) else "nothing is done in it"
        raise NothingMeasured(why)
    work_s = {task.name: max(task.gpu_s - sum(start_up_s[task.name]), 0.001) for task in worked}
    total_s = sum(work_s.values())
    rate = sum(task.audio_s for task in worked) / total_s
    devices = Counter(device.name or "GPU" for device in job.devices)
    return Speed(
        audio_hours_per_gpu_hour=rate,
        origin=f"measured in {name}",
        start_up_s=_rank([max(times) for times in start_up_s.values() if times], 95),
        slowness=_slowness(worked, work_s, rate),
        tasks=len(worked),
        gpu_hours=total_s / 3600,
        devices=tuple(f"{many} × {model}" for model, many in sorted(devices.items())),
        memory_bytes_per_gpu=_most([(task.memory_peak_bytes, task.devices or 0) for task in worked]),
        cores_per_gpu=_most([(task.cpu_mean_cores, task.devices or 0) for task in worked]),
        chunk_s=_mean_chunk(worked),
    )


def _start_ups(job: JobFacts) -> Mapping[str, list[float]]:
    """Return for each task how long each of its devices took to its first chunk."""
    found: dict[str, list[float]] = defaultdict(list)
    for device in job.devices:
        if "start_up" in device.states:
            found[device.task].append(device.states["start_up"].total_s)
    return found


def _slowness(tasks: Sequence[TaskFacts], work_s: Mapping[str, float], rate: float) -> float | None:
    """Return how many times as slow the slowest twentieth was; None: one task has no spread."""
    long_enough = [task for task in tasks if work_s[task.name] >= _ENOUGH_S * (task.devices or 0)]
    if len(long_enough) < 2:
        return None
    slowest = _rank([task.audio_s / work_s[task.name] for task in long_enough], _SLOWEST_PERCENT)
    return None if slowest is None else max(1.0, rate / slowest)


def _mean_chunk(tasks: Sequence[TaskFacts]) -> float | None:
    done = sum(task.done for task in tasks)
    return sum(task.audio_s for task in tasks) / done if done else None


def _rank(values: Sequence[float], percent: int) -> float | None:
    """Return the nearest rank."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _most(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    return max((value / devices for value, devices in pairs if value is not None), default=None)


# --- as a probe has found it ------------------------------------------------------------------------------------------


def probe_line(settings: RunSettings, workers: int | None, store: str | None) -> str:
    """Return the command whose result a plan with these settings would take; somebody has to put in the AUDIO.

    ``workers`` None: any number will do; ``store`` None: the file in the user's cache.
    """
    options = {
        "--engine": None if settings.engine == _USUAL else settings.engine,
        "--command": settings.command,
        "--hawkears-python": settings.hawkears_python,
        "--hawkears-root": settings.hawkears_root,
        "--workers-per-gpu": None if workers in (None, 1) else str(workers),
        "--store": store,
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    arguments = [f"--engine-arg={one}" for one in settings.engine_args]
    return shlex.join(["badcjobs", "probe", "AUDIO", *words, *arguments])


def version_here(settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> str | None:
    """Return the version of the engine, as far as its files tell it; None: it is not here, on a login node perhaps.

    Nothing is started: of HawkEars 2 the models are known, and its release is not.
    """
    engine = choose_engine(
        settings.engine,
        args=settings.engine_args,
        command=settings.command,
        hawkears_python=settings.hawkears_python,
        hawkears_root=None if settings.hawkears_root is None else cwd / settings.hawkears_root,
        allow_cpu=True,
        environ=environ,
        launcher=SubprocessLauncher(""),
        clock=SystemClock(),
    )
    version = getattr(engine, "version", None)
    return version and str(version)


def choose_probes(
    probes: Sequence[Probed], version: str | None, workers: int | None
) -> list[tuple[str, ProbeKey, Speed]]:
    """Return what counts for each model of device that probes have found a speed of; ``workers`` None: any number."""
    known = [one for one in probes if one.key.gpu != _CPU and one.result is not None and one.result.times_real_time]
    chosen = [_choose(group, version, workers) for group in _by_device(known)]
    names = [key.gpu for key, _ in chosen]
    labelled = [(_device_words(key) if names.count(key.gpu) > 1 else key.gpu, key, speed) for key, speed in chosen]
    return sorted(labelled, key=lambda one: one[0])


def _by_device(probes: Sequence[Probed]) -> list[list[Probed]]:
    groups: list[list[Probed]] = []
    for one in probes:
        for group in groups:
            of = group[0].key
            if of.gpu == one.key.gpu and is_same_memory(of.memory_bytes, one.key.memory_bytes):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _choose(probes: Sequence[Probed], version: str | None, workers: int | None) -> tuple[ProbeKey, Speed]:
    """Return the newest of those that fit, with what there is to say where none fits, or several do."""
    of_version = [one for one in probes if version is None or _is_version(one.key.engine_version, version)] or probes
    fitting = [one for one in of_version if workers is None or one.key.workers == workers] or of_version
    newest = max(fitting, key=lambda one: (one.at or "", str(one.key)))
    doubts = tuple(_doubts(newest.key, [one.key for one in fitting], version, workers))
    assert newest.result is not None  # choose_probes has left the others out
    return newest.key, _speed_of(newest, newest.result, doubts)


def _is_version(probed: str, here: str) -> bool:
    return probed == here or probed.endswith(f", {here}")  # a release before its models


def _doubts(chosen: ProbeKey, among: Sequence[ProbeKey], version: str | None, workers: int | None) -> Iterator[str]:
    if version is not None and not _is_version(chosen.engine_version, version):
        yield f"it is that of {chosen.engine} ({chosen.engine_version}); the one here is another ({version})"
    if workers is not None and chosen.workers != workers:
        yield f"it was measured with {_workers(chosen.workers)}, and the tasks will have {_workers(workers)}"
    others = [_differences(key, chosen) for key in among if key != chosen]
    if others:
        yield f"it is the newest of {len(among)} probes that it could be; not taken: {'; '.join(others)}"


def _differences(key: ProbeKey, chosen: ProbeKey) -> str:
    pairs = [
        (f"version {key.engine_version}", key.engine_version != chosen.engine_version),
        (_workers(key.workers), key.workers != chosen.workers),
        (_at_once(key.chunks_at_once), key.chunks_at_once != chosen.chunks_at_once),
    ]
    return ", ".join(words for words, differs in pairs if differs) or _device_words(key)


def _speed_of(probed: Probed, result: ProbeResult, doubts: tuple[str, ...]) -> Speed:
    """Return the speed at the best length, the trials of others, and how long chunks may be."""
    key, curve = probed.key, _curve(probed, lean=False)
    held = [trial.host_peak_bytes for trial in probed.trials if trial.outcome == FITS and trial.host_peak_bytes]
    what = f"{key.engine} ({key.engine_version}), {_workers(key.workers)}, {_at_once(key.chunks_at_once)}"
    return Speed(
        audio_hours_per_gpu_hour=result.times_real_time or 0.0,  # of one device, with all its workers
        origin=f"as a probe of {key.gpu} has found with {what}" + ("" if curve else ", at its best length"),
        devices=(key.gpu,),
        memory_bytes_per_gpu=max(held, default=None),
        chunk_s=result.best_s,
        curve=curve,
        lean_curve=_curve(probed, lean=True),
        safe_s=None if result.too_long_s is None else result.safe_s,
        lean_safe_s=None if result.lean_too_long_s is None else result.lean_safe_s,
        best_s=result.best_s,
        doubts=doubts,
    )


def _curve(probed: Probed, *, lean: bool) -> Curve:
    fitting = [trial for trial in probed.trials if trial.outcome == FITS and trial.lean == lean]
    return tuple(sorted((trial.length_s, trial.times_real_time) for trial in fitting if trial.times_real_time))


def _device_words(key: ProbeKey) -> str:
    return f"{key.gpu}, {'memory unknown' if key.memory_bytes is None else f'{key.memory_bytes / 2**30:.1f} GiB'}"


def _workers(many: int) -> str:
    return f"{count(many, 'worker')} per GPU"


def _at_once(many: int) -> str:
    return f"{count(many, 'chunk')} at once"


# --- chunks of other lengths ------------------------------------------------------------------------------------------


def at_length(speed: Speed, chunk_s: float) -> Speed:
    """Return the speed for chunks of a length, where trials of several are known; else the speed as it is."""
    if not speed.curve or chunk_s <= 0:
        return speed
    if speed.safe_s is not None and chunk_s > speed.safe_s and speed.lean_curve:
        piece_s = min(chunk_s, speed.lean_safe_s or chunk_s)
        rate, how = _read_off(speed.lean_curve, piece_s)
        pieces = f" in pieces of {piece_s:g} s" if piece_s < chunk_s else ""
        how = f"longer than is safe, so with one thread{pieces}: {how}"
    else:
        rate, how = _read_off(speed.curve, chunk_s)
    words = f"{speed.origin}, for chunks of {chunk_s:,.3g} s ({how})"
    return replace(speed, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=chunk_s)


def is_below(curve: Curve, chunk_s: float) -> bool:
    """Say whether no trial had chunks as short as that."""
    return bool(curve) and chunk_s < curve[0][0]


def _read_off(curve: Curve, chunk_s: float) -> tuple[float, str]:
    if is_below(curve, chunk_s):
        return _extrapolated(curve, chunk_s)
    for (short_s, slow), (long_s, fast) in pairwise(curve):
        if short_s < chunk_s < long_s:
            part = math.log(chunk_s / short_s) / math.log(long_s / short_s)
            return slow + part * (fast - slow), f"between trials of {short_s:g} and {long_s:g} s"
    length_s, rate = next(trial for trial in reversed(curve) if trial[0] <= chunk_s)
    return rate, "tried" if length_s == chunk_s else f"no faster than the longest trial, of {length_s:g} s"


def _extrapolated(curve: Curve, chunk_s: float) -> tuple[float, str]:
    """Reckon with a fixed cost of each chunk; one trial alone cannot tell it apart, so all its time counts as that."""
    first_s, first_rate = curve[0]
    took_s, per_second = first_s / first_rate, 0.0
    if len(curve) > 1:
        next_s, next_rate = curve[1]
        per_second = max(0.0, (next_s / next_rate - took_s) / (next_s - first_s))
    per_chunk = max(0.0, took_s - per_second * first_s)
    rate = chunk_s / (per_chunk + per_second * chunk_s) if per_chunk else first_rate
    return rate, f"shorter than any trial: reckoned with {per_chunk:.2g} s for each chunk besides its audio"
