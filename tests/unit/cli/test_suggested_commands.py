"""Every ``badcjobs COMMAND --option`` and ``badcjobs guide PAGE`` in a message, page or script exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rooms.cli import PAGES, app

ROOT = Path(__file__).parents[3]
PLACES = ("badcjobs/**/*.py", "badcjobs/**/*.md", "templates/*", "slurm/**/*.*", "README.md")
PROGRAM: Any = typer.main.get_command(app)
OPTIONS = {
    name: {"--config", "--debug", "--help"}.union(
        *((*one.opts, *one.secondary_opts) for one in PROGRAM.get_command(None, name).params)
    )
    for name in PROGRAM.commands
}
OPTIONS["check"] |= OPTIONS["submit"]
# A command ends at a quotation mark, a bracket, a comment, the next command, or the end of a sentence or line.
SUGGESTED = re.compile(r"\bbadcjobs ([a-z]+)\b([^\n`\"()|;#]*?)(?=   |[.,:] |&&|[\n`\"()|;#]|$)")
OPTION = re.compile(r"(?<![\w=-])--[a-z][a-z-]*")


def find_wrong(text: str) -> Iterator[str]:
    """Yield the suggested commands with an option or a page that does not exist."""
    for found in SUGGESTED.finditer(text):
        command, (own, _, after) = found[1], found[2].partition(" -- ")
        if command in OPTIONS:
            wrong = {*OPTION.findall(own)} - OPTIONS[command]
            if command != "record":
                wrong |= {*OPTION.findall(after)} - OPTIONS["run"]
            wrong |= {*re.findall(r"^ ([a-z-]+)", own)} - PAGES.keys() if command == "guide" else set()
            if wrong:
                yield found[0]


def test_commands_in_messages_pages_and_scripts_have_only_options_and_pages_that_exist() -> None:
    files = sorted(path for place in PLACES for path in ROOT.glob(place) if path.is_file())
    assert [(file.name, wrong) for file in files for wrong in find_wrong(file.read_text("utf-8"))] == []
    assert list(find_wrong("try: badcjobs submit x --retries 2 -- --retries 2 or `badcjobs guide sbatch`")) == [
        "badcjobs submit x --retries 2 -- --retries 2 or ", "badcjobs guide sbatch"
    ]  # fmt: skip
