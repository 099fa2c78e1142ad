"""Pieces of any audio: WAV by ourselves, other formats by soundfile or ffmpeg where there is one."""

from __future__ import annotations

import math
import os
import random
import struct
import sys
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import soundfile
from rooms.sources import AudioCutter, CannotCut, NoDecoder, NotThere, load_soundfile, read_header
from support.audio import make_wav, read_duration_s

# Decodes "audio" that says how long it is: FAKE 12.5; both programs take their arguments as the real ones do.
FFMPEG = """
import sys, wave
args = sys.argv[1:]
source, target = args[args.index("-i") + 1], args[-1]
start_s, length_s = (float(args[args.index(name) + 1]) for name in ("-ss", "-t"))
text = open(source).read()
if not text.startswith("FAKE "):
    sys.exit(f"{source}: Invalid data found when processing input")
length_s = max(0.0, min(length_s, float(text.split()[1]) - start_s))
with wave.open(target, "wb") as audio:
    audio.setnchannels(1); audio.setsampwidth(2); audio.setframerate(1000)
    audio.writeframes(bytes(2 * round(1000 * length_s)))
"""
FFPROBE = """
import sys
text = open(sys.argv[-1]).read()
print(text.split()[1] if text.startswith("FAKE ") else "N/A")
"""


@pytest.fixture
def with_ffmpeg(tmp_path: Path) -> AudioCutter:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, program in (("ffmpeg", FFMPEG), ("ffprobe", FFPROBE)):
        (folder / name).write_text(f"#!{sys.executable}\n{program}")
        (folder / name).chmod(0o755)
    return AudioCutter(str(folder))


ALONE = AudioCutter(None)


def test_a_stretch_of_a_wav_is_as_long_as_asked_for(tmp_path: Path) -> None:
    source = make_wav(tmp_path / "a.wav", 10)
    ALONE.cut(source, 2.5, 6.0, tmp_path / "b.wav")
    assert ALONE.length_s(tmp_path / "b.wav") == 3.5


def test_an_end_beyond_the_audio_is_its_end(tmp_path: Path) -> None:
    ALONE.cut(make_wav(tmp_path / "a.wav", 10), 9.0, 60.0, tmp_path / "b.wav")
    assert ALONE.length_s(tmp_path / "b.wav") == 1.0


def test_a_stretch_after_the_end_cannot_be_cut_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CannotCut, match=r"10\.000 s of audio and nothing after 10\.000 s"):
        ALONE.cut(make_wav(tmp_path / "a.wav", 10), 10.0, 12.0, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()


@pytest.fixture
def without_soundfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)  # as where it is not installed: the import fails


@pytest.mark.usefixtures("without_soundfile")
def test_where_nobody_can_decode_it_is_said_what_is_missing_with_the_line_to_paste(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_text("FAKE 60")
    with pytest.raises(NoDecoder, match=r"soundfile cannot be loaded .* and ffmpeg is not on PATH") as refusal:
        ALONE.cut(tmp_path / "a.flac", 0, 30, tmp_path / "b.wav")
    assert str(refusal.value).splitlines()[-1].startswith("pip install 'badcjobs[audio]'")
    assert ALONE.length_s(tmp_path / "a.flac") is None


def test_threads_that_ask_for_a_broken_package_together_are_all_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "soundfile.py").write_text("import time\ntime.sleep(0.2)\nraise OSError('no libsndfile')\n")
    monkeypatch.delitem(sys.modules, "soundfile")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(max_workers=3) as pool:
        asked = [pool.submit(load_soundfile) for _ in range(3)]
    assert [str(one.exception()) for one in asked] == ["the package soundfile cannot be loaded (no libsndfile)"] * 3


def test_with_ffmpeg_other_formats_become_wav(tmp_path: Path, with_ffmpeg: AudioCutter) -> None:
    (tmp_path / "a day.flac").write_text("FAKE 60.5")
    assert with_ffmpeg.length_s(tmp_path / "a day.flac") == 60.5
    with_ffmpeg.cut(tmp_path / "a day.flac", 30, 66, tmp_path / "b.wav")
    assert ALONE.length_s(tmp_path / "b.wav") == 30.5


@pytest.mark.parametrize("content", ["this is not audio", "", "FAKE 3"])
def test_what_ffmpeg_cannot_decode_cannot_be_cut(tmp_path: Path, with_ffmpeg: AudioCutter, content: str) -> None:
    (tmp_path / "a.mp3").write_text(content)
    with pytest.raises(CannotCut, match="ffmpeg cannot decode "):
        with_ffmpeg.cut(tmp_path / "a.mp3", 5, 9, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()


def test_audio_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    assert ALONE.length_s(tmp_path / "gone.wav") is None
    with pytest.raises(FileNotFoundError):
        ALONE.cut(tmp_path / "gone.wav", 0, 1, tmp_path / "b.wav")


def test_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    pipe, target = tmp_path / "a.wav", tmp_path / "b.wav"
    os.mkfifo(pipe)
    assert ALONE.length_s(pipe) is ALONE.promised_s(pipe) is None
    for ask in (lambda: ALONE.size_bytes(pipe, 0, 1), lambda: ALONE.cut(pipe, 0, 1, target)):
        with pytest.raises(OSError, match="it is a pipe, a socket or a device"):
            ask()


def test_nothing_half_written_is_left_when_the_target_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ALONE.cut(make_wav(tmp_path / "a.wav", 1), 0, 1, tmp_path / "no" / "folder" / "b.wav")


# --- formats, to the sample -------------------------------------------------------------------------------------------

RATE = 11_025  # of which no whole number of milliseconds is a whole number of samples


def ramp(frames: int, channels: int, size: int) -> bytes:
    """Return samples that are all different, so that a cut in the wrong place cannot look right."""
    return b"".join((n * 37 % 2 ** (8 * size)).to_bytes(size, "little") for n in range(frames * channels))


def write_wav(path: Path, kind: int, channels: int, size: int, data: bytes, *, magic: bytes = b"RIFF") -> Path:
    frame = channels * size
    extra = struct.pack("<HHI", 22, 8 * size, 0) + bytes([1]) + bytes(15) if kind == 0xFFFE else b""
    form = struct.pack("<HHIIHH", kind, channels, RATE, RATE * frame, frame, 8 * size) + extra
    chunks = b"fmt " + struct.pack("<I", len(form)) + form
    told = len(data)
    if magic == b"RF64":
        chunks = b"ds64" + struct.pack("<IQQQI", 28, 0, len(data), len(data) // frame, 0) + chunks
        told = 0xFFFFFFFF
    body = b"WAVE" + chunks + b"data" + struct.pack("<I", told) + data
    path.write_bytes(magic + struct.pack("<I", len(body) if magic == b"RIFF" else 0xFFFFFFFF) + body)
    return path


@pytest.mark.parametrize(
    ("kind", "channels", "size", "magic"),
    [(1, 1, 2, b"RIFF"), (1, 2, 3, b"RIFF"), (3, 1, 4, b"RIFF"), (0xFFFE, 1, 3, b"RIFF"), (1, 1, 2, b"RF64")],
    ids=["16 bit", "24 bit stereo", "float", "24 bit extensible", "RF64"],
)
def test_every_kind_of_wav_is_cut_to_the_sample(
    tmp_path: Path, kind: int, channels: int, size: int, magic: bytes
) -> None:
    frame = channels * size
    data = ramp(RATE * 3, channels, size)
    source = write_wav(tmp_path / "Grönland 鳥.wav", kind, channels, size, data, magic=magic)
    stretches = [(0.0, 0.777), (0.777, 1.5), (1.5, math.inf)]
    cut = b""
    for number, (start_s, end_s) in enumerate(stretches):
        target = tmp_path / f"{number}.wav"
        ALONE.cut(source, start_s, end_s, target)
        raw = target.read_bytes()
        there = raw.index(b"data") + 8
        (told,) = struct.unpack("<I", raw[there - 4 : there])
        cut += raw[there : there + told]
        assert told % frame == 0
        assert abs(ALONE.size_bytes(source, start_s, end_s) - len(raw)) <= 1
    assert cut == data


@pytest.mark.parametrize(("bits", "subtype"), [(16, "PCM_16"), (24, "PCM_24"), (8, "PCM_S8")])
def test_flac_is_cut_to_the_sample_and_without_loss(tmp_path: Path, bits: int, subtype: str) -> None:
    samples = [[(n * 37 % 2**bits - 2 ** (bits - 1)) << (32 - bits)] for n in range(RATE * 3)]
    source = tmp_path / "a.flac"
    with soundfile.SoundFile(source, "w", RATE, 1, subtype) as out:
        out.buffer_write(struct.pack(f"<{len(samples)}i", *(one for (one,) in samples)), dtype="int32")
    ALONE.cut(source, 0.777, 2.001, tmp_path / "b.wav")
    with soundfile.SoundFile(tmp_path / "b.wav") as cut:
        found = struct.unpack(f"<{cut.frames}i", bytes(cut.buffer_read(dtype="int32")))
    assert list(found) == [one for (one,) in samples[round(0.777 * RATE) : round(2.001 * RATE)]]
    assert ALONE.length_s(source) == 3.0
    with wave.open(str(tmp_path / "b.wav")) as plain:  # for engines that read nothing but PCM
        assert plain.getnframes() == len(found)


@pytest.mark.parametrize(("seconds", "channels", "rate"), [(0.01, 1, 48000), (3.7, 2, 12345), (21.3, 1, 250_000)])
def test_a_flac_whose_header_does_not_tell_its_length_is_measured_by_its_last_frame_and_cut(
    tmp_path: Path, seconds: float, channels: int, rate: int
) -> None:
    source, frames = tmp_path / "a.flac", round(seconds * rate)
    with soundfile.SoundFile(source, "w", rate, channels, "PCM_16") as out:
        out.buffer_write(random.Random(1).randbytes(2 * channels * frames), dtype="int16")
    with soundfile.SoundFile(source) as whole:
        samples = bytes(whole.buffer_read(dtype="int16"))
    streamed = bytearray(source.read_bytes())
    streamed[21:26] = bytes([streamed[21] & 0xF0, 0, 0, 0, 0])  # as encoders leave it that write into a pipe
    source.write_bytes(streamed)
    assert read_duration_s(source) == ALONE.length_s(source) == frames / rate
    ALONE.cut(source, 0, float("inf"), tmp_path / "b.wav")
    with soundfile.SoundFile(tmp_path / "b.wav") as cut:
        assert bytes(cut.buffer_read(dtype="int16")) == samples
    ALONE.cut(source, seconds / 2, seconds * 2, tmp_path / "c.wav")
    with soundfile.SoundFile(tmp_path / "c.wav") as cut:
        assert samples.endswith(found := bytes(cut.buffer_read(dtype="int16")))
        assert abs(len(found) - len(samples) / 2) <= 4
    assert read_header(source).unfinished, "engines get a copy with a sound header"
    source.write_bytes(streamed[:-1])
    whole_frames_s = read_duration_s(source) or 0.0
    assert frames / rate - 0.35 <= whole_frames_s < frames / rate, "what an interrupted encoder left of a frame is none"
    source.write_bytes(streamed[:60])
    assert read_duration_s(source) is ALONE.length_s(source) is None, "unknown, not zero, and not for ever"


def test_of_a_flac_that_breaks_off_nothing_behind_its_end_can_be_cut(tmp_path: Path) -> None:
    with soundfile.SoundFile(tmp_path / "whole.flac", "w", RATE, 1, "PCM_16") as out:
        out.buffer_write(ramp(RATE * 4, 1, 2), dtype="int16")
    whole = (tmp_path / "whole.flac").read_bytes()
    (tmp_path / "a.flac").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CannotCut, match=r"a\.flac cannot be decoded from 3\.5 s to 4 s: it is truncated or damaged"):
        ALONE.cut(tmp_path / "a.flac", 3.5, 4.0, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()


def test_of_a_wav_that_breaks_off_what_is_there_is_cut_and_the_rest_is_told(tmp_path: Path) -> None:
    whole = make_wav(tmp_path / "whole.wav", seconds=60)
    half = tmp_path / "half.wav"
    half.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    cutter = AudioCutter(None)
    cutter.cut(half, 10, 20, tmp_path / "a.wav")
    assert cutter.length_s(tmp_path / "a.wav") == 10
    cutter.cut(half, 25, 35, tmp_path / "a.wav")
    assert cutter.length_s(tmp_path / "a.wav") == pytest.approx(5, abs=0.01)
    assert (cutter.promised_s(half), cutter.length_s(half)) == (60, pytest.approx(30, abs=0.01))
    with wave.open(str(tmp_path / "a.wav")) as cut, wave.open(str(whole)) as audio:
        audio.setpos(25 * audio.getframerate())
        assert cut.readframes(10**9) == audio.readframes(cut.getnframes()) != b""
    for start_s in (30, 40, 59):
        words = rf"half.wav is truncated: its header says 60 s, the file has 29\.9\d+ s and nothing after {start_s} s"
        with pytest.raises(NotThere, match=words):
            cutter.cut(half, start_s, start_s + 10, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()
    half.write_bytes(whole.read_bytes()[:44])
    with pytest.raises(NotThere, match=r"its header says 60 s, the file has 0 s"):
        cutter.cut(half, 0, 10, tmp_path / "b.wav")
    assert cutter.promised_s(tmp_path / "none.wav") is None


def test_a_recording_without_audio_says_so(tmp_path: Path) -> None:
    with pytest.raises(CannotCut, match=r"a\.wav has 0\.000 s of audio"):
        ALONE.cut(make_wav(tmp_path / "a.wav", 0), 0, math.inf, tmp_path / "b.wav")
