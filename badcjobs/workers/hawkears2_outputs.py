"""Watches HawkEars' output folder and says which recordings are finished, never from a file half written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from badcjobs.workers.hawkears2_staging import Staged

POLL_S = 0.5
# HawkEars writes a label file in one go, so one that rests this many looks with a whole last line is closed.
_LOOKS_AT_REST = 4
# HawkEars skips endings it does not know; with one of those in the batch, who takes what is anybody's guess.
_SURELY_TAKEN = {".wav", ".flac", ".mp3", ".ogg"}


@dataclass(frozen=True, slots=True)
class Output:
    """The label file of a finished recording."""

    staged: Staged
    text: str
    written_at_ms: int


@dataclass(slots=True)
class _Seen:
    """A label file that is there but perhaps not finished."""

    position: int
    state: tuple[int, int] = (-1, -1)
    looks_at_rest: int = 0


class OutputWatch:
    """Finds label files as they are finished; each one once.

    A file is finished when its thread has moved on to a later recording (thread k of n takes every
    n-th one), when it has come to rest, or when HawkEars has ended by itself. A file of 0 bytes may be just
    opened, or mean "nothing found": looking at it longer does not tell, so it waits for the other two.
    """

    def __init__(self, staged: Sequence[Staged], folder: Path) -> None:
        self._staged = sorted(staged, key=lambda item: item.path)  # HawkEars' order: by path, links resolved
        self._folder = folder
        self._positions = {f"{item.stem}_scores.txt": position for position, item in enumerate(self._staged)}
        self._order_is_known = all(PurePath(item.path).suffix.lower() in _SURELY_TAKEN for item in staged)
        self._written: set[int] = set()  # positions whose file is there, finished or not
        self._open: dict[str, _Seen] = {}

    def look(self, *, threads: int | None, ended: bool) -> list[Output]:
        """Return what has been finished since the last look, oldest first."""
        self._notice_new()
        moved_on = self._passed_positions(threads)
        finished = [
            name
            for name, seen in self._open.items()
            if self._came_to_rest(name, seen) or ended or seen.position in moved_on
        ]
        outputs = [self._read(name) for name in finished]
        for name in finished:
            del self._open[name]
        return sorted(outputs, key=lambda output: output.written_at_ms)

    def _notice_new(self) -> None:
        for name in self._list():
            position = self._positions.get(name)
            if position is not None and position not in self._written:
                self._written.add(position)
                self._open[name] = _Seen(position)

    def _list(self) -> Iterator[str]:
        try:
            with os.scandir(self._folder) as entries:
                yield from (entry.name for entry in entries)
        except FileNotFoundError:
            pass  # HawkEars makes the folder when it is ready

    def _passed_positions(self, threads: int | None) -> set[int]:
        """Return the positions that have a later file by the same thread."""
        if not threads or not self._order_is_known:
            return set()
        lanes = min(threads, len(self._staged))
        newest = {position % lanes: position for position in sorted(self._written)}
        return self._written - set(newest.values())

    def _came_to_rest(self, name: str, seen: _Seen) -> bool:
        path = self._folder / name
        now = path.stat()
        state = (now.st_size, now.st_mtime_ns)
        seen.looks_at_rest = seen.looks_at_rest + 1 if state == seen.state else 0
        seen.state = state
        return now.st_size > 0 and seen.looks_at_rest >= _LOOKS_AT_REST and path.read_bytes().endswith(b"\n")

    def _read(self, name: str) -> Output:
        path = self._folder / name
        staged = self._staged[self._positions[name]]
        written_at_ms = path.stat().st_mtime_ns // 1_000_000
        return Output(staged, path.read_text(encoding="utf-8", errors="replace"), written_at_ms)
