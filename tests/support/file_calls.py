"""Counts the files that a program opens, looks at and syncs, through a small library built from ``file_calls.c``."""

import atexit
import shutil
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from support.needs import missing

SOURCE = Path(__file__).with_suffix(".c")


@cache
def _library() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        missing("cc", "no C compiler for the library that counts file calls")
    folder = Path(tempfile.mkdtemp(prefix="file-calls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "file_calls.so"
    subprocess.run([compiler, "-std=gnu11", "-Wall", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


class FileCalls:
    """What programs started with ``environ`` do with files below a folder."""

    def __init__(self, below: Path, log: Path) -> None:
        self._log = log
        self.environ = {"LD_PRELOAD": str(_library()), "FILE_CALLS_BELOW": str(below), "FILE_CALLS_LOG": str(log)}

    def count(self) -> Counter[tuple[str, Path]]:
        """Map ("open", "stat" or "sync", path) to how often that was."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return Counter((call, Path(path)) for call, _, path in (line.partition(" ") for line in lines))
