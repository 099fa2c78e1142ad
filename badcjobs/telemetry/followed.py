"""A granted device as the recorder knows it: what to read, and what its numbers are to be judged by."""

from __future__ import annotations

from typing import NamedTuple


class Followed(NamedTuple):
    """One device; a tuple, so that it travels as a short list in the recorder's order."""

    device_id: int
    uuid: str | None  # None: nothing here can read it
    device_index: int | None = None
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    slowdown_c: float | None = None

    @property
    def label(self) -> str:
        """The device in a sentence."""
        return f"device {self.device_id if self.device_index is None else self.device_index}"
