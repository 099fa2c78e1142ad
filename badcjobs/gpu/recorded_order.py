"""In which order the devices of a recording stood: their rows are in the order of their ids, which says nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

Row = TypeVar("Row")

_OLD_SLICE = re.compile(r"MIG-GPU-[^/]+/([0-9]{1,6})/([0-9]{1,6})")


def in_recorded_order(
    rows: Iterable[Row], visible: str, *, index: Callable[[Row], int | None], token: Callable[[Row], str]
) -> list[Row]:
    """Return cards by index, and the slices of a card as the recorded list of visible devices names them.

    Without a list each slice has its old name as its token, whose numbers tell the order.
    """
    places = {name.strip(): place for place, name in enumerate(visible.split(","))}

    def key(row: Row) -> tuple[int, int, tuple[int, int], str]:
        number, name = index(row), token(row)
        return (-1 if number is None else number, places.get(name, len(places)), _numbers_in(name) or (0, 0), name)

    return sorted(rows, key=key)


def visible_in(environment: str | None) -> str:
    """Return the list of visible devices in the variables of a task, which are JSON; empty: it had none."""
    try:
        return str(json.loads(environment or "{}").get("CUDA_VISIBLE_DEVICES", ""))
    except (AttributeError, TypeError, ValueError):  # not of our making
        return ""


def slice_in(token: str) -> str | None:
    """Return "<gpu instance>/<compute instance>" where the token tells it."""
    numbers = _numbers_in(token)
    return None if numbers is None else "{}/{}".format(*numbers)


def _numbers_in(token: str) -> tuple[int, int] | None:
    old = _OLD_SLICE.fullmatch(token)
    return None if old is None else (int(old[1]), int(old[2]))
