"""A stand-in ``nvidia-smi`` for a folder on the search path; tests change how it behaves while it runs.

Device i is GPU-5a1d0000-0000-4000-8000-00000000000i: 50+i % busy, 16 GiB with 1+i used, 40+i °C, 100+10i W of 300.
This file is also the program itself, started by a two-line script with the path of its settings.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "devices": 4,
    "unsupported": {},  # field → [device index, …]: "[Not Supported]"
    "lost": [],  # these devices have fallen off the bus
    "unlisted": [],  # these devices are left out of the stream; all of them: it is silent
    "fails": None,  # says this, and exits with 9
    "rounds": None,  # so many, then it says last_words and ends
    "last_words": "",
    "first_line_after_s": 0,
}
FIXED = {
    "name": "NVIDIA Stand-in, 16 GB", "driver_version": "535.129.03", "memory.total": "16384",
    "enforced.power.limit": "300.00", "clocks.sm": "1410", "clocks.mem": "1593", "fan.speed": "[N/A]",
    "clocks_throttle_reasons.active": "0x0000000000000005",
    "ecc.errors.uncorrected.volatile.total": "0",
}  # fmt: skip


def fake_uuid(index: int) -> str:
    return f"GPU-5a1d0000-0000-4000-8000-{index:012d}"


class FakeNvidiaSmi:
    """The program in a folder of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._settings, self.program = folder, {**SETTINGS}, folder / "nvidia-smi"
        self.set(**settings)
        for name in ("starts", "rounds"):
            (folder / name).touch()
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} "$@"\n')
        self.program.chmod(0o755)

    def set(self, **settings: Any) -> None:
        """Change how it behaves from its next round on."""
        self._settings.update(settings)
        (self._folder / "new").write_text(json.dumps(self._settings))
        (self._folder / "new").replace(self._folder / "settings.json")

    def starts(self) -> list[dict[str, Any]]:
        """Tell how it was started so far: pid and arguments."""
        return [json.loads(line) for line in (self._folder / "starts").read_text().splitlines()]

    def streams(self) -> list[dict[str, Any]]:
        return [start for start in self.starts() if "-lms" in start["arguments"]]

    def wait_for_rounds(self, count: int = 2) -> None:
        """Wait until what is set now can have been heard."""
        rounds = self._folder / "rounds"
        end = int(rounds.read_text() or 0) + count
        while int(rounds.read_text() or 0) < end:
            time.sleep(0.01)
        time.sleep(0.1)  # for a reader on a busy machine


def line(settings: dict[str, Any], fields: list[str], index: int) -> str:
    known = {"uuid": fake_uuid(index), "index": str(index), "pci.bus_id": f"00000000:{index + 1:02X}:00.0"}
    varying = {
        **FIXED, "utilization.gpu": str(50 + index), "utilization.memory": str(20 + index),
        "memory.used": str(1024 * (1 + index)), "temperature.gpu": str(40 + index),
        "power.draw": f"{100 + 10 * index}.25",
    }  # fmt: skip
    if index in settings["lost"]:
        varying = {**dict.fromkeys(varying, "[GPU is lost]"), "name": FIXED["name"]}
    varying |= {field: "[Not Supported]" for field, lacking in settings["unsupported"].items() if index in lacking}
    return ", ".join({**varying, **known}[field] for field in fields)


def main(folder: Path, arguments: list[str]) -> int:
    settings = json.loads((folder / "settings.json").read_text())
    with (folder / "starts").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "arguments": arguments}) + "\n")
    if settings["fails"] is not None:
        print(settings["fails"])
        return 9
    fields = arguments[0].removeprefix("--query-gpu=").split(",")
    if "-lms" not in arguments:
        print("\n".join(line(settings, fields, index) for index in range(settings["devices"])))
        return 0
    time.sleep(settings["first_line_after_s"])
    number = 0
    while settings["rounds"] is None or number < settings["rounds"]:
        number += 1
        for index in {*range(settings["devices"])} - {*settings["unlisted"]}:
            print(line(settings, fields, index), flush=True)
        (folder / "rounds").write_text(str(number))
        time.sleep(int(arguments[-1]) / 1000)
        settings = json.loads((folder / "settings.json").read_text())
    print(settings["last_words"], flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
