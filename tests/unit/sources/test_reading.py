"""What holds for every source: shards, manifests, files looked at ahead and opened once, little memory."""

import csv
import itertools
import os
import sys
import threading
import tracemalloc
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rooms.model import Cutting
from rooms.root import BadInput
from rooms.sources import WHOLE, Mistakes, Shard, look_ahead, open_sources, parse_shard, read_header, survey
from support.audio import make_wav
from support.cases import read_lines
from support.source_files import read_cases, rows, write_files
from support.waiting import wait_for

COLUMNS = ("recording_id", "chunk_id", "source_path", "start_ms", "end_ms", "notes")
NAMES = st.text(st.sampled_from("ab ,;\"'\n#é鳥"), min_size=1, max_size=6).filter(str.strip)
MISTAKES = read_lines("manifest_mistakes.txt")
WRONG = {(column, value): said for column, value, said in (line.split("|") for line in MISTAKES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    make_wav(folder / "a.wav", 2, 1000, tone_hz=100)
    return folder


@given(many=st.integers(1, 60), rows=st.integers(0, 150))
def test_every_row_is_in_exactly_one_shard_and_shards_are_equal_to_within_a_row(many, rows):
    shares = [[row for row in range(rows) if Shard(index, many).takes(row)] for index in range(many)]
    assert sorted(itertools.chain(*shares)) == list(range(rows))
    assert {len(share) for share in shares} <= {rows // many, -(-rows // many)}
    assert all(str(parse_shard(f" {index}/{many} ")) == f"{index}/{many}" for index in range(many))


def test_a_shard_that_cannot_be_is_refused_with_one_that_can():
    for text in ("8/8", "-1/8", "0/0", "2", "a/b", "1/2/3", "", "1.0/2", "٢/٨", "1/99999999999"):
        with pytest.raises(BadInput) as refused:
            parse_shard(text)
        assert refused.value.what == f"no such shard: {text!r}"
        assert (refused.value.fix or "").startswith("--shard 0/") and parse_shard((refused.value.fix or "")[8:])


@pytest.mark.parametrize("many", [1, 2, 3, 5, 13])
def test_shards_of_several_sources_are_disjoint_complete_and_the_same_whoever_counts(folder, many):
    (case,) = read_cases("three_kinds")
    write_files(case.files, folder)
    sources = open_sources([folder / name for name in case.sources], root=folder, cutting=Cutting(None, 10.0, 2.0))
    everything = list(sources.chunks(WHOLE))
    shards = [list(sources.chunks(Shard(index, many))) for index in range(many)]
    assert sorted(one.key for shard in shards for one in shard) == sorted(one.key for one in everything)
    assert len(everything) == 7 + 3 + 1 + 2 + 3
    holders = {(index, one.recording_id) for index, shard in enumerate(shards) for one in shard}
    assert sum(name != "rec" for _, name in holders) == 4, "no recording is in two shards"
    keys = []
    sources.read_identities(keys.append)
    assert keys == [one.key for one in everything]
    keys = []
    sources.read_identities(keys.append, {"x/s": 10.0, "y/s": 8.0, "y/鳥": 13.0})  # as an earlier run has measured them
    assert [key for key in keys if key[0] == "x/s"] == [("x/s", "s_0_10000")]


@settings(max_examples=60)
@given(
    ids=st.lists(st.tuples(NAMES, NAMES), min_size=1, max_size=8, unique=True),
    times=st.lists(st.tuples(st.integers(0, 1900), st.integers(1, 99)), min_size=8, max_size=8),
    order=st.permutations(COLUMNS), ends=st.sampled_from(["\n", "\r\n"]), mark=st.booleans(),
    note=st.text(st.sampled_from('x,"\n'), max_size=3),
    mistakes=st.dictionaries(st.integers(0, 7), st.sampled_from(list(WRONG)), max_size=3),
)  # fmt: skip
@example([("a", "b"), ("a", "c")], [(5, 1)] * 8, COLUMNS, "\n", False, "", {1: ("end_ms", "0")})
def test_a_manifest_is_read_as_written_or_its_mistakes_are_named(folder, ids, times, order, ends, mark, note, mistakes):
    lines = []
    for number, ((recording, chunk), (start_ms, length_ms)) in enumerate(zip(ids, times, strict=False)):
        fields = [recording, chunk, "a.wav", str(start_ms), str(start_ms + length_ms), note]
        values = dict(zip(COLUMNS, fields, strict=True)) | dict([mistakes[number]] if number in mistakes else [])
        lines.append([values[name] for name in order])
    path = folder / "any.csv"
    with path.open("w", encoding="utf-8-sig" if mark else "utf-8", newline="") as file:
        csv.writer(file, lineterminator=ends).writerows([order, *lines])
    wrong = {n: WRONG[what].format(start=times[n][0]) for n, what in sorted(mistakes.items()) if n < len(lines)}
    sources = open_sources([path], root=None, cutting=Cutting(False))
    if wrong:
        with pytest.raises(BadInput) as refused:
            list(sources.chunks(WHOLE))
        heights = [1 + sum(field.count("\n") for field in row) for row in lines]
        named = [f"line {2 + sum(heights[:n])}: {text}" for n, text in wrong.items()]
        assert (refused.value.why or "").splitlines() == named
    else:
        found = [(one.key, one.start_ms, one.end_ms) for one in sources.chunks(WHOLE)]
        assert found == [(key, start, start + length) for key, (start, length) in zip(ids, times, strict=False)]
        planned, _ = survey(sources, Mistakes(["any"]))
        assert [((one.recording_id, one.chunk_id), one.start_ms, one.end_ms) for one in planned] == found


def test_the_mistakes_of_a_large_manifest_are_named_with_their_lines(tmp_path):
    note = "\n".join(["windy, and a woodpecker"] * 4000)
    rows = [f'r,{n},a.wav,{n},{n + 9},"{note if n == 5 else "é"}"\n'.encode() for n in range(5000)]
    wrong = {
        4: (b"r,", b"\xff,", "recording_id \\xff is not UTF-8"),
        6: (b",15,", b",5,", "end_ms 5 is not after start_ms 6"),
    }
    wrong |= {
        4800: (b"a.wav", b"a\0.wav", "has a NUL byte"),
        4900: (b"a.wav", b"\xa9.wav", "a name that is not UTF-8: \\xa9.wav"),
    }
    for number, (text, instead, _) in wrong.items():
        rows[number] = rows[number].replace(text, instead)
    make_wav(tmp_path / "a.wav")
    (tmp_path / "m.csv").write_bytes(b"".join([",".join(COLUMNS).encode() + b"\n", *rows]))
    with pytest.raises(BadInput) as refused:
        list(open_sources([tmp_path / "m.csv"], root=None, cutting=Cutting(False)).chunks(WHOLE))
    named = [f"line {2 + n + (3999 if n > 5 else 0)}: {text}" for n, (_, _, text) in wrong.items()]
    assert (refused.value.why or "").splitlines() == named


def test_a_million_rows_fit_into_200_megabytes(tmp_path):
    make_wav(tmp_path / "x.wav")

    def peak_bytes(rows):
        with (tmp_path / "m.csv").open("w") as file:
            file.write(",".join(COLUMNS) + "\n")
            file.writelines(f"STATION-{n // 20:05}_20230501,{n:060},x.wav,{n},{n + 30000},\n" for n in range(rows))
        tracemalloc.start()
        chunks = sum(1 for _ in open_sources([tmp_path / "m.csv"], root=None).chunks(Shard(0, 3)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert chunks == -(-rows // 3)
        return peak

    assert (peak_bytes(9_000) - peak_bytes(1_000)) / 8_000 * 1_000_000 < 150_000_000


def test_a_task_opens_the_files_of_its_own_rows_and_each_of_them_once(tmp_path):
    opened = []

    def note(event, args):
        if event == "open" and isinstance(args[0], str | os.PathLike) and os.fspath(args[0]).endswith(".wav"):
            opened.append(Path(os.fspath(args[0])).name)

    for name in "ab":
        make_wav(tmp_path / f"{name}.wav", 60, 1000, tone_hz=100)
    ours = [f"r,{name}{n},{name}.wav,{n},{n + 9},,," for name in "ab" for n in range(20)]
    mixed = [row for one in ours for row in (one, one.replace(".wav", " that is not there.wav").replace("r,", "s,"))]
    sys.addaudithook(note)
    cases = (mixed, Shard(0, 2), None, "ab"), (ours, WHOLE, None, "ab"), (ours, WHOLE, False, "")
    for lines, shard, cut, files in cases:
        (tmp_path / "m.csv").write_text(rows(*lines))
        opened.clear()
        assert len(list(open_sources([tmp_path / "m.csv"], root=tmp_path, cutting=Cutting(cut)).chunks(shard))) == 40
        assert (sorted({*opened}) if lines is mixed else opened) == [f"{name}.wav" for name in files]


@pytest.mark.parametrize("kind", ["folder", "list", "manifest"])
def test_slow_files_are_looked_at_many_at_a_time_and_listed_in_their_order(tmp_path, kind):
    names = [f"{number:03}" for number in range(120)]
    for name in names:
        make_wav(tmp_path / "audio" / f"{name}.wav", 1, 100)
    (tmp_path / "audio" / "005.wav").write_bytes(b"RIFF")
    (tmp_path / "list").write_text("".join(f"{name}.wav\n" for name in names))
    (tmp_path / "manifest").write_text(rows(*(f"{name},{name},{name}.wav,,,,," for name in names)))
    threads = set[int]()

    def read_slowly(path):
        threads.add(threading.get_ident())
        wait_for(lambda: len(threads) >= 8, "others that look at a file at the same time")
        return read_header(path)

    sources = open_sources([tmp_path / ("audio" if kind == "folder" else kind)], root=tmp_path / "audio")
    sources = replace(sources, read_header=read_slowly)
    chunks = list(sources.chunks(WHOLE))
    assert [(one.recording_id, one.end_ms) for one in chunks] == [(n, None if n == "005" else 1000) for n in names]
    rows_read, walk = survey(sources, Mistakes([kind]))
    assert [row.end_ms for row in rows_read] == [one.end_ms for one in chunks]
    assert walk.measured == 120


def helpers():
    return sum("look-ahead" in thread.name for thread in threading.enumerate())


def endless(read):
    for read[0] in count():
        yield read[0], read[0]


@pytest.mark.parametrize("slow", [False, True])
def test_more_threads_start_only_for_slow_looks_and_reading_ahead_is_bounded(slow):
    read = [0]

    def look(number):
        if slow and number == 1500:
            wait_for(lambda: helpers() > 1, "more threads")
        return number

    looking = look_ahead(endless(read), look)
    assert [next(looking) for _ in range(3000)] == [(number, number) for number in range(3000)]
    assert 3000 <= read[0] < 3600
    assert (helpers() > 1) is slow and helpers() <= 16
    looking.close()
    wait_for(lambda: not helpers(), "an end of the threads")


def test_a_look_that_hangs_does_not_keep_anybody_who_wants_to_go():
    go_on = threading.Event()
    heard = count(1)

    def hang(number):
        if number >= 1500:
            go_on.wait(60)
        return number

    def heed():
        if helpers() > 1 and next(heard) > 5:
            raise KeyError("a signal came")

    looked = look_ahead(endless([0]), hang, heed)
    with pytest.raises(KeyError, match="a signal came"):
        for seen, _ in looked:
            assert seen < 1500
    assert not go_on.is_set()
    go_on.set()
    wait_for(lambda: not helpers(), "an end of the threads")


def test_an_error_comes_at_its_item():
    looked = look_ahead([("a", "1"), ("b", "x"), ("c", "2")], int)
    assert next(looked) == ("a", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        next(looked)
    assert list(look_ahead([(n, None) for n in range(2000)], int)) == [(n, None) for n in range(2000)]
