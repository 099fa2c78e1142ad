"""``badcjobs gpus``: the devices this task has and those that are free, for people and for scripts, as a page."""

from __future__ import annotations

import re

from rooms.model import InventoryDevice, Reading
from support.badcjobs_program import Outcome, Site, array_task
from support.fake_nvml import fake_nvml_environ, no_driver
from support.pages import Pages
from support.recorded_tape import write_recording

CUDA = "CUDA_VISIBLE_DEVICES"
LOADS = """
[[device]]
index = 0
load = [[0, 95]]
processes = [[4194999, 900]]  # no pid is that high
[[device]]
index = 1
load = [[0, 0]]
processes = []
[[device]]
index = 2
load = [[0, 20]]
[[device]]
index = 3
load = [[0, 60]]
unsupported = ["utilization_percent"]
"""


def commands() -> list[tuple[str, dict[str, str]]]:
    """Return arguments and environments."""
    in_slurm, nothing = array_task(0, (0, 1)), {**no_driver(), "PATH": "/nowhere"}
    return [
        ("--simulate loads.toml --all", {CUDA: "2,0"}),
        ("--simulate loads.toml --json", {CUDA: "3"}),
        ("--simulate tape.sqlite", {CUDA: "1"}),
        ("--simulate 2 --json", in_slurm),
        ("", nothing),
        ("--json", {**nothing, **in_slurm, CUDA: "5"}),
        ("--all", {**fake_nvml_environ(2, mig="1:1"), CUDA: "1"}),
        ("--simulate loads.toml --free 2", {}),
        ("--simulate loads.toml --free 1 --json", {CUDA: "0,2,3"}),
        ("--simulate loads.toml --free 3 --max-utilization 30 --json", {}),
        ("--simulate loads.toml --free 3 --max-utilization 30 --min-memory-mib 9000", {}),
        ("--simulate loads.toml --free 5 --wait 600", {}),
        ("--simulate loads.toml --free 4 --wait 1", {}),
        ("--simulate 2 --free 0", {}),
        ("--simulate 2 --free 1 --all", {}),
        ("--simulate 2 --free 1 --wait nan --json", {}),
        ("--simulate 2 --wait 5", {}),
        ("--simulate 2 --max-utilization 5 --min-memory-mib 9", {}),
    ]


def shown(arguments: str, environ: dict[str, str], outcome: Outcome, site: Site) -> str:
    variables = [CUDA, "SLURM_JOB_ID", "FAKE_NVML_DEVICES"]
    prefix = "".join(f"{name}={environ[name]} " for name in variables if name in environ)
    said = re.sub(r".*waiting for .*\n", "", outcome.stderr)  # how often depends on how busy this machine is
    text = f"$ {prefix}badcjobs gpus {arguments}\n{outcome.stdout}{said}exit code {outcome.exit_code}\n"
    has_amd = "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
    return text.replace(f"{site.folder}/", "").replace(has_amd, "no AMD GPU").replace(" \n", "\n")


def test_people_and_scripts_learn_what_they_have_what_is_free_and_why(site: Site, pages: Pages) -> None:
    (site.folder / "loads.toml").write_text(LOADS)
    devices = [InventoryDevice(i, f"GPU-tape{i}", "Tesla V100", "nvml", 16 * 2**30) for i in range(2)]
    said = Reading(utilization_percent=50, memory_used_bytes=4 * 2**30)
    write_recording(site.folder / "tape.sqlite", devices, lambda index, at_s: said, range(60))
    asked = commands()
    locks = {"BADCJOBS_LOCK_DIR": str(site.folder / "locks")}
    outcomes = site.badcjobs_each(
        [("gpus", *arguments.split()) for arguments, _ in asked], [{**environ, **locks} for _, environ in asked]
    )
    texts = [shown(*one, outcome, site) for one, outcome in zip(asked, outcomes, strict=True)]
    pages({"gpus.txt": "\n".join(texts)})
    assert not (site.folder / "locks").exists(), "looking locks nothing"
