"""Read NVIDIA GPUs with ``nvidia-smi``, where its library cannot be used directly.

One process prints a line per device twice a second. A reading is the newest line, so it is cheap and up to half a
second old. nvidia-smi does not list MIG slices, only their cards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from badcjobs.devices.programs import ProgramFailed, Stream, one_line, run_program
from badcjobs.devices.reading_builder import NoAnswer, ReadingBuilder, look_up
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

_UUID = re.compile(r"GPU-[0-9a-f-]+")
_NO_VALUE = ("", "ERR!", "N/A", "Not Supported", "Unknown Error")  # and everything in brackets: [Not Supported]


def _whole(text: str) -> int:
    return round(float(text))


def _mib(text: str) -> int:
    return _whole(text) * 2**20


class Field(NamedTuple):
    """What is asked about a device, and its name in nvidia-smi."""

    metric: str
    parse: Callable[[str], Any]
    name: str


# Every version has these; of the encoder and the decoder only newer ones report the utilization.
SAMPLE_FIELDS = (
    Field("utilization_percent", _whole, "utilization.gpu"),
    Field("memory_utilization_percent", _whole, "utilization.memory"),
    Field("memory_used_bytes", _mib, "memory.used"),
    Field("temperature_c", _whole, "temperature.gpu"),
    Field("power_w", float, "power.draw"),
    Field("sm_clock_mhz", _whole, "clocks.sm"),
    Field("memory_clock_mhz", _whole, "clocks.mem"),
    Field(
        "throttle_reasons", partial(int, base=16), "clocks_throttle_reasons.active"
    ),  # the name that old drivers have, too
    Field("fan_percent", _whole, "fan.speed"),
    Field("ecc_errors", _whole, "ecc.errors.uncorrected.volatile.total"),
)
_INVENTORY = (
    Field("index", _whole, "index"),
    Field("memory_total_bytes", _mib, "memory.total"),
    Field("power_limit_w", float, "enforced.power.limit"),
    Field("pci_bus_id", str, "pci.bus_id"),
    Field("driver", str, "driver_version"),
    Field("name", str, "name"),  # the last one: it may contain a comma
)


class Line(NamedTuple):
    """What nvidia-smi prints about a device: a text for each field of the query."""

    uuid: str
    texts: list[str]


def query_arguments(fields: Sequence[Field]) -> list[str]:
    """Return the arguments of nvidia-smi for a query; the UUID is the first field."""
    names = ["uuid", *(field.name for field in fields)]
    return [f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]


def parse_line(text: str, fields: Sequence[Field]) -> Line | None:
    """Parse a line of a query; return None for any other line."""
    uuid, *texts = (column.strip() for column in text.split(",", len(fields)))
    if len(texts) != len(fields) or not _UUID.fullmatch(uuid):
        return None
    return Line(uuid, texts)


def parse_value(field: Field, text: str) -> Any:
    """Return the value of a field; raise NoAnswer with the text that it has instead."""
    if text in _NO_VALUE or text.startswith("["):
        raise NoAnswer(one_line(text.strip("[]")) or "no value")
    try:
        return field.parse(text)
    except (ValueError, OverflowError):
        raise NoAnswer(one_line(text)) from None


def add_values(builder: ReadingBuilder, fields: Sequence[Field], line: Line) -> None:
    """Add the values of a line, or the reason where there is none."""
    for field, text in zip(fields, line.texts, strict=True):
        try:
            builder.add(field.metric, parse_value(field, text))
        except NoAnswer as reason:
            builder.add_missing([field.metric], str(reason))


def make_reading(builder: ReadingBuilder, line: Line) -> Reading:
    """Return the reading of a line; raise DeviceUnreadable if it has no value."""
    builder.begin()
    add_values(builder, SAMPLE_FIELDS, line)
    builder.raise_if_empty()
    builder.use_utilization()
    return builder.finish()


# --- the reader ------------------------------------------------------------------------------------------------------

_RESTART_S = 10.0
_SILENCE_S = 5.0  # a line that is older is no reading
_LONGEST_QUOTE = 80
_LACKING = {
    "energy_j": "nvidia-smi has no energy counter",
    "encoder_percent": "not asked of nvidia-smi",
    "decoder_percent": "not asked of nvidia-smi",
}


@dataclass(eq=False)
class NvidiaSmiReader(GpuReader):
    """Reads every NVIDIA GPU that nvidia-smi lists; ``program`` is its path, None if it is not on PATH.

    The first call waits for the list of devices, and the first reading for a line of each device.
    """

    backend = "nvidia-smi"
    why = "requested"
    program: str | None
    clock: Clock
    interval_s: float = 0.5
    timeout_s: float = 5.0  # without persistence mode the driver first initializes every card

    def __post_init__(self) -> None:
        self._inventory: list[InventoryDevice] = []
        self._builders: dict[str, ReadingBuilder] = {}  # by UUID
        self._lines: dict[str, tuple[float, Line]] = {}  # the newest, with the time when it was received
        self._stream: Stream | None = None
        self._may_start_s = 0.0
        self._last_message = ""  # of an earlier process

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices; nvidia-smi runs once, and its answer is kept."""
        if not self._inventory:
            self._inventory = self._list_devices()
            self._builders.update({device.uuid: ReadingBuilder(_LACKING) for device in self._inventory})
        return list(self._inventory)

    def read(self, uuid: str) -> Reading:
        """Return the reading of the newest line of this device."""
        builder = look_up(uuid, self._builders, self)
        stream = self._keep_running()
        received_s, line = self._lines.get(uuid, (0.0, None))
        if line is not None and self.clock.monotonic_s() - received_s <= _SILENCE_S:
            return make_reading(builder, line)
        message = stream.last_message or self._last_message
        # The reason has a constant number of seconds: each new text would be a new gap.
        raise DeviceUnreadable(f"nvidia-smi: {message or f'no line for this device in {_SILENCE_S:g} s'}")

    def close(self) -> None:
        """Kill the process; a later reading starts a new one."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
        self._lines.clear()

    def _keep_running(self) -> Stream:
        """Start nvidia-smi if it does not run, at most every 10 s; wait for the first lines of the first process."""
        stream = self._stream
        now_s = self.clock.monotonic_s()
        if stream is not None and (not stream.ended or now_s < self._may_start_s):
            return stream
        self._may_start_s = now_s + _RESTART_S
        every_ms = max(1, round(self.interval_s * 1000))
        command = [str(self.program), *query_arguments(SAMPLE_FIELDS), "-lms", str(every_ms)]
        self._stream = Stream(lambda: command, self._on_line)
        if stream is None:
            self._stream.wait(lambda: len(self._lines) == len(self._inventory), self.timeout_s)
        else:
            self._last_message = stream.last_message
        return self._stream

    def _on_line(self, text: str) -> bool:
        line = parse_line(text, SAMPLE_FIELDS)
        if line is None:
            return False
        self._lines[line.uuid] = (self.clock.monotonic_s(), line)
        self._last_message = ""
        return True

    def _list_devices(self) -> list[InventoryDevice]:
        if self.program is None:
            raise ReaderUnavailable("no nvidia-smi on PATH")
        try:
            output = run_program([self.program, *query_arguments(_INVENTORY)], self.timeout_s)
        except ProgramFailed as error:
            raise ReaderUnavailable(f"nvidia-smi cannot list the devices: {error}") from error
        devices = []
        for position, text in enumerate(output.splitlines()):
            line = parse_line(text, _INVENTORY)
            if line is not None:
                devices.append(_describe(line, position))
        if not devices:  # its exit code may still be 0
            raise ReaderUnavailable(f"nvidia-smi lists no device: it prints {one_line(output)[:_LONGEST_QUOTE]!r}")
        return devices


def _describe(line: Line, position: int) -> InventoryDevice:
    builder = ReadingBuilder({})
    add_values(builder, _INVENTORY, line)
    facts = {"name": "NVIDIA GPU", "index": position, **builder.values}
    return InventoryDevice(uuid=line.uuid, backend=NvidiaSmiReader.backend, **facts)
