"""What sbatch would refuse in a job script, or not see: each with the line as it should be. Pure.

What an option means is ``script_request.py``'s business: its mistakes come from there in words and get their line here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from badcjobs.own_line import nearest
from badcjobs.preflight.facts import Mistake
from badcjobs.scheduler.local_options import FLAGS, OPTIONAL, VALUES
from badcjobs.scheduler.template_values import example_of

_OPTION = re.compile(r"(?<![\w-])(?P<name>--?[A-Za-z][\w-]*)(?:=(?P<value>\S*))?")
_NEAR = re.compile(r"(?!#SBATCH)[ \t]*#[ \t]*SBATCH[ \t]+(?=-)|#sbatch[ \t]+(?=-)")


def file_mistakes(text: str, name: str) -> Iterator[Mistake]:
    """Yield what is wrong with the file as a whole."""
    file = shlex.quote(name)
    if not text.startswith("#!"):
        said = ": its first line is not #! and an interpreter, so sbatch refuses it"
        yield Mistake(said, f"sed -i '1i #!/bin/bash' {file}")
    if "\r\n" in text:
        yield Mistake(": its lines end as on Windows, so sbatch refuses it", rf"sed -i 's/\r$//' {file}")


def option_mistake(said: str, text: str, name: str) -> Mistake:
    """Return what is wrong with an option, said in words, with its line as it should be."""
    found = _OPTION.search(said)
    option, value = (found["name"], found["value"]) if found else ("", None)
    word = option if value is None else f"{option}={value}"
    number, line = next(((n, one) for n, one in _options(text) if option and word.rstrip(":;,") in one), (None, None))
    where = "" if number is None else f" line {number}"
    if said.startswith("sbatch knows no option") and line is not None and number is not None:
        return Mistake(f"{where}: {said}", _known_option(line, option, word, f"sed -i {number}d {shlex.quote(name)}"))
    if "needs --ntasks" in said and line is not None:
        return Mistake(f"{where}: {said}", f"{line.rstrip()} --ntasks=1")
    example = example_of(option.removeprefix("--"))
    right = f"{option}={example}"
    if example is None:
        fix = f"sbatch --test-only {shlex.quote(name)}   (what does it say?)"
    else:
        fix = f"#SBATCH {right}" if line is None else line.rstrip().replace(word.rstrip(":;,"), right)
    return Mistake(f"{where}: {said}", fix)


def unread_lines(text: str) -> Iterator[Mistake]:
    """Yield the lines whose quotation marks are not closed."""
    for number, line in _options(text):
        if _is_closed(line):
            continue
        closed = next((line.rstrip() + mark for mark in "\"'" if _is_closed(line.rstrip() + mark)), line)
        yield Mistake(f" line {number}: a quotation mark in it is not closed", closed)


def late_options(text: str, name: str) -> Iterator[Mistake]:
    """Yield the #SBATCH lines behind the first command, with what moves them; here-documents are made empty before."""
    first = _first_command(text)
    late = [(n, line) for n, line in enumerate(text.splitlines(), 1) if n > first and line.startswith("#SBATCH")]
    if late:
        numbers = ", ".join(str(number) for number, _ in late)
        gone = ";".join(f"{number}d" for number, _ in late)
        moved = " ".join(f"-e {shlex.quote(f'1a {line.rstrip()}')}" for _, line in late)
        said = f" line {numbers}: #SBATCH behind the first command is a comment to sbatch"
        yield Mistake(said, f"sed -i -e '{gone}' {moved} {shlex.quote(name)}   (moves it above)")


def near_options(text: str) -> Iterator[Mistake]:
    """Yield comments that somebody may take for options; ``##SBATCH`` is the usual way to put one aside."""
    for number, line in enumerate(text.splitlines()[: _first_command(text)], 1):
        if found := _NEAR.match(line):
            said = f" line {number}: to sbatch this is a comment, for only #SBATCH at the beginning of a line counts"
            yield Mistake(said, f"#SBATCH {line[found.end() :].rstrip()}   (or ##SBATCH, if it is to be one)")


def _known_option(line: str, option: str, word: str, remove: str) -> str:
    """Return the line with the option that was meant, or without it."""
    known = nearest(option.removeprefix("--"), VALUES | FLAGS | OPTIONAL)
    if known is not None:
        return line.rstrip().replace(option, f"--{known}", 1)
    rest = " ".join(line.replace(word, "", 1).split())
    return remove if rest == "#SBATCH" else rest


def _options(text: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that sbatch reads."""
    lines = text.splitlines()[: _first_command(text)]
    return ((number, line) for number, line in enumerate(lines, 1) if line.startswith("#SBATCH"))


def _first_command(text: str) -> int:
    """Return how many lines stand before the first that sbatch takes for a command."""
    lines = text.splitlines()
    return next((n for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))


def _is_closed(line: str) -> bool:
    try:
        shlex.split(line.removeprefix("#SBATCH"), comments=True)
    except ValueError:
        return False
    return True
