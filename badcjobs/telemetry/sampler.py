"""Reads every device once and sorts the answers: readings to keep, and gaps with their reasons."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from operator import attrgetter

from badcjobs.model import METRICS, Reading
from badcjobs.seams import DeviceUnreadable, GpuReader, ReaderUnavailable
from badcjobs.telemetry.followed import Followed
from badcjobs.telemetry.gaps import Gaps

log = logging.getLogger(__name__)

_ASKED_FOR = (*METRICS, "processes")
_values_of = attrgetter(*_ASKED_FOR)


class Sampler:
    """Follows devices by UUID; one without has nothing that could read it, and the reader may know why."""

    def __init__(self, reader: GpuReader, devices: Sequence[Followed], gaps: Gaps) -> None:
        self._reader = reader
        self._devices = devices
        self._gaps = gaps
        self.unreadable: Mapping[int, str] = {}  # the devices that gave no reading at the last instant, and why
        nothing = any(device.uuid is None for device in devices)
        self._no_uuid = _why_nothing(reader) if nothing else ""

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]:
        """Read all devices; what cannot be read becomes a gap, never an exception and never a zero."""
        readings, unreadable = [], {}
        for device in self._devices:
            try:
                reading = self._read(device.uuid)
            except DeviceUnreadable as error:
                unreadable[device.device_id] = str(error)
                self._note_silence(device, at_ms, str(error))
            else:
                self._gaps.good(device.device_id, None, at_ms)
                self._note_metrics(device.device_id, reading, at_ms)
                readings.append((device.device_id, reading))
        self.unreadable = unreadable
        return readings

    def hurry(self) -> None:
        """Let the next instant, the last one, leave nothing out."""
        self._reader.hurry()
        self._gaps.hurry()

    def remember_gaps(self) -> None:
        """Keep the state of the gaps before an instant is written."""
        self._gaps.remember()

    def forget_gaps(self) -> None:
        """Take back what the writer has rolled back."""
        self._gaps.forget()

    def _read(self, uuid: str | None) -> Reading:
        if uuid is None:
            raise DeviceUnreadable(self._no_uuid)
        return self._reader.read(uuid)

    def _note_silence(self, device: Followed, at_ms: int, reason: str) -> None:
        if self._gaps.missing(device.device_id, None, at_ms, reason):
            log.warning("%s (%s) cannot be read: %s", device.label, device.uuid, reason)

    def _note_metrics(self, device_id: int, reading: Reading, at_ms: int) -> None:
        for metric, value in zip(_ASKED_FOR, _values_of(reading), strict=True):
            if metric in reading.missing:
                if self._gaps.missing(device_id, metric, at_ms, reading.missing[metric]):
                    log.info("device %d does not give %s: %s", device_id, metric, reading.missing[metric])
            elif value is not None:  # None: not asked this time
                self._gaps.good(device_id, metric, at_ms)


def _why_nothing(reader: GpuReader) -> str:
    """Return why devices were granted that nothing here can read: a container without its driver library, say."""
    try:
        reader.inventory()
    except ReaderUnavailable as error:
        return f"no driver library to read it with: {error}"
    return "no driver library to read it with"
