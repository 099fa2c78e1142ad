"""Read NVIDIA GPUs with ``nvidia-smi``, where its library cannot be used directly.

One process prints a line per device twice a second. A reading is the newest line, so it is cheap and up to half a
second old. nvidia-smi does not list MIG slices, only their cards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from math import inf
from typing import Any, NamedTuple

from badcjobs.devices.programs import ProgramFailed, Stream, one_line, run_program
from badcjobs.devices.reading_builder import NoAnswer, ReadingBuilder, check_range
from badcjobs.model import InventoryDevice, Reading, not_none
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_UUID = re.compile(r"GPU-[0-9a-f-]+")
_NO_VALUE = ("ERR!", "N/A", "Not Supported", "Unknown Error")  # and everything in brackets, such as [Not Supported]


def _whole(text: str) -> int:
    return round(float(text))


def _mib(text: str) -> int:
    return _whole(text) * 2**20


def _hexadecimal(text: str) -> int:
    return int(text, base=16)


class Field(NamedTuple):
    """What is asked about a device; the first name that this nvidia-smi has is used."""

    metric: str
    parse: Callable[[str], Any]
    names: tuple[str, ...]


SAMPLE_FIELDS = (
    Field("utilization_percent", _whole, ("utilization.gpu",)),
    Field("memory_utilization_percent", _whole, ("utilization.memory",)),
    Field("memory_used_bytes", _mib, ("memory.used",)),
    Field("temperature_c", _whole, ("temperature.gpu",)),
    Field("power_w", float, ("power.draw",)),
    Field("sm_clock_mhz", _whole, ("clocks.sm",)),
    Field("memory_clock_mhz", _whole, ("clocks.mem",)),
    # The second name is for drivers before 535.
    Field("throttle_reasons", _hexadecimal, ("clocks_event_reasons.active", "clocks_throttle_reasons.active")),
    Field("fan_percent", _whole, ("fan.speed",)),
    Field("ecc_errors", _whole, ("ecc.errors.uncorrected.volatile.total",)),
    Field("encoder_percent", _whole, ("utilization.encoder",)),
    Field("decoder_percent", _whole, ("utilization.decoder",)),
)
_INVENTORY = (
    Field("index", _whole, ("index",)),
    Field("memory_total_bytes", _mib, ("memory.total",)),
    Field("power_limit_w", float, ("enforced.power.limit", "power.limit")),
    Field("pci_bus_id", str, ("pci.bus_id",)),
    Field("driver", str, ("driver_version",)),
    Field("name", str, ("name",)),
)


class Line(NamedTuple):
    """What nvidia-smi prints about a device."""

    uuid: str
    values: dict[str, Any]
    missing: dict[str, str]  # metric → why it has no value


class Query:
    """The fields of a query, without those that this version of nvidia-smi does not have."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._unknown: set[str] = set()
        self._implausible: dict[tuple[str, str], str] = {}  # (uuid, metric) → the first reason
        self._choose_columns()

    def arguments(self) -> list[str]:
        """Return the command-line arguments; the UUID is the first field."""
        return [f"--query-gpu={','.join(['uuid', *self._columns])}", "--format=csv,noheader,nounits"]

    def drop_unknown(self, message: str) -> bool:
        """Drop the fields that an error message of nvidia-smi names; return whether there are any."""
        unknown = self._columns.keys() & set(_UNKNOWN_FIELD.findall(message))
        self._unknown |= unknown
        self._choose_columns()
        return bool(unknown)

    def parse(self, text: str) -> Line | None:
        """Parse a line of the query; return None for any other line."""
        uuid, *texts = (column.strip() for column in text.split(",", len(self._columns)))
        if len(texts) != len(self._columns) or not _UUID.fullmatch(uuid):
            return None
        line = Line(uuid, {}, dict(self._lacking))
        for field, column in zip(self._columns.values(), texts, strict=True):
            try:
                if not column or column.startswith("[") or column in _NO_VALUE:
                    raise ValueError(column)
                line.values[field.metric] = check_range(field.metric, field.parse(column), column)
            except NoAnswer as reason:  # each new text would be a new gap
                line.missing[field.metric] = self._implausible.setdefault((uuid, field.metric), str(reason))
            except (ValueError, OverflowError):
                line.missing[field.metric] = one_line(column.strip("[]")) or "no value"
        return line

    def _choose_columns(self) -> None:
        self._columns: dict[str, Field] = {}  # by the name to query
        self._lacking: dict[str, str] = {}  # metric → why it is not queried
        for field in self._fields:
            names = [name for name in field.names if name not in self._unknown]
            if names:
                self._columns[names[0]] = field
            else:
                self._lacking[field.metric] = f"this version of nvidia-smi does not have {' or '.join(field.names)}"


def make_reading(line: Line) -> Reading:
    """Return the reading of a line; raise DeviceUnreadable if it has no value."""
    builder = ReadingBuilder(line.missing)
    builder.values.update(line.values)
    builder.raise_if_empty()
    builder.add_missing(["energy_j"], "nvidia-smi has no energy counter")
    builder.use_utilization()
    return builder.finish()


# --- the reader ------------------------------------------------------------------------------------------------------

_RESTART_S = 10.0
_LONGEST_QUOTE = 80


@dataclass(eq=False)
class NvidiaSmiReader(GpuReader):
    """Reads every NVIDIA GPU that nvidia-smi lists; ``program`` is its path.

    The first call waits for the list of devices, and the first reading for a line of each device.
    """

    backend = "nvidia-smi"
    program: str
    clock: Clock
    _: KW_ONLY
    interval_s: float = 0.5
    why: str = "requested"
    timeout_s: float = 5.0  # without persistence mode the driver first initializes every card

    def __post_init__(self) -> None:
        self._silence_s = max(3 * self.interval_s, 5.0)
        self._inventory: list[InventoryDevice] | None = None
        self._query = Query(SAMPLE_FIELDS)
        self._stream: Stream | None = None
        self._may_start_s = 0.0
        self._trouble = ""  # the last message of an earlier process
        self._has_waited = False  # for the first lines of all devices
        self._lines: dict[str, tuple[float, Line]] = {}  # by UUID; with the time when it was received
        self._round_is_over = False  # one device has two lines, so each device that can be read has one

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices; nvidia-smi runs once, and its answer is kept."""
        if self._inventory is None:
            self._inventory = self._list_devices()
        return list(self._inventory)

    def read(self, uuid: str) -> Reading:
        """Return the reading of the newest line of this device."""
        try:
            uuids = [device.uuid for device in self.inventory()]
        except ReaderUnavailable as error:
            raise DeviceUnreadable(str(error)) from error
        if uuid not in uuids:
            raise DeviceUnreadable(f"nvidia-smi lists no device {uuid!r}")

        stream = self._keep_running()
        if not self._has_waited:
            stream = self._wait_for_first_lines(stream)
        received_s, line = self._lines.get(uuid, (-inf, None))
        if line is not None and self.clock.monotonic_s() - received_s <= self._silence_s:
            return make_reading(line)

        message = stream.last_message or self._trouble
        if message:
            raise DeviceUnreadable(f"nvidia-smi: {message}")
        if line is None and self._round_is_over:
            raise DeviceUnreadable("nvidia-smi prints no line for this device")
        # The reason has a constant number of seconds: each new text would be a new gap.
        raise DeviceUnreadable(f"nvidia-smi has printed nothing for {self._silence_s:g} s")

    def close(self) -> None:
        """Kill the process; a later reading starts a new one."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._lines.clear()
        self._round_is_over = self._has_waited = False

    def _wait_for_first_lines(self, stream: Stream) -> Stream:
        """Wait until each device that can be read has a line; return the stream, which may be a new one."""
        until_s = self.clock.monotonic_s() + self.timeout_s
        self._has_waited = True
        while not self._round_is_over:
            stream.wait(lambda: self._round_is_over, max(0.0, until_s - self.clock.monotonic_s()))
            waited_for = stream
            stream = self._keep_running()  # restarts immediately without an unknown field
            if stream is waited_for:
                break
        return stream

    def _keep_running(self) -> Stream:
        """Start nvidia-smi if it does not run: immediately without an unknown field, else at most every 10 s."""
        now_s = self.clock.monotonic_s()
        stream = self._stream
        if stream is not None:
            if not stream.ended:
                return stream
            has_fewer_fields = self._query.drop_unknown(stream.last_message)
            if not has_fewer_fields and now_s < self._may_start_s:
                return stream
            self._trouble = "" if has_fewer_fields else stream.last_message
        self._may_start_s = now_s + _RESTART_S
        every_ms = max(1, round(self.interval_s * 1000))
        command = [self.program, *self._query.arguments(), "-lms", str(every_ms)]
        self._stream = Stream(lambda: command, self._on_line)
        return self._stream

    def _on_line(self, text: str) -> bool:
        line = self._query.parse(text)
        if line is None:
            return False
        self._round_is_over |= line.uuid in self._lines
        self._lines[line.uuid] = (self.clock.monotonic_s(), line)
        self._trouble = ""
        return True

    def _list_devices(self) -> list[InventoryDevice]:
        query = Query(_INVENTORY)
        text = self._run_query(query)
        lines = not_none(map(query.parse, text.splitlines()))
        if not lines:  # its exit code may still be 0
            quote = one_line(text)[:_LONGEST_QUOTE]
            reason = f"it prints {quote!r}"
            if not quote:
                reason = "it prints nothing"
            elif "\N{REPLACEMENT CHARACTER}" in quote:
                reason = "its output is not text"
            raise ReaderUnavailable(f"nvidia-smi lists no device: {reason}")
        devices = []
        for position, line in enumerate(lines):
            facts = {"name": "NVIDIA GPU", "index": position, **line.values}
            devices.append(InventoryDevice(uuid=line.uuid, backend=self.backend, **facts))
        return devices

    def _run_query(self, query: Query) -> str:
        """Return the output of nvidia-smi; repeat the query without the fields that it does not have."""
        end_s = self.clock.monotonic_s() + self.timeout_s
        while True:
            try:
                return run_program([self.program, *query.arguments()], max(0.1, end_s - self.clock.monotonic_s()))
            except ProgramFailed as error:
                if not query.drop_unknown(str(error)):
                    raise ReaderUnavailable(f"nvidia-smi cannot list the devices: {error}") from error
