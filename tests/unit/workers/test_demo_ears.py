"""The demo engine's ears: every plain kind of WAV, FLAC, and honest about the rest."""

from __future__ import annotations

import struct
import sys
from array import array
from pathlib import Path

import pytest
import soundfile
from rooms.devices import simulated_memory_bytes
from rooms.sources import NoDecoder
from rooms.workers import analyse, parse_arguments, take_memory
from support.pages import Pages

RATE = 8000
LEVELS = [(0.5, 0.01), (0.3, 0.8), (0.7, 0.2), (0.5, 0.4)]  # seconds, loudness
LONGER = [*LEVELS, (9.25, 0.2501), (0.5, 0.4)]  # than a block of FLAC
WAV_KINDS = ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")
KINDS = [(form, kind) for form in ("WAV", "WAVEX", "RF64") for kind in WAV_KINDS]
KINDS += [("FLAC", "PCM_16"), ("FLAC", "PCM_24")]


def sound(
    path: Path, *levels: tuple[float, float], form: str = "WAV", kind: str = "PCM_16", channels: int = 1
) -> bytes:
    """Write audio whose last channel alone is loud."""
    values, quiet = array("d"), [0.0] * (channels - 1)
    for seconds, loudness in levels:
        values += array("d", [*quiet, -loudness, *quiet, loudness]) * round(seconds * RATE / 2)
    with soundfile.SoundFile(path, "w", RATE, channels, kind, format=form) as file:
        file.buffer_write(values.tobytes(), dtype="float64")
    return path.read_bytes()


def heard(
    path: Path, content: bytes | None = None, threshold: float = 0.25, digits: int = 2
) -> tuple[float, list[list[object]]]:
    if content is not None:
        path.write_bytes(content)
    answer = analyse(str(path), threshold)
    return answer["audio_s"], [[*row[:3], round(row[3], digits), row[4]] for row in answer["detections"]]


def test_loud_stretches_are_found_at_their_times_in_every_kind_of_audio(tmp_path: Path) -> None:
    path = tmp_path / "audio"
    for form, kind in KINDS:
        levels, found = (LONGER, (11.75, 11_800)) if form == "FLAC" else (LEVELS, (2.0, 2000))
        expected = found[0], [[500, 800, "LOUD", 0.8, "Loud sound"], [1500, found[1], "LOUD", 0.4, "Loud sound"]]
        for channels in (1, 2):
            content = sound(path, *levels, form=form, kind=kind, channels=channels)
            assert heard(path, digits=1 if kind == "PCM_U8" else 2) == expected, (form, kind, channels)
        sound(path, (1, 0.0), form=form, kind=kind)
        assert heard(path) == (1.0, []), (form, kind)
        sound(path, (0.5, 1.0), form=form, kind=kind)
        ((start_ms, end_ms, _, score, _),) = heard(path)[1]
        assert (start_ms, end_ms) == (0, 500) and 0.98 <= score <= 1.0, (form, kind)  # type: ignore[operator]
    assert heard(path, b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + content) == expected, "tags before the audio"
    with pytest.raises(ValueError):
        heard(path, content[: len(content) // 2])


def test_the_threshold_decides_and_odd_headers_are_read_as_far_as_they_make_sense(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    steps = sound(path, (0.5, 0.3), (0.5, 0.6))
    found = [[row[:2] for row in heard(path, threshold=limit)[1]] for limit in (0.7, 0.5, 0.2)]
    assert found == [[], [[500, 1000]], [[0, 1000]]]
    stream = steps.replace(b"data" + struct.pack("<I", 2 * RATE), b"data\xff\xff\xff\xff")
    assert heard(path, stream)[0] == 1.0, "a header of a stream that did not know its end"
    slow = steps[:24] + struct.pack("<I", 4) + steps[28:]
    assert heard(path, slow)[0] == 2000.0, "windows of at least a sample"
    sound(path, (0.2, 0.5), kind="FLOAT")
    assert heard(path, threshold=0.5)[1][0][:2] == [0, 200], "as loud as the threshold"
    sound(path)
    assert heard(path) == (0.0, [])
    sound(path, (1, float("nan")), (1, 0.5), (0.01, 7.0), kind="FLOAT")
    assert heard(path) == (2.01, [[1000, 2100, "LOUD", 1.0, "Loud sound"]])


def test_bad_audio_is_refused_with_the_reason(tmp_path: Path, pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.wav"
    good = sound(path, (1, 0.5))

    def patched(at: int, value: int, size: int = 2) -> bytes:
        return good[:at] + value.to_bytes(size, "little") + good[at + size :]

    bad = {
        "zero bytes": b"", "text": b"this is not audio at all" * 9, "AVI": b"RIFF\x24\0\0\0AVI LIST" * 9,
        "cut in the header": good[:30], "cut in the audio": good[:-RATE], "cut in a sample": good[:-3],
        "floats of 16 bits": patched(20, 3), "64 bit": patched(34, 64), "no rate": patched(24, 0, 4),
        "no channel": patched(22, 0), "FLAC without a decoder": b"fLaC",
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "soundfile", None)
    lines = []
    for name, content in bad.items():
        with pytest.raises((ValueError, NoDecoder)) as refused:
            heard(path, content)
        lines.append(f"{name}: {str(refused.value).partition(' (import')[0]}")
    pages({"refused.txt": "\n".join(lines)})


def test_simulated_memory_is_shared_by_the_processes_of_a_device(tmp_path: Path) -> None:
    (tmp_path / "GPU-1.1").write_text(str(300 * 2**20))  # process 1 runs on every machine
    (tmp_path / "GPU-2.1").write_text(str(900 * 2**20))
    device = [f"--device-bytes={1000 * 2**20}", "--device=GPU-1", "--memory-per-s=10"]
    usual = [*device, f"--ledger={tmp_path}"]
    assert take_memory(parse_arguments(usual), 36) == (
        "CUDA out of memory. Tried to allocate 720 MiB. GPU 0 has a total capacity of 1000 MiB of which 700 MiB is free"
    )
    for words, fits_s, too_long_s in (
        (usual, 35, 35.1), ([*usual, "--lean"], 70, 70.1), (device, 50, 50.1),
        (["--room-s=40"], 20, 21), (["--room-s=40", "--lean"], 40, 41),
    ):  # fmt: skip
        assert take_memory(parse_arguments(words), fits_s) is None
        assert take_memory(parse_arguments(words), too_long_s) is not None
    assert simulated_memory_bytes(tmp_path, "GPU-1") == 1000 * 2**20, "what it took stays noted"
    for no_limit in (["--memory-per-s=10"], device[:2]):
        assert take_memory(parse_arguments(no_limit), 1e9) is None
