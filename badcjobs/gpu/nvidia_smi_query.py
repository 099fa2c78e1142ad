"""What to ask ``nvidia-smi --query-gpu`` and how to understand its lines; running it is left to ``nvidia_smi.py``.

Versions differ in the fields they know, cards in those they answer: each field stands alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from badcjobs.gpu.programs import in_short
from badcjobs.gpu.sane import Absurd, check_range
from badcjobs.model import InventoryDevice, Reading
from badcjobs.seams import DeviceUnreadable

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


_FIELDS = (
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


def sample_query() -> Query:
    """Return the query for a reading."""
    return Query(_FIELDS)


def inventory_query() -> Query:
    """Return the query for the list of devices."""
    return Query(_INVENTORY)


def describe(uuid: str, values: Mapping[str, Any], position: int) -> InventoryDevice:
    """Make a device of a line of the inventory."""
    known: dict[str, Any] = {"name": "NVIDIA GPU", "index": position, **values}
    return InventoryDevice(uuid=uuid, backend=BACKEND, **known)


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
