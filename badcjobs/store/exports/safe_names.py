"""Names that somebody else gave, as file names: never a path, never too long, never two the same."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

_LONGEST_NAME_BYTES = 240  # 255 is what filesystems take; some of it is for the ending


def safe_name(name: str) -> str:
    """Return a part of an id as a file name: unchanged for nearly all, %-escaped for those that a path would follow."""
    escaped = re.sub("%(?=[0-9A-Fa-f]{2})", "%25", name).replace("/", "%2F").replace("\0", "%00")
    if set(escaped) <= {"."}:  # nothing, this folder, or the one above
        escaped = "%2E" * len(escaped) or "%00"
    if len(escaped.encode()) <= _LONGEST_NAME_BYTES:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return escaped.encode()[: _LONGEST_NAME_BYTES - 17].decode(errors="ignore") + "~" + digest


def area_names(areas: Iterable[str | None], *, taken: str, nameless: str) -> Mapping[str | None, str]:
    """Return a file name, without its ending, for each study area in their order.

    ``taken`` is that of another file beside them, ``nameless`` that of recordings without a study area. Names that
    some filesystems do not tell apart (a, A) get a number.
    """
    used, names = {taken.casefold()}, dict[str | None, str]()
    for area in areas:
        name = base = nameless if area is None else re.sub(r"^\.", "%2E", safe_name(area))  # never hidden
        number = 1
        while name.casefold() in used:
            number += 1
            name = f"{base}~{number}"
        used.add(name.casefold())
        names[area] = name
    return names
