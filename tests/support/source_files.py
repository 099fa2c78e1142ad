"""Sources for tests, written as a text: audio that is whole or damaged, manifests, lists, links, pipes.

a.wav: 2 s                      audio; also "2 of 8 s", truncated, and "5 s unfinished", whose size was never written
b.wav: link ../a.wav            also "pipe" and "socket"
c.wav: text no audio            exactly this; \\xNN is a byte, here as in names
list.txt: lines                 followed by indented lines; also "program", a shell script
m.csv: rows                     the same below the header of a manifest; "9 × c#" are nine lines, from c0 to c8
"""

import os
import re
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from support.audio import make_wav
from support.cases import read_blocks

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"


class Case(NamedTuple):
    """Files, and what is asked about them: ``$ SOURCE… option=value…``."""

    name: str
    files: str
    sources: list[str]
    options: dict[str, str]


def read_cases(topic: str) -> list[Case]:
    """Return the cases of a file in tests/data/sources."""
    cases = []
    for block in read_blocks(f"sources/{topic}.txt"):
        name, files, asked = re.fullmatch(r"(.*)\n((?s:.*))\$(.*)\s*", block).groups()  # type: ignore[union-attr]
        words = asked.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        cases.append(Case(name, files, [word for word in words if "=" not in word], options))
    return cases


def rows(*lines: str, header: str = HEADER) -> str:
    """Return the text of a manifest."""
    return "\n".join((header, *lines, ""))


def write_files(text: str, folder: Path = Path()) -> None:
    """Make the files that a text describes."""
    for name, kind, more in re.findall(r"^(\S[^:\n]*): (.*)((?:\n  .*)*)", text, re.MULTILINE):
        path = folder / _unescape(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [one for line in more.split("\n  ")[1:] for one in _repeat(_unescape(line))]
        if audio := re.fullmatch(r"(?:([\d.]+) of )?([\d.]+) s(?: at (\d+) Hz)?( unfinished)?", kind):
            there_s, seconds, rate, unfinished = audio.groups()
            content = make_wav(path, float(seconds), int(rate or 1000), tone_hz=100).read_bytes()
            content = content[:40] + bytes(4) + content[44:] if unfinished else content
            path.write_bytes(content[: 44 + round(float(there_s) * 2000)] if there_s else content)
        elif kind.startswith("link "):
            path.symlink_to(kind[5:])
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(str(path))
        else:
            heads = {"rows": [HEADER], "lines": [], "program": ["#!/bin/sh"]}
            texts = {name: "\n".join([*head, *lines, ""]) for name, head in heads.items()}
            content = texts[kind] if kind in texts else _unescape(re.fullmatch("text ?(.*)", kind)[1])  # type: ignore[index]
            path.write_bytes(content.encode("utf-8", "surrogateescape"))
            path.chmod(0o755 if kind == "program" else 0o644)


def _unescape(text: str) -> str:
    return re.sub(r"\\x(..)", lambda found: bytes.fromhex(found[1]).decode("utf-8", "surrogateescape"), text)


def _repeat(line: str) -> list[str]:
    many, times, one = line.partition(" × ")
    return [one.replace("#", str(number)) for number in range(int(many))] if times else [line]


def write_regions(root: Path, areas: list[tuple[object, ...]]) -> None:
    """Make HawkEars' table of places: code, whether it is a county, and its bounds."""
    (root / "data").mkdir()
    with closing(sqlite3.connect(root / "data" / "locations.db")) as database:
        columns = "Code, Selectable, MinLatitude, MaxLatitude, MinLongitude, MaxLongitude"
        database.execute(f"CREATE TABLE AdministrativeArea ({columns})")
        database.executemany("INSERT INTO AdministrativeArea VALUES (?, ?, ?, ?, ?, ?)", areas)
        database.commit()
