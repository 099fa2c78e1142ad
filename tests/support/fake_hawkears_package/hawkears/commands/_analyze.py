"""``analyze`` as a function, and what the command line makes of its options."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def analyze(
    cfg_path: str | None = None,
    input_path: str = "",
    output_path: str = "",
    rtype: str | None = "audacity",
    date: str | None = None,
    region: str | None = None,
    lat: float | None = None,
    lon: float | None = None,
    start_seconds: float = 0,
    min_score: float | None = None,
    num_threads: int | None = None,
    max_models: int | None = None,
    quiet: bool = False,
    *,
    recording_callback: Callable[[Any], None] | None = None,
    cancellation_callback: Callable[[], bool] | None = None,
    recording_paths: Sequence[Path] | None = None,
    raise_errors: bool = False,
) -> None:
    """Analyse a fixed list; what goes wrong is logged and forgotten unless ``raise_errors``."""
    if os.environ.get("FAKE_HAWKEARS_NO_TORCH"):
        raise ModuleNotFoundError("No module named 'torch'")
    from hawkears.core import analyzer

    time.sleep(float(os.environ.get("FAKE_HAWKEARS_START_S", "0")))
    print("HawkEars prints what it likes, where it likes", flush=True)
    try:
        if not Path("data/ckpt").exists():
            raise analyzer.InferenceError(
                "Model checkpoint files not found. Run 'hawkears init' to initialize environment."
            )
        models = max_models or len(list(Path("data/ckpt").glob("*.ckpt")))
        cfg = SimpleNamespace(
            infer=SimpleNamespace(num_threads=num_threads or 3, max_models=models, min_score=min_score or 0.0),
            hawkears=SimpleNamespace(region=region, latitude=lat, longitude=lon),
            misc=SimpleNamespace(ckpt_folder=str(Path("data/ckpt").absolute())),
        )
        worker = analyzer.Analyzer(cfg)
        worker.run(
            input_path,
            output_path,
            date,
            start_seconds,
            quiet,
            recording_callback=recording_callback,
            cancellation_callback=cancellation_callback,
            recording_paths_override=recording_paths,
        )
    except (analyzer.InferenceError, ValueError) as error:
        if raise_errors:
            raise
        logging.error(error)


if os.environ.get("FAKE_HAWKEARS_SHAPE") == "none":

    def analyze(input_path: str, output_path: str) -> None:  # type: ignore[no-redef]
        """Be an older one, which knows folders alone."""


def _analyze_cmd(
    region: str | None,
    date: str | None,
    cfg: str | None,
    label: str | None,
    lat: float | None,
    lon: float | None,
    num_threads: int | None,
    max_models: int | None,
    start_seconds_str: str | None,
    min_score: float | None,
) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    start_seconds = int(start_seconds_str or 0)
    analyze(
        cfg, "", "", "audacity", date, region, lat, lon, start_seconds, min_score, num_threads, max_models,
        cancellation_callback=lambda: False,
    )  # fmt: skip
