"""Read NVIDIA GPUs by listening to ``nvidia-smi``, where its library cannot be used directly.

One process streams a line per device and round; a reading is the newest line, so it costs nothing to ask and may be
half a second old. MIG slices are not in its lines: their card is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from badcjobs.gpu.nvidia_smi_query import BACKEND, Query, describe, inventory_query, make_reading, sample_query
from badcjobs.gpu.programs import ProgramFailed, Stream, ask, in_short
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

_RESTART_S = 10.0
_LONGEST_QUOTE = 80
_PATIENCE_S = 5.0  # without persistence mode the driver wakes every card first

_Line = tuple[float, dict[str, Any], dict[str, str]]  # heard at, values, reasons


class NvidiaSmiReader:
    """Reads every NVIDIA GPU that nvidia-smi lists; ``program`` is where it lies.

    The list of devices is waited for once, and the first lines of all of them together once.
    """

    backend = BACKEND

    def __init__(
        self,
        program: str,
        clock: Clock,
        *,
        interval_s: float = 0.5,
        why: str = "asked for",
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.why = why
        self._program = program
        self._clock = clock
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._silence_s = max(3 * interval_s, 5.0)
        self._inventory: list[InventoryDevice] | ReaderUnavailable | None = None
        self._query = sample_query()
        self._stream: Stream | None = None
        self._may_start_s = 0.0
        self._trouble = ""  # what an earlier process said before it ended
        self._patient_until_s: float | None = None  # until when first lines are waited for; None: nothing asked yet
        self._met: set[str] = set()  # devices whose first line was waited for
        self._lines: dict[str, _Line] = {}
        self._round_is_over = False  # a device has spoken twice, so every one that speaks has spoken

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices; nvidia-smi is asked once, and the answer remembered, or that there was none."""
        if self._inventory is None:
            self._inventory = self._list_devices()
        if isinstance(self._inventory, ReaderUnavailable):
            raise ReaderUnavailable(str(self._inventory))
        return list(self._inventory)

    def read(self, uuid: str) -> Reading:
        """Return what the newest line says of this device."""
        try:
            known = any(device.uuid == uuid for device in self.inventory())
        except ReaderUnavailable as error:
            raise DeviceUnreadable(str(error)) from error
        if not known:
            raise DeviceUnreadable(f"nvidia-smi lists no device {uuid!r}")
        self._keep_listening()
        if uuid not in self._met:
            self._wait_for_a_line(uuid)
        _, values, missing = self._newest(uuid)
        return make_reading(values, missing)

    def hurry(self) -> None:
        """Do nothing: every reading is a whole one."""

    def close(self) -> None:
        """End the process; a later reading would start another one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._lines.clear()
        self._met.clear()
        self._round_is_over = False
        self._patient_until_s = None

    def _newest(self, uuid: str) -> _Line:
        line = self._lines.get(uuid)
        if line is not None and self._clock.monotonic_s() - line[0] <= self._silence_s:
            return line
        words = (self._stream.last_words if self._stream else "") or self._trouble
        if words:
            raise DeviceUnreadable(f"nvidia-smi: {words}")
        if line is None and self._round_is_over:
            raise DeviceUnreadable("nvidia-smi says nothing of this device")
        # No running number of seconds in the reason: each new text would be a gap of its own.
        raise DeviceUnreadable(f"nvidia-smi has said nothing for {self._silence_s:g} s")

    def _wait_for_a_line(self, uuid: str) -> None:
        """Wait for the first line about a device, unless the others show that there is none in a whole round."""
        if self._patient_until_s is None:
            self._patient_until_s = self._clock.monotonic_s() + self._patience_s
        self._met.add(uuid)
        stream = self._stream
        while stream is not None and (left_s := self._patient_until_s - self._clock.monotonic_s()) > 0:
            told = stream.wait(lambda: uuid in self._lines or self._round_is_over, left_s)
            self._keep_listening()  # at once again without a field that is not known
            if uuid in self._lines or not told or self._stream is stream:
                break
            stream = self._stream

    def _keep_listening(self) -> None:
        """Start nvidia-smi where it does not run: at once without a field it does not know, else every 10 s."""
        stream, now_s = self._stream, self._clock.monotonic_s()
        if stream is not None and not stream.ended:
            return
        fewer = stream is not None and self._query.leave_out_unknown(stream.last_words)
        if stream is not None and not fewer and now_s < self._may_start_s:
            return
        self._may_start_s = now_s + _RESTART_S
        self._trouble = "" if stream is None or fewer else stream.last_words
        query = self._query
        self._stream = Stream(lambda: self._command(query), self._hear)

    def _command(self, query: Query) -> list[str]:
        return [self._program, *query.arguments(), "-lms", str(max(1, round(self._interval_s * 1000)))]

    def _hear(self, text: str) -> bool:
        line = self._query.parse(text)
        if line is None:
            return False
        uuid, values, missing = line
        self._round_is_over |= uuid in self._lines
        self._lines[uuid] = (self._clock.monotonic_s(), values, missing)
        self._trouble = ""
        return True

    def _list_devices(self) -> list[InventoryDevice] | ReaderUnavailable:
        query = inventory_query()
        end_s = self._clock.monotonic_s() + self._patience_s
        while True:
            try:
                text = ask([self._program, *query.arguments()], max(0.1, end_s - self._clock.monotonic_s()))
            except ProgramFailed as error:
                if query.leave_out_unknown(str(error)):
                    continue
                return ReaderUnavailable(f"nvidia-smi does not list the devices: {error}")
            return _parse_list(query, text)


def _parse_list(query: Query, text: str) -> list[InventoryDevice] | ReaderUnavailable:
    lines = [line for line in map(query.parse, text.splitlines()) if line is not None]
    if not lines:  # it may end with 0 all the same
        return ReaderUnavailable(f"nvidia-smi lists no device: {_quote(text)}")
    return [describe(uuid, values, position) for position, (uuid, values, _) in enumerate(lines)]


def _quote(text: str) -> str:
    said = in_short(text)
    if "\N{REPLACEMENT CHARACTER}" in said:
        return "what it says is no text"
    return f"it says {said[:_LONGEST_QUOTE]!r}" if said else "it says nothing"
