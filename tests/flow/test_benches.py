"""Every bench that needs no GPU, at a small scale, and the one that makes the README's pictures."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import chromium

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", ["dispatch", "merge", "monitor", "plan", "report_page", "scale", "writing"])
def test_a_bench_keeps_its_promises_at_a_small_scale(name, tmp_path):
    if name == "report_page":
        chromium()
    command = [sys.executable, BENCH / f"{name}.py", "--small", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stdout + done.stderr
    assert "BROKEN" not in done.stdout and " kept" in done.stdout


def test_every_picture_of_the_readme_is_made_and_none_is_blank(tmp_path):
    chromium()
    words = [sys.executable, str(BENCH / "pictures.py"), "--out", str(tmp_path), "--tasks", "8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    widths = {"timeline": 1024, "live": 1280, "terminal": 1280}
    expected = {f"{name}-{shade}.png": width for name, width in widths.items() for shade in ("light", "dark")}
    assert {path.name for path in tmp_path.iterdir()} == {*expected}
    for name, width in expected.items():
        data = (tmp_path / name).read_bytes()
        wide, high = struct.unpack(">II", data[16:24])
        assert (data[:4], wide, high >= 300) == (b"\x89PNG", width, True), name
        assert len(data) > wide * high / 200, f"{name} is plain paper, which is packed into less than that"
    assert "tasks       8 (7 done, 1 failed)" in done.stdout
