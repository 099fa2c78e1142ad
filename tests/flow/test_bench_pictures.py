"""The command that makes our pictures makes all of them, at a small scale here: of the right size, and not blank."""

from __future__ import annotations

import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import chromium

BENCH = Path(__file__).parents[1] / "bench" / "pictures.py"
RARE = ("report-one-task", "live-one-task", "live-not-begun")
README = tuple(f"{name}-{shade}.png" for name in ("timeline", "live", "terminal") for shade in ("light", "dark"))
SCREENS = ("large", "large-devices", "large-task", "large-80x24", "one-task", "not-begun")


def test_every_kind_of_picture_is_made_and_none_is_blank(tmp_path: Path) -> None:
    chromium()
    words = [sys.executable, str(BENCH), "--out", str(tmp_path), "--all", "--tasks", "8", "--without-demo"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = [(shade, width) for shade in ("light", "dark") for width in (1280, 420)]
    pages = {f"{page}-large-{shade}-{width}.png": width for page in ("report", "live") for shade, width in sizes}
    pages |= {f"{page}-light-1280.png": 1280 for page in RARE} | {f"{page}-dark-420.png": 420 for page in RARE}
    pages |= {f"monitor-{screen}.png": 1280 for screen in SCREENS}
    pages |= {name: 1024 if name.startswith("timeline") else 1280 for name in README}
    pages |= {"report-large-timeline.png": 1280, "report-large-one-device.png": 1280}
    others = {*(f"monitor-{screen}.svg" for screen in SCREENS), "report-large.pdf"}
    assert {path.name for path in tmp_path.iterdir()} == {*pages, *others}
    for name, expected in pages.items():
        data = (tmp_path / name).read_bytes()
        width, height = struct.unpack(">II", data[16:24])
        assert (data[:4], width, height >= 300) == (b"\x89PNG", expected, True), name
        assert len(data) > width * height / 200, f"{name} is plain paper, which is packed into less than that"
    assert (tmp_path / "report-large.pdf").read_bytes().startswith(b"%PDF")


def test_without_the_packages_of_the_tests_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "support.live_server", None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[test\]'"):
        runpy.run_path(str(BENCH))
