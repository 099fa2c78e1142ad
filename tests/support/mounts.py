"""A mount table as another machine would have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def lie_about_filesystem(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Let the kernel's mount table say that a folder is the mount point of a filesystem of this kind."""
    read_text = Path.read_text
    table = Path("/proc/self/mountinfo")
    line = f"900 1 0:99 / {folder.resolve()} rw,relatime shared:99 - {kind} somewhere rw\n"

    def lying(path: Path, *args: Any, **options: Any) -> str:
        text = read_text(path, *args, **options)
        return f"{text}{line}" if path == table else text

    monkeypatch.setattr(Path, "read_text", lying)
