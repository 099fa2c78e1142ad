"""Study area, station and date from paths: the lab's layouts, the built-in rule, and what is never guessed."""

from __future__ import annotations

import re
import sys
import unicodedata
from datetime import datetime
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.cli import read_topic
from rooms.model import Chunk, RecordingName, parse_pattern, parse_patterns
from rooms.root import BadInput, Project, RunSettings
from rooms.sources import NameReader, find_moment, name_reader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LAB = {
    "Fort Smith/ARU_data/SM/FS-01/A/Data/S4A10293_20220501_060000.wav": ("Fort Smith", "FS-01", "2022-05-01T06:00:00"),
    "Fort Smith/ARU_data/SM/FS-02/B/Data/SMU02_20190701_003000.WAV": ("Fort Smith", "FS-02", "2019-07-01T00:30:00"),
    "Thaidene Nene/SM4 2021/TN-2/TN-2_20210612_043000.flac": ("Thaidene Nene", "TN-2", "2021-06-12T04:30:00"),
    "Norman Wells/BAR/NW_13/20220601T040000_NW_13.wav": ("Norman Wells", "NW_13", "2022-06-01T04:00:00"),
    "Gamètì/G-07/G-07_20210612_043000.wav": ("Gamètì", "G-07", "2021-06-12T04:30:00"),
    "Edehzhie/E_3/E_3_20210612_235959.wav": ("Edehzhie", "E_3", "2021-06-12T23:59:59"),
    "Sambaa K'e 2018/b/2/SM3/SK-7_0+1_20180612$053000.wav": ("Sambaa K'e 2018", "SK-7", "2018-06-12T05:30:00"),
    "Sambaa K'e 2022/SK-7_0+1_20220612_053000.wav": ("Sambaa K'e 2022", "SK-7", "2022-06-12T05:30:00"),
}


def guide_patterns() -> list[str]:
    """Return the patterns of the guide's own example, as a scientist would copy them."""
    block = re.search(r"^    \[recordings\]\n.*?^    \]$", read_topic("audio"), re.DOTALL | re.MULTILINE)
    assert block is not None
    found: list[str] = tomllib.loads(dedent(block[0]))["recordings"]["patterns"]
    return found


def read(path: str, *patterns: str, roots: tuple[str, ...] = (), recording_id: str = "") -> RecordingName:
    parsed, wrong = parse_patterns(patterns)
    assert wrong == []
    below = path if path.startswith("/") else f"/data/{path}"
    return NameReader(parsed, roots).read(recording_id or path.rpartition(".")[0], path, below)


@pytest.mark.parametrize("path", list(LAB))
def test_the_patterns_of_the_guide_read_the_layouts_of_the_lab_in_wav_and_flac(path: str) -> None:
    for ending in (".wav", ".WAV", ".flac"):
        name = read(path.rpartition(".")[0] + ending, *guide_patterns())
        assert (name.study_area, name.location, name.recorded_at) == LAB[path]
        assert name.pattern in guide_patterns()


@pytest.mark.parametrize("path", list(LAB))
def test_without_patterns_study_area_and_date_are_right_everywhere(path: str) -> None:
    name = read(path)
    area, _, recorded_at = LAB[path]
    known = area if path.count("/") > 1 else None  # one folder alone may as well be the station
    assert (name.study_area, name.location, name.recorded_at) == (known, path.split("/")[-2], recorded_at)
    assert name.pattern is None


# --- dates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["20220501_060000", "20220501$060000", "x-20220501T060000Z", "20220501060000", "A_20220501_0+1_060000",
     "S4A10293_20220501_060000_000030", "20220501_060000_20220501_060000"],
)  # fmt: skip
def test_a_moment_is_found_wherever_it_stands(name: str) -> None:
    assert find_moment(name) == "2022-05-01T06:00:00"


@pytest.mark.parametrize(
    "name",
    ["20221399_060000", "20220230_060000", "20220501_246000", "20220501", "060000", "test", "", "120220501_060000",
     "20220501_0600", "SMA001234_20220501", "001234_20220501", "20220501_060000_20220501_070000", "30220501_060000",
     "20220501_x_060000_070000"],
)  # fmt: skip
def test_what_is_no_moment_or_not_certain_is_not_guessed(name: str) -> None:
    assert find_moment(name) is None


@given(st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2089, 1, 1)))
def test_every_moment_comes_back(at: datetime) -> None:
    at = at.replace(microsecond=0)
    assert find_moment(f"S4A10293_{at:%Y%m%d_%H%M%S}.wav") == at.isoformat()


def test_the_name_of_the_recording_tells_where_its_chunks_do_not() -> None:
    assert read("chunks/c001.wav", recording_id="G-07_20210612_043000").recorded_at == "2021-06-12T04:30:00"


def test_an_impossible_date_under_a_pattern_is_none_either() -> None:
    name = read("Gameti/G-07/G_20221399_060000_20220501_060000.wav", "{study_area}/{location}/G_{date}_{time}_*")
    assert (name.study_area, name.recorded_at) == ("Gameti", None)


def test_a_pattern_may_read_a_date_alone() -> None:
    assert read("a/b_20220501.wav", "*/b_{date}.wav").recorded_at == "2022-05-01"


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_letters_that_mean_something_elsewhere_are_themselves() -> None:
    pattern = "{study_area}/(a+b) [1].$/{location}^{date}|{time}.wav"
    name = read("X/(a+b) [1].$/S 1^20220501|060000.wav", pattern)
    assert name == RecordingName("X", "S 1", "2022-05-01T06:00:00", pattern)
    assert read("X/(aab) 1.$/S 1^20220501|060000.wav", pattern).pattern is None


def test_a_pattern_is_for_the_whole_path_from_the_root_on() -> None:
    assert read("A/B/x.wav", "{study_area}/{location}/*.wav").pattern is not None
    assert read("up/A/B/x.wav", "{study_area}/{location}/*.wav").pattern is None
    assert read("A/B/x.flac", "{study_area}/{location}/*.wav").pattern is None


def test_a_pattern_may_begin_above_the_source() -> None:
    """The folder of one study area was given as SOURCE."""
    for pattern in ("**/{study_area}/{location}/*", "/data/{study_area}/{location}/*"):
        name = NameReader(parse_patterns([pattern])[0]).read("G-07/x", "G-07/x.wav", "/data/Gameti/G-07/x.wav")
        assert (name.study_area, name.location) == ("Gameti", "G-07")


def test_accents_are_the_same_however_a_disk_writes_them() -> None:
    apart = unicodedata.normalize("NFD", "Gamètì/G/x.wav")
    assert read(apart).study_area == "Gamètì"
    assert read(apart, "Gamètì/{location}/*").location == "G"


def test_absolute_paths_count_from_the_root_or_from_where_lists_name_them() -> None:
    assert read("/data/lab/Gameti/G-07/x.wav", roots=("/data/lab",)).study_area == "Gameti"
    assert read("/data/lab/Gameti/G-07/x.wav", recording_id="Gameti/G-07/x").study_area == "Gameti"
    assert read("/data/lab/Gameti/G-07/x.wav", recording_id="data/lab/Gameti/G-07/x").study_area is None
    assert read("/data/x.wav", recording_id="rec1") == RecordingName()


def test_a_run_takes_its_root_or_the_folder_beside_its_list(tmp_path: Path) -> None:
    chunk = Chunk("x", "x", f"{tmp_path}/Gameti/G-07/x.wav", f"{tmp_path}/Gameti/G-07/x.wav")
    given_list = Project().make(RunSettings, {"source": ["list.txt"]}, "run")
    assert name_reader(given_list, tmp_path).of(chunk).study_area == "Gameti"
    rooted = Project().make(RunSettings, {"source": ["list.txt"], "root": "Gameti"}, "run")
    found = name_reader(rooted, tmp_path).of(chunk)
    assert (found.study_area, found.location) == (None, "G-07")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("{study_area}/", "ends with /"),
        ("{station}/*", "has {station}; the known fields are {study_area}, {location}, {date}, {time}"),
        ("{study_area/*", "an unmatched { or }"),
        ("{location}/{location}/*", "has {location} twice"),
        ("a/*.wav", "has no field"),
        ("a**/{date}.wav", "has ** that is not a complete folder name"),
        ("a//{date}.wav", "has // in it"),
        ("{time}.wav", "has {time} without {date}"),
    ],
)
def test_a_pattern_that_cannot_be_used_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_pattern(text)


def test_all_mistakes_of_a_config_are_named_at_once(tmp_path: Path) -> None:
    config = tmp_path / "lab.toml"
    config.write_text('[recordings]\npatterns = ["{x}/*", "a"]\npattern = 1\n[run]\nsource = ["a"]\nretries = "x"\n')
    with pytest.raises(BadInput) as refused:
        Project.read([str(config)], tmp_path).make(RunSettings, {}, "run")
    for word in (
        "pattern: unknown key; did you mean recordings.patterns?",
        "'{x}/*' has {x}",
        "'a' has no field",
        "retries",
    ):
        assert word in (refused.value.why or "")


@pytest.mark.parametrize("text", ["recordings = 3", '[recordings]\npatterns = "a"', "[recordings]\npatterns = [1]"])
def test_a_table_of_the_wrong_kind_is_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "lab.toml"
    config.write_text(text)
    with pytest.raises(BadInput, match=r"recordings must be a table|patterns = .* must be a list of strings"):
        Project.read([str(config)], tmp_path).make(RunSettings, {"source": ["a"]}, "run")


def test_the_patterns_are_kept_with_the_results(tmp_path: Path) -> None:
    config = tmp_path / "lab.toml"
    config.write_text('[recordings]\npatterns = ["{study_area}/*"]\n')
    kept = Project.read([str(config)], tmp_path).make(RunSettings, {"source": ["a"]}, "run").to_json(tmp_path)
    assert '"recordings": {"patterns": ["{study_area}/*"]}' in kept
