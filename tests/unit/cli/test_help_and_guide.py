"""Help pages as they are printed, the handbook, and every command that a message, page or script suggests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rooms.cli import BY_NAME, PAGES, app, guide, make_parser, read_topic
from rooms.root import BadInput, folder
from support.pages import Pages

ROOT = Path(__file__).parents[3]
PROGRAM: Any = typer.main.get_command(app)
PARSE = make_parser(PROGRAM)


def test_every_help_page(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for command in ("", *BY_NAME):
        app([*filter(None, [command]), "--help"], standalone_mode=False)
        said[f"{command or 'badcjobs'}.txt"] = capsys.readouterr().out
    pages(said)
    assert max(len(line) for text in said.values() for line in text.splitlines()) <= 80
    assert max(text.count("\n") for text in said.values()) <= 40
    del said["badcjobs.txt"]
    assert len(re.findall(r"(?m)^  (?:-\w, )?--?[\[a-z]", "\n".join(said.values()))) <= 130
    assert all(f"Example:\n  badcjobs {command}" in said[f"{command}.txt"] for command in BY_NAME)


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the words of each indented line that starts badcjobs, without what explains it."""
    for line in re.findall(r"^    (?:nohup |exec )?badcjobs ([a-z].*)", page, re.MULTILINE):
        if "…" not in (plain := re.split(r" {3,}| [#>|&]", line)[0]):
            yield shlex.split(plain)


def refusal_of(words: list[str]) -> str | None:
    """Return why the program refuses a command line; None: it accepts it."""
    dashes = words.index("--") if "--" in words else len(words)
    wrong = PARSE(words[:dashes]).wrong
    if not wrong and words[0] != "record":
        wrong = PARSE(["run", *words[dashes + 1 :]]).wrong
    return wrong[0] if wrong else None


def test_the_handbook_is_a_list_of_short_pages_with_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert guide(None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(PAGES)
    assert max(map(len, lines)) <= 100
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in folder("guide").glob("*.md")}
    assert (words.keys(), max(words.values()) <= 1_500, sum(words.values()) <= 12_000) == (PAGES.keys(), True, True)
    for name in PAGES:
        page = read_topic(name)
        assert re.match(r"# \w+: ", page)
        assert not re.findall(r"\{\{[a-z: ]+\}\}", page), "an open placeholder"
        assert {*re.findall(r"badcjobs guide ([a-z-]+)", page)} <= PAGES.keys()
        assert [reason for words in commands_of(page) if (reason := refusal_of(words))] == []
    with pytest.raises(BadInput) as refused:
        read_topic("sbatch")
    assert refused.value.why == "pages are " + ", ".join(PAGES)


OPTIONS = {name: {"--config", "--debug", "--help"} for name in PROGRAM.commands}
for name, known in OPTIONS.items():
    known.update(*((*one.opts, *one.secondary_opts) for one in PROGRAM.get_command(None, name).params))
OPTIONS["check"] |= OPTIONS["submit"]
# A command ends at a quotation mark, a bracket, a comment, the next command, or the end of a sentence or line.
SUGGESTED = re.compile(r"\bbadcjobs ([a-z]+)\b([^\n`\"()|;#]*?)(?=   |[.,:] |&&|[\n`\"()|;#]|$)")
OPTION = re.compile(r"(?<![\w=-])--[a-z][a-z-]*")
PLACES = ("badcjobs/**/*.py", "badcjobs/**/*.md", "templates/*", "slurm/**/*.*", "README.md")


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
