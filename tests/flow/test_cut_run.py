"""Whole tasks whose audio is cut, copied or in trouble, and whose engine runs behind a program: the same detections."""

import os
import re
import shlex
from pathlib import Path

import soundfile
from rooms.workers import analyse
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, assert_refused
from support.by_hand import cut
from support.fake_prefix import install_fake_prefix
from support.waiting import wait_for

RATE = 2000
LOUD = [(n + 0.2, n + 0.2 + n % 4 * 0.2) for n in range(0, 31, 2)]  # every second has a sound of its own
DETECTIONS = "SELECT chunk_id, start_ms, end_ms FROM detection ORDER BY 1, 2"
DEMO = ("--engine", "demo", "--simulate", 2, "--no-emit-gpu-telemetry")


def record(path, length_s, rate=RATE):
    return make_wav(path, length_s, rate, loud=LOUD, tone_hz=100)


def heard_beforehand(source, target, start_ms, end_ms):
    """Cut with nothing of ours, as someone would before, and return what is to be heard."""
    cut(source, start_ms, end_ms, target)
    return [tuple(found[:2]) for found in analyse(str(target), 0.25)["detections"]]


def left_behind(site):
    return [path for path in site.local.rglob("*") if path.suffix == ".wav"]


def log_of(site):
    return "".join(path.read_text() for path in sorted((site.out / "tasks").glob("*.log")))


def test_stretches_of_whole_recordings_are_heard_as_if_they_had_been_cut_beforehand(site):
    """Cut in advance or on demand, and again where one is too long for the device."""
    lines, expected = [MANIFEST_HEADER], []
    for recording in (record(site.folder / "a.wav", 80.0), record(site.folder / "b.wav", 29.7, 5000)):
        long = [(2000, 42_000)] * (recording.stem == "a")
        for start_ms, end_ms in [(n, n + 5000) for n in range(0, 26_000, 4000)] + long:
            name = f"{recording.stem}-{start_ms}-{end_ms}"
            lines.append(f"{recording.stem},{name},{recording},{start_ms},{end_ms},1000,,")
            found = heard_beforehand(recording, site.folder / "cut.wav", start_ms, end_ms)
            expected += [(name, *times) for times in found]
    source = site.folder / "whole.csv"
    source.write_text("\n".join(lines) + "\n")
    for stage in ("auto", "never"):
        site.out = site.folder / stage
        ended = site.run(source, *DEMO, "--engine-arg=--memory-per-s=655", "--config", f"run.stage={stage}")
        assert ended.exit_code == 0, ended.stderr
        assert site.rows("SELECT is_cut, status, count(*) FROM chunk GROUP BY 1, 2") == [(1, "done", 15)]
        assert site.rows(DETECTIONS) == sorted(expected)
        pieces = site.rows("SELECT chunk_id, pieces FROM attempt WHERE pieces AND outcome = 'done'")
        assert pieces == [("a-2000-42000", 2)]
        paths = site.rows("SELECT DISTINCT audio_path FROM chunk ORDER BY 1")
        assert paths == [(str(site.folder / name),) for name in ("a.wav", "b.wav")]
        assert left_behind(site) == []
        late = re.search(r"cut on demand: (\d+)", log_of(site))  # the second run knows which one needs pieces
        assert late and (int(late[1]) >= 14) == (stage == "never"), log_of(site)


def samples_of(path):
    with soundfile.SoundFile(path) as audio:
        return bytes(audio.buffer_read(dtype="int32"))


def test_every_sample_of_whole_recordings_is_in_the_chunks_that_were_asked_for(site):
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
    cutting = ("--chunk-length", 7, "--overlap", 2)
    planned = site.badcjobs("check", folder, "--json", "--", *ON_CPU, *cutting).json["source"]
    ended = site.run(folder, "--command", command, "--cpu-workers", 2, "--no-emit-gpu-telemetry", *cutting)
    assert ended.exit_code == 0, ended.stderr
    found = site.rows("SELECT recording_id, start_ms, end_ms, chunk_id, audio_path FROM chunk ORDER BY 1, 2")
    long = [(0, 7000), (5000, 12_000), (10_000, 17_000)]
    assert [one[:3] for one in found] == [
        *(("A/s_20230501_043000", *span) for span in [*long, (15_000, 23_000)]),
        *(("B'é è/s_20230501_043000", *span) for span in [*long, (15_000, 23_001)]),
        *((name, *span) for name in ("deep", "float", "鳥") for span in long[:2]),
    ]
    lengths_s = sum(end_ms - start_ms for _, start_ms, end_ms, *_ in found) / 1000
    assert (planned["chunks"], round(planned["audio_s"], 2)) == (len(found), round(lengths_s, 2)), "as check has said"
    covered = {}
    for recording, start_ms, _, chunk_id, audio_path in found:
        whole, rate = samples_of(audio_path), soundfile.info(audio_path).samplerate
        piece, first = samples_of(kept / recording / f"{chunk_id}.wav"), start_ms * rate // 1000 * 4
        assert whole[first : first + len(piece)] == piece, chunk_id
        assert first <= covered.get(audio_path, 0), f"{chunk_id} begins after the end of the one before"
        covered[audio_path] = first + len(piece)
    assert covered == {path: len(samples_of(Path(path))) for path in covered}
    assert left_behind(site) == []
    again = ("run", folder, "--out", site.out, "--command", command, "--cpu-workers", 2, "--chunk-length", 5)
    changed, overlap = site.badcjobs_each([(*again, "--overlap", 2), (*again, "--overlap", 5)])
    assert_refused(changed, 2, ": different from", "chunk_length was 7.0, now 5.0", "use the same settings")
    assert_refused(overlap, 2, "--overlap 5 must be at least 1 s shorter than --chunk-length 5")


def test_broken_recordings_fail_alone_and_one_that_breaks_off_is_done_as_far_as_it_goes(site, pages):
    folder = site.folder / "rec"
    good, broken = record(folder / "a good one.wav", 12.0), record(folder / "a.wav", 120.0)
    expected = heard_beforehand(broken, site.folder / "cut.wav", 0, 36_500)
    whole = broken.read_bytes()
    broken.write_bytes(whole[: 44 + 2 * RATE * 40] + whole[44 : 44 + RATE * 73])  # 76.5 s, and then no more
    make_wav(folder / "zero.wav", 0)
    empty = [folder / f"empty{number}.wav" for number in range(12)]
    for path in empty:
        path.write_bytes(b"")
    (folder / "header.wav").write_bytes(good.read_bytes()[:30])
    (folder / "text.flac").write_text("this is not audio")
    os.mkfifo(site.folder / "pipe")  # a program that opens it waits for ever
    (folder / "pipe.wav").symlink_to(site.folder / "pipe")
    os.mkfifo(folder / "no link.wav")
    ended = site.run(folder, *DEMO, "--engine-arg=--memory-per-s=655", "--chunk-length", 40, "--retries", 0, "--json")
    assert ended.exit_code == 1, ended.stderr
    chunks = site.rows("SELECT chunk_id, status, audio_s, error_class, error FROM chunk ORDER BY 1")
    decisions = site.rows("SELECT subject, figures ->> 'found_s', reason FROM decision WHERE code = 'short_audio'")
    assert f"{decisions[0][0]}: {decisions[0][2]}" in ended.stderr
    of_it = "WHERE chunk_id = 'a_40000_80000'"
    assert site.rows(f"SELECT pieces FROM attempt {of_it} AND outcome = 'done'") == [(2,)]
    assert site.rows(f"SELECT start_ms, end_ms FROM detection {of_it} ORDER BY 1") == expected != []
    assert left_behind(site) == []
    reported = "\n".join(" | ".join(map(str, row)) for row in [*chunks, *decisions])
    pages({"chunks.txt": reported.replace(str(site.folder), "/…")})
    for words in (("monitor", "--once"), ("merge",)):
        said = "".join(site.badcjobs(*words, site.out).stdout.split())
        assert all(f"{path}:ithas0bytes" in said for path in empty), "each file without audio is named"


def test_what_a_recording_that_breaks_off_took_of_the_memory_says_nothing_of_its_planned_length(site):
    short = record(site.folder / "rec" / "a.wav", 40.0)
    short.write_bytes(short.read_bytes()[: 44 + 2 * RATE * 5])  # 5 s of the 40 s that its header says
    for name in ("b", "c"):
        record(site.folder / "rec" / f"{name}.wav", 40.0)
    room = ("--simulate", 1, "--engine-arg=--memory-per-s=655", "--chunk-length", 40)
    ended = site.run(site.folder / "rec", *DEMO[:2], *room)
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT recording_id, audio_s FROM chunk ORDER BY 1") == [("a", 5.0), ("b", 40.0), ("c", 40.0)]
    [first] = site.rows("SELECT recording_id, outcome FROM attempt ORDER BY attempt_id LIMIT 1")
    assert first == ("a", "done")
    merged = " ".join(site.badcjobs("merge", site.out).stdout.split())
    assert "1 chunk has less audio than planned: only what is there was analysed." in merged
    assert f"{short} ends early, at 5.000 s" in merged
    limits = site.rows("SELECT figures ->> 'limit_s' FROM decision WHERE code = 'memory_limit.met'")
    assert limits == [(40.0,), (40.0,)], "with the usual threads and with one; 40 s have never fitted"


def test_copies_on_the_node_and_a_talkative_program_before_the_engine_change_nothing_that_is_found(site):
    source = site.manifest(20)
    (site.folder / "audio" / "c019.wav").write_bytes(b"this is not audio")
    burn = (*DEMO, "--engine-arg=--burn-s=0.05", "--retries", 0)
    program = site.start_run(source, *burn, "--config", "run.stage=always")
    copies = wait_for(lambda: list(site.local.glob("*/staged/*/*.wav")), "there are copies")
    assert re.fullmatch(r"c\d+\.wav", copies[0].name) and program.wait().exit_code == 1
    staged = site.rows(DETECTIONS)
    assert site.rows("SELECT code, reason FROM decision WHERE code LIKE 'staging%'") == [
        ("staging.all", "run.stage = always")
    ]
    counts = re.search(r"chunks read from copies on this node: (\d+), read in place: (\d+)", log_of(site))
    assert counts and int(counts[1]) + int(counts[2]) == 19 and int(counts[1]) >= 7, log_of(site)
    assert {Path(path).parent for (path,) in site.rows("SELECT audio_path FROM chunk")} == {site.folder / "audio"}
    [(error,)] = site.rows("SELECT error FROM chunk WHERE status = 'failed'")
    assert str(site.folder / "audio" / "c019.wav") in error and str(site.local) not in error
    assert list(site.local.iterdir()) == []
    site.out = site.folder / "behind"
    talker = install_fake_prefix(site.folder / "bin", report_s=0.2)
    words = f"{shlex.quote(str(talker))} {shlex.quote(str(site.folder))}/{{worker}}"
    stay = ("--config", "run.stage=never", "--engine-prefix", words)
    assert site.run(source, *DEMO, "--retries", 0, *stay).exit_code == 1
    assert site.rows(DETECTIONS) == staged != []
    reports = sorted(site.folder.glob("*.report"))
    assert [path.stem.rpartition("-")[2] for path in reports] == ["1", "2"], "a report for each of the two workers"
