"""Where BADC looks for a chunk's file, and how an id that means something to a path stays inside the folder."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_LONGEST_NAME_BYTES = 240  # 255 is what filesystems take; some of it is for the ending


def chunk_file(recording_id: str, chunk_id: str) -> Path:
    """Return where a chunk's file lies below the output folder; never outside it, whatever the ids say.

    A recording id may be a path, as folders of audio give it, and then becomes folders. A chunk id is one name,
    unless it is the recording's.
    """
    parts = recording_id.split("/")
    names = parts if chunk_id == recording_id else [chunk_id]
    return Path(*map(_safe_name, parts), *map(_safe_name, names[:-1]), _safe_name(names[-1]) + ".json")


def _safe_name(name: str) -> str:
    """Return a part of an id as a file name: unchanged for nearly all, %-escaped for those that a path would follow."""
    escaped = re.sub("%(?=[0-9A-Fa-f]{2})", "%25", name).replace("/", "%2F").replace("\0", "%00")
    if set(escaped) <= {"."}:  # nothing, this folder, or the one above
        escaped = "%2E" * len(escaped) or "%00"
    if len(escaped.encode()) <= _LONGEST_NAME_BYTES:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return escaped.encode()[: _LONGEST_NAME_BYTES - 17].decode(errors="ignore") + "~" + digest
