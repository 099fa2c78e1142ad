"""Pieces of any audio: WAV by ourselves, other formats by ffmpeg where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.audio import make_wav

from badcjobs.audio.cutter import AudioCutter
from badcjobs.seams import CannotCut

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
    with pytest.raises(CannotCut, match=r"10\.000 s of audio, and none after 10\.000 s"):
        ALONE.cut(make_wav(tmp_path / "a.wav", 10), 10.0, 12.0, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()


def test_without_ffmpeg_other_formats_cannot_be_cut_and_it_is_said_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.flac").write_text("FAKE 60")
    with pytest.raises(CannotCut, match="no ffmpeg on PATH"):
        ALONE.cut(tmp_path / "a.flac", 0, 30, tmp_path / "b.wav")
    assert ALONE.length_s(tmp_path / "a.flac") is None


def test_with_ffmpeg_other_formats_become_wav(tmp_path: Path, with_ffmpeg: AudioCutter) -> None:
    (tmp_path / "a day.flac").write_text("FAKE 60.5")
    assert with_ffmpeg.length_s(tmp_path / "a day.flac") == 60.5
    with_ffmpeg.cut(tmp_path / "a day.flac", 30, 66, tmp_path / "b.wav")
    assert ALONE.length_s(tmp_path / "b.wav") == 30.5


@pytest.mark.parametrize("content", ["this is not audio", "", "FAKE 3"])
def test_what_ffmpeg_cannot_decode_cannot_be_cut(tmp_path: Path, with_ffmpeg: AudioCutter, content: str) -> None:
    (tmp_path / "a.mp3").write_text(content)
    with pytest.raises(CannotCut, match="cannot be decoded by ffmpeg"):
        with_ffmpeg.cut(tmp_path / "a.mp3", 5, 9, tmp_path / "b.wav")
    assert not (tmp_path / "b.wav").exists()


def test_audio_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    assert ALONE.length_s(tmp_path / "gone.wav") is None
    with pytest.raises(FileNotFoundError):
        ALONE.cut(tmp_path / "gone.wav", 0, 1, tmp_path / "b.wav")


def test_nothing_half_written_is_left_when_the_target_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ALONE.cut(make_wav(tmp_path / "a.wav", 1), 0, 1, tmp_path / "no" / "folder" / "b.wav")
