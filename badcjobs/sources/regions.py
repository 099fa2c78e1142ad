"""The regions of HawkEars' occurrence data, read from ``data/locations.db`` in its folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from badcjobs.model import Place

# HawkEars' occurrence data has exactly the areas that can be selected; it is a pickle, which we do not open.
_COUNTIES = (
    "SELECT Code, MinLatitude, MaxLatitude, MinLongitude, MaxLongitude FROM AdministrativeArea WHERE Selectable = 1"
)


class Regions:
    """Answers what HawkEars would find in its occurrence data."""

    def __init__(self, counties: Sequence[tuple[Any, ...]]) -> None:
        self.counties = counties  # code, and bounds in degrees: south, north, west, east
        self._codes = {code[:length] for code, *_ in counties for length in range(1, len(code) + 1)}
        self._bounds = [bounds for _, *bounds in counties if None not in bounds]
        self._covers = cache(self._find_county)  # a station has many recordings

    def has(self, code: str) -> bool:
        """Return whether HawkEars finds a region: the code of a county, or the beginning of one."""
        return code in self._codes

    def covers_place(self, place: Place) -> bool:
        """Return whether HawkEars finds a county for a place, or needs none: its region counts before coordinates."""
        if place.region is not None or place.latitude is None or place.longitude is None:
            return True
        return self._covers(place.latitude, place.longitude)

    def _find_county(self, latitude: float, longitude: float) -> bool:
        """Return whether a county is at a point; HawkEars finds none that has no bounds."""
        return any(
            south <= latitude <= north and west <= longitude <= east for south, north, west, east in self._bounds
        )


def read_regions(root: Path) -> Regions | None:
    """Return the regions of the HawkEars in a folder; None: it has no readable table of them."""
    path = (root / "data" / "locations.db").absolute()
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            counties = database.execute(_COUNTIES).fetchall()
    except sqlite3.Error:
        return None
    return Regions(counties)
