"""``analyze`` as a function, and the command line above it in the shape of a click group."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SHAPE = os.environ.get("FAKE_HAWKEARS_SHAPE")


class UsageError(Exception):
    """What click raises for a wrong option."""

    def format_message(self) -> str:
        return str(self)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(f"Invalid value: {message}")


def analyze(
    input_path: str = "",
    output_path: str = "",
    rtype: str | None = "audacity",
    date: str | None = None,
    region: str | None = None,
    lat: float | None = None,
    lon: float | None = None,
    min_score: float | None = None,
    num_threads: int | None = None,
    max_models: int | None = None,
    label: str | None = None,
    quiet: bool = False,
    *,
    recording_callback: Callable[[Any], None] | None = None,
    cancellation_callback: Callable[[], bool] | None = None,
    recording_paths: Sequence[str] = (),
    raise_errors: bool = False,
) -> None:
    """Analyse a fixed list; what goes wrong is logged and forgotten unless ``raise_errors``."""
    if os.environ.get("FAKE_HAWKEARS_NO_TORCH"):
        raise ModuleNotFoundError("No module named 'torch'")
    from hawkears.core import analyzer

    time.sleep(float(os.environ.get("FAKE_HAWKEARS_START_S", "0")))
    print("HawkEars prints what it likes, where it likes", flush=True)
    models = sorted(Path("data/ckpt").glob("*.ckpt"))
    cfg = SimpleNamespace(
        infer=SimpleNamespace(num_threads=num_threads or 3, max_models=max_models or len(models)),
        min_score=min_score or 0.0,
        label=label or "code",
        hawkears=SimpleNamespace(region=region, latitude=lat, longitude=lon),
    )
    try:
        if not models:
            text = "Model checkpoint files not found. Run 'hawkears init' to initialize environment."
            raise analyzer.InferenceError(text)
        analyzer.Analyzer(cfg).run(output_path, recording_callback, cancellation_callback, recording_paths)
    except (analyzer.InferenceError, ValueError) as error:
        if raise_errors:
            raise
        logging.error(error)


if _SHAPE == "none":

    def analyze(input_path: str, output_path: str) -> None:  # type: ignore[no-redef]
        """Be an older one, which knows folders alone."""


def _analyze_cmd(**options: Any) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    analyze(**options, cancellation_callback=lambda: False)


def _main(args: list[str], prog_name: str, standalone_mode: bool) -> None:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for name in ("--region", "--date", "--label"):
        parser.add_argument(name)
    for name in ("--lat", "--lon", "--min_score"):
        parser.add_argument(name, type=float)
    parser.add_argument("--threads", dest="num_threads", type=int)
    parser.add_argument("--models", dest="max_models", type=int)
    options, unknown = parser.parse_known_args(args)
    if unknown:
        raise UsageError(f"No such option: {unknown[0]}")
    _analyze_cmd(**vars(options))


cli = SimpleNamespace(commands={"analyze": SimpleNamespace(callback=_analyze_cmd, main=_main)})
