"""The handbook: its pages in reading order, and commands in them that the program accepts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
import typer
from rooms.cli import PAGES, app, guide, make_parser, read_topic
from rooms.root import BadInput, folder

PARSE = make_parser(typer.main.get_command(app))


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the words of each indented line that starts badcjobs, without what explains it."""
    for line in re.findall(r"^    (?:nohup |exec )?badcjobs ([a-z].*)", page, re.MULTILINE):
        plain = re.split(r" {3,}| [#>|&]", line)[0]
        if "…" not in plain:
            yield shlex.split(plain)


def refusal_of(words: list[str]) -> str | None:
    """Return why the program refuses a command line; None: it accepts it."""
    dashes = words.index("--") if "--" in words else len(words)
    wrong = PARSE(words[:dashes]).wrong
    if not wrong and words[0] != "record":
        wrong = PARSE(["run", *words[dashes + 1 :]]).wrong
    return wrong[0] if wrong else None


def test_the_list_has_every_page_in_reading_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert guide(None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(PAGES)
    assert max(map(len, lines)) <= 100


def test_the_handbook_is_these_pages_and_short() -> None:
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in folder("guide").glob("*.md")}
    assert words.keys() == PAGES.keys()
    assert max(words.values()) <= 1_500
    assert sum(words.values()) <= 12_000


def test_a_page_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(BadInput) as refused:
        read_topic("sbatch")
    assert refused.value.why == "pages are " + ", ".join(PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_title_and_no_open_placeholder(name: str) -> None:
    page = read_topic(name)
    assert re.match(r"# \w+: ", page)
    assert not re.findall(r"\{\{[a-z: ]+\}\}", page)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_pages_and_commands_that_exist(name: str) -> None:
    page = read_topic(name)
    assert {*re.findall(r"badcjobs guide ([a-z-]+)", page)} <= PAGES.keys()
    assert [reason for words in commands_of(page) if (reason := refusal_of(words))] == []
