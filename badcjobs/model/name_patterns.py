"""Patterns that say what the folders and file names of recordings mean: texts that a scientist writes. Pure.

    {study_area}/ARU_data/SM/{location}/*/Data/*_{date}_{time}.wav

A name in braces is what is read, * and ? stand for letters of one name, ** for any folders; all else is itself. What a
path tells that fits no pattern is recording_names' business."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unicodedata import normalize

FIELDS = {"study_area": "[^/]+?", "location": "[^/]+?", "date": "[0-9]{8}", "time": "[0-9]{6}"}
_TOKEN = re.compile(r"\{(?P<field>[^{}/]*)\}|(?P<any>\*)|(?P<one>\?)|(?P<text>[^{}*?]+)|(?P<stray>[{}])")
_OF_DIGITS = ("date", "time")
_ANY_FOLDERS = "(?:[^/]+/)*?"


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A pattern that can be used."""

    text: str
    regex: re.Pattern[str]
    is_full: bool  # it is compared with the whole path, and not with that below the source's root

    def read(self, path: str, below: str | None) -> Mapping[str, str] | None:
        """Return what a path tells; None: it does not fit. ``below``: from the root on; None: it is not below it."""
        compared = path if self.is_full else below
        found = None if compared is None else self.regex.fullmatch(normalize("NFC", compared))
        return None if found is None else found.groupdict()


def parse_pattern(text: str) -> NamePattern:
    """Read a pattern; a ValueError says, in words that go on after it, what is wrong with it."""
    is_full = text.startswith(("/", "**/"))
    folders = normalize("NFC", text).removeprefix("./").removeprefix("/").split("/")
    if not folders[-1]:
        raise ValueError("is empty" if not text else "ends with /, but has to end with a file name")
    parts = [_folder(name) for name in folders[:-1]] + [_name(folders[-1], is_file=True)]
    fields = re.findall(r"\{([^{}/]*)\}", text)
    if not fields:
        raise ValueError(f"reads nothing: it has none of {_known()}")
    if twice := sorted({field for field in fields if fields.count(field) > 1}):
        raise ValueError(f"has {{{twice[0]}}} twice")
    if "time" in fields and "date" not in fields:
        raise ValueError("has {time} without {date}")
    return NamePattern(text, re.compile(("/" if is_full else "") + "".join(parts)), is_full)


def parse_patterns(texts: Sequence[str]) -> tuple[tuple[NamePattern, ...], list[str]]:
    """Read several, and return those that can be used, and what is wrong with the others."""
    patterns, wrong = [], []
    for text in texts:
        try:
            patterns.append(parse_pattern(text))
        except ValueError as error:
            wrong.append(f"{text!r} {error}")
    return tuple(patterns), wrong


def _folder(name: str) -> str:
    if name == "**":
        return _ANY_FOLDERS
    if not name:
        raise ValueError("has // in it")
    return _name(name) + "/"


def _name(name: str, *, is_file: bool = False) -> str:
    """Return one name of a path as a regular expression."""
    if "**" in name:
        raise ValueError("has ** that is not a folder of its own, as in a/**/b")
    tokens = list(_TOKEN.finditer(name))
    if any(token["stray"] for token in tokens):
        raise ValueError("has a { or } that stands alone")
    ending = re.search(r"\.(wav|flac)$", name, re.IGNORECASE) if is_file else None
    parts = []
    for number, token in enumerate(tokens):
        around = [tokens[i]["field"] if 0 <= i < len(tokens) else None for i in (number - 1, number + 1)]
        parts.append(_part(token, *around))
    if ending:  # recorders write .WAV as well as .wav
        last = tokens[-1]["text"].removesuffix(ending[0])
        parts[-1] = re.escape(last) + f"(?i:{re.escape(ending[0])})"
    return "".join(parts)


def _part(token: re.Match[str], before: str | None, after: str | None) -> str:
    field = token["field"]
    if field is None:
        return "[^/]*" if token["any"] else "[^/]" if token["one"] else re.escape(token["text"])
    if field not in FIELDS:
        raise ValueError(f"has {{{field}}}; what can be read is {_known()}")
    group = f"(?P<{field}>{FIELDS[field]})"
    if field in _OF_DIGITS:  # not the first eight digits of a serial number
        group = group if before in _OF_DIGITS else f"(?<![0-9]){group}"
        group = group if after in _OF_DIGITS else f"{group}(?![0-9])"
    return group


def _known() -> str:
    return ", ".join(f"{{{field}}}" for field in FIELDS)
