"""Every ``badcjobs COMMAND --option`` and ``badcjobs guide PAGE`` in a message, page or script exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from badcjobs.cli.program import app

ROOT = Path(__file__).parents[2]
PLACES = ("badcjobs/**/*.py", "badcjobs/**/*.md", "templates/*", "slurm/**/*", "README.md", "CHANGELOG.md")
PROGRAM: Any = typer.main.get_command(app)
ALWAYS = {"--config", "--debug", "--help"}
OPTIONS = {
    name: ALWAYS.union(*((*one.opts, *one.secondary_opts) for one in PROGRAM.get_command(None, name).params))
    for name in PROGRAM.commands
}
OPTIONS["check"] |= OPTIONS["submit"]
PAGES = {page.stem for page in (ROOT / "badcjobs" / "guide").glob("*.md")}
# To the end of the command: a quotation mark, a bracket, another command, a comment, the end of a sentence or line.
SUGGESTED = re.compile(r"\bbadcjobs (?P<command>[a-z]+)\b(?P<rest>[^\n`\"()|;#]*?)(?=   |[.,:] |&&|[\n`\"()|;#]|$)")


def unknown_words(text: str) -> Iterator[str]:
    """Yield suggested commands that have an option, or name a page, that does not exist."""
    for found in SUGGESTED.finditer(text):
        command, (own, _, after) = found["command"], found["rest"].partition(" -- ")
        if command not in OPTIONS:
            continue
        of_run = OPTIONS["run"] if command != "record" else set()
        wrong = set(re.findall(r"(?<![\w=-])--[a-z][a-z-]*", own)) - OPTIONS[command]
        wrong |= set(re.findall(r"(?<![\w=-])--[a-z][a-z-]*", after)) - of_run if of_run else set()
        page = re.match(r" ([a-z-]+)", own) if command == "guide" else None
        if wrong or (page and page[1] not in PAGES):
            yield found[0]


def test_suggested_commands_have_only_options_and_pages_that_exist() -> None:
    files = {path for place in PLACES for path in ROOT.glob(place) if path.is_file() and path.suffix != ".png"}
    texts = {path: path.read_text("utf-8", errors="replace") for path in files if "__pycache__" not in path.parts}
    assert [(path.name, words) for path, text in texts.items() for words in unknown_words(text)] == []
