"""A stand-in NVML library for tests, built from ``fake_nvml.c``, whose head tells how to steer it.

``fake_nvml_environ`` is for a program in its own process; ``FakeNvml`` for a reader in this one, and ``NvmlBench`` for
one whose time a test moves on by hand.
"""

import ctypes
import os
import time
from pathlib import Path

import pynvml
import pytest
from rooms.devices import NvmlReader
from rooms.model import Reading
from support.hand_clock import HandClock
from support.stand_ins import Steered, build


def fake_nvml() -> Path:
    return build(Path(__file__).with_suffix(".c"), "libnvidia-ml.so.1")


def fake_nvml_environ(devices: int, **settings: object) -> dict[str, str]:
    """Return what to add to a program's environment: ``lost=2`` stands for FAKE_NVML_LOST=2, and so on."""
    named = {f"FAKE_NVML_{name.upper()}": str(value) for name, value in settings.items()}
    return {**no_driver(), "FAKE_NVML_DEVICES": str(devices), **named}


def no_driver() -> dict[str, str]:
    """Return what to add to an environment so that no NVML answers, even on a machine that has one."""
    search_path = [str(fake_nvml().parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": ":".join(search_path)}  # the stand-in knows no device


def fake_uuid(index: int) -> str:
    return f"GPU-fa4e0000-0000-4000-8000-{index:012d}"


def fake_slice_uuid(index: int, slice_: int) -> str:
    return f"MIG-fa4e0000-0000-4000-800{slice_}-{index:012d}"


class FakeNvml(Steered):
    """The stand-in inside this process, until the test ends."""

    prefix = "FAKE_NVML_"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int, **settings: object) -> None:
        super().__init__(monkeypatch)
        self._library = ctypes.CDLL(str(fake_nvml()))
        # The binding keeps the first library it loads; a test must neither meet that one nor leave ours behind.
        monkeypatch.setattr(pynvml, "nvmlLib", self._library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        # A call takes as long as it is set to, however busy this machine is.
        self._library.fake_nvml_took_s.restype = ctypes.c_double
        monkeypatch.setattr(time, "perf_counter", self._library.fake_nvml_took_s)
        for earlier in [name for name in os.environ if name.startswith(self.prefix)]:
            monkeypatch.delenv(earlier)
        self.set(devices=devices, **settings)

    def calls(self, name: str, index: int) -> int:
        """Tell how often a call reached a device since NVML was started."""
        return int(self._library.fake_nvml_calls(name.encode(), index))

    def last_seen_us(self, index: int) -> int:
        """Tell since when the samples of processes were asked for last."""
        self._library.fake_nvml_last_seen.restype = ctypes.c_ulonglong
        return int(self._library.fake_nvml_last_seen(index))

    def unreleased(self) -> int:
        """Tell how many GPM samples and event sets were allocated and not given back."""
        return int(self._library.fake_nvml_live_samples() + self._library.fake_nvml_live_sets())


class NvmlBench:
    """A reader on the stand-in; the reader's clock and the library's are moved together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int = 2, **settings: object) -> None:
        self.clock, self._now_s, self._worked_s = HandClock(), 1000.0, 0.0
        self.stand_in = FakeNvml(monkeypatch, devices, **{"now_s": self._now_s, "worked_s": self._worked_s, **settings})
        self.reader = NvmlReader(self.clock)

    def move(self, seconds: float, worked_s: float = 0.0) -> None:
        """Let time pass, in which every device works for some seconds."""
        self.clock.sleep(seconds)
        self._now_s += seconds
        self._worked_s += worked_s
        self.stand_in.set(now_s=self._now_s, worked_s=self._worked_s)

    def read(self, index: int = 0) -> Reading:
        return self.reader.read(fake_uuid(index))

    def read_later(self, seconds: float = 5, worked_s: float = 0.0) -> Reading:
        """Let time pass and read device 0."""
        self.move(seconds, worked_s)
        return self.read()
