"""Files by their names, sizes and content: how a program is known that tells nobody its version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from os import stat_result
from pathlib import Path

_END_BYTES = 8 << 20  # are read at each end: a program whole; of a model that is larger, where its checksums are


def fingerprint_of(files: Iterable[Path], *, content: bool = True) -> str | None:
    """Return a few letters that change when one of the files does; None: there are none. A copy is the same file.

    Without ``content`` nothing is read: it is enough for what has a size of its own in every version.
    """
    digest, found = hashlib.sha256(), False
    for path in sorted(files):
        try:
            state = path.stat()
        except OSError:
            continue
        digest.update(f"{path.name}\0{state.st_size}\0".encode(errors="replace"))
        for part in _ends_of(path, state) if content else ():
            digest.update(part)
        found = True
    return digest.hexdigest()[:8] if found else None


def _ends_of(path: Path, state: stat_result) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield file.read(_END_BYTES)
            file.seek(max(_END_BYTES, state.st_size - _END_BYTES))
            yield file.read(_END_BYTES)
    except OSError:  # it may be run, but not be read
        yield str(state.st_mtime_ns).encode()
