"""SM activity and occupancy of cards without GPM, from DCGM: a reader around another reader.

Volta to Ampere have the counters, but NVML does not show them; DCGM's host engine may, where the site runs one. One
``dcgmi dmon`` streams them, started when a device first turns out to need it. Its numbers for devices are the host
engine's own, which sees cards that we do not, so ``dcgmi discovery`` tells which UUID is which."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from badcjobs.devices.plausible import NoAnswer, check_range
from badcjobs.devices.programs import ProgramFailed, Stream, ask, in_short
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, GpuReader

METRICS = ("sm_activity_percent", "sm_occupancy_percent")
_FIELDS = "1002,1003"  # DCGM_FI_PROF_SM_ACTIVE, DCGM_FI_PROF_SM_OCCUPANCY: shares from 0 to 1
_TOO_OLD_S = 5.0

_ROW = re.compile(r"GPU\s+(\d{1,6})\s+(\S+)\s+(\S+)")
_LISTED_ID = re.compile(r"\|\s*(\d{1,6})\s*\|")
_LISTED_UUID = re.compile(r"Device UUID:\s*(\S+)")

Shares = dict[str, float | str]  # metric → percent, or why there is none


def parse_row(text: str) -> tuple[int, Shares] | None:
    """Return DCGM's number of a device and its shares, from a line of ``dcgmi dmon``; None: no such line."""
    row = _ROW.fullmatch(text)
    if row is None:
        return None
    shares: Shares = {}
    for metric, said in zip(METRICS, row.groups()[1:], strict=True):
        try:
            shares[metric] = check_range(metric, round(float(said) * 100, 3), said)
        except NoAnswer as reason:
            shares[metric] = str(reason)
        except ValueError:  # N/A
            shares[metric] = in_short(said)
    return int(row[1]), shares


def parse_discovery(text: str) -> dict[int, str]:
    """Map DCGM's number of a device to its UUID, from ``dcgmi discovery -l``."""
    found: dict[int, str] = {}
    number: int | None = None
    for line in text.splitlines():
        if row := _LISTED_ID.match(line):
            number = int(row[1])
        if number is not None and (told := _LISTED_UUID.search(line)):
            found[number] = told[1]
    return found


class DcgmReader:
    """Reads with another reader, and asks dcgmi for what that one says it cannot give.

    ``program`` is where dcgmi lies; None: nowhere, which becomes a part of the reason.
    """

    def __init__(self, inner: GpuReader, program: str | None, clock: Clock) -> None:
        self.backend = inner.backend
        self.why = inner.why
        self._inner = inner
        self._program = program
        self._clock = clock
        self._stream: Stream | None = None
        self._started_s = 0.0
        self._uuid_of: dict[int, str] = {}
        self._heard: dict[str, tuple[float, Shares]] = {}  # by UUID
        self._first_reasons: dict[tuple[str, str], str] = {}  # (UUID, metric) → why there was no share at first

    def inventory(self) -> Sequence[InventoryDevice]:
        found = self._inner.inventory()
        self.why = self._inner.why
        return found

    def read(self, uuid: str) -> Reading:
        """Read the device; fill in what it called missing and dcgmi knows."""
        reading = self._inner.read(uuid)
        wanted = {metric: reading.missing[metric] for metric in METRICS if metric in reading.missing}
        if not wanted:
            return reading
        shares = self._shares(uuid)
        values: dict[str, Any] = {m: shares[m] for m in wanted if isinstance(shares.get(m), float)}
        missing = {metric: why for metric, why in reading.missing.items() if metric not in wanted}
        missing |= {m: f"{why}; {shares[m]}" for m, why in wanted.items() if m in shares and m not in values}
        sources = {**reading.sources, **dict.fromkeys(values, "dcgmi")}
        return replace(reading, **values, missing=missing, sources=sources)

    def force_full_read(self) -> None:
        """Pass it on."""
        self._inner.force_full_read()

    def close(self) -> None:
        """End dcgmi and close the reader inside."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._heard.clear()
        self._inner.close()

    def _shares(self, uuid: str) -> Shares:
        """Return the shares of a device, or why there are none; nothing: dcgmi has just been started."""
        if self._program is None:
            return dict.fromkeys(METRICS, "dcgmi is not on PATH")
        if self._stream is None:
            self._started_s = self._clock.monotonic_s()
            self._stream = Stream(self._prepare, self._hear)
        at_s, shares = self._heard.get(uuid, (self._started_s, None))
        if self._clock.monotonic_s() - at_s > _TOO_OLD_S or (shares is None and self._stream.ended):
            return dict.fromkeys(METRICS, f"dcgmi: {self._stream.last_words or 'nothing said of this device'}")
        return {  # always the same reason for having none: each new text would be a gap
            metric: self._first_reasons.setdefault((uuid, metric), f"dcgmi: {share}")
            if isinstance(share, str)
            else share
            for metric, share in (shares or {}).items()
        }

    def _prepare(self) -> list[str]:
        """Learn which device is which and return the command to listen to; in the listener's thread."""
        assert self._program is not None
        self._uuid_of = parse_discovery(ask([self._program, "discovery", "-l"]))
        if not self._uuid_of:
            raise ProgramFailed("discovery lists no GPU")
        return [self._program, "dmon", "-e", _FIELDS, "-d", "1000"]

    def _hear(self, text: str) -> bool:
        if text.startswith(("#", "ID")):  # the heads of the table come again and again
            return True
        row = parse_row(text)
        if row is None:
            return False
        if row[0] in self._uuid_of:
            self._heard[self._uuid_of[row[0]]] = (self._clock.monotonic_s(), row[1])
        return True
