"""Puts the stand-in package ``amdsmi`` beside this file into the process of a test, until it ends."""

import importlib
import sys
from pathlib import Path

import pytest
from support.stand_ins import Steered


class FakeAmdsmi(Steered):
    """The stand-in package; its head tells what can be set."""

    prefix = "FAKE_AMDSMI_"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int | None = 4, **settings: object) -> None:
        super().__init__(monkeypatch)
        monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        self._module = importlib.import_module("amdsmi")
        monkeypatch.setitem(sys.modules, "amdsmi", self._module)  # and gone after the test
        self.set(devices=devices, **settings)

    @property
    def running(self) -> bool:
        """Whether the library was started and not shut down."""
        return bool(self._module._started)

    def calls(self, call: str, device: int) -> int:
        """Tell how often a call reached a device."""
        return int(self._module.calls.count((call, device)))
