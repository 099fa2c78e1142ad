"""The reader of a machine on which no device can be read: it knows why, and says so whenever it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from badcjobs.model import InventoryDevice
from badcjobs.seams import DeviceUnreadable, ReaderUnavailable


class NothingReader:
    """Reads nothing; ``why`` tells what was tried."""

    backend = "none"

    def __init__(self, why: str) -> None:
        self.why = why

    def inventory(self) -> Sequence[InventoryDevice]:
        raise ReaderUnavailable(self.why)

    def read(self, uuid: str) -> NoReturn:
        raise DeviceUnreadable(self.why)

    def hurry(self) -> None:
        """Do nothing: every reading is a whole one."""

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""
