"""A loop over a fixed list on several threads, each with models of its own: where one bad recording ends the loop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import wave
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.fake_hawkears import CODES, KNOWN_REGIONS, OUT_OF_MEMORY, OutOfMemoryError, check_room, hear, hear_loud

NOT_IN_BC = ("RUGR", "STGR")  # by our own decree: a location must make a difference
NAMES = {"ROPT": "Rock Ptarmigan", "RUGR": "Ruffed Grouse", "SPGR": "Spruce Grouse", "STGR": "Sharp-tailed Grouse"}
_LOADING = threading.Lock()
util = SimpleNamespace(get_device=lambda: "cuda" if torch.cuda.is_available() else "cpu")


class InferenceError(Exception):
    """What callers of the API get for a bad recording."""


@dataclass(frozen=True)
class InferenceDetection:
    """One detection."""

    recording_path: Path
    species: str
    start_time: float
    end_time: float
    score: float


@dataclass(frozen=True)
class AnalysisRecordingResult:
    """A recording's detections."""

    recording_path: Path
    detections: tuple[InferenceDetection, ...]


class Audio:
    """The recording at hand."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.load_error: str | None = None
        self._seconds = 0.0

    def set_config(self, cfg: Any, resample: bool = True) -> None:
        self.cfg = cfg

    def seconds(self) -> float:
        return self._seconds

    def load(self, path: str) -> bytes:
        self.load_error, self._seconds = None, 0.0
        content = Path(path).read_bytes()
        if content.startswith(b"#fake "):
            self._seconds = 3.0
            return content
        try:
            with wave.open(path) as audio:
                self._seconds = audio.getnframes() / audio.getframerate()
        except (wave.Error, EOFError):
            self.load_error = f"[Errno 1094995529] Invalid data found when processing input: '{path}'"
            logging.error(f"Caught exception in audio load of {path}: {self.load_error}")
        return content


class Predictor:
    """Models in memory."""

    def __init__(self, model_path: str, cfg: Any) -> None:
        self.cfg = cfg
        if not any(Path(model_path).glob("*.ckpt")):
            raise InferenceError(f'No models loaded from "{model_path}"')
        if loads := os.environ.get("FAKE_HAWKEARS_LOADS"):
            with _LOADING:  # the third of three threads finds no room, not all of them
                with Path(loads).open("a") as file:
                    file.write(f"{os.getpid()}\n")
                number = len(Path(loads).read_text().splitlines())
            if number > int(os.environ.get("FAKE_HAWKEARS_ROOM", "99")):
                raise InferenceError(f"Failed to load model from {model_path}: {OUT_OF_MEMORY}")
        if os.environ.get("FAKE_HAWKEARS_OOM") == "load":
            raise InferenceError(f"Failed to load model from {model_path}: {OUT_OF_MEMORY}")
        self.audio = Audio(cfg)

    def get_overlapping_scores(self, recording_path: str, start_times: list[float]) -> list[Any] | None:
        if not os.path.exists(recording_path):  # noqa: PTH110
            raise InferenceError(f'Recording "{recording_path}" not found')
        if not os.path.isfile(recording_path):  # noqa: PTH113
            raise InferenceError(f'Recording "{recording_path}" is not a file')
        content = self.audio.load(recording_path)
        word = content[6:].split()[0].decode() if content.startswith(b"#fake ") else ""
        time.sleep(float(os.environ.get("FAKE_HAWKEARS_S", "0.01")))
        misbehave(word)
        try:
            check_room(self.audio.seconds(), self.cfg.infer.num_threads, os.environ)
        except OutOfMemoryError as problem:
            raise torch.OutOfMemoryError(str(problem)) from None
        if self.audio.load_error or self.audio.seconds() < 0.5:
            return None
        if os.environ.get("FAKE_HAWKEARS_EARS") == "loud":
            return hear_loud(recording_path)
        return [] if word == "silence" else hear(content)


def misbehave(word: str) -> None:
    """Do what a recording asks for; with FAKE_HAWKEARS_ONCE, a file that marks the first time, never again."""
    if word and (once := os.environ.get("FAKE_HAWKEARS_ONCE")):
        if Path(once).exists():
            return
        Path(once).touch()
    if word == "oom":
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    if word == "traceback":
        raise RuntimeError("Given groups=1, weight of size [32, 1, 3, 3], expected input to have 1 channels")
    if word == "assert":
        raise RuntimeError("CUDA error: device-side assert triggered")
    if word == "lost":
        raise RuntimeError("CUDA error: no CUDA-capable device is detected")
    if word == "full":
        raise OSError(28, "No space left on device")
    if word == "hang":
        time.sleep(3600)
    if word in ("SIGSEGV", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, word))
        time.sleep(60)  # it may reach another thread first


class OccurrenceManager:
    """Knows where a recording is from: those of the list by name, others by the region alone."""

    def __init__(self, cfg: Any, paths: list[str]) -> None:
        self.region = cfg.hawkears.region
        self.said_so = False
        region = self.region or ("CA-BC" if (cfg.hawkears.latitude or 0) < 60 else "CA-NT")
        self.file_info = {Path(path).name: (region, None) for path in paths}

    def occurs(self, path: str, code: str) -> bool:
        region = self.file_info.get(Path(path).name, (self.region, None))[0]
        if region is not None and region not in KNOWN_REGIONS and not self.said_so:
            logging.error(f"Error: location {region} not found")
            self.said_so = True
        return region != "CA-BC" or code not in NOT_IN_BC


class ClassManager:
    """Knows the species of the models by code and name; one of them has a code alone."""

    def all_classes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(code=code, name=NAMES.get(code), alt_code=None, alt_name=None) for code in CODES]


class Analyzer:
    """One analysis."""

    def __init__(self, cfg: Any, include_names: Any = None) -> None:
        self.cfg = cfg
        self.occur_mgr: OccurrenceManager | None = None
        self.class_mgr = ClassManager()

    def _load_heuristics_manager(self, audio: Audio) -> None:
        return None

    def _process_recordings(
        self,
        recording_paths: Iterable[str],
        output_path: str,
        start_seconds: float,
        thread_num: int,
        cancellation_callback: Callable[[], bool] | None = None,
    ) -> None:
        predictor = Predictor(self.cfg.misc.ckpt_folder, cfg=self.cfg)
        self._load_heuristics_manager(predictor.audio)
        for path in recording_paths:
            if cancellation_callback is not None and cancellation_callback():
                break
            found = predictor.get_overlapping_scores(path, [start_seconds])
            if found is None and predictor.audio.load_error:
                raise InferenceError(f'Could not load recording "{path}": {predictor.audio.load_error}')
            self.recording_callback(AnalysisRecordingResult(Path(path), self._detections(path, found or [])))
        if thread_num == 1:
            (Path(output_path) / "manifest.yaml").write_text("models: []\n")

    def _detections(self, path: str, found: list[Any]) -> tuple[InferenceDetection, ...]:
        return tuple(
            InferenceDetection(Path(path), code, start_s, end_s, score)
            for start_s, end_s, code, score in found
            if score >= self.cfg.infer.min_score and (self.occur_mgr is None or self.occur_mgr.occurs(path, code))
        )

    def run(
        self,
        input_path: str,
        output_path: str,
        date: str | None,
        start_seconds: float,
        quiet: bool,
        *,
        recording_callback: Any,
        cancellation_callback: Any,
        recording_paths_override: Iterable[Path],
    ) -> None:
        self.recording_callback = recording_callback
        paths = [str(Path(path)) for path in recording_paths_override]
        if self.cfg.hawkears.region or self.cfg.hawkears.latitude is not None:
            self.occur_mgr = OccurrenceManager(self.cfg, paths)
        lanes = min(self.cfg.infer.num_threads, len(paths))
        work = getattr(self, "_process_recordings", None) or self._work_off
        with ThreadPoolExecutor(max(1, lanes)) as pool:
            jobs = [
                pool.submit(work, paths[n::lanes], output_path, start_seconds, n + 1, cancellation_callback)
                for n in range(lanes)
            ]
        for job in jobs:
            job.result()


if os.environ.get("FAKE_HAWKEARS_SHAPE") == "other":
    Analyzer._work_off = Analyzer._process_recordings  # type: ignore[attr-defined]
    del Analyzer._process_recordings
