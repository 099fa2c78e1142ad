"""Small audio files for tests: a quiet tone with loud stretches, made with nothing but the standard library."""

from __future__ import annotations

import math
import wave
from array import array
from collections.abc import Sequence
from pathlib import Path

from rooms.sources import read_header

LOUD, QUIET = 16_000, 40  # 16-bit amplitudes: half of full scale, and what is left of a calm night


def make_wav(
    path: Path | str,
    seconds: float = 1,
    rate: int = 8000,
    *,
    channels: int = 1,
    loud: Sequence[tuple[float, float]] = ((0.25, 0.5),),
    tone_hz: int = 1000,
) -> Path:
    """Write a 16-bit WAV whose ``loud`` stretches (from, to, in seconds) stand out, and return its path.

    Folders on the way are made. The same arguments always give the same bytes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = round(seconds * rate)
    samples = _tone(frames, rate, tone_hz, QUIET, channels)
    for start_s, end_s in loud:
        first, last = (min(frames, round(at_s * rate)) for at_s in (start_s, end_s))
        samples[first * channels : last * channels] = _tone(last - first, rate, tone_hz, LOUD, channels)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return path


def _tone(frames: int, rate: int, tone_hz: int, amplitude: int, channels: int) -> array[int]:
    # A whole number of hertz repeats every second, so one second is computed and copied.
    second = [round(amplitude * math.sin(2 * math.pi * tone_hz * frame / rate)) for frame in range(min(rate, frames))]
    interleaved = array("h", (value for value in second for _ in range(channels)))
    whole, rest = divmod(frames, rate)
    return interleaved * whole + interleaved[: rest * channels] if whole else interleaved


def read_duration_s(path: Path | str) -> float | None:
    """Return the seconds of audio that are in a file; None when its header does not tell."""
    header = read_header(path)
    return header.duration_s if header.there_s is None else header.there_s
