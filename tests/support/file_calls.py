"""Counts the files that a program opens, looks at and syncs, through a small library built from ``file_calls.c``."""

from collections import Counter
from pathlib import Path

from support.stand_ins import build


class FileCalls:
    """What programs started with ``environ`` do with files below a folder."""

    def __init__(self, below: Path, log: Path) -> None:
        self._log, library = log, build(Path(__file__).with_suffix(".c"), "file_calls.so")
        self.environ = {"LD_PRELOAD": str(library), "FILE_CALLS_BELOW": str(below), "FILE_CALLS_LOG": str(log)}

    def count(self) -> Counter[tuple[str, Path]]:
        """Map ("open", "stat" or "sync", path) to how often that was."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return Counter((call, Path(path)) for call, _, path in (line.partition(" ") for line in lines))
