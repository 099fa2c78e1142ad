"""Reads shell as far as job scripts need it: which lines there are, what variables hold, which flags a command gets.

Plain assignments, ``: "${OUT:=…}"``, arrays of arguments and lines that go on behind a backslash are understood; what
cannot be followed stays unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

_ASSIGNED = re.compile(r"""^\s*(?:export\s+)?(\w+)=("[^"]*"|'[^']*'|[^\s;(]+)\s*(?:#.*)?$""")
_DEFAULTED = re.compile(r"""^\s*:\s+"?\$\{(\w+):?=([^}]*)\}"?""")
_ARRAY = re.compile(r"^\s*(\w+)=\((.*?)\)", re.MULTILINE | re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")

Lines = Sequence[tuple[int, str]]


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that is no comment, with the lines behind a backslash joined to it."""
    before, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if before else number
        if line.endswith("\\"):
            before += line[:-1]
        else:
            if not (before + line).lstrip().startswith("#"):
                yield first, before + line
            before = ""


def code_of(line: str) -> str:
    """Return a line without the comment behind it."""
    return re.sub(r"\s#.*$", "", line)


def read_flags(words: str, text: str, lines: Lines, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags among a command's words whose values the script says plainly."""
    arrays = {found[1]: split_words(found[2]) for found in _ARRAY.finditer(text)}
    variables = _variables(lines, environ)
    flags: dict[str, str] = {}
    name = ""
    for raw in split_words(words):
        of_array = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", raw)
        for word in arrays.get(of_array[1], []) if of_array else [raw]:
            value = _expanded(word, variables)
            if word.startswith("--"):
                name, equals, _ = word.partition("=")
                if equals and value is not None:
                    flags[name] = value.partition("=")[2]
                name = "" if equals else name
            else:
                if name and value is not None:
                    flags[name] = value
                name = ""
    return flags


def _variables(lines: Lines, environ: Mapping[str, str]) -> dict[str, str]:
    known = dict(environ)
    for _, line in lines:
        if found := _ASSIGNED.match(line):
            value = _expanded(found[2].strip("\"'"), known)
            known.pop(found[1], None)
            known |= {} if value is None else {found[1]: value}
        elif (found := _DEFAULTED.match(line)) and not known.get(found[1]):
            value = _expanded(found[2], known)
            known |= {} if value is None else {found[1]: value}
    return {name: value for name, value in known.items() if value}


def _expanded(word: str, variables: Mapping[str, str]) -> str | None:
    """Put values in the place of variables; None: one of them is not known, or there is more shell in it."""
    unknown = False

    def value_of(found: re.Match[str]) -> str:
        nonlocal unknown
        value = variables.get(found[1] or found[2]) or found[3]
        unknown = unknown or not value
        return value or ""

    text = _VARIABLE.sub(value_of, word)
    return None if unknown or "$" in text or "`" in text else text


def split_words(text: str) -> list[str]:
    """Split as a shell does, without the comment at the end; at blanks where a quotation mark is missing."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
