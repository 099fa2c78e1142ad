"""The demo engine's ears: every plain kind of WAV, FLAC, and honest about the rest."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
import soundfile
from rooms.devices import simulated_memory_bytes
from rooms.sources import NoDecoder
from rooms.workers import analyse, parse_arguments, take_memory

RATE = 8000
LEVELS = [(0.5, 0.01), (0.3, 0.8), (0.7, 0.2), (0.5, 0.4)]  # seconds, loudness of full scale
FOUND = [[500, 800, "LOUD", 0.8, "Loud sound"], [1500, 2000, "LOUD", 0.4, "Loud sound"]]


def samples(levels: list[tuple[float, float]], bits: int, channels: int = 1, *, floats: bool = False) -> bytes:
    full, raw = (1 << (bits - 1)) - 1, bytearray()
    for seconds, loudness in levels:
        for number in range(round(seconds * RATE)):
            sign = 1 if number % 2 else -1
            if floats:
                one = struct.pack("<f" if bits == 32 else "<d", loudness * sign)
            elif bits == 8:
                one = bytes([round(127 * loudness) * sign + 128])
            else:
                one = (round(full * loudness) * sign).to_bytes(bits // 8, "little", signed=True)
            silence = b"\x80" if bits == 8 else bytes(len(one))
            raw += silence * (channels - 1) + one  # one loud channel is enough
    return bytes(raw)


def wav(
    data: bytes, bits: int = 16, channels: int = 1, *, kind: int = 1, rate: int = RATE, long: bool = False
) -> bytes:
    """Make a WAV file; ``long``: with the description that programs write for 24 bits and more, and 64-bit sizes."""
    frame = max(1, channels * ((bits + 7) // 8))
    form = struct.pack("<HHIIHH", 0xFFFE if long else kind, channels, rate, rate * frame, frame, bits)
    form += struct.pack("<HHIH14x", 22, bits, 4, kind) if long else b""
    size = 0xFFFFFFFF if long else len(data)
    body = b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", size) + data
    sizes = b"ds64" + struct.pack("<IQQQI", 28, 0, len(data), len(data) // frame, 0) if long else b""
    return (b"RF64" if long else b"RIFF") + struct.pack("<I", len(body)) + b"WAVE" + sizes + body


def heard(path: Path, content: bytes, threshold: float = 0.25) -> tuple[float, list[list[object]]]:
    path.write_bytes(content)
    answer = analyse(str(path), threshold)
    rows = [[*row[:3], round(row[3], 2), row[4]] for row in answer["detections"]]
    return answer["audio_s"], rows


@pytest.mark.parametrize(
    ("bits", "floats"), [(8, False), (16, False), (24, False), (32, False), (32, True), (64, True)]
)
@pytest.mark.parametrize(("channels", "long"), [(1, False), (2, False), (1, True)])
def test_loud_stretches_are_found_at_their_times_in_every_kind_of_wav(
    tmp_path: Path, bits: int, floats: bool, channels: int, long: bool
) -> None:
    data = samples(LEVELS, bits, channels, floats=floats)
    content = wav(data, bits, channels, kind=3 if floats else 1, long=long)
    assert heard(tmp_path / "a.wav", content) == (2.0, FOUND)
    quiet = wav(samples([(1, 0.0)], bits, floats=floats), bits, kind=3 if floats else 1)
    assert heard(tmp_path / "quiet.wav", quiet) == (1.0, [])
    full = wav(samples([(0.5, 1.0)], bits, floats=floats), bits, kind=3 if floats else 1)
    ((start_ms, end_ms, _, score, _),) = heard(tmp_path / "full.wav", full)[1]
    assert (start_ms, end_ms) == (0, 500) and 0.98 <= score <= 1.0  # type: ignore[operator]


def test_the_threshold_decides_and_odd_headers_are_read_as_far_as_they_make_sense(tmp_path: Path) -> None:
    path, steps = tmp_path / "a.wav", wav(samples([(0.5, 0.3), (0.5, 0.6)], 16))
    assert [[row[:2] for row in heard(path, steps, limit)[1]] for limit in (0.7, 0.5, 0.2)] == [
        [], [[500, 1000]], [[0, 1000]],
    ]  # fmt: skip
    assert heard(path, wav(samples([(0.2, 0.5)], 16)), 0.5)[1][0][:2] == [0, 200], "as loud as the threshold"
    assert heard(path, wav(b"")) == (0.0, [])
    odd = [float("nan")] * RATE + [0.5, float("nan")] * (RATE // 2) + [7.0] * 80
    assert heard(path, wav(struct.pack(f"<{len(odd)}f", *odd), 32, kind=3)) == (
        2.01, [[1000, 2100, "LOUD", 1.0, "Loud sound"]],
    )  # fmt: skip
    stream = steps.replace(b"data" + struct.pack("<I", 2 * RATE), b"data\xff\xff\xff\xff")
    assert heard(path, stream)[0] == 1.0, "a header of a stream that did not know its end"
    assert heard(path, wav(samples([(0.1, 0.9)], 16), rate=4))[0] == 200.0, "windows of at least a sample"


@pytest.mark.parametrize(("bits", "subtype"), [(16, "PCM_16"), (24, "PCM_24")])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_same_is_found_in_flac_as_in_wav(tmp_path: Path, bits: int, subtype: str, channels: int) -> None:
    levels = [*LEVELS, (9.25, 0.2501), (0.5, 0.4)]  # longer than a block
    expected = heard(tmp_path / "a.wav", wav(samples(levels, bits, channels), bits, channels))
    flac = tmp_path / "a.flac"
    with (
        soundfile.SoundFile(tmp_path / "a.wav") as audio,
        soundfile.SoundFile(flac, "w", RATE, channels, subtype) as out,
    ):
        out.buffer_write(audio.buffer_read(dtype="int32"), dtype="int32")
    content = flac.read_bytes()
    assert heard(flac, content) == expected and expected[0] == 11.75
    assert heard(flac, b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + content) == expected, "tags before the audio"
    with pytest.raises(ValueError):
        heard(flac, content[: len(content) // 2])


def test_a_flac_without_a_decoder_is_a_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(NoDecoder, match="the package soundfile cannot be loaded"):
        heard(tmp_path / "a.flac", b"fLaC")


GOOD = wav(samples([(1, 0.5)], 16))
BAD = {
    "zero bytes": (b"", "the file is empty"),
    "text": (b"this is not audio at all" * 9, "the file is neither WAV nor FLAC"),
    "AVI": (b"RIFF\x24\0\0\0AVI LIST" * 9, "the file is neither WAV nor FLAC"),
    "cut in the header": (GOOD[:30], "."),
    "cut in the audio": (GOOD[:-RATE], "the audio is shorter than its header states"),
    "cut in a sample": (GOOD[:-3], "the audio is shorter than its header states"),
    "floats of 16 bits": (wav(bytes(64), 16, kind=3), "WAV format 3 with 16 bits per sample at 8000 Hz"),
    "64 bit": (wav(bytes(64), 64), "WAV format 1 with 64 bits"),
    "no rate": (wav(bytes(64), rate=0), "."),
    "no channel": (wav(bytes(64), channels=0), "."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_audio_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    content, why = BAD[name]
    with pytest.raises(ValueError, match=why):
        heard(tmp_path / "a.wav", content)


def test_simulated_memory_is_shared_by_the_processes_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "GPU-1.1").write_text(str(300 * 2**20))  # process 1 runs on every machine
    (tmp_path / "GPU-2.1").write_text(str(900 * 2**20))
    device = [f"--device-bytes={1000 * 2**20}", "--device=GPU-1"]
    usual = parse_arguments([*device, "--memory-per-s=10", f"--ledger={tmp_path}"])
    lean = parse_arguments([*device, "--memory-per-s=10", f"--ledger={tmp_path}", "--lean"])
    alone = parse_arguments([*device, "--memory-per-s=10"])
    no_limit, nothing = parse_arguments(["--memory-per-s=10"]), parse_arguments(device)
    assert take_memory(usual, 36) == (
        "CUDA out of memory. Tried to allocate 720 MiB. GPU 0 has a total capacity of 1000 MiB of which 700 MiB is free"
    )
    for options, fits_s, too_long_s in ((usual, 35, 35.1), (lean, 70, 70.1), (alone, 50, 50.1)):
        assert take_memory(options, fits_s) is None
        assert take_memory(options, too_long_s) is not None
    assert simulated_memory_bytes(tmp_path, "GPU-1") == 1000 * 2**20, "what it took stays noted"
    assert take_memory(no_limit, 1e9) is None and take_memory(nothing, 1e9) is None
    room = parse_arguments(["--room-s=40", "--lean"])
    assert (take_memory(room, 40), take_memory(replace_lean(room), 20)) == (None, None)
    assert take_memory(room, 41) and take_memory(replace_lean(room), 21)


def replace_lean(options: object) -> object:
    return type(options)(**{**vars(options), "lean": False})
