"""Where and when recordings were made, for an engine's filter of species."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import date

from badcjobs.model.devices import known_values

_REGION = re.compile(r"[A-Z]{2}(-[A-Z0-9]{1,3}){0,2}")
_DATE = re.compile(r"(\d{4})(-?)(\d{2})\2(\d{2})([T ].*)?")
_LIMITS = {"latitude": 90.0, "longitude": 180.0}


@dataclass(frozen=True, slots=True)
class Place:
    """Where and when a recording was made; None: not known."""

    latitude: float | None = None
    longitude: float | None = None
    region: str | None = None  # an eBird code or its beginning, such as CA-AB; it counts before the coordinates
    recorded_on: str | None = None  # ISO 8601; None: the place counts for all weeks of the year
    location_name: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether it says where."""
        return self.region is not None or self.latitude is not None


NOWHERE = Place()


@dataclass(frozen=True, slots=True)
class ProjectPlaces:
    """The places in the project file."""

    everywhere: Place = NOWHERE
    study_areas: Mapping[str, Place] = field(default_factory=dict)

    def to_keys(self) -> dict[str, object]:
        """Return the keys of the project file that give these places."""
        keys = _to_keys(self.everywhere)
        if self.study_areas:
            keys["study_areas"] = {name: _to_keys(place) for name, place in self.study_areas.items()}
        return keys


def _to_keys(place: Place) -> dict[str, object]:
    return known_values(
        {"region": place.region, "latitude": place.latitude, "longitude": place.longitude, "date": place.recorded_on}
    )


@dataclass(slots=True)
class PlaceCounts:
    """How many recordings lack a place or a date; some kinds are named."""

    recordings: int = 0
    left_out: int = 0  # not analysed: with --filelist, nothing gives them a place
    undated: int = 0  # with a place, but no date
    unplaced: int = 0  # analysed without a place
    left_out_names: list[str] = field(default_factory=list)
    not_covered: int = 0  # at coordinates where HawkEars has no county, so that its filter is off
    not_covered_names: list[str] = field(default_factory=list)
    unmatched_names: list[str] = field(default_factory=list)  # in the list, of no recording
    unused_areas: list[str] = field(default_factory=list)  # study areas in the project file without a recording

    @property
    def placed(self) -> int:
        """How many have a place."""
        return self.recordings - self.left_out - self.unplaced


def names_place(columns: Collection[str]) -> bool:
    """Return whether these columns can give a place."""
    return "region" in columns or {"latitude", "longitude"} <= {*columns}


def parse_place(fields: Mapping[str, object]) -> tuple[Place, list[str]]:
    """Return the place that these columns or keys give, and the mistakes in them; an empty value is not given."""
    texts = {name: str(value).strip() for name, value in fields.items()}
    mistakes: list[str] = []
    latitude, longitude = (_parse_coordinate(name, texts.get(name, ""), mistakes) for name in _LIMITS)
    if (latitude is None) != (longitude is None) and not mistakes:
        mistakes.append("latitude and longitude belong together, and one of them is missing")
    region = texts.get("region") or None
    if region is not None and _REGION.fullmatch(region) is None:
        mistakes.append(f"region {region!r} is not an eBird region, such as CA-AB")
        region = None
    day = _parse_date("recording_date" if "recording_date" in texts else "date", texts, mistakes)
    name = texts.get("location_name") or texts.get("location") or None
    return Place(latitude, longitude, region, day, name), mistakes


def _parse_coordinate(name: str, text: str, mistakes: list[str]) -> float | None:
    if not text:
        return None
    try:
        degrees = float(text)
    except ValueError:
        degrees = math.nan
    limit = _LIMITS[name]
    if -limit <= degrees <= limit:
        return degrees
    mistakes.append(f"{name} {text!r} is not a number from -{limit:g} to {limit:g}")
    return None


def _parse_date(name: str, texts: Mapping[str, str], mistakes: list[str]) -> str | None:
    text = texts.get(name, "")
    if not text:
        return None
    parts = _DATE.fullmatch(text)
    if parts is None:
        mistakes.append(f"{name} {text!r} is not a date with its year: 2024-06-30 or 20240630")
        return None
    try:
        return date(int(parts[1]), int(parts[3]), int(parts[4])).isoformat()
    except ValueError:
        mistakes.append(f"{name} {text!r}: there is no such day")
        return None
