"""Read NVIDIA GPUs by listening to ``nvidia-smi``, where its library cannot be used directly.

One process streams a line per device and round; a reading is the newest line, so it costs nothing to ask and may be
half a second old. MIG slices are not in its lines: their card is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from badcjobs.devices.programs import ProgramFailed, Stream, ask, in_short
from badcjobs.devices.reading_builder import NoAnswer, check_range, no_metric
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_UUID = re.compile(r"GPU-[0-9a-f-]+")
_NO_VALUE = ("ERR!", "N/A", "Not Supported", "Unknown Error")  # besides [N/A], [Not Supported] and their like


def _whole(text: str) -> int:
    return round(float(text))


def _mib(text: str) -> int:
    return _whole(text) * 2**20


# Metric, its columns (the first one that this nvidia-smi knows is asked for), and how a text is read.
Field = tuple[str, tuple[str, ...], Callable[[str], int | float | str]]
SAMPLE_FIELDS: tuple[Field, ...] = (
    ("utilization_percent", ("utilization.gpu",), _whole),
    ("memory_utilization_percent", ("utilization.memory",), _whole),
    ("memory_used_bytes", ("memory.used",), _mib),
    ("temperature_c", ("temperature.gpu",), _whole),
    ("power_w", ("power.draw",), float),
    ("sm_clock_mhz", ("clocks.sm",), _whole),
    ("memory_clock_mhz", ("clocks.mem",), _whole),
    # Called throttle before driver 535.
    ("throttle_reasons", ("clocks_event_reasons.active", "clocks_throttle_reasons.active"), lambda t: int(t, 16)),
    ("fan_percent", ("fan.speed",), _whole),
    ("ecc_errors", ("ecc.errors.uncorrected.volatile.total",), _whole),
    ("encoder_percent", ("utilization.encoder",), _whole),
    ("decoder_percent", ("utilization.decoder",), _whole),
)
_INVENTORY: tuple[Field, ...] = (
    ("index", ("index",), _whole),
    ("memory_total_bytes", ("memory.total",), _mib),
    ("power_limit_w", ("enforced.power.limit", "power.limit"), float),
    ("pci_bus_id", ("pci.bus_id",), str),
    ("driver", ("driver_version",), str),
    ("name", ("name",), str),
)


class Query:
    """A list of fields, which shrinks as a version of nvidia-smi says which of them it does not know."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._unknown: set[str] = set()
        self._absurd: dict[tuple[str, str], str] = {}  # (uuid, metric) → the reason for its first value of that kind

    def arguments(self) -> list[str]:
        """Return the words for the command line; the UUID comes first."""
        names = [name for *_, name in self._asked() if name is not None]
        return [f"--query-gpu={','.join(['uuid', *names])}", "--format=csv,noheader,nounits"]

    def leave_out_unknown(self, words: str) -> bool:
        """Leave out the fields that nvidia-smi has just complained about; return whether there were any."""
        asked = {name for *_, name in self._asked()}
        news = asked.intersection(_UNKNOWN_FIELD.findall(words))
        self._unknown |= {name for name in news if name is not None}
        return bool(news)

    def parse(self, line: str) -> tuple[str, dict[str, Any], dict[str, str]] | None:
        """Return (uuid, values, reasons for those without one); None: this is no line of ours."""
        fields = self._asked()
        known = sum(name is not None for *_, name in fields)
        uuid, *texts = (text.strip() for text in line.split(",", known))
        if len(texts) != known or not _UUID.fullmatch(uuid):
            return None
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for metric, names, understand, name in fields:
            if name is None:
                missing[metric] = f"this nvidia-smi does not know {' or '.join(names)}"
                continue
            text = texts.pop(0)
            try:
                if not text or text.startswith("[") or text in _NO_VALUE:
                    raise ValueError(text)
                values[metric] = check_range(metric, understand(text), text)
            except NoAnswer as reason:  # each new text would be a gap of its own
                missing[metric] = self._absurd.setdefault((uuid, metric), str(reason))
            except (ValueError, OverflowError):
                missing[metric] = in_short(text.strip("[]")) or "nothing said"
        return uuid, values, missing

    def _asked(self) -> list[tuple[str, tuple[str, ...], Callable[[str], int | float | str], str | None]]:
        """Return the fields, each with the name that is asked for; None: this nvidia-smi knows none of its names."""
        unknown = self._unknown
        return [(*field, next((name for name in field[1] if name not in unknown), None)) for field in self._fields]


def make_reading(values: Mapping[str, Any], missing: Mapping[str, str]) -> Reading:
    """Make a reading of a line; raise DeviceUnreadable when it holds no value at all."""
    if not values:
        raise no_metric(missing)
    reasons = {**missing, "energy_j": "nvidia-smi gives no energy counter"}
    if "utilization_percent" not in values:
        return Reading(**values, missing={**reasons, "busy_percent": missing["utilization_percent"]})
    busy = float(values["utilization_percent"])
    return Reading(**values, busy_percent=busy, missing=reasons, sources={"busy_percent": "utilization"})


# --- the reader ------------------------------------------------------------------------------------------------------

_RESTART_S = 10.0
_LONGEST_QUOTE = 80
_PATIENCE_S = 5.0  # without persistence mode the driver wakes every card first


class NvidiaSmiReader(GpuReader):
    """Reads every NVIDIA GPU that nvidia-smi lists; ``program`` is where it lies.

    The list of devices is waited for once, and the first lines of all of them together once.
    """

    backend = "nvidia-smi"

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
        self._query = Query(SAMPLE_FIELDS)
        self._stream: Stream | None = None
        self._may_start_s = 0.0
        self._trouble = ""  # what an earlier process said before it ended
        self._has_waited = False  # for the first lines
        self._lines: dict[str, tuple[float, dict[str, Any], dict[str, str]]] = {}  # heard at, values, reasons
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
        if not self._has_waited:
            self._wait_for_a_round()
        line = self._lines.get(uuid)
        if line is not None and self._clock.monotonic_s() - line[0] <= self._silence_s:
            return make_reading(line[1], line[2])
        words = (self._stream.last_words if self._stream else "") or self._trouble
        if words:
            raise DeviceUnreadable(f"nvidia-smi: {words}")
        if line is None and self._round_is_over:
            raise DeviceUnreadable("nvidia-smi says nothing of this device")
        # No running number of seconds in the reason: each new text would be a gap of its own.
        raise DeviceUnreadable(f"nvidia-smi has said nothing for {self._silence_s:g} s")

    def close(self) -> None:
        """End the process; a later reading would start another one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._lines.clear()
        self._round_is_over = self._has_waited = False

    def _wait_for_a_round(self) -> None:
        """Wait once until every device has spoken that speaks at all."""
        self._has_waited = True
        until_s = self._clock.monotonic_s() + self._patience_s
        stream = None
        while self._stream is not stream and not self._round_is_over:
            stream = self._stream
            if stream is not None:
                stream.wait(lambda: self._round_is_over, max(0.0, until_s - self._clock.monotonic_s()))
            self._keep_listening()  # at once again without a field that is not known

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
        every_ms = max(1, round(self._interval_s * 1000))
        command = [self._program, *self._query.arguments(), "-lms", str(every_ms)]
        self._stream = Stream(lambda: command, self._hear)

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
        query = Query(_INVENTORY)
        end_s = self._clock.monotonic_s() + self._patience_s
        while True:
            try:
                text = ask([self._program, *query.arguments()], max(0.1, end_s - self._clock.monotonic_s()))
                break
            except ProgramFailed as error:
                if not query.leave_out_unknown(str(error)):
                    return ReaderUnavailable(f"nvidia-smi does not list the devices: {error}")
        lines = [line for line in map(query.parse, text.splitlines()) if line is not None]
        if not lines:  # it may end with 0 all the same
            said = in_short(text)[:_LONGEST_QUOTE]
            what = f"it says {said!r}" if said else "it says nothing"
            what = "what it says is no text" if "\N{REPLACEMENT CHARACTER}" in said else what
            return ReaderUnavailable(f"nvidia-smi lists no device: {what}")
        usual = {"name": "NVIDIA GPU", "backend": self.backend}
        return [
            InventoryDevice(uuid=uuid, **{**usual, "index": position, **values})
            for position, (uuid, values, _) in enumerate(lines)
        ]
