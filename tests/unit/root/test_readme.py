"""The README: its length, pictures, links, commands and its picture of the rooms."""

from __future__ import annotations

import re
from pathlib import Path

from test_architecture import HOUSE

import badcjobs

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURES = ROOT / "badcjobs" / "guide" / "pictures"


def test_it_has_at_most_900_words_and_its_pictures_are_light_and_dark_small_and_used() -> None:
    assert len(TEXT.split()) <= 900
    used = re.findall(r"badcjobs/guide/pictures/([\w-]+\.png)", TEXT)
    expected = {f"{name}-{shade}.png" for name in ("timeline", "live", "terminal") for shade in ("light", "dark")}
    assert set(used) == expected == {path.name for path in PICTURES.iterdir()}
    assert max(path.stat().st_size for path in PICTURES.iterdir()) < 300_000


def test_every_file_that_a_page_names_exists_and_this_version_is_named() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!http)([^)]+)\)", text)
        files = re.findall(r"\b((?:tests|badcjobs)/[\w./-]+)", text)
        assert links and files and not [name for name in links + files if not (ROOT / name).exists()]
    for page, words in {"CITATION.cff": "\nversion: {}\n", "CHANGELOG.md": "\n## {}"}.items():
        assert words.format(badcjobs.__version__) in (ROOT / page).read_text(encoding="utf-8")


def test_the_rooms_are_drawn_in_the_order_that_the_imports_keep() -> None:
    picture = TEXT[TEXT.index("    cli/") :]
    drawn = [tuple(re.findall(r"^(\w+)/|  (\w+)/", line.strip())) for line in picture.splitlines() if "/  " in line]
    rooms = [tuple(first or second for first, second in line) for line in drawn]
    assert rooms == [line for line in HOUSE if line[0] not in ("run_toml", "seams", "model")]
