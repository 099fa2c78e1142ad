"""The table [alerts] of the settings: where alerts begin, and which command is called."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Where alerts begin; the fields are the keys of the table [alerts]."""

    temperature_c: float | None = None  # None: where the device slows down, else 83
    memory_percent: float = 90.0
    power_percent: float = 95.0
    idle_s: float = 300.0  # without work for so long, while work waits
    energy_percent: float = 5.0  # counter against integrated power

    def problems(self) -> list[str]:
        """Return what is wrong with these limits, a sentence each."""
        found = []
        for name, value in asdict(self).items():
            if name == "temperature_c" and value is None:
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                found.append(f"{name} = {value!r} must be a number above 0")
            elif name.endswith("_percent") and value > 100:
                found.append(f"{name} = {value!r} must be at most 100")
        return found


@dataclass(frozen=True, slots=True)
class AlertHooks:
    """A command or none; the fields are keys of the table [alerts].

    The command's line may hold a secret: it is never logged and never stored.
    """

    command: str | None = field(default=None, repr=False)
    min_interval_s: float = 600.0  # between two calls for one kind of trouble on one device

    @property
    def wanted(self) -> bool:
        """Whether there is a command to run."""
        return self.command is not None

    def problems(self) -> list[str]:
        """Return what is wrong with them, a sentence each, without their secrets."""
        found = []
        if self.command is not None and (wrong := _wrong_command(self.command)):
            found.append(f"command {wrong}")
        number = self.min_interval_s
        if type(number) not in (int, float) or not math.isfinite(number) or number < 0:
            found.append(f"min_interval_s = {number!r} must be a number, 0 or above")
        return found

    def without_secrets(self) -> dict[str, object]:
        """Return what may be stored and shown: of the command only its program."""
        program = None if self.command is None else shlex.split(self.command)[0]
        return {"command": program and f"{program} …", "min_interval_s": self.min_interval_s}


def _wrong_command(command: object) -> str | None:
    if not isinstance(command, str):
        return "must be a text"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"cannot be taken apart into words: {str(error).lower()}"
    return "must name a program" if not words or not words[0] or "\0" in command else None
