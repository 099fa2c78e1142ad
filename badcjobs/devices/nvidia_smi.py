"""Read NVIDIA GPUs with ``nvidia-smi``, where its library cannot be used directly.

One process prints a line per device twice a second. A reading is the newest line, so it is cheap and up to half a
second old. nvidia-smi does not list MIG slices, only their cards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from badcjobs.devices.programs import ProgramFailed, Stream, one_line, run_program
from badcjobs.devices.reading_builder import NoAnswer, ReadingBuilder, check_range
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader, ReaderUnavailable

_UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field to query')
_UUID = re.compile(r"GPU-[0-9a-f-]+")
_NO_VALUE = ("ERR!", "N/A", "Not Supported", "Unknown Error")  # and everything in brackets, such as [Not Supported]


def _whole(text: str) -> int:
    return round(float(text))


def _mib(text: str) -> int:
    return _whole(text) * 2**20


# Metric, the names of its field (the first one that this nvidia-smi has is used), and the parser of its text.
Field = tuple[str, tuple[str, ...], Callable[[str], int | float | str]]
SAMPLE_FIELDS: tuple[Field, ...] = (
    ("utilization_percent", ("utilization.gpu",), _whole),
    ("memory_utilization_percent", ("utilization.memory",), _whole),
    ("memory_used_bytes", ("memory.used",), _mib),
    ("temperature_c", ("temperature.gpu",), _whole),
    ("power_w", ("power.draw",), float),
    ("sm_clock_mhz", ("clocks.sm",), _whole),
    ("memory_clock_mhz", ("clocks.mem",), _whole),
    # The second name is for drivers before 535.
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
    """The fields of a query, without those that this version of nvidia-smi does not have."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._unknown: set[str] = set()
        self._implausible: dict[tuple[str, str], str] = {}  # (uuid, metric) → the first reason

    def arguments(self) -> list[str]:
        """Return the command-line arguments; the UUID is the first field."""
        names = [name for _, name in self._fields_in_use() if name is not None]
        return [f"--query-gpu={','.join(['uuid', *names])}", "--format=csv,noheader,nounits"]

    def drop_unknown(self, message: str) -> bool:
        """Drop the fields that an error message of nvidia-smi names; return whether there are any."""
        asked = {name for _, name in self._fields_in_use()}
        unknown = asked.intersection(_UNKNOWN_FIELD.findall(message))
        self._unknown |= {name for name in unknown if name is not None}
        return bool(unknown)

    def parse(self, line: str) -> tuple[str, dict[str, Any], dict[str, str]] | None:
        """Return (uuid, values, metric → reason for no value); None if this is not a line of the query."""
        fields = self._fields_in_use()
        known = sum(name is not None for _, name in fields)
        uuid, *texts = (text.strip() for text in line.split(",", known))
        if len(texts) != known or not _UUID.fullmatch(uuid):
            return None
        values: dict[str, Any] = {}
        missing: dict[str, str] = {}
        for (metric, names, parse_text), name in fields:
            if name is None:
                missing[metric] = f"this version of nvidia-smi does not have {' or '.join(names)}"
                continue
            text = texts.pop(0)
            try:
                if not text or text.startswith("[") or text in _NO_VALUE:
                    raise ValueError(text)
                values[metric] = check_range(metric, parse_text(text), text)
            except NoAnswer as reason:  # each new text would be a new gap
                missing[metric] = self._implausible.setdefault((uuid, metric), str(reason))
            except (ValueError, OverflowError):
                missing[metric] = one_line(text.strip("[]")) or "no value"
        return uuid, values, missing

    def _fields_in_use(self) -> list[tuple[Field, str | None]]:
        """Return the fields, each with the name to query; None: this version of nvidia-smi has none of its names."""
        unknown = self._unknown
        return [(field, next((name for name in field[1] if name not in unknown), None)) for field in self._fields]


def make_reading(values: Mapping[str, Any], missing: Mapping[str, str]) -> Reading:
    """Return the reading of a line; raise DeviceUnreadable if it has no value."""
    builder = ReadingBuilder(missing)
    builder.values.update(values)
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
        self._inventory: list[InventoryDevice] | ReaderUnavailable | None = None
        self._query = Query(SAMPLE_FIELDS)
        self._stream: Stream | None = None
        self._may_start_s = 0.0
        self._trouble = ""  # the last message of an earlier process
        self._has_waited = False  # for the first lines of all devices
        self._lines: dict[str, tuple[float, dict[str, Any], dict[str, str]]] = {}  # received at, values, reasons
        self._round_is_over = False  # one device has two lines, so each device that can be read has one

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices; nvidia-smi runs once, and its answer or its error is kept."""
        if self._inventory is None:
            self._inventory = self._list_devices()
        if isinstance(self._inventory, ReaderUnavailable):
            raise ReaderUnavailable(str(self._inventory))
        return list(self._inventory)

    def read(self, uuid: str) -> Reading:
        """Return the reading of the newest line of this device."""
        try:
            known = any(device.uuid == uuid for device in self.inventory())
        except ReaderUnavailable as error:
            raise DeviceUnreadable(str(error)) from error
        if not known:
            raise DeviceUnreadable(f"nvidia-smi lists no device {uuid!r}")
        self._keep_running()
        until_s, stream = self.clock.monotonic_s() + self.timeout_s, None
        # Wait once until each device that can be read has a line.
        while not self._has_waited and self._stream is not stream and not self._round_is_over:
            stream = self._stream
            if stream is not None:
                stream.wait(lambda: self._round_is_over, max(0.0, until_s - self.clock.monotonic_s()))
            self._keep_running()  # restarts immediately without an unknown field
        self._has_waited = True
        line = self._lines.get(uuid)
        if line is not None and self.clock.monotonic_s() - line[0] <= self._silence_s:
            return make_reading(line[1], line[2])
        message = (self._stream.last_message if self._stream else "") or self._trouble
        if message:
            raise DeviceUnreadable(f"nvidia-smi: {message}")
        if line is None and self._round_is_over:
            raise DeviceUnreadable("nvidia-smi prints no line for this device")
        # The reason has a constant number of seconds: each new text would be a new gap.
        raise DeviceUnreadable(f"nvidia-smi has printed nothing for {self._silence_s:g} s")

    def close(self) -> None:
        """Kill the process; a later reading starts a new one."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self._lines.clear()
        self._round_is_over = self._has_waited = False

    def _keep_running(self) -> None:
        """Start nvidia-smi if it does not run: immediately without an unknown field, else at most every 10 s."""
        stream, now_s = self._stream, self.clock.monotonic_s()
        if stream is not None and not stream.ended:
            return
        fewer = stream is not None and self._query.drop_unknown(stream.last_message)
        if stream is not None and not fewer and now_s < self._may_start_s:
            return
        self._may_start_s = now_s + _RESTART_S
        self._trouble = "" if stream is None or fewer else stream.last_message
        every_ms = max(1, round(self.interval_s * 1000))
        command = [self.program, *self._query.arguments(), "-lms", str(every_ms)]
        self._stream = Stream(lambda: command, self._on_line)

    def _on_line(self, text: str) -> bool:
        line = self._query.parse(text)
        if line is None:
            return False
        uuid, values, missing = line
        self._round_is_over |= uuid in self._lines
        self._lines[uuid] = (self.clock.monotonic_s(), values, missing)
        self._trouble = ""
        return True

    def _list_devices(self) -> list[InventoryDevice] | ReaderUnavailable:
        query = Query(_INVENTORY)
        end_s = self.clock.monotonic_s() + self.timeout_s
        while True:
            try:
                text = run_program([self.program, *query.arguments()], max(0.1, end_s - self.clock.monotonic_s()))
                break
            except ProgramFailed as error:
                if not query.drop_unknown(str(error)):
                    return ReaderUnavailable(f"nvidia-smi cannot list the devices: {error}")
        lines = [line for line in map(query.parse, text.splitlines()) if line is not None]
        if not lines:  # its exit code may still be 0
            said = one_line(text)[:_LONGEST_QUOTE]
            what = f"it prints {said!r}" if said else "it prints nothing"
            what = "its output is not text" if "\N{REPLACEMENT CHARACTER}" in said else what
            return ReaderUnavailable(f"nvidia-smi lists no device: {what}")
        default = {"name": "NVIDIA GPU", "backend": self.backend}
        return [
            InventoryDevice(uuid=uuid, **{**default, "index": position, **values})
            for position, (uuid, values, _) in enumerate(lines)
        ]
