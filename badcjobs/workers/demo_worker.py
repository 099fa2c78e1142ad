"""The worker process of the demo engine: finds loud sounds in WAV files (standard library) and others (soundfile).

It is started as ``python -m badcjobs.workers.demo_worker``, and reads and writes the same lines as ``hawkears_worker``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.devices.simulated import simulated_memory_bytes
from badcjobs.errors import BadInput
from badcjobs.locks import kernel_lock
from badcjobs.sources.audio_formats import read_wav_header
from badcjobs.sources.cutter import NoDecoder, load_soundfile
from badcjobs.workers.hawkears_worker import OrderPipe
from badcjobs.workers.policy import BAD_AUDIO

_WINDOW_S = 0.1
_MIB = 2**20
_WAV_MAGIC = (b"RIFF", b"RF64", b"BW64")
_PCM = 1
_FULL_SCALE = 1 << 15
_BLOCK = 1 << 16  # frames
_TOO_SHORT = "the audio is shorter than its header states"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"wrong arguments for the demo engine: {message}", fix=self.format_usage().strip())


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse the values of --engine-arg for the demo engine."""
    parser = _Parser(prog="--engine-arg", add_help=False)
    parser.add_argument("--burn-s", type=float, default=0.0, help="seconds of work per chunk")
    parser.add_argument("--threshold", type=float, default=0.25, help="lowest loudness of a detection, 1 is full scale")
    parser.add_argument("--memory-per-s", type=float, help="simulate: MiB per second of audio, lean; usual: twice that")
    # Set by the engine: lean, the simulated device and its memory, and the folder where workers note their use.
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ledger", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def main(args: Sequence[str]) -> None:
    """Process orders until the input ends."""
    options = parse_arguments(args)
    pipe = OrderPipe()
    pipe.send("ready", threads=1, holds=2)
    for order in pipe.orders():
        pipe.send("started", id=order["id"])
        answer = process(order["audio"], options)
        burn(options.burn_s)
        pipe.send("failed" if "error" in answer else "done", id=order["id"], **answer)
    pipe.send("bye")


def process(path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts for the event done, or those for the event failed, with an error."""
    try:
        answer = analyse(path, options.threshold)
        refusal = take_memory(options, answer["audio_s"])
    except (OSError, ValueError, NoDecoder) as error:
        return {"error_class": BAD_AUDIO, "error": f"{path}: {error}"}
    return {"error": refusal} if refusal else answer


class Sound(NamedTuple):
    """The samples of an audio file; those of all channels alternate."""

    channels: int
    rate_hz: int
    samples: array[int] | array[float]
    full_scale: int = 1


def analyse(path: str, threshold: float) -> dict[str, Any]:
    """Return the length of an audio file and its loud sounds as [start_ms, end_ms, label, score, name]."""
    sound = read_sound(path)
    window_ms = round(_WINDOW_S * 1000)
    detections = []
    start = 0
    for is_loud, group in groupby(peaks(sound), lambda level: level >= threshold):
        levels = list(group)
        end = start + len(levels)
        if is_loud:
            detections.append([start * window_ms, end * window_ms, "LOUD", round(max(levels), 3), "Loud sound"])
        start = end
    return {"audio_s": len(sound.samples) / sound.channels / sound.rate_hz, "detections": detections}


def read_sound(path: str) -> Sound:
    """Return the sound of an audio file; a WAV file of 16 bits is read without soundfile.

    Raise ValueError if it is not complete audio, NoDecoder if soundfile cannot be loaded.
    """
    with Path(path).open("rb") as file:
        if file.read(4) in _WAV_MAGIC:
            header = read_wav_header(file)
            if header.missing_frames:
                raise ValueError(_TOO_SHORT)
            if header.kind == _PCM and header.frame_bytes == 2 * header.channels:
                file.seek(header.data_start)
                raw = file.read(header.frames * header.frame_bytes)
                return Sound(header.channels, header.rate_hz, array("h", raw), _FULL_SCALE)

    soundfile = load_soundfile()
    try:
        with soundfile.SoundFile(path) as audio:
            blocks = iter(lambda: bytes(audio.buffer_read(_BLOCK, dtype="float32")), b"")
            sound = Sound(audio.channels, audio.samplerate, array("f", b"".join(blocks)))
            frames = audio.frames
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from error
    if len(sound.samples) < sound.channels * frames:
        raise ValueError(_TOO_SHORT)
    return sound


def peaks(sound: Sound) -> Iterator[float]:
    """Yield the peak of each window, from 0 to 1 (full scale)."""
    window = max(1, int(_WINDOW_S * sound.rate_hz)) * sound.channels
    for start in range(0, len(sound.samples), window):
        part = sound.samples[start : start + window]
        yield min(1.0, max(max(part), -min(part)) / sound.full_scale)


def burn(seconds: float) -> None:
    """Use this much time, half of it computing and half waiting, like a real engine."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s - seconds / 2:
        sum(range(1000))
    time.sleep(max(0.0, end_s - time.monotonic()))


def take_memory(options: argparse.Namespace, audio_s: float) -> str | None:
    """Simulate the use of device memory until this process ends; return PyTorch's error message if it runs out.

    The memory is proportional to the length of the audio, and twice as much for a usual worker as for a lean one. The
    processes of a device share its memory: each writes its use to a file ``<device>.<pid>`` in a common folder, which
    the simulated devices read. Without a folder, each process has the device to itself.
    """
    if options.memory_per_s is None:
        return None
    factor = 1 if options.lean else 2
    needed_bytes = round(factor * audio_s * options.memory_per_s * _MIB)
    folder = options.ledger
    if folder is None:
        return refuse_memory(needed_bytes, options.device_bytes)
    with kernel_lock(folder / "ledger.lock"):
        used_bytes = simulated_memory_bytes(folder, options.device, without_pid=os.getpid())
        refusal = refuse_memory(needed_bytes + used_bytes, options.device_bytes)
        if refusal is None:
            (folder / f"{options.device}.{os.getpid()}").write_text(str(needed_bytes), encoding="ascii")
    return refusal


def refuse_memory(needed_bytes: int, device_bytes: int | None) -> str | None:
    """Return PyTorch's error message if a device does not have so much memory; None: it has."""
    if device_bytes is None or needed_bytes <= device_bytes:
        return None
    return f"CUDA out of memory: {needed_bytes / _MIB:.0f} MiB of {device_bytes / _MIB:.0f} MiB"


if __name__ == "__main__":
    main(sys.argv[1:])
