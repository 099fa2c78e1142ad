"""The speed that a plan uses: from --rate, from a job database, or from a probe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.masking import mask_words
from badcjobs.model import Probed, fitting_workers, not_none
from badcjobs.paths import shell_line, user_cache
from badcjobs.planning.probe_search import device_words, setup_words, usual_trials
from badcjobs.processes import Launcher
from badcjobs.report.completeness import merge_again
from badcjobs.report.job import find_job_database
from badcjobs.report.rules import without_unused
from badcjobs.report.verdict import news_words
from badcjobs.seams import Environ
from badcjobs.settings import RunSettings, option_words
from badcjobs.store.connect import grouped, is_database
from badcjobs.store.read_job import read_job
from badcjobs.store.read_model import JobFacts, TaskFacts
from badcjobs.store.read_tasks import parse_settings
from badcjobs.workers.engines import choose_engine, traits_of
from badcjobs.workers.learned import LESSONS, Learned, default_store, read_probes, subject_of
from badcjobs.workers.program_start import EngineStart

_CPU = "cpu"  # what a probe without a device calls it
_USUAL = "hawkears"  # the default engine
_SHOWN = 3
_ENOUGH_S = 60.0  # of work; shorter tasks say little about their node
_SLOWEST_PERCENT = 5
_MANY_FAILED = 0.1  # of the GPU time
_SetUp = tuple[int, float]  # workers per GPU, and the length that recordings were cut to; 0: they were not
Curve = list[tuple[float, float]]  # length of the chunks in seconds, times real time; the shortest first
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


@dataclass(frozen=True)
class Speed:
    """The speed of one GPU, without start-up; None: not measured."""

    audio_hours_per_gpu_hour: float
    origin: str  # in words
    start_up_s: float | None = None  # of a task, from its start to the first chunk; only one in twenty took longer
    slowness: float | None = None  # of the slowest twentieth of the tasks, compared with all of their point together
    tasks: int = 0  # that was measured on
    gpu_hours: float | None = None
    memory_bytes: int | None = None  # of a device
    devices: Sequence[str] = ()
    points: Sequence[Measured] = ()  # with several numbers of workers; the first is what this is the speed of
    bytes_per_s: float | None = None  # main memory of a worker for each second of a chunk, assumed
    given: bool = False  # by --rate
    chunk_s: float | None = None  # the mean length of the chunks that it is the speed of
    safe_s: float | None = None  # longer chunks are done with one thread, or in pieces; None: nothing was too long
    best_s: float | None = None  # the best length that is safe
    doubts: Sequence[str] = ()  # reasons why it may not apply
    remedy: str | None = None  # a line to paste that measures again; None: not known

    @property
    def most_workers(self) -> int:
        """The most workers per GPU that were measured."""
        return max((point.workers for point in self.points), default=0)

    def device_room(self, chunk_s: float | None) -> float:
        """Return how many workers the memory of a device holds with such chunks; infinite: not known."""
        near_s = chunk_s or 3600.0  # a whole recording
        points = [point for point in self.points if point.device_bytes]
        if not self.memory_bytes or not points:
            return math.inf
        # With fewer workers, each has more of what is needed once.
        nearest = min(points, key=lambda point: (abs((point.chunk_s or near_s) - near_s), -point.workers))
        return fitting_workers(self.memory_bytes, (nearest.device_bytes or 0.0) / nearest.workers)


def find_speed(
    rate: float | None,
    origin: Path | None,
    settings: RunSettings,
    environ: Environ,
    cwd: Path,
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
    if origin is not None and origin.suffix == ".json":
        speed = _of_probes(cwd / origin, str(origin), settings, environ, cwd)
    elif origin is not None:
        speed = _of_job(cwd / origin, str(origin), settings)
    elif rate is not None:
        speed = Speed(rate, "from --rate", given=True)
    else:
        speed = _measured_here(settings, environ, cwd)

    if rate is not None and origin is not None:
        speed = replace(
            speed,
            audio_hours_per_gpu_hour=rate,
            origin=f"from --rate; the rest is {speed.origin}",
            given=True,
            chunk_s=None,
            doubts=(),
        )
    per_worker = traits_of(settings.engine).memory_per_worker
    if per_worker:
        return replace(speed, bytes_per_s=per_worker.bytes_per_audio_s)
    return speed


def _measured_here(settings: RunSettings, environ: Environ, cwd: Path) -> Speed:
    """Return what runs of this user have learned, else what a probe has found; raise BadInput without either."""
    speed = _of_lessons(settings, environ)
    if speed is not None:
        return speed
    store = default_store(environ)
    if store is not None and store.exists():
        return _of_probes(store, None, settings, environ, cwd)
    engine = subject_of(settings)
    raise BadInput(
        "no measured speed for this engine",
        why=f"there is neither --from nor --rate, and no run or probe of this engine ({engine}) is known",
        fix=_ways_to_a_speed(settings),
    )


def _ways_to_a_speed(settings: RunSettings, store: str | None = None) -> str:
    probe = probe_line(settings, settings.workers_wanted, store)
    return f"{probe}   (or --from RUN, a run of one task of such audio; or --rate AUDIO_HOURS_PER_GPU_HOUR)"


def _of_lessons(settings: RunSettings, environ: Environ) -> Speed | None:
    """Return what runs with this engine have learned, the fastest first; None: nothing, or on several models of GPU."""
    cache = user_cache(environ)
    if cache is None:
        return None
    lessons = Learned(subject_of(settings), [cache / LESSONS]).every()
    points = []
    models = set()
    for about, lesson in lessons.items():
        for number, rate in lesson.rates.items():
            models.add(about.partition(",")[0])
            workers = int(number)
            memory_bytes = lesson.worker_bytes and workers * lesson.worker_bytes
            device_bytes = lesson.device_bytes and workers * lesson.device_bytes
            points.append(
                Measured(workers, rate, lesson.chunk_s, memory_bytes, device_bytes, cut_s=lesson.chunk_s or 0.0)
            )
    if len(models) != 1:
        return None
    points.sort(key=lambda point: -point.rate)
    return Speed(
        audio_hours_per_gpu_hour=points[0].rate,
        origin=f"learned by earlier runs on {' '.join(models)}",
        memory_bytes=min(not_none(lesson.memory_bytes for lesson in lessons.values()), default=None),
        devices=list(models),
        points=points,
        chunk_s=points[0].chunk_s,
    )


# --- from a job -------------------------------------------------------------------------------------------------------


def _of_job(path: Path, name: str, settings: RunSettings) -> Speed:
    """Return what a merged job has measured, with the reasons why it may not apply."""
    database = find_job_database(path)
    try:
        job = read_job(database)
    except DatabaseProblem as error:
        raise DatabaseProblem(
            f"{name} has no speed to plan with",
            why=f"{error.what}\n--from takes a run folder, its job.sqlite, or the result of a probe (.json)",
            fix=error.fix if is_database(database) else _ways_to_a_speed(settings),
        ) from error
    engines = sorted({task.engine for task in job.tasks if task.engine} - {settings.engine})
    if engines:
        options = option_words({"engine": engines[0], "command": job.last_settings.get("command")})
        raise BadInput(
            f"{name} ran the engine {' and '.join(engines)}; this plan is for {settings.engine}",
            why="speed and memory differ",
            fix=f"{shell_line('--', *options)}   (or --from a run of {settings.engine})",
        )
    try:
        speed = speed_of(job, name)
    except ValueError as error:
        fix = _ways_to_a_speed(settings)
        raise BadInput(f"{name} has no measured speed of GPUs", why=str(error), fix=fix) from error

    doubts = []
    engine_args = job.last_settings.get("engine_arg") or []
    if engine_args != mask_words(settings.engine_args):
        doubts.append(f"{name} ran with other options of the engine: {shell_line(*engine_args) or 'none'}")
    failed_share = job.failed_gpu_s / sum(task.gpu_s for task in job.tasks)
    if failed_share >= _MANY_FAILED:
        doubts.append(f"{100 * failed_share:.0f} % of the GPU time of {name} went to chunks that failed")
    remedy = None
    news = news_words(job.merged)
    if news:
        doubts.append(f"the merge of {name}: {news}; what was done since is not in this speed")
        remedy = merge_again(database, job)
    return replace(speed, doubts=doubts, remedy=remedy)


def speed_of(job: JobFacts, name: str) -> Speed:
    """Return what a job has measured; raise ValueError where that is nothing.

    Start-up is counted separately: in a short first job it is a large part. GPUs without work do not count.
    """
    job = without_unused(job)
    worked = [task for task in job.tasks if task.devices and task.audio_s > 0]
    if not worked:
        raise ValueError("none of its tasks has done anything on a GPU")

    # Of each task, its devices up to their first chunk.
    start_up_s = grouped((d.task, d.states["start_up"].total_s) for d in job.devices if "start_up" in d.states)
    work_s = {task.name: max(task.gpu_s - sum(start_up_s[task.name]), 0.001) for task in worked}
    memory_bytes = min((d.memory_total_bytes for d in job.devices if d.memory_total_bytes), default=None)
    groups = grouped((_set_up(task), task) for task in worked)
    points = []
    paces = []  # of each task that worked long enough, compared with all tasks of its set-up
    for set_up, tasks in sorted(groups.items(), key=lambda group: -len(group[1])):
        point = _point_of(job, set_up, tasks, work_s, memory_bytes)
        points.append(point)
        long = [task for task in tasks if work_s[task.name] >= _ENOUGH_S * (task.devices or 0)]
        if len(long) > 1:  # one task has no spread
            paces += [task.audio_s / work_s[task.name] / point.rate for task in long]
    slowest = _rank(paces, _SLOWEST_PERCENT)
    models = Counter(device.name or "GPU" for device in job.devices)
    return Speed(
        audio_hours_per_gpu_hour=points[0].rate,
        origin=f"measured in {name}",
        start_up_s=_rank([max(times) for times in start_up_s.values() if times], 95),
        slowness=max(1.0, 1 / slowest) if slowest else None,
        tasks=len(worked),
        gpu_hours=sum(work_s.values()) / 3600,
        memory_bytes=memory_bytes,
        devices=[f"{number} × {model}" for model, number in sorted(models.items())],
        points=points,
        chunk_s=points[0].chunk_s,
    )


def _set_up(task: TaskFacts) -> _SetUp:
    workers = max(1, round((task.workers or 0) / (task.devices or 1)))
    return workers, parse_settings(task.settings).get("chunk_length") or 0.0


def _point_of(
    job: JobFacts,
    set_up: _SetUp,
    tasks: Sequence[TaskFacts],
    work_s: Mapping[str, float],
    smallest_bytes: int | None,
) -> Measured:
    """Return what the tasks with a set-up have shown."""
    workers, cut_s = set_up
    names = {task.name for task in tasks}
    devices = [device for device in job.devices if device.task in names]
    audio_s = sum(task.audio_s for task in tasks)
    done = sum(task.done for task in tasks)
    measured_s = sum(device.energy_measured_s for device in devices)
    energy_j = sum(device.energy_j or 0.0 for device in devices)
    smallest = [device for device in devices if device.memory_total_bytes == smallest_bytes]
    return Measured(
        workers=workers,
        rate=audio_s / sum(work_s[task.name] for task in tasks),
        chunk_s=audio_s / done if done else None,
        memory_bytes=_most_per_gpu((task.memory_peak_bytes, task.devices) for task in tasks),
        device_bytes=max(not_none(device.memory_peak_bytes for device in smallest), default=None),
        cores=_most_per_gpu((task.cpu_mean_cores, task.devices) for task in tasks),
        power_w=energy_j / measured_s if measured_s else None,
        idle_w=min((d.metrics["power_w"].minimum for d in devices if "power_w" in d.metrics), default=None),
        cut_s=cut_s,
    )


def _rank(values: Sequence[float], percent: int) -> float | None:
    """Return the nearest rank."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _most_per_gpu(pairs: Iterable[tuple[float | None, int | None]]) -> float | None:
    """Return the largest value for one GPU, of pairs of a value and a number of GPUs."""
    return max((value / gpus for value, gpus in pairs if value is not None and gpus), default=None)


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
        "workers_per_gpu": None if workers == 1 else workers,
    }
    line = ["badcjobs", "probe", "AUDIO"]
    if store is not None:
        line.append(f"--out={store}")
    options = list(option_words(values))
    if options:
        line += ["--", *options]
    return shell_line(*line)


def version_here(settings: RunSettings, environ: Environ, cwd: Path) -> str | None:
    """Return the version of the engine, as far as its files show it; None: it is not installed here.

    No program is started: for HawkEars 2, the models are known but not the release.
    """
    start = EngineStart(
        settings.engine_args,
        environ,
        Launcher(""),
        SystemClock(),
        cwd=cwd,
        allow_cpu=True,
    )
    return choose_engine(settings, start).version


def _of_probes(
    path: Path,
    store: str | None,
    settings: RunSettings,
    environ: Environ,
    cwd: Path,
) -> Speed:
    """Return what a probe of this engine has found; ``store``: the file as it was given, None: it is in the cache."""
    subject = subject_of(settings)
    ways = _ways_to_a_speed(settings, store)
    if not path.exists():
        raise BadInput(f"{path} does not exist", fix=ways)
    try:
        probes = read_probes(path)
    except (ValueError, OSError) as error:
        raise BadInput(f"{path} cannot be used", why=str(error), fix=ways) from error

    by_model = []
    for probe in probes:
        key = probe.key
        is_measured = probe.result is not None and probe.result.times_real_time
        if key.settings == subject and key.gpu != _CPU and is_measured:
            by_model.append((device_words(key), probe))
    if not by_model:
        subjects = sorted({probe.key.settings for probe in probes} - {subject})
        why = "\n".join([f"looked for: {subject}", *(f"it has: {other}" for other in subjects[:_SHOWN])])
        raise BadInput(f"{path} has no finished probe of this engine with these options", why=why, fix=ways)
    version = version_here(settings, environ, cwd) or ""
    speeds = {
        model: _speed_of_probes(group, version, settings.workers_wanted) for model, group in grouped(by_model).items()
    }
    if len(speeds) > 1:
        rates = sorted(f"{model}: {speed.audio_hours_per_gpu_hour:,.1f}" for model, speed in speeds.items())
        raise BadInput(
            f"{path} knows the speed of {len(speeds)} models of GPU, each at its best length",
            why="\n".join(rates),
            fix="the same command with --rate and the speed of the model that you will use",
        )
    (speed,) = speeds.values()
    return replace(speed, remedy=probe_line(settings, settings.workers_wanted or speed.points[0].workers, store))


def _speed_of_probes(probes: Sequence[Probed], version: str, workers: int | None) -> Speed:
    """Return the speed of the newest probe with these workers, else with others, and the trials of all of its version.

    A version that is known without starting the engine is the last part of one that a probe has seen.
    """
    of_version = [probe for probe in probes if probe.key.engine_version.endswith(version)] or probes

    def rank(probe: Probed) -> tuple[bool, str, str]:
        return workers in (None, probe.key.workers), probe.at or "", str(probe.key)

    best_first = sorted(of_version, key=rank, reverse=True)
    probe = best_first[0]
    key = probe.key
    result = probe.result
    assert result is not None  # the others are left out
    doubts = []
    if not key.engine_version.endswith(version):
        doubts.append(f"it is that of {key.engine} ({key.engine_version}); the one here is another ({version})")
    by_workers: dict[int, Probed] = {}
    for other in best_first:
        by_workers.setdefault(other.key.workers, other)
    points: list[Measured] = []
    for other in by_workers.values():
        points += _points_of(other, result.best_s or 0.0)
    return Speed(
        audio_hours_per_gpu_hour=points[0].rate,  # of one device, with all its workers
        origin=f"from a probe of {key.gpu} with {setup_words(key)}",
        devices=(key.gpu,),
        memory_bytes=key.memory_bytes,
        start_up_s=max((trial.start_up_s for trial in probe.trials if trial.start_up_s), default=None),
        points=points,
        chunk_s=points[0].chunk_s,
        safe_s=None if result.too_long_s is None else result.safe_s,
        best_s=result.best_s,
        doubts=doubts,
    )


def _points_of(probe: Probed, best_s: float) -> Iterator[Measured]:
    """Yield what the trials have shown, the one next to the best length first."""
    for trial in sorted(usual_trials(probe.trials), key=lambda trial: abs(trial.length_s - best_s)):
        if trial.times_real_time:
            yield Measured(
                workers=probe.key.workers,
                rate=trial.times_real_time,
                chunk_s=trial.length_s,
                memory_bytes=trial.host_peak_bytes,
                device_bytes=trial.peak_bytes,
            )


# --- chunks of other lengths ------------------------------------------------------------------------------------------


def read_off(curve: Curve, chunk_s: float) -> float:
    """Return the speed for chunks of a length; longer ones than were measured are no faster."""
    if chunk_s < curve[0][0]:
        return _shorter_than_measured(curve, chunk_s)
    for (short_s, slow), (long_s, fast) in pairwise(curve):
        if short_s <= chunk_s < long_s:
            part = math.log(chunk_s / short_s) / math.log(long_s / short_s)
            return slow + part * (fast - slow)
    return curve[-1][1]


def _shorter_than_measured(curve: Curve, chunk_s: float) -> float:
    """Estimate the speed: each chunk has a fixed cost; with only one length, all its time counts as fixed cost."""
    first_s, first_rate = curve[0]
    took_s = first_s / first_rate
    per_second = 0.0
    if len(curve) > 1:
        next_s, next_rate = curve[1]
        per_second = max(0.0, (next_s / next_rate - took_s) / (next_s - first_s))
    per_chunk = took_s - per_second * first_s
    if per_chunk <= 0:
        return first_rate
    return chunk_s / (per_chunk + per_second * chunk_s)
