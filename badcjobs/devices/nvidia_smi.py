"""Read NVIDIA GPUs by listening to ``nvidia-smi``, where its library cannot be used directly.

One process streams a line per device and round; a reading is the newest line, so it costs nothing to ask and may be
half a second old. MIG slices are not in its lines: their card is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from badcjobs.devices.plausible import Absurd, check_range
from badcjobs.devices.programs import ProgramFailed, Stream, ask, in_short
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, ReaderUnavailable

BACKEND = "nvidia-smi"

_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_UUID = re.compile(r"GPU-[0-9a-f-]+")
_FORMAT = "--format=csv,noheader,nounits"
_NO_ENERGY = "nvidia-smi gives no energy counter"


@dataclass(frozen=True, slots=True)
class Field:
    """One column and what becomes of it."""

    metric: str
    names: tuple[str, ...]  # the first one that this nvidia-smi knows is asked for
    understand: Callable[[str], int | float | str]


def _whole(text: str) -> int:
    return round(float(text))


def _real(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


def _mib(text: str) -> int:
    return _whole(text) * 2**20


SAMPLE_FIELDS = (
    Field("utilization_percent", ("utilization.gpu",), _whole),
    Field("memory_utilization_percent", ("utilization.memory",), _whole),
    Field("memory_used_bytes", ("memory.used",), _mib),
    Field("temperature_c", ("temperature.gpu",), _whole),
    Field("power_w", ("power.draw",), _real),
    Field("sm_clock_mhz", ("clocks.sm",), _whole),
    Field("memory_clock_mhz", ("clocks.mem",), _whole),
    # Called throttle before driver 535.
    Field("throttle_reasons", ("clocks_event_reasons.active", "clocks_throttle_reasons.active"), lambda t: int(t, 16)),
    Field("fan_percent", ("fan.speed",), _whole),
    Field("ecc_errors", ("ecc.errors.uncorrected.volatile.total",), _whole),
    Field("encoder_percent", ("utilization.encoder",), _whole),
    Field("decoder_percent", ("utilization.decoder",), _whole),
)
_INVENTORY = (
    Field("index", ("index",), _whole),
    Field("memory_total_bytes", ("memory.total",), _mib),
    Field("power_limit_w", ("enforced.power.limit", "power.limit"), _real),
    Field("pci_bus_id", ("pci.bus_id",), str),
    Field("driver", ("driver_version",), str),
    Field("name", ("name",), str),
)


class Query:
    """A list of fields, which shrinks as a version of nvidia-smi says which of them it does not know."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._unknown: set[str] = set()
        self._absurd: dict[tuple[str, str], str] = {}  # (uuid, metric) → the reason for its first value of that kind

    def arguments(self) -> list[str]:
        """Return the words for the command line; the UUID comes first."""
        return [f"--query-gpu={','.join(['uuid', *(name for _, name in self._asked())])}", _FORMAT]

    def leave_out_unknown(self, words: str) -> bool:
        """Leave out the fields that nvidia-smi has just complained about; return whether there were any."""
        news = {name for name in _UNKNOWN_FIELD.findall(words) if any(name == asked for _, asked in self._asked())}
        self._unknown |= news
        return bool(news)

    def parse(self, line: str) -> tuple[str, dict[str, Any], dict[str, str]] | None:
        """Return (uuid, values, reasons for those without one); None: this is no line of ours."""
        asked = self._asked()
        uuid, *texts = (text.strip() for text in line.split(",", len(asked)))
        if len(texts) != len(asked) or not _UUID.fullmatch(uuid):
            return None
        values: dict[str, Any] = {}
        missing = {field.metric: self._why_not(field) for field in self._fields if self._name(field) is None}
        for (field, _), text in zip(asked, texts, strict=True):
            try:
                values[field.metric] = check_range(field.metric, field.understand(_value(text)), text)
            except Absurd as reason:  # each new text would be a gap of its own
                missing[field.metric] = self._absurd.setdefault((uuid, field.metric), str(reason))
            except (ValueError, OverflowError):
                missing[field.metric] = in_short(text.strip("[]")) or "nothing said"
        return uuid, values, missing

    def _asked(self) -> list[tuple[Field, str]]:
        return [(field, name) for field in self._fields if (name := self._name(field)) is not None]

    def _name(self, field: Field) -> str | None:
        return next((name for name in field.names if name not in self._unknown), None)

    def _why_not(self, field: Field) -> str:
        return f"this nvidia-smi does not know {' or '.join(field.names)}"


def _value(text: str) -> str:
    """Return the text of a value; raise ValueError for "[N/A]", "[Not Supported]", "ERR!" and their like."""
    if not text or text.startswith("[") or text in ("ERR!", "N/A", "Not Supported", "Unknown Error"):
        raise ValueError(text)
    return text


def make_reading(values: Mapping[str, Any], missing: Mapping[str, str]) -> Reading:
    """Make a reading of a line; raise DeviceUnreadable when it holds no value at all."""
    if not values:
        raise DeviceUnreadable(f"no metric can be read: {'; '.join(sorted(set(missing.values())))}")
    given = dict(values)
    reasons = {**missing, "energy_j": _NO_ENERGY}
    sources = {}
    if "utilization_percent" in values:
        given["busy_percent"] = float(values["utilization_percent"])
        sources["busy_percent"] = "utilization"
    else:
        reasons["busy_percent"] = missing["utilization_percent"]
    return Reading(**given, missing=reasons, sources=sources)


# --- the reader ------------------------------------------------------------------------------------------------------

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
        self._query = Query(SAMPLE_FIELDS)
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

    def force_full_read(self) -> None:
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
        query = Query(_INVENTORY)
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
    usual = {"name": "NVIDIA GPU", "backend": BACKEND}
    return [
        InventoryDevice(uuid=uuid, **{**usual, "index": position, **values})
        for position, (uuid, values, _) in enumerate(lines)
    ]


def _quote(text: str) -> str:
    said = in_short(text)
    if "\N{REPLACEMENT CHARACTER}" in said:
        return "what it says is no text"
    return f"it says {said[:_LONGEST_QUOTE]!r}" if said else "it says nothing"
