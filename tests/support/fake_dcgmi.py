"""A stand-in ``dcgmi`` for a folder on the search path: ``discovery -l`` and ``dmon``, as DCGM 3 and 4 write them.

It prints whatever rows it is given, a round every 50 ms whatever -d says. This file is also the program itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "listed": {},  # DCGM's number of a device → its UUID
    "rows": {},  # DCGM's number → [SMACT, SMOCC], as text
    "refuses": None,  # says this instead of watching, and exits with 226
    "discovery_fails": None,
    "silent": False,
    "ends": False,
}
HEAD = "#Entity   SMACT        SMOCC        \nID                                  "


class FakeDcgmi:
    """The program in a folder of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.program = folder / "dcgmi"
        self._settings = {**SETTINGS, "log": str(folder / "starts")}
        self.set(**settings)
        me = Path(__file__)
        self.program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {me} {folder / "settings.json"} "$@"\n')
        self.program.chmod(0o755)

    def set(self, **settings: Any) -> None:
        """Change how it behaves from its next round on."""
        self._settings.update(settings)
        (self.folder / "new").write_text(json.dumps(self._settings))
        (self.folder / "new").replace(self.folder / "settings.json")

    def starts(self) -> list[dict[str, Any]]:
        log = self.folder / "starts"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def rounds(self) -> int:
        """Tell how many rounds it has begun."""
        rounds = self.folder / "starts.rounds"
        return len(rounds.read_bytes()) if rounds.exists() else 0


def discovery(listed: dict[str, str]) -> str:
    line = f"+--------+{'-' * 70}+"
    rows = [f"{len(listed)} GPUs found.", line, f"| GPU ID | {'Device Information':<69}|", line]
    for number, uuid in listed.items():
        for first, text in (
            (number, "Name: Stand-in"),
            ("", "PCI Bus ID: 00000000:01:00.0"),
            ("", f"Device UUID: {uuid}"),
        ):
            rows.append(f"| {first:<7}| {text:<69}|")
        rows.append(line)
    return "\n".join([*rows, "0 NvSwitches found."])


def main(path: str, arguments: list[str]) -> int:
    settings = json.loads(Path(path).read_text())
    with Path(settings["log"]).open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "arguments": arguments}) + "\n")
    if arguments[0] == "discovery":
        print(settings["discovery_fails"] or discovery(settings["listed"]))
        return 1 if settings["discovery_fails"] else 0
    if settings["refuses"] is not None:
        print(settings["refuses"])
        return 226
    print(HEAD, flush=True)
    while not settings["ends"]:
        for number, (activity, occupancy) in () if settings["silent"] else settings["rows"].items():
            print(f"GPU {number}     {activity:<13}{occupancy:<13}", flush=True)
        with Path(f"{settings['log']}.rounds").open("a") as file:
            file.write(".")
        time.sleep(0.05)
        settings = json.loads(Path(path).read_text())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
