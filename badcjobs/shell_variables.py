"""Follows a job script's variables and its folder from command to command, as far as the script says them plainly.

What cannot be followed is unknown, and stays so: nobody is to be told a mistake that is none.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence

from badcjobs.own_line import Word
from badcjobs.shell_commands import Command

_ASSIGNED = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_DEFAULTED = re.compile(r"\$\{(\w+):?=([^}]*)\}")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?[-=]([^}]*))?\})")
_ARRAY = re.compile(r"""["']?\$\{(\w+)\[[@*]\]\}["']?""")
_RAW_WORD = re.compile(r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|\\.|[^\s"'\\])+""", re.DOTALL)
_QUOTED = re.compile(r"""'[^']*'|"(?:[^"\\]|\\.)*\"""")
_SPREADING = re.compile(r"[*?\[{(]")  # outside of quotation marks the shell makes any number of words of them
_LOOSE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_OWN_TO_THE_JOB = ("SLURM", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")


class Variables:
    """What is known at one point of a script."""

    def __init__(self, environ: Mapping[str, str], cwd: str, chdir: str = "") -> None:
        self._known = {name: value for name, value in environ.items() if not name.startswith(_OWN_TO_THE_JOB)}
        self._known |= {"SLURM_SUBMIT_DIR": cwd, "PWD": posixpath.join(cwd, chdir)}
        self._arrays: dict[str, list[str]] = {}
        self.folder: str | None = posixpath.join(cwd, chdir)  # where the script is; None: not known
        self._submitted_from = posixpath.join(cwd, "")

    def pass_by(self, command: Command) -> None:
        """Note what a command changes; what may or may not have run leaves its variables unknown."""
        if command.within is not None:
            return
        words = command.words[1:] if command.words[0] in _DECLARING else command.words
        assigned = [_ASSIGNED.fullmatch(word) for word in words]
        if command.words[0] in _DECLARING or all(assigned):
            for found in filter(None, assigned):
                self._assign(found[1], found[3], sure=command.sure and not found[2])
        elif words[0] == ":" and len(words) == 2 and (default := _DEFAULTED.fullmatch(words[1].strip("\"'"))):
            if not self._known.get(default[1]):
                self._assign(default[1], f'"{default[2]}"', sure=command.sure)
        elif words[0] in ("read", "mapfile", "readarray", "unset", "for"):
            self._forget(words[1:])
            if words[0] == "read" and "-a" in words and command.here and command.sure:
                text = self.value_of(command.here)
                self._arrays |= {} if text is None else {words[-1]: [shlex.quote(one) for one in text.split()]}
        elif words[0] in ("cd", "pushd", "popd"):
            self.folder = self._moved(words[1:]) if command.sure and words[0] != "popd" else None

    def value_of(self, word: str) -> str | None:
        """Return what a word of the script is when it runs; None: not known."""
        if word.startswith("'") and word.endswith("'") and "'" not in word[1:-1]:
            return word[1:-1]
        text = unquoted(word)
        if text == "~" or text.startswith("~/"):
            text = "${HOME}" + text[1:]
        return None if text.startswith("~") else _expanded(text, self._known)

    def own_word(self, word: str) -> Word:
        """Return a word as the program gets it that it is meant for."""
        value = self.value_of(word)
        bare = _VARIABLE.sub("", _QUOTED.sub("", word))
        several = "[@]" in word or word == '"$@"'
        one = word.startswith(('"', "'", "-"))  # --out=$OUT may become several, but is not meant to
        loose = several if value is None and one else value is None or bool(_SPREADING.search(bare))
        return Word(unquoted(word), None if loose else value, loose)

    def words_of(self, command: Command) -> list[str]:
        """Return a command's words with arrays, and variables that hold several words, taken apart."""
        words: list[str] = []
        for word in command.words:
            array, loose = _ARRAY.fullmatch(word), _LOOSE.fullmatch(word)
            value = self._known.get(loose[1] or loose[2]) if loose else None
            if array and array[1] in self._arrays:
                words += self._arrays[array[1]]
            else:
                words += [shlex.quote(one) for one in value.split()] if value else [word]
        return words

    def path_of(self, text: str) -> str | None:
        """Return a path from where the script is; None: nobody knows where that is."""
        if posixpath.isabs(text):
            return text
        if self.folder is None:
            return None
        below = posixpath.join(self.folder, "") == self._submitted_from
        return text if below else posixpath.join(self.folder, text)

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._arrays.pop(name, None)

    def _assign(self, name: str, raw: str, *, sure: bool) -> None:
        self._forget([name])
        if sure and raw.startswith("(") and raw.endswith(")"):
            self._arrays[name] = _raw_words(raw[1:-1])
        elif sure and (value := self.value_of(raw)) is not None:
            self._known[name] = value

    def _moved(self, words: Sequence[str]) -> str | None:
        where = [word for word in words if word not in ("-P", "-L", "--")]
        value = self.value_of(where[0]) if len(where) == 1 else self._known.get("HOME") if not where else None
        return None if not value or value == "-" or self.folder is None else posixpath.join(self.folder, value)


def read_flags(words: Sequence[str], variables: Variables) -> tuple[dict[str, str], frozenset[str], bool]:
    """Return the flags among a command's words with the values that are known, all flags, and whether more may hide."""
    flags: dict[str, str] = {}
    named: set[str] = set()
    name, hidden = "", False
    for word in words:
        value = variables.value_of(word)
        hidden = hidden or (value is None and (word.startswith("$") or "[@]" in word or word in ('"$@"', '"$*"')))
        bare = unquoted(word)
        if bare.startswith("--"):
            name, equals, _ = bare.partition("=")
            named.add(name)
            if equals and value is not None:
                flags[name] = value.partition("=")[2]
            name = "" if equals else name
        else:
            if name and value is not None:
                flags[name] = value
            name = ""
    return flags, frozenset(named), hidden


def unquoted(word: str) -> str:
    """Return a word without its quotation marks; variables in it stay."""
    try:
        return "".join(shlex.split(word))
    except ValueError:  # a mark that nobody closes
        return word.strip("\"'")


def _raw_words(text: str) -> list[str]:
    """Split at blanks that no quotation mark encloses, and keep the marks."""
    return _RAW_WORD.findall(re.sub(r"(?:^|(?<=\s))#[^\n]*", "", text))


def _expanded(text: str, variables: Mapping[str, str]) -> str | None:
    """Put values in the place of variables; None: one of them is not known, or there is more shell in it."""
    unknown = False

    def value_of(found: re.Match[str]) -> str:
        nonlocal unknown
        value = variables.get(found[1] or found[2]) or found[3]
        unknown = unknown or value is None
        return value or ""

    expanded = _VARIABLE.sub(value_of, text)
    return None if unknown or "$" in expanded or "`" in expanded else expanded
