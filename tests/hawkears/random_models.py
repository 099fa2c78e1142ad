"""Prepare a data folder for HawkEars with random models: everything is real but what they hear.

PYTHON_OF_HAWKEARS random_models.py FOLDER
"""

import csv
import os
import sys
from pathlib import Path

os.environ["BRITEKIT_INFERENCE_ONLY"] = "1"  # or it needs a library for training

import torch  # type: ignore[import-not-found]
import yaml  # type: ignore[import-untyped]
from britekit.core.config_loader import get_config  # type: ignore[import-not-found]
from britekit.models.model_loader import load_new_model  # type: ignore[import-not-found]
from hawkears.core.initializer import initialize  # type: ignore[import-not-found]

ROOT = Path(sys.argv[1])
GROUSE = [("Other", "Other"), ("Ruffed Grouse", "RUGR"), ("Speech", "Speech"), ("Spruce Grouse", "SPGR")]
SHAPE = {"model_type": "vovnet.1", "head_type": "temporal_sed", "hidden_channels": 64}


def write_models(_url: str, folder: Path) -> None:
    """Write models where HawkEars would download its own."""
    low = "low-band" in folder.name
    settings = yaml.safe_load((ROOT / "yaml" / ("low_band.yaml" if low else "default.yaml")).read_text())
    config = get_config()
    for section, values in ((config.audio, settings["audio"]), (config.train, {**SHAPE, "sed_fps": 4})):
        for name, value in values.items():
            setattr(section, name, value)
    with (ROOT / "data" / "classes.csv").open() as table:
        kinds = GROUSE if low else [(row["Name"], row["Code"]) for row in csv.DictReader(table)]
    birds = {
        "train_class_names": [name for name, _ in kinds],
        "train_class_codes": [code for _, code in kinds],
        "train_class_alt_names": [""] * len(kinds),
        "train_class_alt_codes": [None] * len(kinds),
        "num_train_specs": 1000,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(2 if low else 3):
        torch.manual_seed(number)
        model = load_new_model(**birds)
        make_sure(model, torch.rand(8, 1, config.audio.spec_height, config.audio.spec_width))
        checkpoint = {
            "epoch": 0,
            "state_dict": model.state_dict(),
            "hyper_parameters": {**SHAPE, **birds, "multi_label": True},
        }
        model.on_save_checkpoint(checkpoint)
        torch.save(checkpoint, folder / f"random-{number}.ckpt")


def make_sure(model: torch.nn.Module, noise: torch.Tensor) -> None:
    """Let a model tell sounds apart: untrained, it is equally unsure of all."""
    for part in model.modules():
        if isinstance(part, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)):
            part.momentum = 1.0
    with torch.no_grad():
        model.train()(noise)
        model.head.frame_head.weight.mul_(8)
        model.head.frame_head.bias.sub_(10)


initialize(ROOT, downloader=write_models)
