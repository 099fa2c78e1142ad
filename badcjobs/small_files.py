"""Small files of JSON or TOML: anyone who may write in a run folder can put anything in their place."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 20
_DEEPEST = 20
_MOST_KEYS = 500
Noun = TypeVar("Noun")


class DamagedFile(ValueError):
    """The content of a small file is not as badcjobs writes it."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without waiting; raise OSError for a pipe, a folder or a device."""
    file = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_small(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read a small file; raise OSError for anything else."""
    return read_with_status(path, most_bytes)[0]


def read_with_status(path: Path, most_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a small file, and the status of the very file that was read."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
        status = os.fstat(file.fileno())
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes:,} bytes", str(path))
    return content, status


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise DamagedFile for anything else, for deep nesting and for impossible values."""
    try:
        document = json.loads(text)
        check_document(document)
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedFile(str(error) or "too large") from error
    return document


def check_document(document: Any) -> None:
    """Raise ValueError for deep nesting, large tables, numbers of more than 64 bits, and NUL characters."""
    level = [document]
    for _ in range(_DEEPEST):
        if any(map(_is_impossible, level)):
            raise ValueError("a number or a table is too large, or a text has a NUL character")
        tables = [child for table in level if isinstance(table, dict) for child in table.values()]
        level = tables + [child for items in level if isinstance(items, list) for child in items]
    if level:
        raise ValueError("nested too deeply")


def _is_impossible(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > _MOST_KEYS
    if isinstance(value, str):
        return "\0" in value
    return isinstance(value, int) and abs(value) >= 1 << 63


def read_optional(path: Path, parse: Callable[[Any], Noun]) -> Noun | None:
    """Return what a JSON file holds; None: there is none, it is empty, or it is damaged, which is logged."""
    try:
        content = read_small(path)
        if not content.strip():
            return None
        return parse(parse_json(content))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        set_aside(path, str(error))
        return None


@lru_cache(100)
def set_aside(path: Path, why: str) -> None:
    """Log, once, that a file is ignored."""
    log.warning("%s is ignored: %s", path, why)


def parse_fields(noun: type[Noun], table: Any) -> Noun:
    """Make a dataclass of a table, field by field; raise DamagedFile for a value of the wrong type."""
    if not isinstance(table, dict):
        raise DamagedFile(f"{str(table)[:40]} is not a table")
    values = {}
    for field in fields(noun):  # type: ignore[arg-type]
        if field.name not in table:
            if field.default is MISSING and field.default_factory is MISSING:
                raise DamagedFile(f"{field.name} is missing")
            continue
        value = table[field.name]
        kinds = str(field.type).split(" | ")
        if not any(_fits(kind, value) for kind in kinds):
            raise DamagedFile(f"{field.name} = {repr(value)[:40]} is not {' or '.join(kinds)}")
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, int) and "float" in kinds:
            value = float(value)
        values[field.name] = value
    return noun(**values)


def _fits(kind: str, value: Any) -> bool:
    """Return whether a value from a file has the type that the annotation of a field names."""
    base, _, items = kind.removesuffix("]").partition("[")
    if base == "float":
        return type(value) in (int, float) and math.isfinite(value)
    if base == "tuple" and items.endswith(", ..."):
        return type(value) is list and all(_fits(items.removesuffix(", ..."), item) for item in value)
    if base == "tuple":
        kinds = items.split(", ")
        return type(value) is list and len(value) == len(kinds) and all(map(_fits, kinds, value))
    if base == "Mapping":
        return type(value) is dict and all(_fits(items.removeprefix("str, "), item) for item in value.values())
    return type(value).__name__.removesuffix("Type") == base
