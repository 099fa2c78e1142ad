"""Chunks that are stretches of longer files: which rows are, how whole recordings are cut, and who takes which."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import Chunk, Cutting
from rooms.root import BadInput
from rooms.sources import WHOLE, Remarks, Shard, Sources, open_sources
from support.audio import make_wav

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms\n"
Row = tuple[str, int | str, int | str]  # source_path, start_ms, end_ms


def manifest(folder: Path, *rows: Row) -> Path:
    lines = [f"rec,c{number},{','.join(map(str, row))}\n" for number, row in enumerate(rows)]
    (folder / "m.csv").write_text(HEADER + "".join(lines))
    return folder / "m.csv"


def chunks_of(source: Path, cutting: Cutting = Cutting(), shard: Shard = WHOLE) -> list[Chunk]:  # noqa: B008
    return list(open_sources([source], root=source.parent, cutting=cutting).chunks(shard))


def cut_of(folder: Path, *rows: Row, cut: bool | None = None) -> list[bool]:
    return [chunk.is_cut for chunk in chunks_of(manifest(folder, *rows), Cutting(cut))]


# --- rows of a manifest -----------------------------------------------------------------------------------------------


def test_a_row_is_a_stretch_when_its_file_is_longer_by_more_than_a_second_and_reaches_its_end(tmp_path: Path) -> None:
    make_wav(tmp_path / "long.wav", 60, 1000, tone_hz=100)
    make_wav(tmp_path / "chunk.wav", 10, 1000, tone_hz=100)
    assert cut_of(
        tmp_path,
        ("long.wav", 0, 10_000),
        ("long.wav", 50_000, 60_000),
        ("chunk.wav", 50_000, 60_000),  # cut beforehand: the file is the chunk
        ("chunk.wav", 0, 9_000),  # longer, but only by a second
        ("chunk.wav", 0, 8_999),
        ("long.wav", 0, 60_000),
        ("long.wav", 90_000, 100_000),  # it does not reach so far: whatever it is, it is no stretch of this file
    ) == [True, True, False, False, True, False, False]  # fmt: skip


def test_no_cut_takes_every_file_as_it_is_and_reads_no_header(tmp_path: Path) -> None:
    make_wav(tmp_path / "long.wav", 60, 1000, tone_hz=100)
    (tmp_path / "odd.wav").write_bytes(b"nothing that has a length")
    rows: list[Row] = [("long.wav", 0, 10_000), ("long.wav", 10_000, 20_000), ("odd.wav", 0, 10_000)]
    source = manifest(tmp_path, *rows)
    opened: list[str] = []
    watch_opens(opened)
    assert [chunk.is_cut for chunk in chunks_of(source, Cutting(False))] == [False] * 3
    assert not [path for path in opened if path.endswith(".wav")]


def test_cut_makes_a_stretch_of_every_row_that_is_not_its_whole_file(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 10, 1000, tone_hz=100)
    rows: list[Row] = [("a.wav", 0, 10_000), ("a.wav", 0, 9_900), ("a.wav", 500, 10_000), ("a.wav", 5000, 10_900)]
    assert cut_of(tmp_path, *rows, cut=True) == [False, True, True, True]


def test_with_cut_every_row_that_ends_beyond_its_file_is_named_with_its_line(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 10, 1000, tone_hz=100)
    with pytest.raises(BadInput, match=r"m\.csv has 2 mistakes") as refusal:
        cut_of(tmp_path, ("a.wav", 0, 5000), ("a.wav", 5000, 11_001), ("a.wav", 20_000, 30_000), cut=True)
    why = refusal.value.why or ""
    assert "line 3: end_ms 11001 is after the end of a.wav at 10000 ms" in why
    assert "line 4: end_ms 30000 is after" in why
    assert "without run.cut = true" in (refusal.value.fix or "")


def test_a_row_behind_the_end_of_a_recording_that_is_cut_fails_later_and_alone(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 25, 1000, tone_hz=100)  # a recorder whose battery was empty
    rows: list[Row] = [("a.wav", n * 10_000, n * 10_000 + 10_000) for n in range(4)]
    assert cut_of(tmp_path, *rows) == [True] * 4, "the last two are no whole files either"


@pytest.mark.parametrize("content", [b"", b"RIFF", b"fLaC", b"RIFF\0\0\0\0WAVEfmt "], ids=repr)
@pytest.mark.parametrize("cut", [None, True])
def test_a_file_without_a_length_stops_nobody(tmp_path: Path, content: bytes, cut: bool | None) -> None:
    make_wav(tmp_path / "a.wav", 25, 1000, tone_hz=100)
    (tmp_path / "b.wav").write_bytes(content)
    rows: list[Row] = [("a.wav", 0, 10_000), ("b.wav", 0, 10_000), ("a.wav", 10_000, 20_000)]
    assert cut_of(tmp_path, *rows, cut=cut) == [True, cut is True, True]


def test_a_row_without_an_end_goes_to_the_end_of_its_file(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 25, 1000, tone_hz=100)
    first, rest = chunks_of(manifest(tmp_path, ("a.wav", "", ""), ("a.wav", 10_000, "")))
    assert (first.is_cut, first.end_ms) == (False, 25_000)
    assert (rest.is_cut, rest.start_ms, rest.end_ms) == (True, 10_000, 25_000)


def watch_opens(opened: list[str]) -> None:
    """Note every file that this process opens from now on."""

    def note(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            opened.append(os.fspath(args[0]) if not isinstance(args[0], str) else args[0])

    sys.addaudithook(note)


def test_a_task_reads_the_header_of_its_own_rows_only_and_of_each_recording_once(tmp_path: Path) -> None:
    for name in ("a.wav", "b.wav"):
        make_wav(tmp_path / name, 60, 1000, tone_hz=100)
    rows: list[Row] = [(name, n * 1000, n * 1000 + 10_000) for name in ("a.wav", "b.wav") for n in range(20)]
    others: list[Row] = [(f"not there {n}.wav", 0, 10_000) for n in range(40)]
    source = manifest(tmp_path, *(row for pair in zip(rows, others, strict=True) for row in pair))
    opened: list[str] = []
    watch_opens(opened)
    assert len(chunks_of(source, shard=Shard(0, 2))) == 40
    # The path of a row that is not ours lies between two of ours: two readings of 20 rows would be 40.
    assert len([path for path in opened if path.endswith(".wav")]) <= 40
    opened.clear()
    assert len(chunks_of(manifest(tmp_path, *rows))) == 40
    assert sorted(Path(path).name for path in opened if path.endswith(".wav")) == ["a.wav", "b.wav"]


# --- whole recordings -------------------------------------------------------------------------------------------------


@given(
    audio_ms=st.integers(0, 5_000_000), length_ms=st.integers(1000, 400_000), share=st.floats(0, 1), step=st.just(1000)
)
def test_the_chunks_of_a_recording_cover_it_and_share_what_was_asked(
    audio_ms: int, length_ms: int, share: float, step: int
) -> None:
    overlap_ms = int(share * (length_ms - step))
    stretches = Cutting(None, length_ms / 1000, overlap_ms / 1000).stretches(audio_ms)
    assert stretches[0][0] == 0 and stretches[-1][1] == audio_ms
    for before, after in itertools.pairwise(stretches):
        assert before[1] - after[0] == overlap_ms
        assert before[1] - before[0] == length_ms
    last_ms = stretches[-1][1] - stretches[-1][0]
    assert last_ms < length_ms + 3000, "what goes to the one before is less than three seconds"
    assert len(stretches) == 1 or last_ms >= overlap_ms + 3000


def recordings(folder: Path) -> Path:
    """Write recordings of 25, 8 and 13.0004 s, two of them with the same name, one with letters of its own."""
    make_wav(folder / "A" / "s_20230501_043000.wav", 25, 1000, tone_hz=100)
    make_wav(folder / "Tsá Tué" / "s_20230501_043000.wav", 8, 22_050, tone_hz=100)
    make_wav(folder / "Tsá Tué" / "鳥.wav", 13.0004, 5000, tone_hz=100)
    return folder


def test_chunks_of_whole_recordings_are_named_by_their_place(tmp_path: Path) -> None:
    found = chunks_of(recordings(tmp_path / "rec"), Cutting(None, 10.0, 2.0))
    assert [(one.recording_id, one.chunk_id, one.start_ms, one.end_ms, one.is_cut) for one in found] == [
        ("A/s_20230501_043000", "s_20230501_043000_0_10000", 0, 10_000, True),
        ("A/s_20230501_043000", "s_20230501_043000_8000_18000", 8000, 18_000, True),
        ("A/s_20230501_043000", "s_20230501_043000_16000_25000", 16_000, 25_000, True),
        ("Tsá Tué/s_20230501_043000", "s_20230501_043000_0_8000", 0, 8000, False),  # it is the whole file
        ("Tsá Tué/鳥", "鳥_0_10000", 0, 10_000, True),
        ("Tsá Tué/鳥", "鳥_8000_13001", 8000, 13_001, True),  # no sample lies behind its end
    ]
    assert {one.source_path for one in found[:3]} == {"A/s_20230501_043000.wav"}
    assert len({one.fingerprint for one in found[:3]}) == 1 and found[0].fingerprint.audio_bytes


def test_without_a_chunk_length_every_recording_is_one_chunk_as_it_always_was(tmp_path: Path) -> None:
    found = chunks_of(recordings(tmp_path / "rec"))
    assert [(one.chunk_id == one.recording_id, one.is_cut) for one in found] == [(True, False)] * 3


def test_recordings_without_a_length_or_without_audio_stop_nobody(tmp_path: Path) -> None:
    folder = recordings(tmp_path / "rec")
    make_wav(folder / "z zero.wav", 0)
    (folder / "z empty.wav").write_bytes(b"")
    *sound, empty, zero = chunks_of(folder, Cutting(None, 10.0))
    assert len(sound) == 6
    assert (empty.chunk_id, empty.end_ms, empty.is_cut) == ("z empty", None, False)  # the engine will say
    assert (zero.end_ms, zero.is_cut) == (0, True), "of no audio nothing can be cut: it fails, whatever the engine"


def sources_of(tmp_path: Path, cutting: Cutting) -> Sources:
    listed = tmp_path / "list.txt"
    folder = recordings(tmp_path / "rec")
    listed.write_text("".join(f"{path}\n" for path in sorted(folder.rglob("*.wav"))))
    make_wav(tmp_path / "m" / "x.wav", 30, 1000, tone_hz=100)
    rows: list[Row] = [("m/x.wav", n * 5000, n * 5000 + 5000) for n in range(5)]
    return open_sources([manifest(tmp_path, *rows), listed], root=tmp_path, cutting=cutting)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 11])
def test_a_recording_is_taken_whole_and_everybody_counts_the_same(tmp_path: Path, count: int) -> None:
    sources = sources_of(tmp_path, Cutting(None, 10.0, 2.0))
    everything = {chunk.key for chunk in sources.chunks(WHOLE)}
    shards = [[chunk.key for chunk in sources.chunks(Shard(index, count))] for index in range(count)]
    assert sum(map(len, shards)) == len(everything) == 11
    assert set().union(*shards) == everything
    cut = [{recording for recording, _ in shard if recording != "rec"} for shard in shards]
    assert sum(map(len, cut)) == 3, "no recording is in two shards"
    counted: dict[int, list[tuple[str, str]]] = {index: [] for index in range(count)}
    sources.read_identities(lambda row, part, key: counted[row % count].append(key))
    assert [counted[index] for index in range(count)] == shards


# --- what cannot be meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length_s", "overlap_s", "words"),
    [
        (10.0, 10.0, "--overlap 10 must be at least 1 s shorter than --chunk-length 10"),
        (10.0, 12.0, "--overlap 12 must be at least 1 s shorter"),
        (10.0, 9.5, "--overlap 9.5 must be at least 1 s shorter"),
        (10.0, -1.0, "--overlap -1 must not be negative"),
        (0.0, 0.0, "--chunk-length 0 must be from 1 to 86400 seconds"),
        (-5.0, 0.0, "--chunk-length -5 must be from 1 to 86400 seconds"),
        (1e9, 0.0, "--chunk-length 1e+09 must be from 1 to 86400 seconds"),
        (None, 3.0, "--overlap 3 needs --chunk-length SECONDS"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(
    tmp_path: Path, length_s: float | None, overlap_s: float, words: str
) -> None:
    with pytest.raises(BadInput) as refusal:
        open_sources([recordings(tmp_path / "rec")], root=None, cutting=Cutting(None, length_s, overlap_s))
    assert refusal.value.what.startswith(words)


def test_a_chunk_length_has_no_effect_on_a_manifest_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_wav(tmp_path / "a.wav", 5)
    caplog.set_level("INFO")
    sources = open_sources([manifest(tmp_path, ("a.wav", 0, 5000))], root=None, cutting=Cutting(None, 2.0))
    assert [(one.start_ms, one.end_ms) for one in sources.chunks(WHOLE)] == [(0, 5000)]
    assert "is a manifest, which defines where each chunk starts and ends" in caplog.text


def test_the_key_cut_is_refused_for_whole_recordings(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 5)
    for cut, flag in ((True, "run.cut = true"), (False, "run.cut = false")):
        with pytest.raises(BadInput, match=f"{flag} needs a manifest"):
            open_sources([tmp_path], root=None, cutting=Cutting(cut))


# --- recordings with a problem ----------------------------------------------------------------------------------------


def test_a_recording_that_breaks_off_is_listed_as_long_as_its_header_says_and_remarked(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 60, 1000)
    os.truncate(tmp_path / "a.wav", 44 + 30 * 2000)
    remarks = Remarks()
    sources = open_sources([tmp_path], root=None, cutting=Cutting(chunk_length_s=10))
    assert [chunk.end_ms for chunk in sources.chunks(WHOLE, remarks)] == list(range(10_000, 61_000, 10_000))
    what = "1 file is truncated; the existing audio is processed: a.wav (its header says 60 s, the file has 30 s)"
    assert remarks.lines() == [what]
    assert cut_of(tmp_path, ("a.wav", 0, 10_000), ("a.wav", 50_000, 60_000)) == [True, True]
    whole = [*open_sources([tmp_path / "a.wav"], root=None, cutting=Cutting(chunk_length_s=90)).chunks(WHOLE)]
    whole += open_sources([tmp_path / "a.wav"], root=None).chunks(WHOLE)
    assert [(chunk.end_ms, chunk.is_cut) for chunk in whole] == [(60_000, True)] * 2, "a cut of it is a sound file"
    assert cut_of(tmp_path, ("a.wav", 0, 60_000)) == [True]


@pytest.mark.parametrize("seconds", [0, 50])
def test_without_audio_or_with_an_unfinished_header_a_file_goes_through_the_cutter_in_every_source(
    tmp_path: Path, seconds: int
) -> None:
    path = make_wav(tmp_path / "a.wav", seconds, 1000, tone_hz=100)
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes(4) + content[44:])
    expected = [(0, 1000 * seconds, True)]
    for found in (chunks_of(path), chunks_of(path, Cutting(chunk_length_s=600))):
        assert [(chunk.start_ms, chunk.end_ms, chunk.is_cut) for chunk in found] == expected
    for cut in (None, True, False):
        assert cut_of(tmp_path, ("a.wav", 0, ""), cut=cut) == [True]
    assert cut_of(tmp_path, ("a.wav", 0, 50_000)) == [True]
