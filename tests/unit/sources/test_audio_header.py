from __future__ import annotations

import struct
from pathlib import Path

import pytest
from rooms.model import AudioHeader
from rooms.sources import read_header, read_wav_header
from support.audio import make_wav, read_duration_s
from support.powerless import powerless_folder

RATE = 8000


def fmt(kind: int = 1, channels: int = 1, bits: int = 16, extra: bytes = b"", rate: int = RATE) -> bytes:
    frame = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits) + extra)


def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    return name + struct.pack("<I", len(body) if size is None else size) + body + b"\0" * (len(body) % 2)


def wav(path: Path, *chunks: bytes, magic: bytes = b"RIFF") -> Path:
    body = b"WAVE" + b"".join(chunks)
    path.write_bytes(magic + struct.pack("<I", len(body)) + body)
    return path


def flac(path: Path, samples: int, rate: int = 44100, before: bytes = b"", block_type: int = 0x80) -> Path:
    packed = rate << 44 | 0 << 41 | 15 << 36 | samples
    streaminfo = struct.pack(">HH6xQ16x", 4096, 4096, packed)
    path.write_bytes(before + b"fLaC" + bytes([block_type, 0, 0, len(streaminfo)]) + streaminfo + b"frames")
    return path


def test_a_wav_says_how_long_it_is(tmp_path: Path) -> None:
    assert read_duration_s(make_wav(tmp_path / "a.wav", seconds=2.5)) == 2.5
    assert read_duration_s(str(make_wav(tmp_path / "b.wav", seconds=1.5, channels=2, rate=22050))) == 1.5


def test_float_24_bit_and_extensible_wavs_are_understood(tmp_path: Path) -> None:
    guid = struct.pack("<HHI", 22, 24, 4) + b"\x01\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71"
    one_second = {
        "float": (fmt(3, bits=32), 4),
        "24 bit stereo": (fmt(1, channels=2, bits=24), 6),
        "extensible": (fmt(0xFFFE, bits=24, extra=guid), 3),
    }
    for name, (header, frame) in one_second.items():
        path = wav(tmp_path / f"{name}.wav", header, chunk(b"data", b"\0" * RATE * frame))
        assert read_duration_s(path) == 1, name


def test_recorder_notes_before_the_data_are_skipped_with_their_padding(tmp_path: Path) -> None:
    notes = chunk(b"LIST", b"INFOICMT odd"), chunk(b"wamd", b"123")
    assert (
        read_duration_s(wav(tmp_path / "a.wav", *notes, fmt(), chunk(b"bext", b"x"), chunk(b"data", b"\0" * 16000)))
        == 1
    )


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_streamed_wav_is_measured_by_its_file_size(tmp_path: Path, size: int) -> None:
    assert read_duration_s(wav(tmp_path / "a.wav", fmt(), chunk(b"data", b"\0" * 32000, size))) == 2


def test_a_wav_cut_short_lasts_as_long_as_what_is_there_and_its_header_says_how_long_it_was(tmp_path: Path) -> None:
    path = wav(tmp_path / "a.wav", fmt(), chunk(b"data", b"\0" * 16000, 64000))
    header = read_header(path)
    assert (read_duration_s(path), header.duration_s, header.there_s, header.unfinished) == (1, 4, 1, False)


def test_a_file_that_cannot_be_read_says_why_and_not_that_its_header_tells_nothing(tmp_path: Path) -> None:
    assert read_header(tmp_path / "gone.wav").unreadable == "No such file or directory"
    assert read_header(tmp_path).unreadable == "Is a directory"
    (tmp_path / "short.wav").write_bytes(b"RIFF\0\0\0\0WAVEfm")
    assert read_header(tmp_path / "short.wav") == AudioHeader()
    with powerless_folder():
        make_wav("secret.wav", 1, RATE).chmod(0)
        assert read_header("secret.wav") == AudioHeader(unreadable="Permission denied")


@pytest.mark.parametrize("riff_is_right", [True, False])
@pytest.mark.parametrize("size", [0, 16000, 48000, 0x7FFFF000, 0xFFFFFFDB, 0xFFFFFFFF])
@pytest.mark.parametrize("body", [b"", b"\1\2" * 8000, chunk(b"LIST", b"nothing was heard today")])
def test_what_is_listed_is_what_can_be_cut(tmp_path: Path, size: int, body: bytes, riff_is_right: bool) -> None:
    path = wav(tmp_path / "a.wav", fmt(), chunk(b"data", body, size))
    if not riff_is_right:
        path.write_bytes(path.read_bytes()[:4] + b"\0\0\0\0" + path.read_bytes()[8:])
    listed = read_header(path)
    with path.open("rb") as file:
        cut = read_wav_header(file)
    assert read_duration_s(path) == cut.length_s
    assert listed.duration_s == cut.length_s + (cut.missing_frames / RATE if listed.there_s is not None else 0)
    assert listed.unfinished == (cut.frames > 0 and size not in (16000, 48000))


@pytest.mark.parametrize("magic", [b"RF64", b"BW64"])
def test_a_wav_beyond_four_gigabytes_has_its_size_in_ds64(tmp_path: Path, magic: bytes) -> None:
    data_size = 6 * 1024**3
    ds64 = chunk(b"ds64", struct.pack("<QQQI", data_size + 72, data_size, data_size // 2, 0))
    path = wav(tmp_path / "a.wav", ds64, fmt(), chunk(b"data", b"", 0xFFFFFFFF), magic=magic)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + data_size)  # sparse: takes no room
    assert read_duration_s(path) == data_size / 2 / RATE


def test_a_compressed_wav_is_measured_by_its_byte_rate(tmp_path: Path) -> None:
    adpcm = chunk(b"fmt ", struct.pack("<HHIIHH", 0x11, 1, RATE, 4055, 256, 4))
    assert read_duration_s(wav(tmp_path / "a.wav", adpcm, chunk(b"data", b"\0" * 8110))) == 2


def test_a_flac_says_how_long_it_is(tmp_path: Path) -> None:
    assert read_duration_s(flac(tmp_path / "a.flac", 441000)) == 10
    assert read_duration_s(flac(tmp_path / "long.flac", 2**36 - 1, rate=384000)) == (2**36 - 1) / 384000


def test_a_flac_with_tags_in_front_is_understood(tmp_path: Path) -> None:
    tags = b"ID3\x04\0\0" + bytes([0, 0, 1, 2]) + b"t" * 130
    assert read_duration_s(flac(tmp_path / "a.flac", 44100, before=tags)) == 1


def test_unknown_is_none_and_not_zero(tmp_path: Path) -> None:
    text = tmp_path / "text.wav"
    text.write_text("this is not audio, whatever its name says")
    short = tmp_path / "short.flac"
    short.write_bytes(b"fLaC\0\0")
    empty = tmp_path / "empty.wav"
    empty.touch()
    unknown = {
        "no length written": flac(tmp_path / "streamed.flac", 0),
        "not the first block": flac(tmp_path / "odd.flac", 44100, block_type=4),
        "no format": wav(tmp_path / "noformat.wav", chunk(b"data", b"\0" * 100)),
        "no data": wav(tmp_path / "nodata.wav", fmt()),
        "no rate": wav(tmp_path / "norate.wav", fmt(rate=0), chunk(b"data", b"\0" * 100)),
        "only zeros": wav(tmp_path / "zeros.wav", b"\0" * 100_000),
        "text": text,
        "cut in the header": short,
        "empty": empty,
        "missing": tmp_path / "missing.wav",
        "a folder": tmp_path,
    }
    assert {name: read_duration_s(path) for name, path in unknown.items()} == dict.fromkeys(unknown)


def test_a_wav_without_any_sound_lasts_zero_seconds(tmp_path: Path) -> None:
    assert read_duration_s(make_wav(tmp_path / "a.wav", seconds=0)) == 0
