"""The command that makes our pictures makes all of them, at a small scale here: whole, of the right size, not blank."""

from __future__ import annotations

import runpy
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from support.browser import chromium
from support.synthetic_job import SLOW_NODE, shape_of

BENCH = Path(__file__).parents[1] / "bench" / "pictures.py"
PAGES = ("report-large", "live-large")
RARE = ("report-one-task", "live-one-task", "live-not-begun")
README = tuple(f"{name}-{shade}.png" for name in ("timeline", "live", "terminal") for shade in ("light", "dark"))
SCREENS = ("large", "large-devices", "large-task", "large-80x24", "one-task", "not-begun")


def size_and_colours(path: Path, enough: int) -> tuple[int, int, int]:
    """Return width, height, and how many colours a PNG has, as far as somebody wants to know."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed, found = 8, b"", set[bytes]()
    while at < len(data):
        (length,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, bits, colour = struct.unpack(">IIBB", body[:10])
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    assert (bits, colour in (2, 6)) == (8, True)
    step = 3 if colour == 2 else 4
    rows = zlib.decompress(packed)
    assert len(rows) == height * (1 + width * step)
    # A row is written as the difference to its neighbours: two rows alike are zeros, so that plain paper has one value.
    for row in range(0, height, 7):
        begin = row * (1 + width * step) + 1
        found.update(rows[at : at + step] for at in range(begin, begin + width * step, step))
        if len(found) > enough:
            break
    return width, height, len(found)


def test_every_kind_of_picture_is_made_and_none_is_blank(tmp_path: Path) -> None:
    chromium()
    done = subprocess.run(
        [sys.executable, str(BENCH), "--out", str(tmp_path), "--all", "--tasks", "8", "--without-demo"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = {path.name for path in tmp_path.iterdir()}
    sizes = [(shade, width) for shade in ("light", "dark") for width in (1280, 420)]
    pages = {f"{page}-{shade}-{width}.png": width for page in PAGES for shade, width in sizes}
    pages |= {f"{page}-light-1280.png": 1280 for page in RARE} | {f"{page}-dark-420.png": 420 for page in RARE}
    screens = {f"monitor-{screen}.png": 1280 for screen in SCREENS}
    readme = {name: 1024 if name.startswith("timeline") else 1280 for name in README}
    in_use = {"report-large-timeline.png": 1280, "report-large-one-device.png": 1280}
    wanted = pages | screens | in_use | readme
    assert made == {*wanted, *(f"monitor-{screen}.svg" for screen in SCREENS), "report-large.pdf"}
    for name, expected in wanted.items():
        width, height, colours = size_and_colours(tmp_path / name, 60)
        assert (width, height >= 300, colours > 60) == (expected, True, True), name
    assert (tmp_path / "report-large.pdf").read_bytes().startswith(b"%PDF")


def test_without_the_packages_of_the_tests_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "support.live_server", None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[test\]'"):
        runpy.run_path(str(BENCH))


def test_slow_and_poisoned_tasks_of_the_large_job_are_not_all_alike() -> None:
    assert len({shape_of(index, SLOW_NODE) for index in range(0, 1000, 44)}) == 5
    assert len({shape_of(7 + 41 * n, "gpu01") for n in range(24)}) == 3


def test_a_blank_picture_would_be_noticed(tmp_path: Path) -> None:
    header = struct.pack(">IIBBBBB", 40, 30, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress((b"\0" + b"\xff" * 120) * 30)), (b"IEND", b"")]
    chunks = [struct.pack(">I", len(b)) + kind + b + struct.pack(">I", zlib.crc32(kind + b)) for kind, b in parts]
    (tmp_path / "blank.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
    assert size_and_colours(tmp_path / "blank.png", 60) == (40, 30, 1)
    with pytest.raises(AssertionError):
        size_and_colours(BENCH, 60)
