"""The files that come with badcjobs: found in a checkout, and in a wheel that was installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from rooms.root import folder
from support.needs import missing

ROOT = Path(__file__).parents[3]
PROBE = """
import badcjobs
from badcjobs.paths import folder
for name in ("templates", "slurm", "guide"):
    print(folder(name))
print(badcjobs.__file__)
"""


def test_a_checkout_has_its_folders_where_users_look_for_them() -> None:
    assert (folder("templates"), folder("slurm")) == (ROOT / "templates", ROOT / "slurm")
    assert (folder("templates") / "array.sbatch").read_text().startswith("#!/bin/bash")
    assert {path.stem for path in folder("guide").glob("*.md")} >= {"start", "slurm", "settings", "tables"}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Build a wheel and install it into a venv of its own that borrows our dependencies; no network."""
    absent = [name for name in ("pip", "hatchling", "venv") if importlib.util.find_spec(name) is None]
    if absent:
        missing("wheel", f"cannot build a wheel without {', '.join(absent)}")
    pip, source, venv = [sys.executable, "-m", "pip", "-q"], tmp_path / "source", tmp_path / "venv"
    source.mkdir()  # a copy, so that building leaves nothing in the checkout
    names = ["badcjobs", "templates", "slurm", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *names, str(source)], cwd=ROOT, check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    [wheel] = tmp_path.glob("badcjobs-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    alone = ["--ignore-installed", "--no-deps", "--no-index", "--no-warn-script-location"]
    subprocess.run([*pip, "install", *alone, "--prefix", str(venv), str(wheel)], check=True)
    [site] = (venv / "lib").glob("python*/site-packages")
    # A path file is not read through another: our own editable install stays out of it.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def ask(python: Path, *arguments: str, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(python), *arguments]
    return subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, check=True).stdout


def test_an_installed_wheel_is_a_program_with_its_folders_inside_the_package(installed: Path, tmp_path: Path) -> None:
    templates, slurm, guide, package = map(Path, ask(installed / "python", "-c", PROBE, cwd=tmp_path).split())
    home = package.parent
    assert home.is_relative_to(installed.parent)
    assert (templates, slurm, guide) == (home / "_shipped/templates", home / "_shipped/slurm", home / "guide")
    for mine, theirs in ((ROOT / "templates", templates), (ROOT / "slurm", slurm)):
        assert sorted(p.name for p in mine.rglob("*")) == sorted(p.name for p in theirs.rglob("*"))
    assert (home / "py.typed").exists() and any(guide.glob("*.md"))
    assert not (guide / "pictures").exists()  # the README shows them, no command does
    program = str(installed / "badcjobs")
    assert ask(installed / "python", program, "--version", cwd=tmp_path).startswith("badcjobs ")
    page = ask(installed / "python", program, "guide", "slurm", cwd=tmp_path)
    here = ask(Path(sys.executable), "-m", "badcjobs", "guide", "slurm", cwd=tmp_path)
    assert page == here.replace(str(ROOT / "templates"), str(templates))
