"""The speed that a plan uses: from --rate, from a job database, or from a probe."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.masking import mask_words
from badcjobs.model import FITS, Probed, ProbeKey, fitting_workers, guess_worker_bytes
from badcjobs.paths import shell_line, user_cache
from badcjobs.planning.probe_search import device_words, setup_words
from badcjobs.processes import Launcher
from badcjobs.report.completeness import merge_again
from badcjobs.report.job import find_job_database
from badcjobs.report.rules import without_unused
from badcjobs.report.verdict import news_words
from badcjobs.report.words import count
from badcjobs.settings import RunSettings, option_words
from badcjobs.store.read_job import NO_DATABASE, read_job
from badcjobs.store.read_model import JobFacts, TaskFacts
from badcjobs.store.read_tasks import parse_settings
from badcjobs.workers.engines import choose_engine
from badcjobs.workers.learned import LESSONS, Learned, default_store, is_same_memory, read_probes, subject_of

_CPU = "cpu"  # what a probe without a device calls it
_USUAL = "hawkears"  # the default engine
_SHOWN = 3
_ENOUGH_S = 60.0  # of work; shorter tasks say little about their node
_SLOWEST_PERCENT = 5
_MANY_FAILED = 0.1  # of the GPU time
Curve = tuple[tuple[float, float], ...]  # length of the chunks in seconds, times real time; the shortest first
ASSUMED_START_UP_S = 300.0  # models read from a shared filesystem by many tasks at once


class Measured(NamedTuple):
    """What was measured with a number of workers on one GPU; None: it was not."""

    workers: int
    rate: float  # audio-hours per GPU-hour, of all of them, without start-up
    chunk_s: float | None = None
    memory_bytes: float | None = None  # main memory for one GPU, the most of any task
    device_bytes: float | None = None  # memory in use on one GPU: the most of any of the smallest model
    cores: float | None = None  # busy on average for one GPU, the most of any task
    power_w: float | None = None  # the mean of a GPU
    idle_w: float | None = None  # the least of a GPU
    cut_s: float | None = None  # the length that recordings were cut to; 0: they were not; None: chunk_s


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of one GPU, without start-up; None: not measured."""

    audio_hours_per_gpu_hour: float
    origin: str  # in words
    start_up_s: float | None = None  # of a task, from its start to the first chunk; only one in twenty took longer
    slowness: float | None = None  # of the slowest twentieth of the tasks, compared with all of their point together
    tasks: int = 0  # that was measured on
    gpu_hours: float | None = None
    memory_bytes: int | None = None  # of a device
    devices: tuple[str, ...] = ()
    points: tuple[Measured, ...] = ()  # with several numbers of workers; the first is what this is the speed of
    bytes_per_s: float = 0.0  # main memory of a worker for each second of a chunk, assumed; 0: not known
    given: bool = False  # by --rate
    chunk_s: float | None = None  # the mean length of the chunks that it is the speed of
    curve: Curve = ()  # a probe's trials
    lean_curve: Curve = ()  # with one thread, and nothing beside it
    safe_s: float | None = None  # longer chunks are done with one thread; None: nothing was too long, or not tried
    lean_safe_s: float | None = None  # and still longer ones in pieces
    best_s: float | None = None  # the best length that is safe
    doubts: tuple[str, ...] = ()  # reasons why it may not apply
    remedy: str | None = None  # a line to paste that measures again; None: not known

    @property
    def most_workers(self) -> int:
        """The most workers per GPU that were measured."""
        return max((one.workers for one in self.points), default=0)

    def device_room(self, chunk_s: float | None) -> float:
        """Return how many workers the memory of a device holds with such chunks; infinite: not known."""
        near_s = chunk_s or 3600.0  # a whole recording
        known = [one for one in self.points if one.device_bytes]
        if not self.memory_bytes or not known:
            return math.inf
        # With fewer workers, each has more of what is needed once.
        one = min(known, key=lambda one: (abs((one.chunk_s or near_s) - near_s), -one.workers))
        return fitting_workers(self.memory_bytes, (one.device_bytes or 0.0) / one.workers)


def find_speed(
    rate: float | None, origin: Path | None, settings: RunSettings, environ: Mapping[str, str], cwd: Path
) -> Speed:
    """Return the speed; a rate that is given wins over a job's, whose start-up, memory and cores still count.

    ``origin``: a run folder, a job database, or the file of a probe; without one, what runs or probes have found here.
    """
    if rate is not None and not 0.001 <= rate <= 1e6:
        raise BadInput(
            f"--rate {rate:g} is not a speed",
            why="it is the hours of audio that one GPU analyses in an hour: from 0.001 to 1,000,000",
            fix="--rate 400   (badcjobs report RUN shows it: audio-hours per GPU-hour)",
        )
    measured, store = None, default_store(environ)
    if origin is not None and origin.suffix == ".toml":
        measured = _of_probes(cwd / origin, str(origin), settings, environ, cwd)
    elif origin is not None:
        measured = _of_job(cwd / origin, str(origin), settings)
    elif rate is None and (measured := _of_lessons(settings, environ)) is None and store is not None and store.exists():
        measured = _of_probes(store, None, settings, environ, cwd)
    if rate is not None and measured is not None:
        words = f"from --rate; the rest is {measured.origin}"
        measured = replace(measured, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=None, curve=(), doubts=())
    elif rate is not None:
        measured = Speed(rate, "from --rate")
    if measured is None:
        engine = subject_of(settings)
        why = f"there is neither --from nor --rate, and no run or probe of this engine ({engine}) is known"
        raise BadInput("no measured speed for this engine", why=why, fix=_how(settings))
    bytes_per_s = guess_worker_bytes(1.0) - guess_worker_bytes(0.0) if settings.engine == _USUAL else 0.0
    return replace(measured, bytes_per_s=bytes_per_s, given=rate is not None)


def _how(settings: RunSettings, store: str | None = None) -> str:
    """Return the ways to a speed."""
    probe = probe_line(settings, settings.workers_wanted, store)
    return f"{probe}   (or --from RUN, a run of one task of such audio; or --rate AUDIO_HOURS_PER_GPU_HOUR)"


def _of_lessons(settings: RunSettings, environ: Mapping[str, str]) -> Speed | None:
    """Return what runs with this engine have learned, the fastest first; None: nothing, or on several models of GPU."""
    cache = user_cache(environ)
    lessons = {} if cache is None else Learned(subject_of(settings), [cache / LESSONS]).every()
    models = {about.partition(",")[0] for about, one in lessons.items() if one.rates}
    points = [
        Measured(int(many), rate, one.chunk_s, *(x and int(many) * x for x in (one.worker_bytes, one.device_bytes)))
        for one in lessons.values()
        for many, rate in one.rates.items()
    ]
    points.sort(key=lambda one: -one.rate)
    if len(models) != 1:
        return None
    return Speed(
        audio_hours_per_gpu_hour=points[0].rate,
        origin=f"learned by earlier runs on {', '.join(models)}",
        memory_bytes=min((one.memory_bytes for one in lessons.values() if one.memory_bytes), default=None),
        devices=(*models,),
        points=tuple(points),
        chunk_s=points[0].chunk_s,
    )


# --- from a job -------------------------------------------------------------------------------------------------------


def _of_job(path: Path, name: str, settings: RunSettings) -> Speed:
    database, mine = find_job_database(path), settings.engine
    try:
        job = read_job(database)
    except DatabaseProblem as error:
        why = f"{error.what}\n--from takes a run folder, its job.sqlite, or the result of a probe (.toml)"
        fix = _how(settings) if error.what.endswith(NO_DATABASE) else error.fix
        raise DatabaseProblem(f"{name} has no speed to plan with", why=why, fix=fix) from error
    if others := sorted({task.engine for task in job.tasks if task.engine} - {mine}):
        what, why = f"{name} ran the engine {' and '.join(others)}; this plan is for {mine}", "speed and memory differ"
        words = shell_line("--", *option_words({"engine": others[0], "command": job.last_settings.get("command")}))
        raise BadInput(what, why=why, fix=f"{words}   (or --from a run of {mine})")
    try:
        speed = speed_of(job, name)
    except ValueError as error:
        raise BadInput(f"{name} has no measured speed of GPUs", why=str(error), fix=_how(settings)) from error
    doubts, theirs, news = [], job.last_settings.get("engine_arg") or [], news_words(job.merged)
    if theirs != mask_words(settings.engine_args):
        doubts.append(f"{name} ran with other options of the engine: {shell_line(*theirs) or 'none'}")
    if (failed := job.failed_gpu_s / sum(task.gpu_s for task in job.tasks)) >= _MANY_FAILED:
        doubts.append(f"{100 * failed:.0f} % of the GPU time of {name} went to chunks that failed")
    if not news:
        return replace(speed, doubts=(*doubts,))
    doubts.append(f"the merge of {name}: {news}; what was done since is not in this speed")
    return replace(speed, doubts=(*doubts,), remedy=merge_again(database, job.file_folders, job.merged))


def speed_of(job: JobFacts, name: str) -> Speed:
    """Return what a job has measured; raise ValueError where that is nothing.

    Start-up is counted separately: in a short first job it is a large part. GPUs without work do not count.
    """
    job = without_unused(job)
    start_up_s: dict[str, list[float]] = defaultdict(list)  # of each task, its devices up to their first chunk
    for device in job.devices:
        if "start_up" in device.states:
            start_up_s[device.task].append(device.states["start_up"].total_s)
    worked = [task for task in job.tasks if task.devices and task.audio_s > 0]
    if not worked:
        done_without = any(task.audio_s > 0 for task in job.tasks)
        raise ValueError("none of its tasks had a GPU" if done_without else "nothing is done in it")
    work_s = {task.name: max(task.gpu_s - sum(start_up_s[task.name]), 0.001) for task in worked}
    memory_bytes = min((one.memory_total_bytes for one in job.devices if one.memory_total_bytes), default=None)
    points = tuple(_points_of(job, worked, work_s, memory_bytes or 0))
    rate = points[0].rate
    rates = {(one.workers, one.cut_s): one.rate for one in points}
    long_enough = [(_set_up(task), task) for task in worked if work_s[task.name] >= _ENOUGH_S * (task.devices or 0)]
    many = Counter(key for key, _ in long_enough)  # one task has no spread
    paces = [task.audio_s / work_s[task.name] / rates[key] for key, task in long_enough if many[key] > 1]
    slowest = _rank(paces, _SLOWEST_PERCENT)
    devices = Counter(device.name or "GPU" for device in job.devices)
    return Speed(
        audio_hours_per_gpu_hour=rate,
        origin=f"measured in {name}",
        start_up_s=_rank([max(times) for times in start_up_s.values() if times], 95),
        slowness=max(1.0, 1 / slowest) if slowest else None,
        tasks=len(worked),
        gpu_hours=sum(work_s.values()) / 3600,
        memory_bytes=memory_bytes,
        devices=tuple(f"{many} × {model}" for model, many in sorted(devices.items())),
        points=points,
        chunk_s=points[0].chunk_s,
    )


def _points_of(
    job: JobFacts, tasks: Sequence[TaskFacts], work_s: Mapping[str, float], smallest_bytes: int
) -> Iterator[Measured]:
    """Yield what each number of workers per GPU and length of chunks has shown, that of most tasks first."""
    alike: dict[tuple[int, float], list[TaskFacts]] = defaultdict(list)
    for task in tasks:
        alike[_set_up(task)].append(task)
    for (workers, cut_s), some in sorted(alike.items(), key=lambda pair: -len(pair[1])):
        names = {one.name for one in some}
        audio_s, done = sum(one.audio_s for one in some), sum(one.done for one in some)
        devices = [one for one in job.devices if one.task in names]
        idle_w = [one.metrics["power_w"].minimum for one in devices if "power_w" in one.metrics]
        seconds = sum(one.energy_measured_s for one in devices)
        memory_bytes = _most([(one.memory_peak_bytes, one.devices or 0) for one in some])
        cores = _most([(one.cpu_mean_cores, one.devices or 0) for one in some])
        power_w = sum(one.energy_j or 0.0 for one in devices) / seconds if seconds else None
        rate, chunk_s = audio_s / sum(work_s[one.name] for one in some), audio_s / done if done else None
        peaks = [(one.memory_peak_bytes or 0, one.memory_total_bytes) for one in devices]
        of_smallest = [peak for peak, total in peaks if total == smallest_bytes]
        device_bytes = max(of_smallest or (peak for peak, total in peaks if total), default=None)
        least_w = min(idle_w, default=None)
        yield Measured(workers, rate, chunk_s, memory_bytes, device_bytes, cores, power_w, least_w, cut_s)


def _set_up(task: TaskFacts) -> tuple[int, float]:
    """Return the workers per GPU, and the length that recordings were cut to."""
    workers = max(1, round((task.workers or 0) / (task.devices or 1)))
    return workers, parse_settings(task.settings).get("chunk_length") or 0.0


def _rank(values: Sequence[float], percent: int) -> float | None:
    """Return the nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else None


def _most(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    return max((value / devices for value, devices in pairs if value is not None), default=None)


# --- from a probe -----------------------------------------------------------------------------------------------------


def probe_line(settings: RunSettings, workers: int | None, store: str | None) -> str:
    """Return the command whose result a plan with these settings would use; AUDIO is to be replaced.

    ``workers`` None: any number will do; ``store`` None: the file in the user's cache.
    """
    values = {
        "engine": None if settings.engine == _USUAL else settings.engine,
        "hawkears_python": settings.hawkears_python,
        "hawkears_root": settings.hawkears_root,
        "engine_arg": settings.engine_args,
        "command": settings.command,
        "workers_per_gpu": None if workers in (None, 1) else workers,
    }
    words = list(option_words(values))
    file = [] if store is None else [f"--out={store}"]
    return shell_line("badcjobs", "probe", "AUDIO", *file, *(["--", *words] if words else []))


def version_here(settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> str | None:
    """Return the version of the engine, as far as its files show it; None: it is not installed here.

    No program is started: for HawkEars 2, the models are known but not the release.
    """
    return choose_engine(settings, environ, Launcher(""), SystemClock(), cwd=cwd, allow_cpu=True).version


def _of_probes(path: Path, store: str | None, settings: RunSettings, environ: Mapping[str, str], cwd: Path) -> Speed:
    """Return what a probe of this engine has found; refuse several results that the user has to choose from.

    ``store``: the file as it was given; None: it is the one in the user's cache.
    """
    subject, workers = subject_of(settings), settings.workers_wanted
    try:
        if not path.exists():
            raise BadInput(f"{path} does not exist", fix=_how(settings, store))
        there = read_probes(path)
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be used", why=str(error), fix=_how(settings, store)) from error
    groups = _by_device([one for one in there if one.key.settings == subject])
    if not groups:
        others = sorted({one.key.settings for one in there if one.key.settings != subject})
        why = "\n".join([f"looked for: {subject}", *(f"it has: {one}" for one in others[:_SHOWN])])
        what = f"{path} has no finished probe of this engine with these options"
        raise BadInput(what, why=why, fix=_how(settings, store))
    version = version_here(settings, environ, cwd)
    chosen = [_choose(group, version, workers) for group in groups]
    if len(chosen) > 1:
        said = sorted(f"{device_words(key)}: {speed.audio_hours_per_gpu_hour:,.1f}" for key, speed in chosen)
        what = f"{path} knows the speed of {len(chosen)} models of GPU, each at its best length"
        fix = "the same command with --rate and the speed of the model that you will use"
        raise BadInput(what, why="\n".join(said), fix=fix)
    ((key, speed),) = chosen
    return replace(speed, remedy=probe_line(settings, workers or key.workers, store))


def _by_device(probes: Sequence[Probed]) -> list[list[Probed]]:
    """Group the probes that have found a speed by the model of their device."""
    groups: list[list[Probed]] = []
    for one in probes:
        if one.key.gpu == _CPU or one.result is None or not one.result.times_real_time:
            continue
        for group in groups:
            of = group[0].key
            if of.gpu == one.key.gpu and is_same_memory(of.memory_bytes, one.key.memory_bytes):
                group.append(one)
                break
        else:
            groups.append([one])
    return groups


def _choose(probes: Sequence[Probed], version: str | None, workers: int | None) -> tuple[ProbeKey, Speed]:
    """Return the newest probe that matches, with doubts if none or several match.

    ``version`` and ``workers`` None: any will do.
    """
    of_version = [one for one in probes if version is None or _is_version(one.key, version)] or probes
    fitting = [one for one in of_version if workers is None or one.key.workers == workers] or of_version
    newest = max(fitting, key=lambda one: (one.at or "", str(one.key)))
    key, doubts = newest.key, []
    if version is not None and not _is_version(key, version):
        doubts.append(f"it is that of {key.engine} ({key.engine_version}); the one here is another ({version})")
    if workers is not None and key.workers != workers:
        measured, wanted = (f"{count(many, 'worker')} per GPU" for many in (key.workers, workers))
        doubts.append(f"it was measured with {measured}, and the tasks will have {wanted}")
    alike = [one for one in fitting if one.key.workers == key.workers]
    if len(alike) > 1:
        others = [f"{device_words(one.key)}, {setup_words(one.key)}" for one in alike if one is not newest]
        doubts.append(f"it is the newest of {len(alike)} probes that it could be; not taken: {'; '.join(others)}")
    by_workers = {one.key.workers: one for one in sorted(fitting, key=lambda one: one.at or "")}  # the newest of each
    return key, _speed_of(newest, tuple(doubts), [newest, *(by_workers[n] for n in by_workers if n != key.workers)])


def _is_version(key: ProbeKey, here: str) -> bool:
    return key.engine_version == here or key.engine_version.endswith(f", {here}")  # a release before its models


def _speed_of(probed: Probed, doubts: tuple[str, ...], probes: Sequence[Probed]) -> Speed:
    """Return the speed at the best length, the trials of all probes (it comes first), and how long chunks may be."""
    key, result = probed.key, probed.result
    assert result is not None  # _by_device has left the others out
    fitting = [trial for trial in probed.trials if trial.outcome == FITS]
    timed = sorted((one.length_s, one.times_real_time, one.lean) for one in fitting if one.times_real_time)
    curve, lean_curve = (tuple((s, rate) for s, rate, lean in timed if lean is way) for way in (False, True))
    return Speed(
        audio_hours_per_gpu_hour=result.times_real_time or 0.0,  # of one device, with all its workers
        origin=f"from a probe of {key.gpu} with {setup_words(key)}" + ("" if curve else ", at its best length"),
        devices=(key.gpu,),
        memory_bytes=key.memory_bytes,
        start_up_s=max((one.start_up_s for one in fitting if one.start_up_s), default=None),
        points=tuple(
            Measured(one.key.workers, trial.times_real_time, trial.length_s, trial.host_peak_bytes, trial.peak_bytes)
            for one in probes
            for trial in sorted(one.trials, key=lambda trial: trial.length_s != result.best_s)
            if trial.outcome == FITS and not trial.lean and trial.times_real_time
        ),
        chunk_s=result.best_s,
        curve=curve,
        lean_curve=lean_curve,
        safe_s=None if result.too_long_s is None else result.safe_s,
        lean_safe_s=None if result.lean_too_long_s is None else result.lean_safe_s,
        best_s=result.best_s,
        doubts=doubts,
    )


# --- chunks of other lengths ------------------------------------------------------------------------------------------


def at_length(speed: Speed, chunk_s: float) -> Speed:
    """Return the speed for chunks of a length, where trials of several are known; else the speed as it is."""
    if not speed.curve or chunk_s <= 0:
        return speed
    if speed.safe_s is not None and chunk_s > speed.safe_s and speed.lean_curve:
        piece_s = min(chunk_s, speed.lean_safe_s or chunk_s)
        rate, how = read_off(speed.lean_curve, piece_s)
        pieces = f" in pieces of {piece_s:g} s" if piece_s < chunk_s else ""
        how = f"longer than is safe, so with one thread{pieces}: {how}"
    else:
        rate, how = read_off(speed.curve, chunk_s)
    words = f"{speed.origin}, for chunks of {chunk_s:,.3g} s ({how})"
    return replace(speed, audio_hours_per_gpu_hour=rate, origin=words, chunk_s=chunk_s)


def read_off(curve: Curve, chunk_s: float) -> tuple[float, str]:
    """Return the speed for chunks of a length, and how it was found."""
    if chunk_s < curve[0][0]:
        # Each chunk has a fixed cost; with only one trial, all its time counts as fixed cost.
        first_s, first_rate = curve[0]
        took_s, per_second = first_s / first_rate, 0.0
        for next_s, next_rate in curve[1:2]:
            per_second = max(0.0, (next_s / next_rate - took_s) / (next_s - first_s))
        per_chunk = max(0.0, took_s - per_second * first_s)
        rate = chunk_s / (per_chunk + per_second * chunk_s) if per_chunk else first_rate
        return rate, f"shorter than any trial: estimated with {per_chunk:.2g} s for each chunk besides its audio"
    for (short_s, slow), (long_s, fast) in pairwise(curve):
        if short_s < chunk_s < long_s:
            part = math.log(chunk_s / short_s) / math.log(long_s / short_s)
            return slow + part * (fast - slow), f"between trials of {short_s:g} and {long_s:g} s"
    length_s, rate = next(trial for trial in reversed(curve) if trial[0] <= chunk_s)
    return rate, "tried" if length_s == chunk_s else f"no faster than the longest trial, of {length_s:g} s"
