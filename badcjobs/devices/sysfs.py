"""Read GPUs through the Linux kernel's files in /sys/class/drm, where no vendor's library works (Intel and AMD).

The kernel reports less than a library: often only clocks and a temperature. Everything else is unknown. NVIDIA's driver
has no such files, so a machine with an NVIDIA card is not read here: its devices must keep the numbers of CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from badcjobs.devices.reading_builder import NoAnswer, ReadingBuilder, look_up, or_none
from badcjobs.model import METRICS, InventoryDevice, Reading
from badcjobs.seams import DeviceUnreadable, GpuReader, ReaderUnavailable

_VENDORS = {"0x1002": "AMD", "0x8086": "Intel"}  # AMD first: ROCm counts only its cards, from 0
_NVIDIA = "0x10de"
_HWMON = "device/hwmon/hwmon*"
# Metric → the files that may hold it, below the folder of the card, and the factor to its unit.
_FILES = {
    "utilization_percent": (("device/gpu_busy_percent", 1),),
    "memory_utilization_percent": (("device/mem_busy_percent", 1),),
    "memory_used_bytes": (("device/mem_info_vram_used", 1),),
    "temperature_c": ((f"{_HWMON}/temp[0-9]_input", 1e-3),),
    "power_w": ((f"{_HWMON}/power1_average", 1e-6), (f"{_HWMON}/power1_input", 1e-6)),
    "energy_j": ((f"{_HWMON}/energy1_input", 1e-6),),
    "sm_clock_mhz": (
        ("gt_act_freq_mhz", 1),
        ("gt/gt0/rps_act_freq_mhz", 1),
        ("device/tile0/gt0/freq0/act_freq", 1),
        (f"{_HWMON}/freq1_input", 1e-6),
    ),
    "memory_clock_mhz": ((f"{_HWMON}/freq2_input", 1e-6),),
    "fan_percent": ((f"{_HWMON}/pwm1", 100 / 255),),
}
_FRACTIONS = ("power_w", "energy_j")
_NOT_SUPPORTED = "not supported by the kernel's driver"


class SysfsReader(GpuReader):
    """Reads every GPU that the kernel lists; ``sysfs`` is the folder /sys."""

    backend = "sysfs"

    why = "requested"

    def __init__(self, sysfs: Path) -> None:
        self._sysfs = sysfs
        self._cards: dict[str, tuple[Path, ReadingBuilder]] = {}

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the cards of each vendor in the kernel's order."""
        if (self._sysfs / "module/nvidia").exists() or has_card(self._sysfs, _NVIDIA):
            raise ReaderUnavailable("the kernel does not report the state of NVIDIA GPUs")
        devices: list[InventoryDevice] = []
        cards = sorted((self._sysfs / "class/drm").glob("card*[0-9]"), key=lambda card: (len(card.name), card))
        for vendor_id, vendor in _VENDORS.items():
            for card in cards:
                if _text(card / "device/vendor") != vendor_id or "-" in card.name:  # card0-DP-1 is a socket
                    continue
                device = _describe(len(devices), card, vendor)
                devices.append(device)
                self._cards.setdefault(device.uuid, (card, ReadingBuilder({})))
        if not devices:
            raise ReaderUnavailable("the kernel lists no GPU")
        return devices

    def read(self, uuid: str) -> Reading:
        """Read every file that the driver has."""
        card, builder = look_up(uuid, self._cards, self)
        if not (card / "device").exists():
            raise DeviceUnreadable("the kernel no longer lists this device")
        builder.begin()
        for metric in _FILES:
            try:
                builder.add(metric, _read_number(card, metric))
            except NoAnswer as reason:
                builder.add_missing([metric], str(reason))
        builder.raise_if_empty()
        builder.use_utilization()
        builder.add_missing(set(METRICS) - builder.values.keys() - builder.missing.keys(), _NOT_SUPPORTED)
        return builder.finish()


def has_card(sysfs: Path, vendor: str) -> bool:
    """Return whether the kernel lists a card of this vendor (a PCI id)."""
    return any(_text(file) == vendor for file in sysfs.glob("class/drm/card*/device/vendor"))


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _read_number(card: Path, metric: str) -> float:
    """Return the value of the first file that has a number; raise NoAnswer if there is none."""
    reason = ""
    for pattern, factor in _FILES[metric]:
        for file in sorted(card.glob(pattern)):
            try:
                value = float(file.read_text(encoding="ascii")) * factor
                return value if metric in _FRACTIONS else round(value)
            except (OSError, ValueError) as error:  # some sensors fail while the card sleeps
                reason = reason or f"{file.name}: {getattr(error, 'strerror', None) or 'not a number'}"
    raise NoAnswer(reason or _NOT_SUPPORTED)


def _read_fact(card: Path, pattern: str) -> int | None:
    for file in card.glob(pattern):
        text = _text(file)
        if text and text.isdecimal():
            return int(text)
    return None


def _describe(index: int, card: Path, vendor: str) -> InventoryDevice:
    address = (card / "device").resolve().name
    model = (_text(card / "device/device") or "?").removeprefix("0x")
    unique = _text(card / "device/unique_id")  # AMD: the number that ROCm's names are made of
    limit_uw = _read_fact(card, f"{_HWMON}/power1_cap")
    uuid = f"PCI-{address}"
    if unique:
        uuid = f"GPU-{unique:0>16}"
    return InventoryDevice(
        index=index,
        uuid=uuid,
        name=_text(card / "device/product_name") or f"{vendor} GPU {model}",
        backend=SysfsReader.backend,
        memory_total_bytes=or_none("memory_total_bytes", _read_fact(card, "device/mem_info_vram_total")),
        power_limit_w=or_none("power_limit_w", limit_uw and limit_uw / 1e6),
        pci_bus_id=address if ":" in address else None,
        driver=(card / "device/driver").resolve().name,
        vendor=vendor.lower(),
    )
