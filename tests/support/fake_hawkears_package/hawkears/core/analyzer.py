"""A loop over a fixed list on several threads, each with models of its own: where one bad recording ends the loop."""

import logging
import os
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import polars
import torch
from support.fake_hawkears import CODES, KNOWN_REGIONS, NAMES, OUT_OF_MEMORY, length_s, listen, occurs, region_at
from support.fake_mps import BUSY, tell_daemon

_LOADING = threading.Lock()
util = SimpleNamespace(get_device=lambda: "cuda" if torch.cuda.is_available() else "cpu")


class InferenceError(Exception):
    """What callers of the API get for a bad recording."""


class Audio:
    """The recording at hand."""

    load_error, length_s, stuck = None, 0.0, False

    def set_config(self, cfg, resample=True):
        if self.stuck:
            raise RuntimeError("stuck")

    def seconds(self):
        return self.length_s

    def load(self, path):
        self.load_error, self.length_s = None, 0.0
        self.stuck = Path(path).read_bytes().startswith(b"#fake stuck")
        try:
            self.length_s = length_s(Path(path))
        except (wave.Error, EOFError):
            self.load_error = f"[Errno 1094995529] Invalid data found when processing input: '{path}'"
            logging.error(f"Caught exception in audio load of {path}: {self.load_error}")


class Predictor:
    """Models in memory."""

    def __init__(self, cfg):
        import timm  # noqa: F401 - as late as the real one imports it

        self.cfg, self.audio, number = cfg, Audio(), 1
        assert polars.thread_pool_size() == 1, "a thread did not live through a fork"
        if loads := os.environ.get("FAKE_HAWKEARS_LOADS"):
            with _LOADING, Path(loads).open("a+") as file:  # the third of three threads finds no room, not all of them
                file.write(f"{os.getpid()}\n")
                file.seek(0)
                number = len(file.readlines())
        if os.environ.get("FAKE_MPS") == "held" and tell_daemon("get_server_list") is None:
            raise InferenceError(f"Failed to load model from data/ckpt: {BUSY}")
        if number > int(os.environ.get("FAKE_HAWKEARS_ROOM", "99")):
            raise InferenceError(f"Failed to load model from data/ckpt: {OUT_OF_MEMORY}")

    def get_overlapping_scores(self, recording_path):
        path = Path(recording_path)
        if not path.is_file():
            raise InferenceError(f'Recording "{path}" {"is not a file" if path.exists() else "not found"}')
        self.audio.load(recording_path)
        found = listen(path, self.audio.seconds(), self.cfg.infer.num_threads) if not self.audio.load_error else []
        return None if self.audio.load_error or self.audio.seconds() < 0.5 else found

    def get_dataframe(self, score_array, frame_map, start_times, recording_name):
        return [row for row in frame_map if row[3] >= self.cfg.min_score]


class OccurrenceManager:
    """Knows where a recording is from: those of the list by name, others by the region alone."""

    def __init__(self, cfg, paths, metadata=None):
        self.region = cfg.hawkears.region
        region = self.region or region_at(cfg.hawkears.latitude)
        self.file_info = {Path(path).name: (region, None) for path in paths}
        if metadata is not None:
            self._process_recording_metadata(metadata)

    def _process_recording_metadata(self, metadata):
        self.file_info = {
            path: (place.get("region_code") or region_at(place.get("latitude")), place.get("recorded_at"))
            for path, place in metadata.items()
        }

    def occurs(self, path, code):
        key = path if path in self.file_info else Path(path).name
        region, date = self.file_info.get(key, (self.region, None))
        if region is not None and region not in KNOWN_REGIONS:
            logging.error(f"Error: location {region} not found")
        return occurs(code, region, date)


class Analyzer:
    """One analysis."""

    def __init__(self, cfg):
        self.cfg, self.occur_mgr = cfg, None
        names = [SimpleNamespace(code=code, name=NAMES.get(code), alt_code=code.lower()) for code in CODES]
        self.labels = {one.code: getattr(one, cfg.label) for one in names}
        self.class_mgr = SimpleNamespace(all_classes=lambda: names)

    def _load_heuristics_manager(self, audio):
        print("heuristics loaded", file=sys.stderr, flush=True)
        return self

    def _process_recordings(self, recording_paths, output_path, cancelled=None):
        predictor = Predictor(self.cfg)
        self._load_heuristics_manager(predictor.audio)
        for path in recording_paths:
            if cancelled is not None and cancelled():
                break
            found = predictor.get_overlapping_scores(path)
            if found is None and predictor.audio.load_error:
                raise InferenceError(f'Could not load recording "{path}": {predictor.audio.load_error}')
            if found is None and predictor.audio.seconds() >= 0.5:
                continue
            frame_map = list(found or ())
            self._update_frame_map(frame_map, path)
            kept = self._dataframe_detections(path, predictor.get_dataframe(None, frame_map, None, ""))
            self.recording_callback(SimpleNamespace(recording_path=Path(path), detections=kept))

    def _update_frame_map(self, frame_map, recording_path):
        if self.occur_mgr is None:
            return None
        rare = [row for row in frame_map if not self.occur_mgr.occurs(recording_path, row[2])]
        frame_map[:] = [row for row in frame_map if row not in rare]
        return rare

    def _filter_output_dataframe(self, table):
        return table

    _split_long_dataframe_labels = _filter_short_dataframe_labels = _filter_output_dataframe

    def _dataframe_detections(self, recording_path, table):
        return tuple(
            SimpleNamespace(species=self.labels[code], start_time=start_s, end_time=end_s, score=score)
            for start_s, end_s, code, score in table
        )

    def run(self, output_path, recording_callback, cancelled, paths, metadata):
        self.recording_callback = recording_callback
        shape = os.environ.get("FAKE_HAWKEARS_SHAPE")
        if shape == "deaf":
            return
        if shape == "stuck":
            raise InferenceError("no such date")
        if self.cfg.hawkears.region or self.cfg.hawkears.latitude is not None or metadata is not None:
            self.occur_mgr = OccurrenceManager(self.cfg, paths, metadata)
        lanes, work = max(1, min(self.cfg.infer.num_threads, len(paths))), self._process_recordings
        with ThreadPoolExecutor(lanes) as pool:
            jobs = [pool.submit(work, paths[n::lanes], output_path, cancelled) for n in range(lanes)]
        for job in jobs:
            job.result()


if os.environ.get("FAKE_HAWKEARS_SHAPE") == "other":
    del Analyzer._process_recordings
if os.environ.get("FAKE_HAWKEARS_SHAPE") == "unplaced":
    del OccurrenceManager._process_recording_metadata
