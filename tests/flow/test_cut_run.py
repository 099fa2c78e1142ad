"""Whole recordings in, chunks cut on the way: the same detections as of chunks cut beforehand, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import wave
from collections.abc import Sequence
from pathlib import Path

import pytest
import soundfile
from rooms.workers import analyse
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, Site, assert_refused, rows
from support.waiting import wait_for

BENCH = Path(__file__).parents[1] / "bench" / "cutting.py"
RATE, LENGTH_S = 2000, 31.0
LOUD = [(n + 0.2, n + 0.2 + n % 4 * 0.2) for n in range(0, 31, 2)]  # every second has a sound of its own
DETECTIONS = "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1, 2, 3"
STATES = "SELECT status, count(*) FROM chunk GROUP BY status ORDER BY 1"
DEMO = ("--engine", "demo", "--simulate", 2, "--no-emit-gpu-telemetry")


def record(path: Path, length_s: float = LENGTH_S, rate: int = RATE) -> Path:
    return make_wav(path, length_s, rate, loud=LOUD, tone_hz=100)


def cut_beforehand(source: Path, target: Path, start_ms: int, end_ms: int) -> None:
    """Cut with nothing of ours, as somebody would before."""
    target.parent.mkdir(exist_ok=True)
    with wave.open(str(source)) as audio, wave.open(str(target), "wb") as out:
        out.setparams(audio.getparams())
        audio.setpos(round(start_ms / 1000 * audio.getframerate()))
        out.writeframes(audio.readframes(round((end_ms - start_ms) / 1000 * audio.getframerate())))


def manifests(site: Site, recordings: Sequence[Path]) -> tuple[Path, Path]:
    """Write two manifests of the same chunks, 5 s each with 1 s in common: in whole recordings, and cut beforehand."""
    whole, cut = [MANIFEST_HEADER], [MANIFEST_HEADER]
    for recording in recordings:
        for start_ms in range(0, 26_000, 4000):
            name = f"{recording.stem}-{start_ms}"
            chunk = site.folder / "cut beforehand" / f"{name}.wav"
            cut_beforehand(recording, chunk, start_ms, start_ms + 5000)
            times = f"{start_ms},{start_ms + 5000},1000,,"
            whole.append(f"{recording.stem},{name},{recording},{times}")
            cut.append(f"{recording.stem},{name},{chunk},{times}")
    paths = site.folder / "whole.csv", site.folder / "cut.csv"
    for path, lines in zip(paths, (whole, cut), strict=True):
        path.write_text("\n".join(lines) + "\n")
    return paths


def left_behind(site: Site) -> list[Path]:
    return [path for path in site.local.rglob("*") if path.suffix == ".wav"]


def log_of(site: Site) -> str:
    return "".join(path.read_text() for path in sorted((site.out / "tasks").glob("*.log")))


# --- the same as cut beforehand ---------------------------------------------------------------------------------------


@pytest.fixture
def pair(site: Site) -> tuple[Path, Path]:
    recordings = [record(site.folder / "rec" / "a.wav"), record(site.folder / "rec" / "b.wav", 29.7, 5000)]
    return manifests(site, recordings)


def test_the_demo_engine_hears_the_same_as_in_chunks_that_were_cut_beforehand(
    site: Site, pair: tuple[Path, Path]
) -> None:
    whole, cut = pair
    assert site.run(cut, *DEMO).exit_code == 0
    expected = site.rows(DETECTIONS)
    assert site.rows("SELECT DISTINCT is_cut FROM chunk") == [(0,)]
    for stage in ("auto", "never"):
        site.out = site.folder / stage
        ended = site.run(whole, *DEMO, "--config", f"run.stage={stage}")
        assert ended.exit_code == 0, ended.stderr
        assert site.rows("SELECT is_cut, status, count(*) FROM chunk GROUP BY 1, 2") == [(1, "done", 14)]
        assert site.rows(DETECTIONS) == expected != []
        assert site.rows("SELECT DISTINCT audio_path FROM chunk ORDER BY 1") == [
            (str(site.folder / "rec" / name),) for name in ("a.wav", "b.wav")
        ]
        assert left_behind(site) == []
        late = "cut on demand: 14;" in log_of(site)
        assert late == (stage == "never"), log_of(site)


def test_a_command_gets_the_very_bytes_of_chunks_that_were_cut_beforehand(site: Site, pair: tuple[Path, Path]) -> None:
    kept = site.folder / "kept"
    kept.mkdir()
    program = site.script("keep.sh", 'cp "$1" "$3/$4" && printf "start_time,end_time,label,score\\n" > "$2"')
    command = f"{program} {{input}} {{output}} '{kept}' {{chunk_id}}.wav"
    ended = site.run(pair[0], "--command", command, "--cpu-workers", 2, "--no-emit-gpu-telemetry")
    assert ended.exit_code == 0, ended.stderr
    beforehand = sorted((site.folder / "cut beforehand").iterdir())
    assert len(beforehand) == 14
    for path in beforehand:
        assert (kept / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_stretch_that_is_too_long_for_the_device_is_cut_again_with_the_same_result(site: Site) -> None:
    source, beforehand = site.folder / "m.csv", site.folder / "chunk.wav"
    recording = record(site.folder / "rec" / "a.wav", 80.0)
    cut_beforehand(recording, beforehand, 2000, 42_000)
    source.write_text(f"{MANIFEST_HEADER}\nrec,c,{recording},2000,42000,0,,\n")
    ended = site.run(source, *DEMO, "--engine-arg=--room-s=25")
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT pieces FROM attempt WHERE outcome = 'done'") == [(2,)]
    expected = [tuple(found[:2]) for found in analyse(str(beforehand), 0.25)["detections"]]
    assert site.rows("SELECT start_ms, end_ms FROM detection ORDER BY 1") == expected != []
    assert left_behind(site) == []


# --- whole recordings -------------------------------------------------------------------------------------------------


def samples_of(path: Path) -> bytes:
    with soundfile.SoundFile(path) as audio:
        return bytes(audio.buffer_read(dtype="int32"))


def test_every_sample_of_whole_recordings_is_in_the_chunks_that_were_asked_for(site: Site) -> None:
    """Kinds of audio beside each other: rates, 24 bits, float, FLAC, one name in two folders, letters of all kinds."""
    folder, kept = site.folder / "rec", site.folder / "kept"
    record(folder / "A" / "s_20230501_043000.wav", 23.0)
    record(folder / "B'é è" / "s_20230501_043000.wav", 23.0005, 4000)
    noise = b"".join((n * 7919 % 65536).to_bytes(2, "little") for n in range(12 * RATE))
    for name, subtype in (("deep.wav", "PCM_24"), ("float.wav", "FLOAT"), ("鳥.flac", "PCM_16")):
        with soundfile.SoundFile(folder / name, "w", RATE, 1, subtype) as out:
            out.buffer_write(noise, dtype="int16")
    keep = 'mkdir -p "$3" && cp "$1" "$3/$4" && printf "start_time,end_time,label,score\\n" > "$2"'
    command = f"{site.script('keep.sh', keep)} {{input}} {{output}} '{kept}'/{{recording_id}} {{chunk_id}}.wav"
    ended = site.run(folder, "--command", command, "--cpu-workers", 2, "--no-emit-gpu-telemetry",
                     "--chunk-length", 7, "--overlap", 2)  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    found = site.rows("SELECT recording_id, start_ms, end_ms, chunk_id, audio_path FROM chunk ORDER BY 1, 2")
    short = [(0, 7000), (5000, 12_000)]
    assert [one[:3] for one in found] == [
        *(("A/s_20230501_043000", n * 5000, n * 5000 + 7000) for n in range(3)),
        ("A/s_20230501_043000", 15_000, 23_000),
        *(("B'é è/s_20230501_043000", n * 5000, n * 5000 + 7000) for n in range(3)),
        ("B'é è/s_20230501_043000", 15_000, 23_001),
        *((name, *span) for name in ("deep", "float", "鳥") for span in short),
    ]  # fmt: skip
    covered: dict[str, int] = {}
    for recording, start_ms, _, chunk_id, audio_path in found:
        whole, rate = samples_of(audio_path), soundfile.info(audio_path).samplerate
        piece, first = samples_of(kept / recording / f"{chunk_id}.wav"), start_ms * rate // 1000 * 4
        assert whole[first : first + len(piece)] == piece, chunk_id
        assert first <= covered.get(audio_path, 0), f"{chunk_id} begins after the end of the one before"
        covered[audio_path] = first + len(piece)
    assert covered == {path: len(samples_of(Path(path))) for path in covered}
    assert left_behind(site) == []


def test_broken_recordings_fail_alone_each_with_its_line(site: Site) -> None:
    folder = site.folder / "rec"
    good = record(folder / "a good one.wav", 12.0)
    make_wav(folder / "zero.wav", 0)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "header.wav").write_bytes(good.read_bytes()[:30])
    (folder / "text.flac").write_text("this is not audio")
    os.mkfifo(site.folder / "pipe")  # whoever opens it waits for ever
    (folder / "pipe.wav").symlink_to(site.folder / "pipe")
    os.mkfifo(folder / "no link.wav")
    ended = site.run(folder, *DEMO, "--chunk-length", 6, "--retries", 0, "--json")
    assert ended.exit_code == 1, ended.stderr
    assert {one["recording_id"]: one["error_class"] for one in ended.json["failed"]} == dict.fromkeys(
        ("zero", "empty", "header", "text", "pipe", "no link"), "bad_audio"
    )
    assert all(one["recording_id"] in one["error"] for one in ended.json["failed"])
    assert site.rows(STATES) == [("done", 2), ("failed", 6)]
    pipes = [one["error"] for one in ended.json["failed"] if one["recording_id"] in ("pipe", "no link")]
    why = "cannot be cut out: it is a pipe, a socket or a device, not an audio file"
    assert [error.endswith(why) for error in pipes] == [True, True]


@pytest.mark.parametrize(("room", "pieces"), [((), None), (("--engine-arg=--room-s=25",), 2)])
def test_a_recording_that_breaks_off_is_done_as_far_as_it_goes_and_that_is_told(
    site: Site, room: tuple[str, ...], pieces: int | None
) -> None:
    recording, beforehand = record(site.folder / "rec" / "a.wav", 120.0), site.folder / "chunk.wav"
    cut_beforehand(recording, beforehand, 0, 36_500)
    whole = recording.read_bytes()
    recording.write_bytes(whole[: 44 + 2 * RATE * 40] + whole[44 : 44 + RATE * 73])  # 76.5 s, and then no more
    ended = site.run(site.folder / "rec", *DEMO, *room, "--chunk-length", 40, "--retries", 0, "--json")
    assert ended.exit_code == 1, ended.stderr
    assert site.rows("SELECT chunk_id, status, audio_s FROM chunk ORDER BY start_ms") == [
        ("a_0_40000", "done", 40.0), ("a_40000_80000", "done", 36.5), ("a_80000_120000", "failed", 40.0),
    ]  # fmt: skip
    [failed] = ended.json["failed"]
    assert failed["error_class"] == "missing_audio"
    assert "is truncated: its header says 120 s, the file has 76.5 s and nothing after 80 s" in failed["error"]
    of_it = "WHERE chunk_id = 'a_40000_80000'"
    assert site.rows(f"SELECT pieces FROM attempt {of_it} AND outcome = 'done'") == [(pieces,)]
    expected = [tuple(found[:2]) for found in analyse(str(beforehand), 0.25)["detections"]]
    assert site.rows(f"SELECT start_ms, end_ms FROM detection {of_it} ORDER BY 1") == expected != []
    words = f"{recording} ends early, at 76.500 s: 36.500 s of the 40 s of this chunk exist and were analysed"
    told = site.rows("SELECT subject, value, reason FROM decision WHERE kind = 'short_audio'")
    assert told == [("a/a_40000_80000", 36.5, words)]
    assert f"a/a_40000_80000: {words}" in ended.stderr
    assert left_behind(site) == []


def test_what_a_recording_that_breaks_off_took_of_the_memory_says_nothing_of_its_planned_length(site: Site) -> None:
    short = record(site.folder / "rec" / "a.wav", 40.0)
    short.write_bytes(short.read_bytes()[: 44 + 2 * RATE * 5])  # 5 s of the 40 s that its header says
    for name in ("b", "c", "d"):
        record(site.folder / "rec" / f"{name}.wav", 40.0)
    ended = site.run(
        site.folder / "rec", *DEMO[:2], "--simulate", 1, "--engine-arg=--room-s=25", "--chunk-length", 40, "--json"
    )
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT recording_id, audio_s FROM chunk ORDER BY 1") == [
        ("a", 5.0), ("b", 40.0), ("c", 40.0), ("d", 40.0),
    ]  # fmt: skip
    [first] = site.rows("SELECT recording_id, outcome FROM attempt ORDER BY attempt_id LIMIT 1")
    assert first == ("a", "done")
    limits = site.rows("SELECT value FROM decision WHERE kind = 'memory_limit'")
    assert limits == [(40.0,), (40.0,)], "with the usual threads and with one; 40 s have never fitted"


def test_flac_is_cut_or_read_as_it_is_and_without_a_decoder_the_line_to_paste_is_told(site: Site) -> None:
    (site.folder / "flac").mkdir()
    for name, length_s in (("a", 21.0), ("no longer than a chunk", 5.0)):
        wav = record(site.folder / "wav" / f"{name}.wav", length_s)
        with (
            soundfile.SoundFile(wav) as audio,
            soundfile.SoundFile(site.folder / "flac" / f"{name}.flac", "w", RATE, 1, "PCM_16") as out,
        ):
            out.buffer_write(bytes(audio.buffer_read(dtype="int16")), dtype="int16")
    found = []
    for kind in ("wav", "flac"):
        site.out = site.folder / f"run {kind}"
        ended = site.run(site.folder / kind, *ON_CPU, "--chunk-length", 7)
        assert ended.exit_code == 0, ended.stderr
        found.append(site.rows(DETECTIONS))
    assert found[0] == found[1] and {row[0] for row in found[0]} == {"a", "no longer than a chunk"}
    blocked = site.folder / "blocked" / "soundfile.py"
    blocked.parent.mkdir()
    blocked.write_text("raise ImportError('it is not installed')\n")
    site.out = site.folder / "run without"
    path = f"{blocked.parent}:{site.environ()['PYTHONPATH']}"
    ended = site.run(site.folder / "flac", *ON_CPU, "--chunk-length", 7, "--retries", 0, "--json",
                     env={"PYTHONPATH": path, "PATH": "/nonexistent"})  # fmt: skip
    assert ended.exit_code == 1, ended.stderr
    assert {one["error_class"] for one in ended.json["failed"]} == {"no_program"}
    assert all("\npip install 'badcjobs[audio]'" in one["error"] for one in ended.json["failed"])


# --- the life of a run ------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_and_its_chunk_length_cannot_change_meanwhile(site: Site) -> None:
    folder = site.folder / "rec"
    for name in "abc":
        record(folder / f"{name}.wav")
    how = (*DEMO, "--engine-arg=--burn-s=0.1", "--chunk-length", 4, "--overlap", 1)
    program = site.start_run(folder, *how)
    wait_for(lambda: site.count("chunk", "status = 'done'") >= 3, "some chunks are done and published")
    program.send(signal.SIGKILL)
    program.wait()
    changed = site.run(folder, *DEMO, "--engine-arg=--burn-s=0.1", "--chunk-length", 5, "--overlap", 1)
    assert_refused(changed, 2, "chunk_length: different from", "chunk_length was 4.0, now 5.0", "use the same settings")
    again = site.run(folder, *how)
    assert again.exit_code == 0, again.stderr
    job = site.merged()
    assert rows(job, STATES) == [("done", 30)]
    assert rows(job, "SELECT count(*) FROM attempt WHERE outcome = 'done'") == [(30,)], "each chunk was done once"
    skipped = site.count("chunk", "status = 'skipped'")
    assert skipped >= 3
    assert left_behind(site) == []


def test_an_emulated_array_does_every_stretch_exactly_once_and_proves_it(site: Site) -> None:
    folder = site.folder / "rec"
    for number in range(5):
        record(folder / f"station{number % 2}" / f"{number}.wav", 10.0 + 3 * number)
    cutting = ("--chunk-length", 5, "--overlap", 1)
    ended = site.badcjobs("submit", folder, "--out", site.out, "--cluster", "local", "--tasks", 3, "--json", "--wait",
                          "--", "--simulate", 3, "--engine", "demo", *cutting)  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    job = site.out / "job.sqlite"
    assert rows(job, STATES) == [("done", 18)]
    assert rows(job, "SELECT count(*), count(DISTINCT recording_id || chunk_id) FROM attempt") == [(18, 18)]
    assert rows(
        job, "SELECT max(many) FROM (SELECT count(DISTINCT task_id) many FROM chunk GROUP BY recording_id)"
    ) == [(1,)]
    for path in folder.rglob("*.wav"):
        path.write_bytes(b"")  # what the tasks have read once, nobody has to read again
    proof = site.badcjobs("report", site.out, "--json").json["completeness"]
    assert (proof["expected"], proof["done"], proof["not_listed"], proof["strangers"]) == (18, 18, 0, 0)
    assert left_behind(site) == []


# --- what is said beforehand ------------------------------------------------------------------------------------------


def test_what_cannot_be_meant_is_refused_and_without_cut_only_the_row_that_is_not_there_fails(site: Site) -> None:
    recording = record(site.folder / "rec" / "a.wav")
    source = site.folder / "m.csv"
    source.write_text(f"{MANIFEST_HEADER}\nr,c0,{recording},0,5000,0,,\nr,c1,{recording},28000,33000,0,,\n")
    run = ("--out", site.out, *ON_CPU)
    length, cut = site.badcjobs_each(
        [
            ("run", recording, *run, "--chunk-length", 5, "--overlap", 5),
            ("run", source, *run, "--config", "run.cut=true"),
        ]
    )
    assert_refused(length, 2, "--overlap 5 must be at least 1 s shorter than --chunk-length 5")
    assert_refused(cut, 2, "line 3: end_ms 33000 is after the end of", "without run.cut = true")
    assert not list(site.out.rglob("*.sqlite"))
    alone = site.run(source, *ON_CPU, "--retries", 0)
    assert alone.exit_code == 1
    assert site.rows("SELECT chunk_id, status FROM chunk ORDER BY 1") == [("c0", "done"), ("c1", "failed")]
    assert "ends at 31.000 s, before the end of the chunk from 28.000 s to 33.000 s" in alone.stderr + alone.stdout


def test_check_counts_the_chunks_that_a_run_would_have(site: Site) -> None:
    folder = record(site.folder / "rec" / "a.wav").parent
    found = site.badcjobs(
        "check", folder, "--json", "--", "--engine", "demo", "--chunk-length", 10, "--overlap", 2
    ).json
    assert found["source"]["chunks"] == 4
    assert found["source"]["audio_s"] == pytest.approx(31.0 + 3 * 2.0)


# --- what it costs ----------------------------------------------------------------------------------------------------


def test_cutting_costs_no_more_than_copying_the_same_bytes() -> None:
    words = [sys.executable, str(BENCH), "--minutes", "2", "--chunk-length", "20", "--rounds", "5", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout)
    assert figures["ratio"] <= 2.5, figures  # one, with room for a busy machine
