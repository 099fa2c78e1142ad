"""A folder that looks like /sys: the cards of a machine, as the kernel's drivers show them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

AMDGPU = {
    "unique_id": "d1a9f00c0000000{0}", "product_name": "Radeon Pro W7900", "gpu_busy_percent": "37",
    "mem_busy_percent": "12", "mem_info_vram_used": "1073741824", "mem_info_vram_total": "17179869184",
    "hwmon/hwmon7/temp1_input": "41000", "hwmon/hwmon7/temp2_input": "55000", "hwmon/hwmon7/power1_average": "91500000",
    "hwmon/hwmon7/power1_cap": "300000000", "hwmon/hwmon7/freq1_input": "1800000000",
    "hwmon/hwmon7/freq2_input": "1000000000", "hwmon/hwmon7/pwm1": "102",
}  # fmt: skip


def make_card(sysfs: Path, number: int, driver: str, vendor: str, files: Mapping[str, str]) -> Path:
    """Make a card as a real machine has it, with links; names that begin with / belong to the card, not its device."""
    device = sysfs / f"devices/pci0000:00/0000:0{number}:00.0"
    card, driver_folder = sysfs / f"class/drm/card{number}", sysfs / f"bus/pci/drivers/{driver}"
    for folder in (device, card, driver_folder):
        folder.mkdir(parents=True, exist_ok=True)
    (card / "device").symlink_to(device)
    (device / "driver").symlink_to(driver_folder)
    for name, text in {"vendor": vendor, "device": "0x744a", **files}.items():
        file = card / name[1:] if name.startswith("/") else device / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return card


def amd_card(sysfs: Path, number: int) -> Path:
    """Make a card of AMD, of 16 GiB and 300 W."""
    files = {name: text.format(number) for name, text in AMDGPU.items()}
    return make_card(sysfs, number, "amdgpu", "0x1002", files)
