"""Small audio files for tests: a quiet tone with loud stretches, made with nothing but the standard library."""

from __future__ import annotations

import math
import wave
from array import array
from collections.abc import Sequence
from pathlib import Path

LOUD, QUIET = 16_000, 40  # 16-bit amplitudes: half of full scale, and what is left of a calm night
Stretches = Sequence[tuple[float, float]]


def make_wav(
    path: Path, seconds: float = 1, rate: int = 8000, *, loud: Stretches = ((0.25, 0.5),), tone_hz: int = 1000
) -> Path:
    """Write a 16-bit WAV whose ``loud`` stretches (from, to, in seconds) stand out, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = round(seconds * rate)
    samples = _tone(frames, rate, tone_hz, QUIET)
    for start_s, end_s in loud:
        first, last = (min(frames, round(at_s * rate)) for at_s in (start_s, end_s))
        samples[first:last] = _tone(last - first, rate, tone_hz, LOUD)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return path


def _tone(frames: int, rate: int, tone_hz: int, amplitude: int) -> array[int]:
    # A whole number of hertz repeats every second, so one second is computed and copied.
    turns = (2 * math.pi * tone_hz * frame / rate for frame in range(min(rate, frames)))
    second = array("h", (round(amplitude * math.sin(turn)) for turn in turns))
    whole, rest = divmod(frames, rate)
    return second * whole + second[:rest] if whole else second
