"""The process behind the demo engine: reads WAV with the standard library and reports loud stretches.

Started as ``python -m badcjobs.workers.demo_worker``; speaks as ``hawkears_worker`` does, which stands alone and so has
the conversation in it.
"""

from __future__ import annotations

import argparse
import sys
import time
import wave
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from badcjobs.errors import BadInput
from badcjobs.workers.failures import BAD_AUDIO
from badcjobs.workers.hawkears_worker import Conversation

_WINDOW_S = 0.1
_ARRAY_TYPE = {1: "B", 2: "h", 4: "i"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"the demo engine does not understand its arguments: {message}", fix=self.format_usage().strip())


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse what --engine-arg gives to the demo engine."""
    parser = _Parser(prog="--engine-arg", add_help=False)
    parser.add_argument("--burn-s", type=float, default=0.0, help="seconds of work per chunk, so that demos look alive")
    parser.add_argument("--threshold", type=float, default=0.25, help="loudness that counts, of full scale")
    parser.add_argument("--room-s", type=float, help="pretend that audio of this length fits into the memory, lean")
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)  # how a worker is told to do with less
    return parser.parse_args(args)


def main(args: Sequence[str]) -> None:
    """Answer orders until the input ends."""
    options = parse_arguments(args)
    talk = Conversation()
    talk.say("ready", threads=1, holds=2)
    for order in talk.orders():
        path = order["audio"]
        talk.say("started", id=order["id"])
        try:
            answer = analyse(path, options.threshold)
            if options.room_s is not None and fill(answer["audio_s"], lean=options.lean) > options.room_s:
                answer = {"error": f"CUDA out of memory. Tried to make room for {answer['audio_s']:.1f} s (pretended)"}
        except (OSError, EOFError, ValueError, wave.Error) as error:
            what = str(error) or "the file ends too early"
            answer = {"error_class": BAD_AUDIO, "error": f"{path}: {what} (this engine reads PCM WAV)"}
        burn(options.burn_s)
        talk.say("failed" if "error" in answer else "done", id=order["id"], **answer)
    talk.say("bye")


def analyse(path: str, threshold: float) -> dict[str, Any]:
    """Return the length of a WAV file and its loud stretches as (start_ms, end_ms, label, score, name)."""
    with wave.open(path, "rb") as audio:
        rate, width, channels = audio.getframerate(), audio.getsampwidth(), audio.getnchannels()
        if rate == 0 or width not in (*_ARRAY_TYPE, 3):
            raise ValueError(f"audio with {8 * width} bits a sample at {rate} Hz is not understood")
        audio_s = audio.getnframes() / rate
        raw = audio.readframes(audio.getnframes())
    if len(raw) < int(audio_s * rate) * width * channels:
        raise ValueError("the audio ends before its header says")
    window = max(1, int(_WINDOW_S * rate)) * channels
    levels = list(_levels(raw, width, window))
    return {"audio_s": audio_s, "detections": list(_stretches(levels, threshold, round(_WINDOW_S * 1000)))}


def fill(audio_s: float, *, lean: bool) -> float:
    """Return how much memory audio is made to take, in seconds: as usual twice its length."""
    return audio_s if lean else 2 * audio_s


def _levels(raw: bytes, width: int, window: int) -> Iterator[float]:
    """Yield the peak of each window, 0 to 1 of full scale."""
    if width == 3:
        # Drop the lowest byte of each 24-bit sample: 16 bits tell loud from quiet.
        high = bytearray(len(raw) // 3 * 2)
        high[0::2], high[1::2] = raw[1::3], raw[2::3]
        raw, width = bytes(high), 2
    samples = array(_ARRAY_TYPE[width])
    samples.frombytes(raw)
    middle, full = (128, 128) if width == 1 else (0, 1 << (8 * width - 1))
    for start in range(0, len(samples), window):
        part = samples[start : start + window]
        yield max(max(part) - middle, middle - min(part)) / full


def _stretches(levels: Sequence[float], threshold: float, window_ms: int) -> Iterator[list[int | str | float]]:
    start = None
    for number, level in enumerate([*levels, 0.0]):
        if level >= threshold:
            start = number if start is None else start
        elif start is not None:
            score = round(max(levels[start:number]), 3)
            yield [start * window_ms, number * window_ms, "LOUD", score, "Loud sound"]
            start = None


def burn(seconds: float) -> None:
    """Work for a while: half of it computing, half of it waiting, as a real engine does."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s - seconds / 2:
        sum(range(1000))
    time.sleep(max(0.0, end_s - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1:])
