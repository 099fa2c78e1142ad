"""Sources for tests, as a folder of files: audio that is whole or damaged, manifests, links, pipes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from support.audio import make_wav

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
Files = dict[str, object]  # name → seconds of audio, text, bytes, or how to make it


def rows(*lines: str, header: str = HEADER) -> str:
    return "\n".join((header, *lines, ""))


def link(target: str) -> Any:
    return lambda path: path.symlink_to(target)


def truncated(seconds: float, there_s: float) -> Any:
    def make(path: Path) -> None:
        make_wav(path, seconds, 1000, tone_hz=100)
        os.truncate(path, 44 + round(there_s * 2000))

    return make


def unfinished(seconds: float) -> Any:
    """Return what makes a recording whose recorder lost power before it wrote the size."""

    def make(path: Path) -> None:
        content = make_wav(path, seconds, 1000, tone_hz=100).read_bytes()
        path.write_bytes(content[:40] + bytes(4) + content[44:])

    return make


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def write(files: Files, folder: Path = Path()) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        elif isinstance(content, str):
            path.write_text(content, encoding="utf-8", newline="")
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            assert isinstance(content, int | float)
            make_wav(path, content, 1000, tone_hz=100)
