"""Audio as recorders leave it: how long it is, whatever its header says, and pieces of it, exact to the sample."""

import io
import itertools
import math
import os
import random
import re
import struct
import sys
import tracemalloc
import wave
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import sources
from rooms.sources import AudioCutter, CannotCut, NoDecoder, NotWav, read_header, read_wav_header
from support.audio import make_wav
from support.cases import read_data

ALONE = AudioCutter("")
RATE = 11_025  # of which no whole number of milliseconds is a whole number of samples
UNTOLD = 0xFFFFFFFF
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
SOUND = bytes(range(250)) * 80  # 20,000 bytes
LIST = b"nothing was heard today"


def form(kind=PCM, channels=1, bits=16, rate=1000, per_s=None):
    frame = channels * bits // 8
    text = struct.pack("<HHIIHH", kind, channels, rate, rate * frame if per_s is None else per_s, frame, bits)
    more = struct.pack("<HHIH14s", 22, bits, 0, PCM, b"\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71")
    return text + more if kind == EXTENSIBLE else text


def chunk(name, content, size=None):
    return struct.pack("<4sI", name, len(content) if size is None else size) + content + b"\0" * (len(content) & 1)


def riff(*chunks, magic=b"RIFF", size=None):
    body = b"WAVE" + b"".join(chunks)
    return struct.pack("<4sI", magic, len(body) if size is None else size) + body


def wav(content=SOUND, size=None, *after, fmt=None):
    return riff(chunk(b"fmt ", fmt or form()), chunk(b"data", content, size), *after)


def flac(samples, rate=44100, channels=1, bits=16, block=0x80, tags=0):
    streaminfo = struct.pack(">HH6xQ16x", 4096, 4096, rate << 44 | channels - 1 << 41 | bits - 1 << 36 | samples)
    before = b"ID3\x04\0\0" + bytes([0, 0, tags >> 7, tags & 127]) + b"t" * tags if tags else b""
    return before + b"fLaC" + bytes([block, 0, 0, len(streaminfo)]) + streaminfo + b"frames"


def make_audio(text):
    """Return a file from its parts: ``fmt bits=8 | data 0 size=9`` has no sound, although its header says 9 bytes."""
    chunks, whole, content = list[bytes](), dict[str, Any](), b""
    for name, *words in (part.split() for part in text.split(" | ")):
        options = {key: int(value, 0) for key, _, value in (word.partition("=") for word in words) if value}
        length = next((int(word) for word in words if "=" not in word), None)
        if name == "flac":
            content = flac(**options)
        elif name == "cut":
            return (content or riff(*chunks, **whole))[:length]
        elif name in ("RIFF", "RF64", "BW64"):
            whole = {"magic": name.encode(), **options}
        elif name == "fmt":
            chunks.append(chunk(b"fmt ", form(**options)[:length]))
        elif name == "ds64":
            chunks.append(chunk(b"ds64", struct.pack("<QQQI", 0, length, 0, 0)))
        else:
            inside = (SOUND if name == "data" else LIST)[:length]
            tag = name.encode().decode("unicode_escape").encode()
            chunks += [chunk(tag, inside, options.get("size"))] * options.get("times", 1)
    return content or riff(*chunks, **whole)


def test_the_header_of_every_file_tells_what_is_there_and_what_should_be(tmp_path, pages):
    lines = []
    for name, _, parts in (line.partition(": ") for line in read_data("audio_files.txt").splitlines()):
        path = tmp_path / "a.wav"
        path.write_bytes(make_audio(parts))
        header = read_header(path)
        said = f"{header.duration_s} s" + (f", only {header.there_s} s there" if header.there_s is not None else "")
        said += f", {header.sample_rate_hz} Hz × {header.channels}" + (", unfinished" if header.unfinished else "")
        said += f" — {header.problem}" if header.fault else ""
        lengths = f"{ALONE.length_s(path)} of {ALONE.promised_s(path)} s"
        sizes = ", ".join(str(ALONE.size_bytes(path, *part)) for part in ((0, math.inf), (0.5, 0.75), (3, 2)))
        try:
            with path.open("rb") as file:
                wav = read_wav_header(file)
            frames = f"{wav.frames} of {wav.frame_bytes} from {wav.data_start}, {wav.missing_frames} missing"
        except NotWav as problem:
            frames = str(problem)
        lines.append(f"{name}: {said} | cut: {lengths}; {sizes} bytes | {frames}")
    for path in (tmp_path, tmp_path / "gone.wav"):
        lines.append(f"{read_header(path).problem}: {ALONE.length_s(path)} {ALONE.promised_s(path)}")
    pages({"headers.txt": "\n".join(lines)})


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_rubbish_is_refused_and_nothing_worse(rubbish):
    for content in (rubbish, b"RIFF" + rubbish, riff(rubbish), riff(chunk(b"fmt ", form()), rubbish)):
        try:
            header = read_wav_header(io.BytesIO(content))
        except NotWav:
            continue
        assert 0 <= header.frames * header.frame_bytes <= len(content)


def frames_of(content):
    header = read_wav_header(io.BytesIO(content))
    return content[header.data_start : header.data_start + header.frames * header.frame_bytes]


@settings(max_examples=60)
@given(
    audio=st.binary(max_size=4000), shape=st.sampled_from([(8, 1), (16, 1), (24, 1), (24, 2), (32, 2), (64, 1)]),
    kind=st.sampled_from([PCM, FLOAT, EXTENSIBLE]), places=st.lists(st.floats(0, 1.1), max_size=4),
    junk=st.binary(max_size=5), broken=st.booleans(),
)  # fmt: skip
def test_the_pieces_of_any_wav_together_are_its_frames(audio, shape, kind, places, junk, broken, tmp_path_factory):
    fmt = form(kind, shape[1], shape[0], RATE)
    content = riff(chunk(b"junk", junk), chunk(b"fmt ", fmt), chunk(b"data", audio, 0 if broken else None))
    source, target = (tmp_path_factory.getbasetemp() / name for name in ("Grönland 鳥.wav", "piece.wav"))
    source.write_bytes(content)
    frames = frames_of(content)
    length_s = len(frames) / (shape[0] * shape[1] // 8) / RATE
    joined = b""
    for start_s, end_s in itertools.pairwise([0.0, *sorted(place * length_s for place in places), math.inf]):
        try:
            ALONE.cut(source, start_s, end_s, target)
        except CannotCut:
            last = length_s if end_s == math.inf else min(length_s, end_s)
            assert not target.exists() and round(start_s * RATE) >= round(last * RATE)
            continue
        piece = target.read_bytes()
        joined += frames_of(piece)
        assert read_wav_header(io.BytesIO(piece)).format_chunk == fmt
        assert len(piece) % 2 == 0 and struct.unpack("<I", piece[4:8])[0] + 8 == len(piece)
        assert ALONE.size_bytes(source, start_s, end_s) - len(piece) in (0, -1)
    assert joined == frames


def test_a_piece_can_be_read_by_others_and_a_long_file_is_never_in_memory_as_a_whole(tmp_path):
    source = make_wav(tmp_path / "a.wav", 2, loud=[(0.5, 1.5)])
    ALONE.cut(source, 0.5, 1.5, tmp_path / "b.wav")
    with wave.open(str(source)) as whole, wave.open(str(tmp_path / "b.wav")) as piece:
        whole.setpos(4000)
        assert piece.readframes(10**6) == whole.readframes(8000)
    with source.open("wb") as file:
        file.write(wav(b"", 30_000_000))
        file.truncate(30_000_044)
    tracemalloc.start()
    ALONE.cut(source, 1, math.inf, tmp_path / "b.wav")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "b.wav").stat().st_size == 30_000_044 - 2000
    assert peak < 5_000_000


def test_a_piece_of_more_than_four_gigabytes_says_its_size_as_long_files_do():
    for fmt, head_bytes in ((form(channels=2), 44), (form(FLOAT, bits=32), 56)):
        header = read_wav_header(io.BytesIO(wav(fmt=fmt)))
        most = (UNTOLD - 1 - (head_bytes - 8)) // 4
        short, long = sources.make_head(header, most), sources.make_head(header, most + 1)
        assert (short[:8], len(short)) == (b"RIFF" + struct.pack("<I", head_bytes - 8 + 4 * most), head_bytes)
        assert short[-8:] == b"data" + struct.pack("<I", 4 * most)
        assert (long[:8], long[-8:]) == (b"RF64" + b"\xff" * 4, b"data" + b"\xff" * 4)
        size = 4 * (most + 1)
        assert struct.unpack("<IQQQ", long[16:44]) == (28, len(long) - 8 + size, size, most + 1)
        assert frames_of(long + SOUND) == SOUND
        assert (b"fact" in short) is (fmt[:2] == b"\x03\0")


def test_audio_is_repeated_up_to_the_wanted_length(tmp_path):
    for channels, length_s in itertools.product((1, 2), (1.3, 0.25, 0.0001, 0.5)):
        once, frames = SOUND[: 500 * 2 * channels], max(1, round(length_s * 1000))
        (tmp_path / "a.wav").write_bytes(wav(once, fmt=form(channels=channels)))
        sources.write_repeated(tmp_path / "a.wav", length_s, tmp_path / "b.wav")
        assert frames_of((tmp_path / "b.wav").read_bytes()) == (once * 3)[: frames * 2 * channels]
    (tmp_path / "odd.wav").write_bytes(wav(SOUND[:3], fmt=form(bits=8)))
    sources.write_repeated(tmp_path / "odd.wav", 0.005, tmp_path / "b.wav")
    assert (tmp_path / "b.wav").read_bytes()[-6:] == SOUND[:3] + SOUND[:2] + b"\0"
    for content in (wav(b""), b"no audio"):
        (tmp_path / "a.wav").write_bytes(content)
        with pytest.raises(NotWav):
            sources.write_repeated(tmp_path / "a.wav", 5, tmp_path / "c.wav")
        assert not (tmp_path / "c.wav").exists()


def test_what_is_not_there_cannot_be_cut_and_leaves_nothing(tmp_path, pages):
    target, lines = tmp_path / "b.wav", []
    os.mkfifo(tmp_path / "pipe.wav")
    for name, size in (("ten", 20_000), ("half", 40_000), ("nearly", 22_000), ("head", 20_000)):
        (tmp_path / f"{name}.wav").write_bytes(wav(b"" if name == "head" else SOUND, size))
    for case in (
        "ten.wav 9-60", "ten.wav 10-12", "ten.wav 5-5", "half.wav 8-12", "half.wav 10-12", "half.wav 19.9-25",
        "half.wav 20-25", "nearly.wav 10.5-12", "head.wav 0-10", "gone.wav 0-1", "pipe.wav 0-1", ". 0-1",
    ):  # fmt: skip
        name, start_s, end_s = re.split("[ -]", case)
        try:
            ALONE.cut(tmp_path / name, float(start_s), float(end_s), target)
            said = f"{ALONE.length_s(target)} s"
            target.unlink()
        except (CannotCut, OSError) as error:
            said = f"{type(error).__name__}: {error}"
        assert not target.exists()
        lines.append(f"{case}: {said}")
    pages({"refusals.txt": "\n".join(lines).replace(str(tmp_path), "HERE")})
    with pytest.raises(OSError):
        ALONE.size_bytes(tmp_path / "pipe.wav", 0, 1)
    with pytest.raises(OSError):
        ALONE.cut(tmp_path / "ten.wav", 0, 1, target / "x")
    header = read_wav_header(io.BytesIO(wav()))
    with pytest.raises(EOFError, match=r"shorter while it was read \(missing bytes: 100\)"):
        sources.copy_frames(io.BytesIO(wav()[:-100]), header, 0, 10_000, target)


def samples_of(path, dtype="int16"):
    with soundfile.SoundFile(path) as audio:
        return bytes(audio.buffer_read(dtype=dtype))


@pytest.mark.parametrize("bits", [16, 24, 8])
def test_flac_is_cut_to_the_sample_and_without_loss(tmp_path, bits):
    samples = [(n * 37 % 2**bits - 2 ** (bits - 1)) << (32 - bits) for n in range(RATE * 8)]
    subtype = {8: "PCM_S8", 16: "PCM_16", 24: "PCM_24"}[bits]
    data = struct.pack(f"<{len(samples)}i", *samples)
    with soundfile.SoundFile(tmp_path / "a.flac", "w", RATE, 1, subtype) as out:
        out.buffer_write(data, dtype="int32")
    assert ALONE.length_s(tmp_path / "a.flac") == 8.0
    assert ALONE.size_bytes(tmp_path / "a.flac", 1, 3) == 2 * RATE * (4 if bits == 24 else 2)
    for start_s, end_s, last in ((0.777, 7.001, round(7.001 * RATE)), (0.001, math.inf, 8 * RATE), (7.5, 99, 8 * RATE)):
        ALONE.cut(tmp_path / "a.flac", start_s, end_s, tmp_path / "b.wav")
        assert samples_of(tmp_path / "b.wav", "int32") == data[4 * round(start_s * RATE) : 4 * last]
        with wave.open(str(tmp_path / "b.wav")) as plain:  # for engines that read nothing but PCM
            assert plain.getsampwidth() == (4 if bits == 24 else 2)
    with pytest.raises(CannotCut, match=r"a\.flac has 8\.000 s of audio and nothing after 8\.000 s"):
        ALONE.cut(tmp_path / "a.flac", 8, 9, tmp_path / "c.wav")
    os.truncate(tmp_path / "a.flac", (tmp_path / "a.flac").stat().st_size // 2)
    with pytest.raises(CannotCut, match=r"a\.flac cannot be decoded from 7\.5 s to 8 s: it is truncated or damaged"):
        ALONE.cut(tmp_path / "a.flac", 7.5, 8.0, tmp_path / "c.wav")
    assert not (tmp_path / "c.wav").exists()


@pytest.mark.parametrize("sound", [(0.01, 1, 48000), (3.7, 2, 12345), (3.0, 1, 250_000), (0.5, 1, 9_000)])
@pytest.mark.parametrize("tags", [b"", b"ID3\x04\0\0" + bytes([0, 0, 1, 2]) + b"t" * 130])
def test_a_flac_that_does_not_say_its_length_is_measured_and_cut(tmp_path, sound, tags):
    seconds, channels, rate = sound
    source, frames = tmp_path / "a.flac", round(seconds * rate)
    samples = random.Random(1).randbytes(2 * channels * frames)
    with soundfile.SoundFile(source, "w", rate, channels, "PCM_16") as out:
        out.buffer_write(samples, dtype="int16")
    streamed = bytearray(source.read_bytes())
    streamed[21:26] = bytes([streamed[21] & 0xF0, 0, 0, 0, 0])  # as encoders leave it that write into a pipe
    source.write_bytes(tags + streamed)
    header = read_header(source)
    assert (header.duration_s, ALONE.length_s(source), header.unfinished) == (frames / rate, frames / rate, not tags)
    ALONE.cut(source, 0, float("inf"), tmp_path / "b.wav")
    assert samples_of(tmp_path / "b.wav") == samples
    ALONE.cut(source, seconds / 2, seconds * 2, tmp_path / "c.wav")
    assert samples_of(tmp_path / "c.wav") == samples[round(seconds / 2 * rate) * 2 * channels :]
    source.write_bytes(tags + streamed[:-1])
    whole_frames_s = read_header(source).duration_s or 0.0
    assert frames / rate - 0.5 <= whole_frames_s < frames / rate, "what an interrupted encoder left of a frame is none"
    source.write_bytes(tags + streamed[:60])
    assert read_header(source).duration_s is ALONE.length_s(source) is None, "unknown, not zero, and not for ever"
    with pytest.raises(CannotCut):
        ALONE.cut(source, 0, 1, tmp_path / "d.wav")


# As ffprobe it says how long "audio" like FAKE 12.5 is, as ffmpeg it decodes it and notes how it was called.
FFMPEG = """
import sys, wave
args = sys.argv[1:]
source, target = args[args.index("-i") + 1] if "-i" in args else args[-1], args[-1]
whole_s = open(source, errors="replace").read().partition("FAKE ")[2]
if source == target:
    sys.exit(print(whole_s or "N/A"))
print(*args[:-1], file=open(__file__ + ".called", "a"))
start_s, length_s = (float(args[args.index(name) + 1]) if name in args else 1e9 for name in ("-ss", "-t"))
if not whole_s:
    sys.exit(f"{source}: Invalid data found when processing input")
length_s = max(0.0, min(length_s, float(whole_s) - start_s))
with wave.open(target, "wb") as audio:
    audio.setnchannels(1); audio.setsampwidth(2); audio.setframerate(1000)
    audio.writeframes(bytes(2 * round(1000 * length_s)))
"""


def test_ffmpeg_decodes_what_libsndfile_does_not(tmp_path, pages):
    (tmp_path / "bin").mkdir()
    for name in ("ffmpeg", "ffprobe"):
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable} -IS\n{FFMPEG}")
        (tmp_path / "bin" / name).chmod(0o755)
    cutter, target, lines = AudioCutter(str(tmp_path / "bin")), tmp_path / "b.wav", []
    mp4, aac = b"\0\0\0\x18ftypM4A ", b"\xff\xf1"
    sounds = {
        "a day.m4a": mp4 + b"FAKE 60.5", "short.aac": aac + b"FAKE 3", "zero.m4a": mp4 + b"FAKE 0",
        "broken.m4a": mp4, "text.mp3": b"no audio", "empty.mp3": b"",
    }  # fmt: skip
    for name, content in sounds.items():
        (tmp_path / name).write_bytes(content)
        size = cutter.size_bytes(tmp_path / name, 1, math.inf)
        lines.append(f"{name}: {cutter.length_s(tmp_path / name)} s, {size} bytes")
        for start_s, end_s in ((5, 9.0001), (1.7771, math.inf)):
            try:
                cutter.cut(tmp_path / name, start_s, end_s, target)
                lines.append(f"  {start_s}-{end_s}: {ALONE.length_s(target)} s")
                target.unlink()
            except CannotCut as problem:
                lines.append(f"  {start_s}-{end_s}: {problem}")
            assert not target.exists()
    lines += sorted(set((tmp_path / "bin" / "ffmpeg.called").read_text().splitlines()))
    with pytest.raises(NoDecoder) as refusal:
        ALONE.cut(tmp_path / "a day.m4a", 0, 30, target)
    pages({"cuts.txt": "\n".join([*lines, str(refusal.value)]).replace(str(tmp_path), "HERE")})
    assert ALONE.length_s(tmp_path / "a day.m4a") is None


def test_a_broken_package_is_told_to_every_thread_that_asks(tmp_path, monkeypatch):
    (tmp_path / "soundfile.py").write_text("import time\ntime.sleep(0.01)\nraise OSError('no libsndfile')\n")
    monkeypatch.delitem(sys.modules, "soundfile")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ThreadPoolExecutor(max_workers=3) as pool:
        asked = [pool.submit(sources.load_soundfile) for _ in range(3)]
    assert [str(one.exception()) for one in asked] == ["the package soundfile cannot be loaded (no libsndfile)"] * 3
