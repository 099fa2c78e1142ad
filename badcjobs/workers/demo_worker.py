"""The worker process of the demo engine: finds loud sounds in WAV files (standard library) and others (soundfile).

It is started as ``python -m badcjobs.workers.demo_worker``, and reads and writes the same lines as ``hawkears_worker``.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from badcjobs.devices.simulated import simulated_memory_bytes
from badcjobs.errors import BadInput
from badcjobs.sources.audio_formats import begins_like_audio, read_wav_header
from badcjobs.sources.cutter import NoDecoder, load_soundfile
from badcjobs.store.run_lock import folder_lock
from badcjobs.workers.hawkears_worker import OrderPipe
from badcjobs.workers.retry import BAD_AUDIO, NO_PROGRAM

_WINDOW_S = 0.1
_MIB = 2**20
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_ARRAY_TYPES = {_WHOLE: {8: "B", 16: "h", 24: "h", 32: "i"}, _FLOAT: {32: "f", 64: "d"}}  # by bits per sample
_BLOCK = 1 << 16  # frames


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"wrong arguments for the demo engine: {message}", fix=self.format_usage().strip())


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse the values of --engine-arg for the demo engine."""
    parser = _Parser(prog="--engine-arg", add_help=False)
    parser.add_argument("--burn-s", type=float, default=0.0, help="seconds of work per chunk")
    parser.add_argument("--threshold", type=float, default=0.25, help="lowest loudness of a detection, 1 is full scale")
    parser.add_argument("--room-s", type=float, help="simulate: audio of this length just fits, lean")
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
        path = order["audio"]
        pipe.send("started", id=order["id"])
        try:
            answer = analyse(path, options.threshold)
            if refusal := take_memory(options, answer["audio_s"]):
                answer = {"error": refusal}
        except NoDecoder as error:
            install = "pip install 'badcjobs[audio]'   (in the environment of badcjobs)"
            what = f"it is not WAV and needs a decoder: {error}\n{install}"
            answer = {"error_class": NO_PROGRAM, "error": f"{path}: {what}"}
        except (OSError, ValueError) as error:
            what = f"{error} (the demo engine reads WAV with PCM or float samples, and what soundfile reads)"
            answer = {"error_class": BAD_AUDIO, "error": f"{path}: {what}"}
        burn(options.burn_s)
        pipe.send("failed" if "error" in answer else "done", id=order["id"], **answer)
    pipe.send("bye")


def analyse(path: str, threshold: float) -> dict[str, Any]:
    """Return the length of an audio file and its loud sounds as [start_ms, end_ms, label, score, name]."""
    with Path(path).open("rb") as file:
        head = file.read(12)
        if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:] == b"WAVE":
            kind, channels, rate, bits, raw = read_wav(file)
        elif begins_like_audio(head):
            kind, channels, rate, bits, raw = read_with_soundfile(path)
        else:
            raise ValueError("the file is empty" if not head else "the file is not audio")
    audio_s = len(raw) * 8 / bits / channels / rate
    window = max(1, int(_WINDOW_S * rate)) * channels
    found: list[list[int | str | float]] = []
    window_ms, start = round(_WINDOW_S * 1000), 0
    for is_loud, group in groupby(peaks(kind, bits, raw, window), lambda level: level >= threshold):
        levels = list(group)
        end = start + len(levels)
        if is_loud:
            found.append([start * window_ms, end * window_ms, "LOUD", round(max(levels), 3), "Loud sound"])
        start = end
    return {"audio_s": audio_s, "detections": found}


def read_wav(file: BinaryIO) -> tuple[int, int, int, int, bytes]:
    """Return format, channels, rate, bits per sample and frames of a WAV file; ``wave`` reads too few formats."""
    header = read_wav_header(file)
    if header.missing_frames:
        raise ValueError("the audio is shorter than its header states")
    chunk = header.format_chunk
    kind, channels, rate, bits = struct.unpack("<HHI6xH", chunk[:16].ljust(16, b"\0"))
    kind = chunk[24] if kind == _EXTENSIBLE and len(chunk) > 25 else kind
    if not (channels and rate) or bits not in _ARRAY_TYPES.get(kind, {}):
        raise ValueError(f"WAV format {kind} with {bits} bits per sample at {rate} Hz is not supported")
    file.seek(header.data_start)
    return kind, channels, rate, bits, file.read(header.frames * header.frame_bytes)


def read_with_soundfile(path: str) -> tuple[int, int, int, int, bytes]:
    """Return the same for other formats, in 16 bits; raise NoDecoder if soundfile is not installed."""
    soundfile = load_soundfile()
    try:
        with soundfile.SoundFile(path) as audio:
            blocks = iter(lambda: bytes(audio.buffer_read(_BLOCK, dtype="int16")), b"")
            rate, channels, frames, raw = audio.samplerate, audio.channels, audio.frames, b"".join(blocks)
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from error
    if len(raw) < 2 * channels * frames:
        raise ValueError("the audio is shorter than its header states")
    return _WHOLE, channels, rate, 16, raw


def peaks(kind: int, bits: int, raw: bytes, window: int) -> Iterator[float]:
    """Yield the peak of each window, from 0 to 1 (full scale); NaN counts as silence."""
    if bits == 24:
        # Drop the lowest byte of each sample: 16 bits are enough here.
        high = bytearray(len(raw) // 3 * 2)
        high[0::2], high[1::2] = raw[1::3], raw[2::3]
        raw = bytes(high)
    samples = array(_ARRAY_TYPES[kind][bits], raw)
    middle, full = (128, 128) if samples.typecode == "B" else (0, 1 << (8 * samples.itemsize - 1))
    for start in range(0, len(samples), window):
        part: Sequence[float] = samples[start : start + window]
        if kind == _FLOAT:
            part, full = [sample if sample == sample else 0.0 for sample in part], 1
        yield min(1.0, max(max(part) - middle, middle - min(part)) / full)


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
    per_s, device_bytes, folder = options.memory_per_s, options.device_bytes, options.ledger
    if options.room_s is not None:
        per_s, device_bytes, folder = 1.0, round(options.room_s * _MIB), None
    if per_s is None:
        return None
    wanted = round((audio_s if options.lean else 2 * audio_s) * per_s * _MIB)
    with nullcontext() if folder is None else folder_lock(folder):
        others = 0 if folder is None else simulated_memory_bytes(folder, options.device, without_pid=os.getpid())
        if device_bytes is not None and wanted + others > device_bytes:
            total, free = device_bytes / _MIB, max(0, device_bytes - others) / _MIB
            tried = f"CUDA out of memory. Tried to allocate {wanted / _MIB:.0f} MiB."
            return f"{tried} GPU 0 has a total capacity of {total:.0f} MiB of which {free:.0f} MiB is free"
        if folder is not None:
            (folder / f"{options.device}.{os.getpid()}").write_text(str(wanted), encoding="ascii")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
