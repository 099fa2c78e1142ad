"""Shared by all commands: results on stdout, messages on stderr, and the environment of a task."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.masking import mask
from badcjobs.paths import shell_line
from badcjobs.words import duration, plain, to_ascii

if TYPE_CHECKING:
    from badcjobs.task.startup import World

_OUR_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")
_NOT_PLAIN_ASCII = re.compile(r"[^\n\x20-\x7e]")
_POLL = "BADCJOBS_POLL_S"
_WIDTH = 100  # of text that is not for a terminal
_NARROWEST = 40
_WIDEST = 140  # longer lines are hard to read
_PARTS = 4096  # of a JSON document at a time
_CONTINUATION = "    | "  # marks lines that are not log records of their own


def safe_lines(text: str, *, painted: bool = False, tabs: bool = False) -> str:
    """Return text without control characters, except line ends; ``painted`` keeps colours, ``tabs`` keeps tabs."""
    if painted:
        texts_and_colours = _OUR_COLOURS.split(text)
        texts_and_colours[::2] = map(safe_lines, texts_and_colours[::2])
        return "".join(texts_and_colours)
    if text.isprintable():
        return text
    kept = "\n\t" if tabs else "\n"
    parts = re.split(f"([{kept}])", text.replace("\r\n", "\n"))
    return "".join(part if part in kept else plain(part) for part in parts)


def safe_json(text: str) -> str:
    r"""Return the same JSON document with every unprintable character escaped, such as \u202e."""
    return _NOT_PLAIN_ASCII.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    sign = match[0]
    if sign.isprintable() or "\ud800" <= sign <= "\udfff":  # half a surrogate pair: strict readers refuse its escape
        return sign
    pairs = sign.encode("utf-16-be").hex()
    return "".join(f"\\u{pairs[at : at + 4]}" for at in range(0, len(pairs), 4))


def safe_error(error: BadcjobsError) -> str:
    """Return the text of an error: what happened in one line, then reason and fix in one or more lines."""
    masked = BadcjobsError(plain(mask(error.what)), why=mask(error.why or ""), fix=error.fix)
    return safe_lines(str(masked), tabs=True)


class SafeFormatter(logging.Formatter):
    """Formats a log record as one line; further lines get a mark."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by marked lines, such as the output of an engine or a traceback."""
        text = mask(super().format(record).rstrip("\n"))
        return safe_lines(text, tabs=True).replace("\n", f"\n{_CONTINUATION}")


# --- output -----------------------------------------------------------------------------------------------------------

if logging.lastResort is not None:  # prints warnings of commands that do not set up a log
    logging.lastResort.setFormatter(SafeFormatter())


def say(text: str, *, painted: bool = False) -> None:
    """Print a result as text; ``painted``: it may have colours."""
    _print([_in_locale(safe_lines(text, painted=painted))])


def _in_locale(text: str) -> str:
    return to_ascii(text) if shows_only_ascii() else text


def say_next(*words: str | Path, note: str = "") -> None:
    """Print the next useful command, the last line of a result."""
    say(f"next: {shell_line(*words)}{note and f'   ({note})'}")


def this_command(*more: str, name: str | None = None, without: Sequence[str] = ()) -> list[str]:
    """Return the words of this command line, with more options (before --), another name, or without flags."""
    words = [word for word in sys.argv[1:] if word not in ("--debug", *without)]
    at = 0
    while words[at].startswith("--config"):  # before the name of the command
        at += 1 if "=" in words[at] else 2
    end = words.index("--") if "--" in words else len(words)
    return ["badcjobs", *words[:at], name or words[at], *words[at + 1 : end], *more, *words[end:]]


def print_document(document: str | Iterable[str]) -> None:
    """Print a document, or its lines, unchanged but for one line end; on a terminal, without control characters."""
    parts = [document.rstrip("\n"), "\n"] if isinstance(document, str) else document
    if sys.stdout and sys.stdout.isatty():
        parts = (safe_lines(part, tabs=True) for part in parts)
    _print(parts, end="")


def _print(parts: Iterable[str], end: str = "\n") -> OSError | None:
    """Print; a closed pipe (``| head -1``) or a full disk is not an error of the command, and is returned."""
    try:
        for part in parts:
            print(part, end="")  # stdout may be closed: then nothing is printed
        print(end=end, flush=True)
        return None
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            remark(f"warning: stdout cannot be written: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # no error at exit
        return error


def print_line(line: str) -> None:
    """Print a line of a stream; raise BrokenPipeError from the cause when that is no longer possible."""
    error = _print([safe_json(line)])
    if error is not None:
        raise BrokenPipeError from error


def print_json(document: object) -> None:
    """Print one JSON document, and nothing else; a large one in parts."""
    parts = json.JSONEncoder(indent=2, ensure_ascii=False, default=list).iterencode(document)
    _print(map(safe_json, iter(lambda: "".join(islice(parts, _PARTS)), "")))


def answer(json_wanted: bool, document: object, text: str) -> None:
    """Print a result as JSON or as text."""
    if json_wanted:
        print_json(document)
    else:
        say(text)


def shown(path: Path) -> str:
    """Return a path for messages: relative if it is below the working folder."""
    here = Path.cwd()
    if path.is_relative_to(here):
        path = path.relative_to(here)
    return plain(str(path))


def log_to_stderr(*, quiet: bool = True) -> None:
    """Send the log to stderr; ``quiet``: only warnings."""
    _log_to(_StderrHandler(), logging.WARNING if quiet else logging.INFO)
    logging.getLogger("badcjobs").setLevel(logging.INFO)
    logging.raiseExceptions = False  # with a full disk, do not print a traceback per line


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what sys.stderr is at the time: progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_file(path: Path) -> None:
    """Add the log file of a task."""
    _log_to(logging.FileHandler(path, encoding="utf-8"), logging.INFO)


def _log_to(handler: logging.Handler, level: int) -> None:
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S"))
    handler.setLevel(level)
    logging.getLogger("badcjobs").addHandler(handler)


@dataclass
class Pace:
    """Prints the progress of a long operation to stderr, every few seconds: amount, speed and remaining time."""

    what: str
    every_s: float = 3.0
    _started_s: float = 0.0  # the first call starts the clock
    _next_s: float = 0.0

    def __call__(self, done: int, of: int | None = None, rows: int | None = None, *, what: str | None = None) -> None:
        """Report the amount done, and its rows; ``what`` replaces the name of the amount."""
        now_s = time.monotonic()
        if not self._started_s:
            self._started_s = now_s
            self._next_s = now_s + self.every_s
        if now_s < self._next_s or done == of:  # the result follows
            return
        spent_s = now_s - self._started_s
        self._next_s = now_s + self.every_s
        amount = f"{done:,}" if of is None else f"{done:,} of {of:,}"
        text = f"{amount} {what or self.what}, {done / spent_s:,.0f} a second"
        if rows is not None:
            text += f" with {rows / spent_s:,.0f} rows"
        if of is not None and done:
            text += f", done in {duration(spent_s / done * (of - done))}"
        remark(text)


def remark(text: str) -> None:
    """Print a message to stderr."""
    print(_in_locale(safe_lines(f"badcjobs: {text}")), file=sys.stderr)


def terminal_width() -> int | None:
    """Return how wide text on stdout may be; None: it is no terminal."""
    if not sys.stdout.isatty():
        return None
    columns = shutil.get_terminal_size((_WIDTH, 24)).columns
    return max(_NARROWEST, min(columns, _WIDEST))


def text_width() -> int:
    """Return how wide a text of sentences may be, also without a terminal."""
    return terminal_width() or _WIDTH


def colour_wanted() -> bool:
    """Say whether stdout is a terminal with colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def shows_only_ascii() -> bool:
    """Say whether the locale allows only ASCII; Python uses UTF-8 even in the locale C."""
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG")
    if locale in ("C", "POSIX"):
        return True
    encoding = sys.stdout.encoding if sys.stdout else None  # stdout may be closed
    return not (encoding or "").lower().startswith("utf")


# --- the world: only here are the environment, the host and the time asked for ----------------------------------------


def environ() -> Mapping[str, str]:
    """Return this process's environment."""
    return dict(os.environ)


def poll_s(usual_s: float) -> float:
    """Return the seconds between two queries or updates; BADCJOBS_POLL_S replaces them, for a small cluster."""
    text = environ().get(_POLL) or str(usual_s)
    if not text.replace(".", "", 1).isdecimal() or not float(text):
        raise BadInput(f"{_POLL}={text} is not a number of seconds", fix=f"unset {_POLL}")
    return float(text)


def read_world() -> World:
    """Return the real world, and install the signal handlers."""
    from badcjobs.clock import SystemClock
    from badcjobs.task.startup import StopRequest, World

    clock = SystemClock()
    stop = StopRequest(clock.monotonic_s)
    stop.install()
    return replace(World.here(environ(), clock, stop), log_to=log_to_file, progress=Pace("chunks listed"))
