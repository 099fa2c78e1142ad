"""Batch scripts that users may fill in or copy: which keys a template has, and what it looks like filled. Pure.

A template carries no marks of its own, so that it can be submitted and edited as it is. A key is what a reader would
call it: the name of an ``#SBATCH`` option (also of one that is commented out with a second ``#``), or of a variable in
a line such as ``: "${SOURCE:=}"``, in small letters; ``args`` and ``setup`` add lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from badcjobs.errors import BadInput

_OPTION = re.compile(r"(?P<off>#?)#SBATCH --(?P<key>[a-z-]+)=(?P<value>\S*)")
_VARIABLE = re.compile(r': "\$\{(?P<name>[A-Z]+):=(?P<value>.*)\}"')
_PLACEHOLDER = re.compile(r"<[a-z]+>")
_SETUP_BEFORE = ': "${BADCJOBS:='
_NEEDED = ("SOURCE", "OUT", "IMAGE")  # the script itself refuses to go on without them
_ARGS_BEGIN, _ARGS_END = "ARGS=(", ")"


@dataclass(frozen=True, slots=True)
class Key:
    """Something that a template wants to know."""

    name: str
    value: str  # what stands there now
    required: bool = False  # the script is of no use before it is filled in
    open: bool = False  # empty: to be filled in, or to be named when the script is submitted
    several: bool = False  # may be given more than once


def keys_of(text: str) -> tuple[Key, ...]:
    """Return what can be set in a template, in its order."""
    keys = []
    for line in text.splitlines():
        if option := _OPTION.fullmatch(line):
            value = option["value"]
            keys.append(Key(option["key"], value, required=not option["off"] and bool(_PLACEHOLDER.search(value))))
        elif variable := _VARIABLE.fullmatch(line):
            if line.startswith(_SETUP_BEFORE):
                keys.append(Key("setup", "", several=True))
            keys.append(Key(variable["name"].lower(), variable["value"], open=variable["name"] in _NEEDED))
        elif line == _ARGS_BEGIN:
            keys.append(Key("args", "", several=True))
    return tuple(keys)


def still_open(text: str) -> tuple[str, ...]:
    """Return the keys that somebody has to fill in before, or when, the script is submitted."""
    return tuple(key.name for key in keys_of(text) if key.required or (key.open and not key.value))


def parse_settings(text: str, given: Sequence[str], name: str, *, complete: bool) -> dict[str, list[str]]:
    """Read ``KEY=VALUE`` texts for a template; name all that is unknown, given twice or wrong at once.

    ``complete``: what is required and missing is wrong, too.
    """
    keys = {key.name: key for key in keys_of(text)}
    values: dict[str, list[str]] = {}
    mistakes = []
    for one in given:
        word, equals, value = one.partition("=")
        key = word.strip().replace("_", "-")
        if not equals:
            mistakes.append(f"--set {one} has no value; write --set {word}=…")
        elif key not in keys:
            mistakes.append(f"--set {one}: {name} has no key {word!r}")
        elif key in values and not keys[key].several:
            mistakes.append(f"--set {one}: {key} is given twice")
        elif not value or not value.isprintable():
            mistakes.append(f"--set {word}: {value!r} is nothing that a line of a script can hold")
        elif key == "args" and (wrong := _unbalanced(value)):
            mistakes.append(wrong)
        else:
            values.setdefault(key, []).append(value)
    missing = [key.name for key in keys.values() if key.required and key.name not in values]
    if complete and missing:
        mistakes.append(f"missing: {', '.join(missing)}")
    if mistakes:
        raise BadInput(
            mistakes[0] if len(mistakes) == 1 else f"the template {name} cannot be filled in like this",
            why="\n".join([*(mistakes if len(mistakes) > 1 else []), f"keys of {name}: {', '.join(keys)}"]),
            fix=_right_command(name, values, missing),
        )
    return values


def _right_command(name: str, values: Mapping[str, Sequence[str]], missing: Sequence[str]) -> str:
    """Return the command with what was right in it, of two for one key the first, and what is missing."""
    right = [shlex.quote(f"{key}={value}") for key, several in values.items() for value in several]
    words = [f"--set {one}" for one in [*right, *(f"{key}=…" for key in missing)]]
    return " ".join(["badcjobs template", name, *words]) + ("" if words else "   (shows it, with all its keys)")


def _unbalanced(value: str) -> str | None:
    try:
        shlex.split(value)
    except ValueError as error:
        return f"--set args={value}: {error}"
    return None


def fill(text: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return the script with these values in it; everything else stays as it is, byte for byte."""
    lines: list[str] = []
    in_args = False
    for line in text.splitlines():
        if in_args and line == _ARGS_END:
            lines += [f"    {shlex.quote(word)}" for value in values.get("args", ()) for word in shlex.split(value)]
        in_args = line == _ARGS_BEGIN or (in_args and line != _ARGS_END)
        if line.startswith(_SETUP_BEFORE):
            lines += values.get("setup", ())
        lines.append(_filled(line, values))
    return "\n".join(lines) + "\n"


def _filled(line: str, values: Mapping[str, Sequence[str]]) -> str:
    if (option := _OPTION.fullmatch(line)) and option["key"] in values:
        return f"#SBATCH --{option['key']}={shlex.quote(values[option['key']][0])}"
    if (variable := _VARIABLE.fullmatch(line)) and (key := variable["name"].lower()) in values:
        # Inside double quotes and braces these letters mean something to the shell.
        value = re.sub(r'[\\"$`}]', lambda letter: "\\" + letter[0], values[key][0]).replace("'", '"\'"')
        return f': "${{{variable["name"]}:={value}}}"'
    return line
