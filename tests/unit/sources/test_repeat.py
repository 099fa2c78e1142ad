"""Audio made longer by repeating it: the frames themselves, in whatever format they are."""

from __future__ import annotations

import wave
from pathlib import Path

import pytest
from rooms.sources import NotWav, write_repeated
from support.audio import make_wav


def frames(path: Path) -> bytes:
    with wave.open(str(path), "rb") as audio:
        return audio.readframes(audio.getnframes())


@pytest.mark.parametrize("channels", [1, 2])
def test_audio_is_repeated_up_to_the_wanted_length(tmp_path: Path, channels: int) -> None:
    source = make_wav(tmp_path / "a.wav", 0.5, 1000, channels=channels, tone_hz=7)
    write_repeated(source, 1.3, tmp_path / "b.wav")
    once, result = frames(source), frames(tmp_path / "b.wav")
    assert result == (once * 3)[: 1300 * 2 * channels]


def test_long_audio_is_cut(tmp_path: Path) -> None:
    source = make_wav(tmp_path / "a.wav", 2, 1000, tone_hz=7)
    write_repeated(source, 0.25, tmp_path / "b.wav")
    assert frames(tmp_path / "b.wav") == frames(source)[:500]


def test_what_has_no_audio_cannot_be_repeated_and_nothing_is_left(tmp_path: Path) -> None:
    empty, text = make_wav(tmp_path / "a.wav", 0, 1000), tmp_path / "b.wav"
    text.write_text("no audio")
    for source in (empty, text):
        with pytest.raises(NotWav):
            write_repeated(source, 5, tmp_path / "c.wav")
        assert not (tmp_path / "c.wav").exists()
