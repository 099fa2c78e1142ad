"""Which of a file's probes a plan is made with: of the engine as it is here, with as many workers, and the newest.

What a probe is about is in its key; where none is about just this, the nearest one counts, and the difference is said.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.config import RunSettings
from badcjobs.model import FITS, Probed, ProbeKey, ProbeResult
from badcjobs.plan.speed import Curve, Speed
from badcjobs.probed_limits import is_same_memory
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher

_CPU = "cpu"  # what a probe without a device calls it
_USUAL = "hawkears"  # the engine where none is said


@dataclass(frozen=True, slots=True)
class Choice:
    """The probe that counts for one model of device, as the speed of a plan."""

    device: str
    speed: Speed
    workers: int  # that each device had


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


def choose_probes(probes: Sequence[Probed], version: str | None, workers: int | None) -> list[Choice]:
    """Return what counts for each model of device that probes have found a speed of; ``workers`` None: any number."""
    known = [one for one in probes if one.key.gpu != _CPU and one.result is not None and one.result.times_real_time]
    chosen = [_choose(group, version, workers) for group in _by_device(known)]
    names = [speed.devices[0] for _, speed in chosen]
    return sorted(
        (
            Choice(_device_words(key) if names.count(key.gpu) > 1 else key.gpu, speed, key.workers)
            for key, speed in chosen
        ),
        key=lambda choice: choice.device,
    )


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
    fitting = _prefer(probes, lambda key: version is None or _is_version(key.engine_version, version))
    fitting = _prefer(fitting, lambda key: workers is None or key.workers == workers)
    newest = max(fitting, key=lambda one: (one.at or "", str(one.key)))
    doubts = tuple(_doubts(newest.key, [one.key for one in fitting], version, workers))
    assert newest.result is not None  # choose_probes has left the others out
    return newest.key, _speed_of(newest, newest.result, doubts)


def _prefer(probes: Sequence[Probed], fits: Callable[[ProbeKey], bool]) -> Sequence[Probed]:
    return [one for one in probes if fits(one.key)] or probes


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
    return f"{many} worker{'' if many == 1 else 's'} per GPU"


def _at_once(many: int) -> str:
    return f"{many} chunk{'' if many == 1 else 's'} at once"
