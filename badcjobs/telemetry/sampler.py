"""Reads every device once and sorts the answers: readings to keep, and gaps with their reasons."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from badcjobs.model import METRICS, Reading
from badcjobs.seams import DeviceUnreadable, GpuReader
from badcjobs.telemetry.gaps import Gaps

log = logging.getLogger(__name__)


class Sampler:
    """Follows devices by UUID; ``devices`` are (device_id, uuid), uuid None where nothing can read them."""

    def __init__(self, reader: GpuReader, devices: Sequence[tuple[int, str | None]], gaps: Gaps) -> None:
        self._reader = reader
        self._devices = devices
        self._gaps = gaps

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]:
        """Read all devices; what cannot be read becomes a gap, never an exception and never a zero."""
        readings = []
        for device_id, uuid in self._devices:
            reading = self._read(device_id, uuid, at_ms)
            if reading is not None:
                self._note_metrics(device_id, reading, at_ms)
                readings.append((device_id, reading))
        return readings

    def remember_gaps(self) -> None:
        """Keep the state of the gaps before an instant is written."""
        self._gaps.remember()

    def forget_gaps(self) -> None:
        """Take back what the writer has rolled back."""
        self._gaps.forget()

    def _read(self, device_id: int, uuid: str | None, at_ms: int) -> Reading | None:
        try:
            if uuid is None:
                raise DeviceUnreadable("no driver library to read it with")
            reading = self._reader.read(uuid)
        except DeviceUnreadable as error:
            if self._gaps.missing(device_id, None, at_ms, str(error)):
                log.warning("device %s cannot be read: %s", uuid or device_id, error)
            return None
        self._gaps.good(device_id, None, at_ms)
        return reading

    def _note_metrics(self, device_id: int, reading: Reading, at_ms: int) -> None:
        for metric in METRICS:
            if metric in reading.missing:
                if self._gaps.missing(device_id, metric, at_ms, reading.missing[metric]):
                    log.info("device %d does not give %s: %s", device_id, metric, reading.missing[metric])
            elif getattr(reading, metric) is not None:  # None: not asked this time
                self._gaps.good(device_id, metric, at_ms)
