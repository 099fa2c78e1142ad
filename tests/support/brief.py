"""Values as short texts for pages, of a record only what differs from its defaults; and values from such texts."""

import ast
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any


def brief(value: Any) -> Any:
    """Return a value of which JSON can be made."""
    if is_dataclass(value):
        named = {one.name: (getattr(value, one.name), _default(one)) for one in fields(value)}
        return {name: brief(found) for name, (found, usual) in named.items() if found != usual}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): brief(one) for key, one in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(brief, value))
    if isinstance(value, (list, tuple)):
        return [brief(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def without_hints(text: str) -> str:
    """Return a text without what only some versions of click add to a refusal."""
    return re.sub(r" \(Possible options?: [^)]*\)| \(?Did you mean [^?]*\?\)?", "", text)


def line(value: Any) -> str:
    """Return a value as one line."""
    return without_hints(json.dumps(brief(value), ensure_ascii=False))


def page(cases: Mapping[str, Any]) -> str:
    """Return what came of each case, each below its own text."""
    return "\n".join(f"{case}\n    → {line(found)}" for case, found in cases.items())


def literal(text: str) -> Any:
    """Return the value that a word stands for: a number, None, a tuple, or else the word itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
