"""A moment without root's powers: what is closed to everybody is closed to us, whoever runs the tests."""

from __future__ import annotations

import codecs
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def powerless_folder() -> Iterator[Path]:
    """Work in an empty folder; as root, do so as the user nobody."""
    codecs.lookup("utf-8-sig")  # nobody may not read the modules of root's Python, and this one comes late
    before = Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix="badcjobs-test-", dir="/tmp"))  # pytest's own folders are closed to nobody
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, _NOBODY, _NOBODY)
        os.seteuid(_NOBODY)
    try:
        os.chdir(folder)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(before)
        for parent, _, _ in os.walk(folder, onerror=_open_up):
            Path(parent).chmod(0o700)
        shutil.rmtree(folder)


def _open_up(error: OSError) -> None:
    Path(error.filename).chmod(0o700)
