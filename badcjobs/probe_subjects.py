"""What a probe is about, looked up before anything is started: the models of device, the engine, and the audio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.allocation.grant import Grant
from badcjobs.audio.cutter import AudioCutter, open_audio
from badcjobs.audio.wav import NotWav, read_header
from badcjobs.config import AUTO, RunSettings
from badcjobs.errors import BadInput, NotHere
from badcjobs.learned import subject_of
from badcjobs.model import Allocation, Device, ProbeKey, WorkerPlan
from badcjobs.seams import Engine
from badcjobs.surroundings import find_devices, make_engine
from badcjobs.workers.identity import lanes_of, version_of
from badcjobs.workers.piecewise_session import model_of
from badcjobs.world import World


@dataclass(frozen=True)
class Subject:
    """One model of device, with the devices of it that share the trials; None: the CPU."""

    key: ProbeKey
    devices: tuple[Device | None, ...]
    threads: int  # cores for each worker
    lanes: int  # chunks at once in each worker


def find_grant(settings: RunSettings, world: World, allocation: Allocation) -> Grant:
    """Return the devices that are probed; without any, the CPU has to be asked for."""
    grant = find_devices(world, allocation, settings.stand_in(world.cwd))
    if not grant.devices and settings.cpu_workers == 0:
        raise NotHere(
            "there is no GPU here to probe",
            why=f"{grant.why}\nwith --cpu-workers 1 the CPU is measured instead: time, and memory of the node",
            fix="srun --gpus-per-node=1 badcjobs probe …   (or --cpu-workers 1, or --simulate 1 to try it out)",
        )
    return Grant(grant.devices[: settings.max_gpus], grant.why)


def find_engine(settings: RunSettings, world: World, mark: str, grant: Grant, ledger: Path) -> Engine:
    """Return the engine, checked; the demo engine writes down what it pretends to have of a simulated device."""
    if settings.engine == "demo" and settings.simulate is not None:
        settings = replace(settings, engine_args=(*settings.engine_args, f"--ledger={ledger}"))
    return make_engine(settings, world, mark, grant)


def find_subjects(settings: RunSettings, grant: Grant, engine: Engine, cores: int) -> list[Subject]:
    """Return one subject for each model of device, in the order in which they are granted."""
    if settings.workers_per_gpu == AUTO:
        raise BadInput(
            "--workers-per-gpu auto cannot be probed",
            why="how long a chunk may be depends on how many workers share the device",
            fix="badcjobs probe … --workers-per-gpu 1",
        )
    workers = int(settings.workers_per_gpu) if grant.devices else settings.cpu_workers
    models: dict[tuple[str, int | None], list[Device | None]] = {}
    for device in grant.devices or (None,):
        name = model_of(WorkerPlan(0, device, None, 1))
        models.setdefault((name, None if device is None else device.memory_total_bytes), []).append(device)
    threads = max(1, cores // (workers * max(1, len(grant.devices))))
    return [
        _subject(settings, engine, workers, threads, name, memory_bytes, devices)
        for (name, memory_bytes), devices in models.items()
    ]


def _subject(
    settings: RunSettings,
    engine: Engine,
    workers: int,
    threads: int,
    name: str,
    memory_bytes: int | None,
    devices: Sequence[Device | None],
) -> Subject:
    lanes = lanes_of(engine.name, settings.engine_args, WorkerPlan(0, devices[0], None, threads))
    key = ProbeKey(name, memory_bytes, engine.name, version_of(engine), subject_of(settings), lanes * workers, workers)
    return Subject(key, tuple(devices), threads, lanes)


# --- the audio --------------------------------------------------------------------------------------------------------


def check_sounds(paths: Sequence[Path], cutter: AudioCutter) -> None:
    """Refuse audio that cannot be used; all mistakes are named at once."""
    mistakes = [mistake for path in paths for mistake in _mistakes_of(path, cutter)]
    if mistakes:
        raise BadInput(
            "this audio cannot be used" if len(mistakes) > 1 else mistakes[0],
            why="\n".join(mistakes) if len(mistakes) > 1 else None,
            fix="badcjobs probe RECORDING.wav   (one of your own recordings; it is repeated where it is too short)",
        )


def _mistakes_of(path: Path, cutter: AudioCutter) -> Iterator[str]:
    try:
        if path.is_dir():
            yield f"{path} is a folder; name a recording in it"
            return
        with open_audio(path) as file:
            if read_header(file).frames == 0:
                yield f"{path} has no audio in it"
    except OSError as error:
        yield f"{path} cannot be read: {error.strerror}"
    except NotWav as problem:
        if cutter.length_s(path) is None:
            yield f"{path} cannot be read: {problem}; other formats need ffmpeg and ffprobe on PATH"


def prepare_sounds(paths: Sequence[Path], cutter: AudioCutter, folder: Path, longest_s: float) -> list[Path]:
    """Return the audio as WAV files: those that are none are decoded, as far as a trial will ever need them."""
    sounds = []
    for number, path in enumerate(paths):
        try:
            with path.open("rb") as file:
                read_header(file)
            sounds.append(path)
        except NotWav:
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"sound-{number}.wav"
            cutter.cut(path, 0.0, longest_s, target)
            sounds.append(target)
    return sounds
