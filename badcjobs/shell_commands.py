"""Takes a shell script apart into its commands: where each begins, and whether a shell of its own would run it.

No more of the grammar than job scripts need. What the variables in a command hold is ``shell_variables.py``'s business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

PIPELINE, BACKGROUND, BRACKETS = "a pipeline", "the background", "brackets"

_QUOTED = r"""'[^']*'|"(?:[^"\\]|\\.)*\""""
_INNER = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
_TOKEN = re.compile(
    rf"""
      (?P<blank>(?:[ \t\r]|\\\r?\n)+)
    | (?P<comment>\#[^\n]*)
    | (?P<here><<(?!<)-?[ \t]*\\?["']?(?P<end>\w+)["']?)
    | (?P<redirect>(?:\d+|&)?(?:<<<|>>|<>|>\||[<>]&?)(?!\())
    | (?P<operator>\n|&&|\|\||\|&|;;&?|;&|[;&|()])
    | (?P<word>(?:
          \w+\+?=\((?:{_QUOTED}|(?<=\s)\#[^\n]*|\$\([^()]*\)|(?!(?<=\s)\#)[^()"'])*\)   # an array
        | {_QUOTED} | \\. | [$<>@?*+]\({_INNER}\) | \$\{{[^}}]*\}} | `[^`]*` | [^\s;&|()<>"'\\`]
      )+)
    | (?P<stray>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_OPENING = {"if": "branch", "case": "branch", "for": "loop", "while": "loop", "until": "loop", "select": "loop"}
_CLOSING = {"fi", "esac", "done", "}"}
_PASSED_BY = {"if", "while", "until", "then", "else", "elif", "do", "!", "time"}
_TESTS = {"[", "[[", "test"}
_GOES_ON = {"|", "|&", "&&", "||"}


@dataclass(slots=True)
class Command:
    """One simple command, as it is written."""

    line: int
    start: int
    end: int
    words: list[str] = field(default_factory=list)  # quotes and all; redirections left out
    here: str | None = None  # the word behind <<<
    text: str = ""
    within: str | None = None  # what gives it a shell of its own, so that exec ends there
    sure: bool = True  # nothing in the script decides whether it runs
    looped: bool = False


@dataclass(frozen=True, slots=True)
class _Group:
    kind: str  # branch, loop, function, brackets, braces
    first: int  # its first command
    list_first: int  # the first command of the list that it stands in
    piped: bool


def read_commands(text: str) -> list[Command]:
    """Return the commands of a script in their order; comments and here-documents are none."""
    reader = _Reader(text)
    at, ends = 0, list[str]()
    while found := _TOKEN.match(text, at):
        at = found.end()
        if found["end"]:
            ends.append(found["end"])
        elif found["redirect"]:
            reader.take_redirect(found)
        elif found["word"]:
            reader.take_word(found)
        elif found["operator"]:
            reader.take_operator(found[0])
        if found[0] == "\n":
            at, ends = _behind(text, at, ends), []
    reader.take_operator("\n")
    return reader.commands


def blank_here_documents(text: str) -> str:
    """Return the text with the lines of its here-documents made empty, so that line numbers stay."""
    out, at = list[str](), 0
    ends = list[str]()
    while found := _TOKEN.match(text, at):
        out.append(found[0])
        at = found.end()
        ends += [found["end"]] if found["end"] else []
        if found[0] == "\n" and ends:
            behind, ends = _behind(text, at, ends), []
            out.append("\n" * text.count("\n", at, behind))
            at = behind
    return "".join(out)


def _behind(text: str, at: int, ends: list[str]) -> int:
    """Return where a script goes on after its here-documents."""
    for end in ends:
        found = re.compile(rf"^\t*{re.escape(end)}\r?$\n?", re.MULTILINE).search(text, at)
        at = found.end() if found else len(text)
    return at


class _Reader:
    """Puts tokens together; knows which groups are open."""

    def __init__(self, text: str) -> None:
        self.commands: list[Command] = []
        self._text = text
        self._now: Command | None = None
        self._groups: list[_Group] = []
        self._list_first = 0
        self._operator = "\n"
        self._closed: int | None = None  # the first command of a group that has just ended
        self._target = ""
        self._named = self._doubt = self._piped = False

    def take_redirect(self, found: re.Match[str]) -> None:
        self._target = found[0]  # the next word is a file, or behind <<< a text
        if self._now is not None:
            self._now.end = found.end()

    def take_word(self, found: re.Match[str]) -> None:
        word = found[0]
        if self._target:
            if self._now is not None:
                self._now.end = found.end()
                self._now.here = word if self._target == "<<<" else self._now.here
            self._target = ""
            return
        if self._now is None:
            if word in _CLOSING:
                self._close()
                return
            if word in _OPENING or word == "{":
                self._open("function" if self._named and word == "{" else _OPENING.get(word, "braces"))
            self._named, self._closed = False, None
            if word in _PASSED_BY or word == "{":
                return
            self._now = Command(self._text.count("\n", 0, found.start()) + 1, found.start(), found.end())
        self._now.words.append(word)
        self._now.end = found.end()

    def take_operator(self, operator: str) -> None:
        if operator == "\n" and self._now is None and self._operator in _GOES_ON:
            return  # the list goes on in the next line
        if operator == "(":
            self._named = self._now is not None  # a function's name, which is no command
            self._now = None
            self._open("brackets")
            return
        self._finish(operator)
        if operator == ")":
            if self._groups and self._groups[-1].kind == "brackets":
                self._close()
            else:  # the patterns of a case are no commands
                patterns = self.commands[self._list_first :]
                self.commands[self._list_first :] = [one for one in patterns if one.words[0] in _OPENING]
            self._piped = False  # behind the patterns of a case
            return
        if operator in ("|", "|&"):
            self._mark(len(self.commands) - 1 if self._closed is None else self._closed, PIPELINE)
        elif operator == "&":
            self._mark(self._list_first, BACKGROUND)
        self._piped = operator in ("|", "|&")
        if operator not in _GOES_ON:
            self._list_first, self._doubt = len(self.commands), False
        self._operator, self._closed = operator, None

    def _finish(self, operator: str) -> None:
        command, self._now = self._now, None
        if command is None:
            return
        kinds = {group.kind for group in self._groups}
        command.text = re.sub(r"\s*\\\r?\n\s*", " ", self._text[command.start : command.end])
        command.sure = not self._doubt and not kinds & {"branch", "loop", "function"}
        command.looped = "loop" in kinds
        if self._piped or any(group.piped for group in self._groups):
            command.within = PIPELINE
        elif "brackets" in kinds:
            command.within = BRACKETS
        self.commands.append(command)
        tested = operator == "&&" and command.words[0] in _TESTS
        self._doubt = self._doubt or operator == "||" or tested

    def _mark(self, first: int, within: str) -> None:
        for command in self.commands[max(0, first) :]:
            command.within = command.within or within

    def _open(self, kind: str) -> None:
        self._groups.append(_Group(kind, len(self.commands), self._list_first, self._piped))
        self._list_first, self._piped = len(self.commands), False

    def _close(self) -> None:
        if self._groups:
            group = self._groups.pop()
            self._closed, self._list_first = group.first, group.list_first
