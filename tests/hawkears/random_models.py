"""Prepare a data folder for HawkEars with random models: everything is real but what they hear.

PYTHON_OF_HAWKEARS random_models.py FOLDER [--real-size]

With ``--real-size`` there are as many models as HawkEars has, of the same shape: they take as long. Without, they are
few and small.
"""

import csv
import os
import random
import sys
from pathlib import Path

os.environ["BRITEKIT_INFERENCE_ONLY"] = "1"  # or it needs a library for training

import torch  # type: ignore[import-not-found]
import yaml  # type: ignore[import-untyped]
from britekit.core.config_loader import get_config  # type: ignore[import-not-found]
from britekit.models.model_loader import load_new_model  # type: ignore[import-not-found]
from hawkears.core.initializer import initialize  # type: ignore[import-not-found]

ROOT, REAL = Path(sys.argv[1]), "--real-size" in sys.argv
LOW = {"Other": "Other", "Ruffed Grouse": "RUGR", "Speech": "Speech", "Spruce Grouse": "SPGR"}
GROUSE = [(name, code, "", "") for name, code in LOW.items()]  # without other names and codes
HEARD = 12  # kinds of birds


def write_models(_url: str, folder: Path) -> None:
    """Write models where HawkEars would download its own."""
    low = "low-band" in folder.name
    shape = {"model_type": "bknet.5t" if REAL and not low else "vovnet.1", "head_type": "temporal_sed",
             "hidden_channels": 256 if REAL else 64}  # fmt: skip
    settings = yaml.safe_load((ROOT / "yaml" / ("low_band.yaml" if low else "default.yaml")).read_text())
    config = get_config()
    for section, values in ((config.audio, settings["audio"]), (config.train, {**shape, "sed_fps": 4})):
        for name, value in values.items():
            setattr(section, name, value)
    with (ROOT / "data" / "classes.csv").open() as table:
        kinds = GROUSE if low else [tuple(row.values()) for row in csv.DictReader(table)]
    unwanted = (ROOT / "data" / "exclude.txt").read_text().splitlines()
    wanted = [number for number, (name, *_) in enumerate(kinds) if name not in unwanted]
    birds: dict[str, object] = {"num_train_specs": 1000}
    for field, values in zip(("names", "codes", "alt_names", "alt_codes"), zip(*kinds, strict=True), strict=True):
        birds[f"train_class_{field}"] = list(values)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2 if low else 6 if REAL else 3):
        torch.manual_seed(number)
        model = load_new_model(**birds).cpu()
        heard = [] if low else random.Random(7).sample(wanted, HEARD)
        make_sure(model, torch.rand(8, 1, config.audio.spec_height, config.audio.spec_width), heard)
        checkpoint = {
            "epoch": 0,
            "state_dict": model.state_dict(),
            "hyper_parameters": {**shape, **birds, "multi_label": True},
        }
        model.on_save_checkpoint(checkpoint)
        torch.save(checkpoint, folder / f"random-{number}.ckpt")


def make_sure(model: torch.nn.Module, noise: torch.Tensor, heard: list[int]) -> None:
    """Let a model hear some birds now and then, and never any other: untrained, it is equally unsure of all."""
    for part in model.modules():
        if isinstance(part, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)):
            part.momentum = 1.0
    with torch.no_grad():
        model.train()(noise)
        _, frames = model.eval()(noise)  # recording, bird, moment
        mean, spread = torch.full((frames.shape[1],), -7.0), torch.full((frames.shape[1],), 0.5)
        mean[heard], spread[heard] = -0.5, 1.2
        factor = spread / frames.std((0, 2)).clamp_min(1e-6)
        last = model.head.frame_head
        last.weight.mul_(factor[:, None, None])
        last.bias.mul_(factor).add_(mean - frames.mean((0, 2)) * factor)


initialize(ROOT, downloader=write_models)
