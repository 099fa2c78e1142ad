"""WAV files as recorders leave them: every frame is found, and pieces put together are the whole."""

from __future__ import annotations

import io
import struct
import tracemalloc
import wave
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.sources import NotWav, WavHeader, copy_frames, make_head, read_wav_header
from support.audio import make_wav

UNTOLD = 0xFFFFFFFF
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE


def format_chunk(kind: int = PCM, *, channels: int = 1, rate: int = 8000, bits: int = 16) -> bytes:
    frame = channels * bits // 8
    plain = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)
    if kind == EXTENSIBLE:
        plain += struct.pack("<HHIH14s", 22, bits, 0, PCM, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71")
    return plain


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    return struct.pack("<4sI", name, len(content) if size is None else size) + content + b"\0" * (len(content) & 1)


def riff(*chunks: bytes, magic: bytes = b"RIFF", size: int | None = None) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return struct.pack("<4sI", magic, len(body) if size is None else size) + body


def header_of(content: bytes) -> WavHeader:
    return read_wav_header(io.BytesIO(content))


def frames_of(content: bytes) -> bytes:
    header = header_of(content)
    return content[header.data_start : header.data_start + header.frames * header.frame_bytes]


def cut(content: bytes, first: int, last: int, target: Path) -> bytes:
    copy_frames(io.BytesIO(content), header_of(content), first, last, target)
    return target.read_bytes()


AUDIO = bytes(range(200))


@pytest.mark.parametrize("kind", [PCM, FLOAT, EXTENSIBLE, 6, 7])
@pytest.mark.parametrize(("bits", "channels"), [(8, 1), (16, 1), (16, 2), (24, 1), (24, 2), (32, 1), (64, 1)])
def test_frames_of_every_size_are_counted(kind: int, bits: int, channels: int) -> None:
    fmt = format_chunk(kind, bits=bits, channels=channels)
    header = header_of(riff(chunk(b"fmt ", fmt), chunk(b"data", AUDIO)))
    assert header.frame_bytes == bits * channels // 8
    assert header.frames == 200 // header.frame_bytes
    assert header.length_s == header.frames / 8000
    assert header.format_chunk == fmt


def test_chunks_of_odd_length_on_the_way_are_stepped_over() -> None:
    content = riff(chunk(b"LIST", b"odd"), chunk(b"fmt ", format_chunk()), chunk(b"junk", b""), chunk(b"data", AUDIO))
    assert frames_of(content) == AUDIO


def test_what_comes_after_the_data_is_no_audio() -> None:
    content = riff(
        chunk(b"fmt ", format_chunk()), chunk(b"data", AUDIO), chunk(b"LIST", b"recorded by a box in a tree")
    )
    assert frames_of(content) == AUDIO


@pytest.mark.parametrize("said", [0, UNTOLD, 201, 5000], ids=["0", "not told", "one more", "far more"])
@pytest.mark.parametrize("riff_said", [0, UNTOLD, 36, 5036])
def test_after_a_power_cut_all_that_was_written_is_there(said: int, riff_said: int) -> None:
    content = riff(chunk(b"fmt ", format_chunk()), chunk(b"data", AUDIO, size=said), size=riff_said)
    assert frames_of(content) == AUDIO


def test_a_half_written_last_frame_is_left_out() -> None:
    content = riff(chunk(b"fmt ", format_chunk(channels=2)), chunk(b"data", AUDIO, size=0), size=0)[:-3]
    assert frames_of(content) == AUDIO[:196]


def test_a_whole_file_without_audio_has_none_although_something_follows() -> None:
    content = riff(chunk(b"fmt ", format_chunk()), chunk(b"data", b""), chunk(b"LIST", b"nothing was heard today"))
    assert header_of(content).frames == 0


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
@pytest.mark.parametrize("told", [200, 0], ids=["told", "not told"])
def test_a_long_file_says_its_size_elsewhere(magic: bytes, told: int) -> None:
    sizes = chunk(b"ds64", struct.pack("<QQQI", 0, told, 0, 0))
    data = chunk(b"data", AUDIO, size=UNTOLD)
    content = riff(sizes, chunk(b"fmt ", format_chunk()), data, magic=magic, size=UNTOLD)
    assert frames_of(content) == AUDIO


NO_WAV = {
    "the file is empty": b"",
    "it does not begin like a WAV file": b"fLaC" + bytes(100),
    "the file ends within its header": riff(chunk(b"fmt ", format_chunk()))[:30],
    "it has no format before its data": riff(chunk(b"data", AUDIO)),
    "it is compressed (format 2)": riff(chunk(b"fmt ", format_chunk(2)), chunk(b"data", AUDIO)),
    "its header says: channels 1, rate 0 Hz": riff(chunk(b"fmt ", format_chunk(rate=0)), chunk(b"data", AUDIO)),
    "it has no data in its first 1000 chunks": riff(*[chunk(b"junk", b"")] * 2000),
}


@pytest.mark.parametrize("why", NO_WAV)
def test_a_file_that_is_no_wav_is_refused_with_the_reason(why: str) -> None:
    with pytest.raises(NotWav) as refused:
        header_of(NO_WAV[why])
    assert str(refused.value).startswith(why)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_rubbish_is_refused_and_nothing_worse(rubbish: bytes) -> None:
    for content in (rubbish, b"RIFF" + rubbish, riff(rubbish), riff(chunk(b"fmt ", format_chunk()), rubbish)):
        try:
            header = header_of(content)
        except NotWav:
            continue
        assert 0 <= header.frames * header.frame_bytes <= len(content)


@settings(deadline=None, max_examples=60)
@given(
    audio=st.binary(max_size=4000),
    form=st.sampled_from([(8, 1), (16, 1), (24, 1), (24, 2), (32, 2), (64, 1)]),
    kind=st.sampled_from([PCM, FLOAT, EXTENSIBLE]),
    places=st.lists(st.floats(0, 1), max_size=4),
    junk=st.binary(max_size=5),
    broken=st.booleans(),
)
def test_the_pieces_of_any_file_put_together_are_its_frames(
    audio: bytes, form: tuple[int, int], kind: int, places: list[float], junk: bytes, broken: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    bits, channels = form
    fmt = format_chunk(kind, bits=bits, channels=channels)
    data = chunk(b"data", audio, size=0 if broken else None)
    content = riff(chunk(b"junk", junk), chunk(b"fmt ", fmt), data, size=0 if broken else None)
    header = header_of(content)
    joints = sorted({0, header.frames, *(round(place * header.frames) for place in places)})
    target = tmp_path_factory.getbasetemp() / "piece.wav"
    pieces = [cut(content, first, last, target) for first, last in pairwise(joints)]
    assert b"".join(frames_of(piece) for piece in pieces) == frames_of(content)
    for piece in pieces:
        assert header_of(piece).format_chunk == fmt
        assert len(piece) % 2 == 0
        assert struct.unpack("<I", piece[4:8])[0] + 8 == len(piece)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_piece_can_be_read_by_others(tmp_path: Path, channels: int) -> None:
    source = make_wav(tmp_path / "a.wav", 2, channels=channels, loud=[(0.5, 1.5)])
    with source.open("rb") as file:
        copy_frames(file, read_wav_header(file), 4000, 12_001, tmp_path / "b.wav")
    with wave.open(str(source)) as whole, wave.open(str(tmp_path / "b.wav")) as piece:
        assert piece.getparams()[:3] == whole.getparams()[:3]
        assert piece.getnframes() == 8001
        whole.setpos(4000)
        assert piece.readframes(8001) == whole.readframes(8001)


def test_a_piece_of_more_than_four_gigabytes_says_its_size_as_long_files_do() -> None:
    header = header_of(riff(chunk(b"fmt ", format_chunk(channels=2)), chunk(b"data", AUDIO)))
    head = make_head(header, 3_000_000_000)
    assert head[:8] == b"RF64" + b"\xff" * 4
    assert struct.unpack("<QQQ", head[20:44]) == (len(head) - 8 + 12_000_000_000, 12_000_000_000, 3_000_000_000)
    assert head[-8:] == b"data" + b"\xff" * 4
    assert frames_of(head + AUDIO) == AUDIO


def test_a_long_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    source = tmp_path / "long.wav"
    with source.open("wb") as file:
        file.write(riff(chunk(b"fmt ", format_chunk()), chunk(b"data", b"", size=100_000_000))[:44])
        file.truncate(100_000_044)
    tracemalloc.start()
    with source.open("rb") as file:
        copy_frames(file, read_wav_header(file), 1000, 40_000_000, tmp_path / "b.wav")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "b.wav").stat().st_size == 44 + 2 * 39_999_000
    assert peak < 10_000_000


def test_audio_that_is_gone_while_it_is_copied_is_no_piece(tmp_path: Path) -> None:
    content = riff(chunk(b"fmt ", format_chunk()), chunk(b"data", AUDIO))
    with pytest.raises(EOFError, match=r"shorter while it was read \(missing bytes: 100\)"):
        copy_frames(io.BytesIO(content[:-100]), header_of(content), 0, 100, tmp_path / "b.wav")
