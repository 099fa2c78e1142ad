"""Reads a line of a job script that calls badcjobs as badcjobs itself would: its command, options and SOURCE words.

Nothing is run. What a word of the script is when it runs is ``shell_variables.py``'s business.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from badcjobs.preflight.facts import Mistake


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the command line of badcjobs takes: option → whether a value follows it."""

    options: Mapping[str, bool]  # before the command
    commands: Mapping[str, Mapping[str, bool]]


@dataclass(frozen=True, slots=True)
class Word:
    """One word behind ``badcjobs``, or something that may be any number of them."""

    text: str  # without quotation marks; variables stay
    value: str | None  # None: not known
    loose: bool = False  # nobody knows how many words it becomes


@dataclass(frozen=True, slots=True)
class OwnLine:
    """What badcjobs would make of its words."""

    command: str | None  # with a mistake in its name: the one that is meant; None: not known
    operands: tuple[str, ...] | None = None  # None: some of them are not known
    mistakes: tuple[Mistake, ...] = ()
    surely_named: bool = True  # the command is one that there is, or was meant to be


def read_own_line(words: Sequence[Word], grammar: Grammar, where: str, line: str) -> OwnLine:
    """Return what badcjobs would do, and every word that it would refuse, with the line as it should be."""
    before, behind = _split(words)
    reader = _Reader(grammar.options, f"{where}: badcjobs", line)
    reader.read(before)
    if not behind or behind[0].value is None:
        return OwnLine(None, mistakes=tuple(reader.mistakes))
    said = behind[0].value
    command = said if said in grammar.commands else nearest(said, grammar.commands)
    if command != said:
        reader.complain(f"has no command {said}", said, command, "badcjobs --help   (its commands)")
    if command is None:
        return OwnLine(None, mistakes=tuple(reader.mistakes), surely_named=False)
    options = _Reader(grammar.commands[command], f"{where}: badcjobs {command}", line)
    options.read(behind[1:])
    operands = tuple(options.operands) if options.complete else None
    return OwnLine(command, operands, (*reader.mistakes, *options.mistakes))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    found = difflib.get_close_matches(name, known, n=1)
    return found[0] if found else None


def _split(words: Sequence[Word]) -> tuple[Sequence[Word], Sequence[Word]]:
    """Return the options before the command, and the command with what follows it."""
    at = next((n for n, word in enumerate(words) if not word.text.startswith("-")), len(words))
    return words[:at], words[at:]


class _Reader:
    """Goes through the words of one command."""

    def __init__(self, options: Mapping[str, bool], whose: str, line: str) -> None:
        self.mistakes: list[Mistake] = []
        self.operands: list[str] = []
        self.complete = True  # all operands are known
        self._options, self._whose, self._line = options, whose, line

    def read(self, words: Sequence[Word]) -> None:
        left, after_loose, ended = list(words), False, False
        while left:
            word = left.pop(0)
            if word.loose:
                self.complete, after_loose = False, True
                continue
            if ended or not word.text.startswith("-") or word.text == "-":
                self._take_operand(word)
            elif word.text == "--":
                ended = True
            else:
                self._take_option(word.text, left, judged=not after_loose)
            after_loose = False  # what stands directly behind may be the value of an option that nobody sees

    def complain(self, text: str, wrong: str, right: str | None, otherwise: str) -> None:
        mended = re.sub(rf"(?<![\w-]){re.escape(wrong)}(?![\w-])", lambda _: right or "", self._line, count=1)
        fix = mended if right and mended != self._line else otherwise
        self.mistakes.append(Mistake(f"{self._whose} {text}", fix))

    def _take_operand(self, word: Word) -> None:
        self.complete = self.complete and word.value is not None
        self.operands += [] if word.value is None else [word.value]

    def _take_option(self, text: str, left: list[Word], *, judged: bool) -> None:
        name, equals, _ = text.partition("=")
        if not text.startswith("--") and len(text) > 2:
            name, equals = text[:2], "="  # -oFILE
        if name not in self._options:
            self.complete = False  # whether a value follows, nobody knows
            if judged and "$" not in name:
                helps = f"{self._whose.partition(': ')[2]} --help   (its options)"
                self.complain(f"has no option {name}", name, nearest(name, self._options), helps)
        elif self._options[name] and not equals:
            self._take_value(name, left)
        elif equals and not self._options[name] and name.startswith("--"):
            self.complain(f"takes no value for {name}: {text}", text, name, name)

    def _take_value(self, name: str, left: list[Word]) -> None:
        if not left:
            self.complain(f"needs a value behind {name}", name, None, f"{self._line} VALUE")
        elif left.pop(0).loose:
            self.complete = False  # more may follow than the value
