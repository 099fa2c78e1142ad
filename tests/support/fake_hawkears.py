"""What the stand-ins of HawkEars 1 and 2 have in common: how they hear, run out of memory, and are installed.

A file that begins with ``#fake WORD`` makes it misbehave at that recording; the environment sets its pace:
FAKE_HAWKEARS_START_S (before the device line), FAKE_HAWKEARS_S (per recording), FAKE_HAWKEARS_CUDA=0 (a GPU that
PyTorch cannot use), FAKE_HAWKEARS_OOM=load, FAKE_HAWKEARS_NO_TORCH=1. FAKE_HAWKEARS_ROOM_S is how many seconds of
audio times threads fit into its memory; with FAKE_HAWKEARS_EARS=loud it hears what is loud, when it is loud.
"""

from __future__ import annotations

import shlex
import sys
import wave
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path

AUDIO_ENDINGS = {".wav", ".flac", ".mp3", ".ogg"}
KNOWN_REGIONS = {"CA-NT", "CA-AB", "CA-BC"}
CODES = ("ROPT", "RUGR", "SPGR", "STGR", "WIPT")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 7.79 GiB."


def install_fake_hawkears(folder: Path) -> Path:
    """Write a ``hawkears`` as pip does, and the Python that its first line names; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(__file__).with_name("fake_hawkears_package")
    python, program = folder / "python-of-hawkears", folder / "hawkears"
    paths = shlex.quote(f"{package}:{package.parents[1]}")
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {shlex.quote(sys.executable)} "$@"\n')
    program.write_text(f"#!{python}\n")
    for path in (python, program):
        path.chmod(0o755)
    return program


def make_fake_root(folder: Path, *, models: int = 3) -> Path:
    """Make what ``hawkears init`` leaves, as far as anyone looks at it."""
    (folder / "data" / "ckpt").mkdir(parents=True)
    for number in range(models):
        (folder / "data" / "ckpt" / f"model{number + 1:02d}.ckpt").write_bytes(b"")
    return folder


class OutOfMemoryError(Exception):
    """What torch raises; nobody catches it."""


OutOfMemoryError.__module__ = "torch"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def hear(content: bytes) -> list[tuple[float, float, str, float]]:
    """Make detections (start, end, code, score) that depend on the content alone."""
    found = []
    for number, code in enumerate(CODES):
        chance = zlib.crc32(content + code.encode())
        if number == 0 or chance % 3:
            start_s = (chance % 80) / 4
            found.append((start_s, start_s + 0.75, code, 0.7 + (chance % 300) / 1000))
    return found


def hear_loud(path: str | Path, window_s: float = 0.25) -> list[tuple[float, float, str, float]]:
    """Make a detection of each loud stretch of a 16-bit WAV file."""
    with wave.open(str(path)) as audio:
        samples = array("h", audio.readframes(audio.getnframes()))
        window = round(window_s * audio.getframerate()) * audio.getnchannels()
    is_loud = [max(samples[start : start + window]) > 8000 for start in range(0, len(samples), window)]
    found, since = [], None
    for number, loud in enumerate([*is_loud, False]):
        if loud and since is None:
            since = number
        elif not loud and since is not None:
            found.append((since * window_s, number * window_s, "ROPT", 0.9))
            since = None
    return found


def check_room(audio_s: float, threads: int, environ: Mapping[str, str]) -> None:
    """Raise what torch raises when audio of this length is too much for so many threads."""
    room_s = float(environ.get("FAKE_HAWKEARS_ROOM_S", "inf"))
    if audio_s * threads > room_s:
        raise OutOfMemoryError(OUT_OF_MEMORY)
