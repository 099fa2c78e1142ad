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
from rooms.model import Chunk, NameGaps, RecordingName, parse_patterns
from rooms.root import BadInput, Project, RunSettings
from rooms.sources import NameReader, find_moment, gap_lines, name_reader

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
SIX = "2022-05-01T06:00:00"
MOMENTS = {
    **dict.fromkeys(
        ["20220501_060000", "20220501$060000", "x-20220501T060000Z", "20220501060000", "A_20220501_0+1_060000",
         "S4A10293_20220501_060000_000030", "20220501_060000_20220501_060000"], SIX),
    **dict.fromkeys(
        ["20221399_060000", "20220230_060000", "20220501_246000", "20220501", "060000", "test", "", "120220501_060000",
         "20220501_0600", "SMA001234_20220501", "001234_20220501", "20220501_060000_20220501_070000", "30220501_060000",
         "20220501_x_060000_070000"], None),
}  # fmt: skip
# pattern → why it cannot be used
WRONG = {
    "": "is empty", "{study_area}/": "ends with /", "{study_area/*": "an unmatched { or }", "a/*.wav": "has no field",
    "{station}/*": "has {station}; the known fields are {study_area}, {location}, {date}, {time}",
    "{location}/{location}/*": "has {location} twice", "a**/{date}.wav": "has ** that is not a complete folder name",
    "a//{date}.wav": "has // in it", "{time}.wav": "has {time} without {date}",
}  # fmt: skip


def read(path: str, *patterns: str, roots: tuple[str, ...] = (), recording_id: str = "") -> RecordingName:
    parsed, wrong = parse_patterns(patterns)
    assert wrong == []
    below = path if path.startswith("/") else f"/data/{path}"
    return NameReader(parsed, roots).read(recording_id or path.rpartition(".")[0], path, below)


def test_the_patterns_of_the_guide_read_the_layouts_of_the_lab_and_without_them_nothing_is_wrong() -> None:
    block = re.search(r"^    \[recordings\]\n.*?^    \]$", read_topic("audio"), re.DOTALL | re.MULTILINE)
    assert block is not None
    patterns = tomllib.loads(dedent(block[0]))["recordings"]["patterns"]  # as a scientist would copy them
    for path, expected in LAB.items():
        for ending in (".wav", ".WAV", ".flac"):
            name = read(path.rpartition(".")[0] + ending, *patterns)
            assert (name.study_area, name.location, name.recorded_at) == expected
            assert name.pattern in patterns
        area = expected[0] if path.count("/") > 1 else None  # one folder alone may as well be the station
        assert read(path) == RecordingName(area, path.split("/")[-2], expected[2])


def test_a_moment_is_found_wherever_it_stands_and_what_is_not_certain_is_not_guessed() -> None:
    assert {name: find_moment(name) for name in MOMENTS} == MOMENTS
    assert read("chunks/c001.wav", recording_id="G-07_20210612_043000").recorded_at == "2021-06-12T04:30:00"


@given(st.datetimes(min_value=datetime(1990, 1, 1), max_value=datetime(2089, 1, 1)))
def test_every_moment_comes_back(at: datetime) -> None:
    at = at.replace(microsecond=0)
    assert find_moment(f"S4A10293_{at:%Y%m%d_%H%M%S}.wav") == at.isoformat()


def test_a_pattern_is_for_the_whole_path_and_its_letters_are_themselves() -> None:
    odd, plain = "{study_area}/(a+b) [1].$/{location}^{date}|{time}.wav", "{study_area}/{location}/*.wav"
    apart = unicodedata.normalize("NFD", "Gamètì/G/x.wav")
    cases = {
        ("X/(a+b) [1].$/S 1^20220501|060000.wav", odd): RecordingName("X", "S 1", SIX, odd),
        ("X/(aab) 1.$/S 1^20220501|060000.wav", odd): RecordingName("X", "(aab) 1.$", SIX),
        ("A/B/x.wav", plain): RecordingName("A", "B", None, plain),
        ("up/A/B/x.wav", plain): RecordingName("up", "B"),
        ("A/B/x.flac", plain): RecordingName("A", "B"),
        ("a/b_20220501.wav", "*/b_{date}.wav"): RecordingName(None, "a", "2022-05-01", "*/b_{date}.wav"),
        ("A/G_20221399_060000_20220501_060000.wav", "{study_area}/G_{date}_{time}_*"): RecordingName(
            "A", "A", None, "{study_area}/G_{date}_{time}_*"),  # that there is no such day
        (apart, "Gamètì/{location}/*"): RecordingName("Gamètì", "G", None, "Gamètì/{location}/*"),
        ("G-07/x.wav", "**/{study_area}/{location}/*"): RecordingName("data", "G-07", None,
            "**/{study_area}/{location}/*"),
        ("G-07/x.wav", "/data/{location}/*"): RecordingName(None, "G-07", None, "/data/{location}/*"),
    }  # fmt: skip
    assert {case: read(*case) for case in cases} == cases
    assert read(apart).study_area == "Gamètì"


def test_absolute_paths_count_from_the_root_or_from_where_lists_name_them(tmp_path: Path) -> None:
    long = "/data/lab/Gameti/G-07/x.wav"
    assert read(long, roots=("/no", "/data/lab")).study_area == "Gameti"
    assert read(long, recording_id="Gameti/G-07/x").study_area == "Gameti"
    assert read(long, recording_id="Gameti/G-07/x.wav").study_area == "Gameti"
    assert read(long, recording_id="data/lab/Gameti/G-07/x").study_area is None
    assert read("/data/x.wav", recording_id="rec1") == RecordingName()
    chunk = Chunk("x", "x", f"{tmp_path}/Gameti/G-07/x.wav", f"{tmp_path}/Gameti/G-07/x.wav")
    for options, study_area in (({}, "Gameti"), ({"root": "Gameti"}, None)):
        made = Project().make(RunSettings, {"source": ["list.txt"], **options}, "run")
        found = name_reader(made, tmp_path).of(chunk)
        assert (found.study_area, found.location) == (study_area, "G-07")


def test_what_names_lack_is_counted_with_an_example() -> None:
    gaps = NameGaps(recordings=9, undated=1, undated_example="a", no_pattern=2, no_pattern_example="b",
                    no_study_area=3000, no_study_area_example="c")  # fmt: skip
    dated, matched, placed = gap_lines(gaps, ["{date}"], nameless="x.csv")
    assert dated == "1 of 9 recordings has no date in the name, e.g. a (badcjobs guide audio)"
    assert matched.startswith("2 of 9 recordings have no matching pattern in [recordings], e.g. b; the built-in rule")
    assert placed.endswith("have no study area in the path, e.g. c (badcjobs guide audio); the detections are in x.csv")
    assert list(gap_lines(gaps, [])) == [dated]
    one = NameGaps(1, 1, "a", 0, None, 0, None)
    assert next(gap_lines(one, ["x"], nameless="y")).startswith("1 of 1 recording has no date")


def test_all_mistakes_of_patterns_are_named_at_once_and_patterns_are_kept_with_the_results(tmp_path: Path) -> None:
    config = tmp_path / "lab.toml"

    def settings() -> RunSettings:
        return Project.read([str(config)], tmp_path).make(RunSettings, {"source": ["a"]}, "run")

    config.write_text(f"[recordings]\npatterns = {list(WRONG)!r}\npattern = 1\n[run]\nretries = 'x'\n")
    with pytest.raises(BadInput) as refused:
        settings()
    why = refused.value.why or ""
    for word in (*WRONG.values(), "pattern: unknown key; did you mean recordings.patterns?", "retries"):
        assert word in why
    for text in ("recordings = 3", '[recordings]\npatterns = "a"', "[recordings]\npatterns = [1]"):
        config.write_text(text)
        with pytest.raises(BadInput, match=r"recordings must be a table|patterns = .* must be a list of strings"):
            settings()
    config.write_text('[recordings]\npatterns = ["{study_area}/*"]\n')
    assert '"recordings": {"patterns": ["{study_area}/*"]}' in settings().to_json(tmp_path)
