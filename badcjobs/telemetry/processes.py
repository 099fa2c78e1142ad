"""Writes down which processes are on which device: a row each, and how much they use at every instant known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from badcjobs.model import ProcessReading, Reading
from badcjobs.telemetry.process_lookup import Who

_GONE_MS = 60_000  # one that comes back after so long is another one with the same number


@dataclass(slots=True)
class Seen:
    """One process on one device so far."""

    who: Who
    first_at_ms: int
    last_at_ms: int
    memory_peak_bytes: int | None = None


class ProcessWriter(Protocol):
    """Where processes are written."""

    def write_process(self, values: Mapping[str, object]) -> None: ...

    def write_process_samples(self, rows: Sequence[tuple[int, int, int, int | None, int | None]]) -> None: ...

    def last_processes(self) -> Sequence[Mapping[str, object]]: ...


class ProcessBook:
    """Follows the processes on a task's devices; each is looked up once."""

    def __init__(self, writer: ProcessWriter, look_up: Callable[[int], Who]) -> None:
        self._writer = writer
        self._look_up = look_up
        self._seen: dict[tuple[int, int], Seen] = {}  # by device and pid

    def resume(self) -> None:
        """Go on with the rows of a recorder that died."""
        for row in self._writer.last_processes():
            ours = row["ours"]
            who = Who(_text(row["name"]), _text(row["user"]), None if ours is None else bool(ours))
            times = (int(str(row["first_at_ms"])), int(str(row["last_at_ms"])))
            peak = row["memory_peak_bytes"]
            place = (int(str(row["device_id"])), int(str(row["pid"])))
            self._seen[place] = Seen(who, *times, None if peak is None else int(str(peak)))

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write the processes of one instant; most instants do not ask for them."""
        told = [(device_id, p) for device_id, reading in readings for p in reading.processes or ()]
        if told:
            self._forget_the_gone(at_ms)
        for device_id, process in told:
            self._write_one(at_ms, device_id, process)
        self._writer.write_process_samples(
            [(device_id, at_ms, p.pid, p.memory_used_bytes, p.sm_percent) for device_id, p in told]
        )

    def finish(self) -> None:
        """Do nothing: every row has its end already."""

    def written(self) -> None:
        """Do nothing: a row that was refused is written anew when its process is seen again."""

    def _write_one(self, at_ms: int, device_id: int, process: ProcessReading) -> None:
        place = (device_id, process.pid)
        seen = self._seen.get(place)
        if seen is None:
            seen = self._seen[place] = Seen(self._who(process.pid), at_ms, at_ms)
        seen.last_at_ms = at_ms
        if process.memory_used_bytes is not None:
            seen.memory_peak_bytes = max(seen.memory_peak_bytes or 0, process.memory_used_bytes)
        who = seen.who
        self._writer.write_process(
            {
                "device_id": device_id, "pid": process.pid, "name": who.name, "user": who.user,
                "ours": None if who.ours is None else int(who.ours), "first_at_ms": seen.first_at_ms,
                "last_at_ms": seen.last_at_ms, "memory_peak_bytes": seen.memory_peak_bytes,
            }
        )  # fmt: skip

    def _who(self, pid: int) -> Who:
        """Ask once for all devices: one process may use several."""
        known = [seen.who for (_, other), seen in self._seen.items() if other == pid]
        return known[0] if known else self._look_up(pid)

    def _forget_the_gone(self, at_ms: int) -> None:
        """Keep memory small where every chunk is a process of its own."""
        gone = [place for place, seen in self._seen.items() if at_ms - seen.last_at_ms > _GONE_MS]
        for place in gone:
            del self._seen[place]


def _text(value: object) -> str | None:
    return None if value is None else str(value)
