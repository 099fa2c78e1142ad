"""The process behind the demo engine: reads WAV with the standard library, FLAC with soundfile; reports loud stretches.

Started as ``python -m badcjobs.workers.demo_worker``; speaks as ``hawkears_worker`` does, which stands alone and so has
the conversation in it.
"""

from __future__ import annotations

import argparse
import struct
import sys
import time
import wave
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from badcjobs.errors import BadInput
from badcjobs.workers.demo_memory import PretendedMemory, fill
from badcjobs.workers.failures import BAD_AUDIO, NO_PROGRAM
from badcjobs.workers.hawkears_worker import Conversation

_WINDOW_S = 0.1
_ARRAY_TYPE = {1: "B", 2: "h", 4: "i"}
_FLOAT_TYPE = {4: "f", 8: "d"}
_FLOAT, _EXTENSIBLE = 3, 0xFFFE
_BLOCK = 1 << 16  # frames


class _NoDecoder(Exception):
    """The package that reads such audio is not here."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"the demo engine does not understand its arguments: {message}", fix=self.format_usage().strip())


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse what --engine-arg gives to the demo engine."""
    parser = _Parser(prog="--engine-arg", add_help=False)
    parser.add_argument("--burn-s", type=float, default=0.0, help="seconds of work per chunk, so that demos look alive")
    parser.add_argument("--threshold", type=float, default=0.25, help="loudness that counts, of full scale")
    parser.add_argument("--room-s", type=float, help="pretend that audio of this length fits into the memory, lean")
    parser.add_argument("--memory-per-s", type=float, help="MiB for a second of audio, lean; as usual twice that")
    # How a worker is told to do with less, on which device it pretends to be, and where it says how much it has of it.
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ledger", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def memory_of(options: argparse.Namespace) -> PretendedMemory | None:
    """Return the memory that is pretended; None: it is not asked for."""
    if options.memory_per_s is None:
        return None
    per_s, lean = options.memory_per_s * 2**20, options.lean
    return PretendedMemory(per_s, lean, options.device, options.device_bytes, options.ledger)


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
            elif (memory := memory_of(options)) is not None and (refusal := memory.take(answer["audio_s"])):
                answer = {"error": refusal}
        except _NoDecoder as error:
            answer = {"error_class": NO_PROGRAM, "error": f"{path}: {error}"}
        except (OSError, EOFError, ValueError, wave.Error) as error:
            what = f"{error_words(error, path)} (this engine reads WAV, PCM and float, and FLAC)"
            answer = {"error_class": BAD_AUDIO, "error": f"{path}: {what}"}
        burn(options.burn_s)
        talk.say("failed" if "error" in answer else "done", id=order["id"], **answer)
    talk.say("bye")


def error_words(error: Exception, path: str) -> str:
    """Return what is wrong with a file; ``wave`` says nothing of one that ends too early."""
    if str(error):
        return str(error)
    return "the file ends too early" if Path(path).stat().st_size else "it is empty"


def analyse(path: str, threshold: float) -> dict[str, Any]:
    """Return the length of an audio file and its loud stretches as (start_ms, end_ms, label, score, name)."""
    with Path(path).open("rb") as file:
        audio_s, levels = loudness(file)
    return {"audio_s": audio_s, "detections": list(_stretches(levels, threshold, round(_WINDOW_S * 1000)))}


def loudness(file: BinaryIO) -> tuple[float, list[float]]:
    """Return the length of audio in seconds and the peak of each tenth of a second."""
    head = file.read(12)
    if head[8:] == b"WAVE" and (floats := read_floats(file)) is not None:
        rate, channels, samples = floats
        return len(samples) / channels / rate, list(_float_levels(samples, _window(rate) * channels))
    file.seek(0)
    is_flac = head.startswith((b"fLaC", b"ID3"))  # some programs put tags before the stream
    rate, channels, width, raw = read_flac(file) if is_flac else read_pcm(file)
    return len(raw) / (width * channels) / rate, list(_levels(raw, width, _window(rate) * channels))


def _window(rate: int) -> int:
    return max(1, int(_WINDOW_S * rate))


def read_pcm(file: BinaryIO) -> tuple[int, int, int, bytes]:
    """Return rate, channels, bytes a sample and the samples of a WAV file of whole numbers."""
    with wave.open(file, "rb") as audio:
        rate, width, channels = audio.getframerate(), audio.getsampwidth(), audio.getnchannels()
        if rate == 0 or width not in (*_ARRAY_TYPE, 3):
            raise ValueError(f"audio with {8 * width} bits a sample at {rate} Hz is not understood")
        raw = audio.readframes(audio.getnframes())
    if len(raw) < audio.getnframes() * width * channels:
        raise ValueError("the audio ends before its header says")
    return rate, channels, width, raw


def read_flac(file: BinaryIO) -> tuple[int, int, int, bytes]:
    """Return the same of a FLAC file, in 16 bits. Raise _NoDecoder where nobody can read it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        why = f"it is FLAC, and the package soundfile is not here ({error})"
        raise _NoDecoder(f"{why}\npip install 'badcjobs[audio]'   (where badcjobs is installed)") from error
    try:
        with soundfile.SoundFile(file.name) as audio:
            blocks = iter(lambda: bytes(audio.buffer_read(_BLOCK, dtype="int16")), b"")
            rate, channels, frames, raw = audio.samplerate, audio.channels, audio.frames, b"".join(blocks)
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from error
    if len(raw) < 2 * channels * frames:
        raise ValueError("the audio ends before its header says")
    return rate, channels, 2, raw


def read_floats(file: BinaryIO) -> tuple[int, int, array[float]] | None:
    """Return rate, channels and samples of a WAV file of floats, which ``wave`` does not read; None: it is none."""
    rate = channels = bits = 0
    while len(head := file.read(8)) == 8:
        name, size = struct.unpack("<4sI", head)
        if name == b"data" and rate:
            raw = file.read(size)
            if len(raw) < size:
                raise ValueError("the audio ends before its header says")
            samples: array[float] = array(_FLOAT_TYPE[bits // 8])
            samples.frombytes(raw[: size // (bits // 8 * channels) * (bits // 8 * channels)])
            return rate, channels, samples
        start = file.tell()
        if name == b"fmt ":
            form = file.read(min(size, 40))
            kind, channels, rate, bits = struct.unpack("<HHI6xH", form[:16].ljust(16, b"\0"))
            kind = form[24] if kind == _EXTENSIBLE and len(form) > 25 else kind
            if kind != _FLOAT or bits // 8 not in _FLOAT_TYPE or not (channels and rate):
                return None
        file.seek(start + size + (size & 1))
    return None


def _float_levels(samples: array[float], window: int) -> Iterator[float]:
    """Yield the peak of each window; floats beyond full scale count as full scale."""
    for start in range(0, len(samples), window):
        part = samples[start : start + window]
        yield min(1.0, max(max(part), -min(part)))


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
