"""Understands what HawkEars 2 says on stderr: the device it took, the recordings it could not read, why it gave up."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

from badcjobs.workers.failures import CONFIGURATION, OUT_OF_MEMORY, classify

LONGEST_ERROR = 2000

_DEVICE = re.compile(r"Using (\w+) with \d+-model ensemble and (\d+) threads")
_ACCUSATION = re.compile(
    r'(?:Caught exception in audio load of|No predictions generated for|Could not load recording|Recording) "?'
    r'(?P<path>/.+?)(?:: | \(length=|": |" not found|" is not a file)'
)
# Not an error for HawkEars: it looks at nothing shorter than half a second, says so, and goes on.
_UNHEARD = re.compile(
    r"No predictions generated for (?P<path>/.+) \(length=(?P<length>[\d.]+) seconds, audio_error=None\)"
)
_IMPORT_ERROR = re.compile(r"(?:Import|ModuleNotFound)Error: ")  # the end will tell whether it went on without
_NOT_WRITTEN = re.compile(r"Failed to write Audacity labels to .*/(?P<stem>.+?)_scores\.txt")
_SMALL_TALK = re.compile(
    r"^(?:[\d:.]+ )?(?:\*\*\* Install OpenVINO|Using \w+ with|For (?:faster|better)|Low-band classifier|Analyzing \d"
    r"|Elapsed time|Cancellation requested|Aborted!|$)"
)


class HawkEarsLog:
    """What one HawkEars process has said so far; read on as it grows."""

    def __init__(self, path: Path) -> None:
        self.device: str | None = None  # CUDA, CPU or MPS; None: it has not said yet
        self.threads: int | None = None
        self.misconfigured: str | None = None
        self.out_of_memory = False
        self.unheard_s: dict[str, float] = {}  # path → length of audio too short to listen to
        self.not_written: set[str] = set()  # stems whose output it could not finish
        self._path = path
        self.offset = 0  # how much it has said
        self._rest = b""
        self._accusations: dict[str, str] = {}
        self._last: deque[str] = deque(maxlen=12)

    def read_on(self, *, final: bool = False) -> None:
        """Take in the lines that are new; the last one counts without its end only when ``final``."""
        try:
            with self._path.open("rb") as log:
                log.seek(self.offset)
                fresh = log.read()
        except FileNotFoundError:
            return  # a launcher on another node may take its time
        self.offset += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        if final:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._take(line.decode(errors="replace").rstrip())

    def accusation(self, path: str) -> str | None:
        """Return what was said against one recording; None: nothing."""
        return self._accusations.get(path)

    def last_words(self) -> str:
        """Return the last lines that mean something."""
        return "\n".join(self._last)[-LONGEST_ERROR:]

    def _take(self, line: str) -> None:
        if device := _DEVICE.search(line):
            self.device, self.threads = device[1], int(device[2])
        if not _SMALL_TALK.search(line):
            self._last.append(line)
        error_class = classify(line)
        if error_class == OUT_OF_MEMORY:
            self.out_of_memory = True
        elif self.misconfigured is None and error_class == CONFIGURATION and not _IMPORT_ERROR.match(line):
            self.misconfigured = line
        if unheard := _UNHEARD.search(line):
            self.unheard_s[unheard["path"]] = float(unheard["length"])
        elif accusation := _ACCUSATION.search(line):
            # HawkEars says the same of a recording three times; the last time it says it best.
            self._accusations[accusation["path"]] = line[:LONGEST_ERROR]
        if not_written := _NOT_WRITTEN.search(line):
            self.not_written.add(not_written["stem"])
