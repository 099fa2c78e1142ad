"""The demo engine's ears: every plain kind of WAV, FLAC, and honest about the rest."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import time
import wave
from pathlib import Path

import pytest
import soundfile
from rooms.root import BadInput
from rooms.workers import analyse, parse_arguments
from support.audio import make_wav

RATE = 8000


def write(path: Path, levels: list[tuple[float, float]], *, width: int = 2, channels: int = 1) -> str:
    """Write stretches of (seconds, loudness of full scale) in any sample width."""
    full = (1 << (8 * width - 1)) - 1
    raw = bytearray()
    for seconds, loudness in levels:
        for number in range(round(seconds * RATE)):
            value = round(full * loudness) * (1 if number % 2 else -1)
            sample = (value + 128).to_bytes(1, "little") if width == 1 else value.to_bytes(width, "little", signed=True)
            raw += sample * channels
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(bytes(raw))
    return str(path)


def ask(*questions: str, args: tuple[str, ...] = ()) -> list[dict[str, object]]:
    """Put the questions to a real worker process and return its answers, in the order of the questions."""
    with subprocess.Popen(
        [sys.executable, "-m", "badcjobs.workers.demo_worker", *args],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(json.dumps({"id": n, "audio": path}) + "\n" for n, path in enumerate(questions)))
        process.stdin.flush()
        events: list[dict[str, object]] = []
        while sum(event["event"] in ("done", "failed") for event in events) < len(questions):
            events.append(json.loads(process.stdout.readline()))
        process.stdin.close()
        events += map(json.loads, process.stdout)
    assert process.returncode == 0
    numbers = [(n, word) for n in range(len(questions)) for word in ("started", "answer")]
    assert [event["event"] for event in events if "id" not in event] == ["ready", "bye"]
    assert [event["id"] for event in events if "id" in event] == [n for n, _ in numbers]
    return [event for event in events if event["event"] in ("done", "failed")]


@pytest.mark.parametrize("width", [1, 2, 3, 4], ids=["8 bit", "16 bit", "24 bit", "32 bit"])
@pytest.mark.parametrize("channels", [1, 2], ids=["mono", "stereo"])
def test_loud_stretches_are_found_at_their_times_in_every_width(tmp_path: Path, width: int, channels: int) -> None:
    path = write(tmp_path / "a.wav", [(0.5, 0.01), (0.3, 0.8), (0.7, 0.02), (0.5, 0.4)], width=width, channels=channels)
    answer = analyse(path, 0.25)
    assert answer["audio_s"] == 2.0
    found = answer["detections"]
    assert isinstance(found, list)
    assert [row[:2] for row in found] == [[500, 800], [1500, 2000]]
    assert [row[2] for row in found] == ["LOUD", "LOUD"]
    assert [row[3] for row in found] == [pytest.approx(0.8, abs=0.01), pytest.approx(0.4, abs=0.01)]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_silence_has_its_length_and_nothing_in_it(tmp_path: Path, width: int) -> None:
    assert analyse(write(tmp_path / "a.wav", [(1, 0.0)], width=width), 0.25) == {"audio_s": 1.0, "detections": []}


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_full_scale_is_one(tmp_path: Path, width: int) -> None:
    [[start_ms, end_ms, _, score, _]] = analyse(write(tmp_path / "a.wav", [(0.5, 1.0)], width=width), 0.25)[
        "detections"
    ]  # type: ignore[misc]
    assert (start_ms, end_ms) == (0, 500)
    assert 0.98 <= score <= 1.0


def test_one_loud_channel_of_two_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(struct.pack("<2h", 0, 20_000) * RATE)
    assert [row[:2] for row in analyse(str(path), 0.25)["detections"]] == [[0, 1000]]  # type: ignore[attr-defined]


def test_the_threshold_decides_what_is_loud(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", [(0.5, 0.3), (0.5, 0.6)])
    assert len(analyse(path, 0.7)["detections"]) == 0  # type: ignore[arg-type]
    assert [row[:2] for row in analyse(path, 0.5)["detections"]] == [[500, 1000]]  # type: ignore[attr-defined]
    assert [row[:2] for row in analyse(path, 0.2)["detections"]] == [[0, 1000]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("bits", "code"), [(16, "h"), (32, "i")])
@pytest.mark.parametrize("riff", [b"RIFF", b"RF64"])
def test_loud_stretches_are_found_in_the_long_forms_of_wav(tmp_path: Path, bits: int, code: str, riff: bytes) -> None:
    samples = [0] * RATE + [1 << (bits - 2)] * RATE
    content = as_extensible(header(bits=bits, data=struct.pack(f"<{len(samples)}{code}", *samples)), 1, bits)
    if riff == b"RF64":  # sizes of 64 bits have a chunk of their own, and the usual places say so
        data = content.index(b"data")
        long_sizes = b"ds64" + struct.pack("<IQQQI", 28, 0, len(content) - data - 8, len(samples), 0)
        audio = content[data + 8 :]
        content = riff + b"\xff" * 4 + b"WAVE" + long_sizes + content[12:data] + b"data" + b"\xff" * 4 + audio
    (tmp_path / "a.wav").write_bytes(content)
    answer = analyse(str(tmp_path / "a.wav"), 0.25)
    assert (answer["audio_s"], [row[:2] for row in answer["detections"]]) == (2.0, [[1000, 2000]])


def test_what_is_no_number_is_silence(tmp_path: Path) -> None:
    samples = [float("nan")] * RATE + [0.5, float("nan")] * (RATE // 2)
    (tmp_path / "a.wav").write_bytes(header(kind=3, bits=32, data=struct.pack(f"<{len(samples)}f", *samples)))
    assert [row[:4:3] for row in analyse(str(tmp_path / "a.wav"), 0.25)["detections"]] == [[1000, 0.5]]


@pytest.mark.parametrize(("bits", "code"), [(32, "f"), (64, "d")])
@pytest.mark.parametrize("extensible", [False, True])
def test_loud_stretches_are_found_in_floats(tmp_path: Path, bits: int, code: str, extensible: bool) -> None:
    samples = [0.0] * RATE + [-0.5, 0.25] * RATE + [7.0] * RATE
    content = header(kind=3, bits=bits, data=struct.pack(f"<{len(samples)}{code}", *samples))
    content = as_extensible(content, 3, bits) if extensible else content
    (tmp_path / "a.wav").write_bytes(content)
    found = analyse(str(tmp_path / "a.wav"), 0.25)
    assert (found["audio_s"], found["detections"]) == (4.0, [[1000, 4000, "LOUD", 1.0, "Loud sound"]])


def flac_of(wav: str, subtype: str) -> str:
    path = wav.replace(".wav", ".flac")
    with soundfile.SoundFile(wav) as audio, soundfile.SoundFile(path, "w", RATE, audio.channels, subtype) as out:
        out.buffer_write(audio.buffer_read(dtype="int32"), dtype="int32")
    return path


@pytest.mark.parametrize(("width", "subtype"), [(2, "PCM_16"), (3, "PCM_24")])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_same_is_found_in_flac_as_in_wav(tmp_path: Path, width: int, subtype: str, channels: int) -> None:
    levels = [(0.5, 0.01), (0.3, 0.8), (9.25, 0.2501), (0.5, 0.4)]
    wav = write(tmp_path / "a.wav", levels, width=width, channels=channels)
    flac = flac_of(wav, subtype)
    assert analyse(flac, 0.25) == analyse(wav, 0.25) and analyse(flac, 0.25)["audio_s"] == 10.55
    tagged = tmp_path / "tagged.flac"
    tagged.write_bytes(b"ID3\x03\0\0\0\0\0\x0a" + bytes(10) + Path(flac).read_bytes())
    assert analyse(str(tagged), 0.25) == analyse(wav, 0.25)


def test_a_flac_that_nobody_can_read_is_told_with_the_line_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flac = flac_of(write(tmp_path / "a.wav", [(0.3, 0.8)]), "PCM_16")
    (tmp_path / "half.flac").write_bytes(Path(flac).read_bytes()[:60])
    [broken] = ask(str(tmp_path / "half.flac"))
    assert broken["error_class"] == "bad_audio" and "half.flac: " in str(broken["error"])
    (tmp_path / "soundfile.py").write_text("raise ImportError('none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [missing] = ask(flac)
    assert missing["error_class"] == "no_program"
    assert str(missing["error"]).startswith(
        f"{flac}: FLAC needs a decoder: the package soundfile cannot be loaded (none)\n"
    )
    assert "pip install 'badcjobs[audio]'" in str(missing["error"])


def test_a_header_without_audio_is_a_recording_of_no_length(tmp_path: Path) -> None:
    assert analyse(write(tmp_path / "a.wav", []), 0.25) == {"audio_s": 0.0, "detections": []}


def header(*, rate: int = RATE, bits: int = 16, channels: int = 1, kind: int = 1, data: bytes = b"\0" * 64) -> bytes:
    frame = max(1, channels * ((bits + 7) // 8))
    fmt = struct.pack("<HHIIHH", kind, channels, rate, rate * frame, frame, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + fmt + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def as_extensible(content: bytes, kind: int, bits: int) -> bytes:
    """Return the same WAV file with the long form of its description, as programs write it for 24 bits and more."""
    fmt = struct.pack("<HHIIHHHHIH14x", 0xFFFE, 1, RATE, RATE * bits // 8, bits // 8, bits, 22, bits, 4, kind)
    return content[:16] + struct.pack("<I", len(fmt)) + fmt + content[36:]


def good() -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(b"\1\2" * RATE)
    return stream.getvalue()


BAD = {
    "zero bytes": b"",
    "text": b"this is not audio at all" * 9,
    "cut in the header": good()[:30],
    "cut in the audio": good()[:-RATE],
    "cut in a sample": good()[:-3],
    "floats cut short": header(kind=3, bits=32)[:-9],
    "floats of 16 bits": header(kind=3, bits=16),
    "64 bit": header(bits=64),
    "40 bit": header(bits=40),
    "no rate": header(rate=0),
    "no channel": header(channels=0),
}


def test_a_header_of_a_stream_that_did_not_know_its_end_is_read_to_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(good()[:40] + b"\xff\xff\xff\xff" + good()[44:])
    [answer] = ask(str(tmp_path / "a.wav"))
    assert answer["audio_s"] == 1.0


def test_bad_audio_is_told_with_path_and_reason_and_the_worker_goes_on(tmp_path: Path) -> None:
    fine = write(tmp_path / "fine.wav", [(0.2, 0.9)])
    bad = []
    for name, content in BAD.items():
        bad.append(tmp_path / f"{name}.wav")
        bad[-1].write_bytes(content)
    bad.append(tmp_path / "gone.wav")
    bad.append(tmp_path)
    answers = ask(fine, *(question for path in bad for question in (str(path), fine)))
    for answer in answers[::2]:
        assert (answer["audio_s"], answer["detections"]) == (0.2, [[0, 200, "LOUD", 0.9, "Loud sound"]])
    assert len(answers[::2]) == len(bad) + 1
    for path, answer in zip(bad, answers[1::2], strict=True):
        assert answer["error_class"] == "bad_audio", path
        said = str(answer["error"])
        assert said.startswith(f"{path}: ") and len(said) > len(f"{path}: ") + 3, said
        assert not said.startswith(f"{path}:  "), "no reason"
        assert ("the file is empty" in said) == (path.name == "zero bytes.wav")


def test_a_file_name_with_anything_in_it_comes_through(tmp_path: Path) -> None:
    [answer] = ask(str(make_wav(tmp_path / 'été "x"\n☃.wav', 0.5)))
    assert answer["audio_s"] == 0.5


def test_burning_takes_the_time_it_was_told(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", [(0.1, 0.0)])
    start_s = time.monotonic()
    ask(path, path, args=("--burn-s=0.2",))
    assert time.monotonic() - start_s >= 0.4


def test_the_end_of_the_input_means_finish_this_one_and_leave_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.wav", [(0.1, 0.0)])
    orders = "".join(json.dumps({"id": n, "audio": path}) + "\n" for n in range(50))
    done = subprocess.run(
        [sys.executable, "-m", "badcjobs.workers.demo_worker", "--burn-s=0.3"],
        input=orders, capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    events = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert (events[0], events[-1]) == ("ready", "bye")
    assert events.count("started") == events.count("done") <= 2


@pytest.mark.parametrize("args", [["--burn-s=much"], ["--unknown"], ["extra"], ["--threshold"]])
def test_wrong_arguments_are_refused_before_any_worker_starts(args: list[str]) -> None:
    with pytest.raises(BadInput, match="wrong arguments for the demo engine") as refused:
        parse_arguments(args)
    assert "--burn-s" in (refused.value.fix or "")
