"""What one look at a run or a machine has found, in the words of the API: each thing with its JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


def json_text(document: object) -> str:
    """Return JSON as short as it gets; NaN is no JSON and a mistake of ours."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Item:
    """A task or a device: its document, and the text that listeners get of it, made once for all of them."""

    document: Mapping[str, Any]
    text: str

    @classmethod
    def of(cls, document: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> Item:
        """Make it from its document, and what listeners are told of it where that is less."""
        return cls(document, json_text(document if told is None else told))


@dataclass(frozen=True, slots=True)
class Look:
    """All that is known at one moment. A task or device that has not changed is the same Item as before."""

    at_ms: int
    title: str
    of_run: bool  # False: of this machine
    total: Mapping[str, Any]
    tasks: Mapping[str, Item]  # by name
    devices: Mapping[str, Item]  # by key
    alerts: tuple[Mapping[str, Any], ...] = ()
    remarks: tuple[str, ...] = ()
    origin: object = field(default=None, compare=False)  # what it was made from, for whoever made it
