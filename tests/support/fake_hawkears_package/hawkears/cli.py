"""``analyze`` as a function, and the command line above it."""

import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import click


def analyze(
    input_path="", output_path="", rtype="audacity", date=None, region=None, lat=None, lon=None, min_score=None,
    num_threads=None, max_models=None, label=None, quiet=False, *, recording_callback=None, cancellation_callback=None,
    recording_paths=(), raise_errors=False, occurrence_metadata=None,
):  # fmt: skip
    """Analyse a fixed list, or a folder; what goes wrong is logged and forgotten unless ``raise_errors``."""
    if os.environ.get("FAKE_HAWKEARS_NO_TORCH"):
        raise ModuleNotFoundError("No module named 'torch'")
    from hawkears.core import analyzer

    if label not in (None, "code", "alt_code"):
        logging.error(f"Error. invalid label field: {label}")
        return
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
        callback = recording_callback or writer(Path(output_path))
        paths = recording_paths or sorted(Path(input_path).iterdir())
        analyzer.Analyzer(cfg).run(output_path, callback, cancellation_callback, paths, occurrence_metadata)
    except (analyzer.InferenceError, ValueError) as error:
        if raise_errors:
            raise
        logging.error(error)


def writer(folder):
    """Return a callback that writes the files of a recording."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.csv").write_text("recording,name,start_time,end_time,score\n")

    def write(result):
        stem, found = result.recording_path.stem, result.detections
        labels = [f"{d.start_time:.2f}\t{d.end_time:.2f}\t{d.species};{d.score:.3f}\n" for d in found]
        (folder / f"{stem}_scores.txt").write_text("".join(labels))
        lines = [f"{stem},{d.species},{d.start_time:.3f},{d.end_time:.3f},{d.score:.3f}\n" for d in found]
        with (folder / "scores.csv").open("a") as table:
            table.write("".join(lines))

    return write


if os.environ.get("FAKE_HAWKEARS_SHAPE") == "none":

    def analyze(input_path, output_path):
        """Be an older one, which knows folders alone."""


@click.pass_context
def analyze_cmd(context, **options):
    if wrong := [word for word in (options["input_path"], *context.args) if word and word.startswith("-")]:
        raise click.UsageError(f"No such option: {wrong[0]}")  # in the same words in every version of click
    analyze(**options, cancellation_callback=lambda: False)


OPTIONS = {"output output_path": str, "rtype": str, "region": str, "date": str, "label": str, "lat": float,
           "lon": float, "min_score": float, "threads num_threads": int, "models max_models": int}  # fmt: skip
parameters = [click.Argument(["input_path"], required=False)]
parameters += [click.Option([f"--{names.split()[0]}", names.split()[-1]], type=kind) for names, kind in OPTIONS.items()]
lax = {"ignore_unknown_options": True, "allow_extra_args": True}
cli = click.Group(commands={"analyze": click.Command("analyze", lax, analyze_cmd, parameters)})
