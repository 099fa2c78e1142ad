"""Puts the stand-in package ``amdsmi`` beside this file into the process of a test, until it ends."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


class FakeAmdsmi:
    """The stand-in package; its head tells what can be set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int | None = 4, **settings: object) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
        monkeypatch.syspath_prepend(str(FOLDER))
        module = importlib.import_module("amdsmi")
        monkeypatch.setitem(sys.modules, "amdsmi", module)  # and gone after the test
        self._module = module
        self.set(devices=devices, **settings)

    def set(self, **settings: object) -> None:
        """Change how it answers from the next call on; None takes a setting away."""
        for name, value in settings.items():
            if value is None:
                self._monkeypatch.delenv(f"FAKE_AMDSMI_{name.upper()}", raising=False)
            else:
                self._monkeypatch.setenv(f"FAKE_AMDSMI_{name.upper()}", str(value))

    @property
    def running(self) -> bool:
        """Whether the library was started and not shut down."""
        return bool(self._module._started)

    def calls(self, call: str, device: int) -> int:
        """Tell how often a call reached a device."""
        asked: list[Any] = self._module.calls
        return asked.count((call, device))
