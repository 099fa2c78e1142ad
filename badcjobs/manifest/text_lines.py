"""Lines of a text file that somebody else wrote: UTF-8 with or without BOM, any line ends, perhaps damaged."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from badcjobs.manifest.mistakes import Mistakes


def read_lines(path: Path, mistakes: Mistakes) -> Iterator[str]:
    """Yield every line with its end; note what is not UTF-8 text, and yield it repaired so that reading goes on."""
    # With "strict" the first wrong byte would end the reading, and the later mistakes would go untold.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if not line.isascii() and not is_text(line):
                mistakes.add(number, "is not UTF-8", fix=_convert(path, "latin1"))
                line = line.encode(errors="surrogateescape").decode(errors="replace")
            if "\0" in line:
                mistakes.add(number, "has a NUL byte", fix=f"tr -d '\\000' < {_quote(path)} > {_repaired(path)}")
                line = line.replace("\0", "")
            yield line


def note_utf16(path: Path, start: bytes, mistakes: Mistakes) -> bool:
    """Say whether the file is UTF-16 (a spreadsheet's "Unicode text"), where every single line would be a mistake."""
    if start[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    mistakes.add(0, "is UTF-16, not UTF-8", fix=_convert(path, "utf-16"))
    return True


def is_text(line: str) -> bool:
    """Say whether UTF-8 can hold it: what was no text is kept as surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t utf-8 {_quote(path)} > {_repaired(path)}"


def _repaired(path: Path) -> str:
    return _quote(path.with_suffix(f".utf8{path.suffix}"))


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
