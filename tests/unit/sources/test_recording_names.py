"""Study area, station and date from paths: the lab's layouts, the built-in rule, and what is never guessed."""

from __future__ import annotations

import re
import sys
from datetime import datetime
from pathlib import Path
from textwrap import dedent
from unicodedata import normalize

from hypothesis import given
from hypothesis import strategies as st
from rooms.cli import read_topic
from rooms.model import Chunk, NameGaps, parse_patterns
from rooms.root import BadInput, Project, RunSettings
from rooms.sources import NameReader, find_moment, gap_lines, name_reader
from support.brief import line
from support.pages import Pages

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = (Path(__file__).parents[2] / "data" / "recording_names.txt").read_text().split("\n=== ")[1:]
WRONG = ["", "{study_area}/", "{study_area/*", "a/*.wav", "{station}/*", "{location}/{location}/*", "a**/{date}.wav",
         "a//{date}.wav", "{time}.wav"]  # fmt: skip


def read(text: str, patterns: list[str]) -> str:
    """Return what is read of a path, as it stands on a page."""
    path, *options = re.split(r" (?=id=|root=)", text)
    values = [option.partition("=")[::2] for option in options]
    recording_id = dict(values).get("id", path.rpartition(".")[0])
    parsed, wrong = parse_patterns(patterns)
    assert wrong == []
    reader = NameReader(parsed, tuple(value for name, value in values if name == "root"))
    return line(reader.read(recording_id, path, str(Path("/data", path.removeprefix("../")))))


def test_places_and_times_are_read_by_the_patterns_of_the_guide_and_nothing_is_guessed(pages: Pages) -> None:
    block = re.search(r"^    \[recordings\]\n.*?^    \]$", read_topic("audio"), re.DOTALL | re.MULTILINE)
    assert block is not None
    guide = tomllib.loads(dedent(block[0]))["recordings"]["patterns"]  # as a scientist would copy them
    said = []
    for heading, *lines in (case.splitlines() for case in CASES):
        said.append(f"=== {heading}")
        patterns = {"guide": guide, "no pattern": []}.get(heading, [heading])
        for one in lines:
            found = find_moment(one) if heading == "moments" else read(one, patterns)
            assert heading == "moments" or read(normalize("NFD", one), patterns) == found, "however ì is written"
            said.append(f"{one} → {found}")
            if heading == "guide":
                said.append(f"    built in → {read(one, [])}")
    pages({"names.txt": "\n".join(said)})


@given(st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2089, 1, 1)))
def test_every_moment_comes_back(at: datetime) -> None:
    at = at.replace(microsecond=0)
    assert find_moment(f"S4A10293_{at:%Y%m%d_%H%M%S}.wav") == at.isoformat()


def test_absolute_paths_count_from_the_root_or_from_where_the_source_stands(tmp_path: Path) -> None:
    chunk = Chunk("x", "x", f"{tmp_path}/Gameti/G-07/x.wav", f"{tmp_path}/Gameti/G-07/x.wav")
    for options, study_area in (({}, "Gameti"), ({"root": "Gameti"}, None)):
        made = Project().make(RunSettings, {"source": ["list.txt"], **options}, "run")
        found = name_reader(made, tmp_path).of(chunk)
        assert (found.study_area, found.location) == (study_area, "G-07")


def test_gaps_are_counted_with_an_example_and_all_mistakes_of_patterns_are_named(tmp_path: Path, pages: Pages) -> None:
    many, one = NameGaps(9, 1, "a", 3000, "c", 2, "b"), NameGaps(1, 1, "a", 0, None, 0, None)
    said = [*gap_lines(many, ["{date}"], nameless="x.csv"), "--", *gap_lines(many, []), "--"]
    said += gap_lines(one, ["x"], nameless="y")
    (tmp_path / "all.toml").write_text(f"[recordings]\npatterns = {WRONG!r}\npattern = 1\n[run]\nretries = 'x'\n")
    (tmp_path / "1.toml").write_text("recordings = 3")
    (tmp_path / "2.toml").write_text('[recordings]\npatterns = "a"')
    (tmp_path / "3.toml").write_text("[recordings]\npatterns = [1]")
    (tmp_path / "good.toml").write_text('[recordings]\npatterns = ["{study_area}/*"]\n')
    for name in ("all", "1", "2", "3", "good"):
        try:
            made = Project.read([f"{tmp_path}/{name}.toml"], tmp_path).make(RunSettings, {"source": ["a"]}, "run")
            assert '"recordings": {"patterns": ["{study_area}/*"]}' in made.to_json(tmp_path), "kept with the results"
        except BadInput as error:
            said.append(f"## {name}\n{error.what}\n{error.why}\ntry: {error.fix}")
    pages({"gaps.txt": "\n".join(said).replace(str(tmp_path), "HERE")})
