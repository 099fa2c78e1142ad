"""Where BADC looks for a chunk's file; safe_names keeps ids that mean something to a path inside the folder."""

from __future__ import annotations

from pathlib import Path

from badcjobs.store.exports.safe_names import safe_name


def chunk_file(recording_id: str, chunk_id: str) -> Path:
    """Return where a chunk's file lies below the output folder; never outside it, whatever the ids say.

    A recording id may be a path, as folders of audio give it, and then becomes folders. A chunk id is one name,
    unless it is the recording's.
    """
    parts = recording_id.split("/")
    names = parts if chunk_id == recording_id else [chunk_id]
    return Path(*map(safe_name, parts), *map(safe_name, names[:-1]), safe_name(names[-1]) + ".json")
