"""Chunks that fail, engines that do not work, programs that misbehave: what is tried again, named, or given up."""

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest
from support.audio import make_wav
from support.badcjobs_program import MANIFEST_HEADER, ON_CPU, array_task, assert_refused, rows
from support.cases import read_data
from support.fake_hawkears import fake_package_environ, hawkears_options
from support.source_files import write_files
from support.waiting import wait_for

ONE_WORKER = ("--cpu-workers", 1, "--no-emit-gpu-telemetry")


def command(site, text):
    """Return the options that run a shell script for every chunk."""
    script = site.script("engine.sh", text)
    return "--command", f"{script} {{input}} {{output}}", *ONE_WORKER


def test_each_chunk_has_the_end_that_its_program_deserves_and_those_that_failed_are_named(site, pages):
    program = read_data("each_chunk.sh")
    pool = "with multiprocessing.Pool(2) as pool:\n        assert pool.map(abs, [-1, -2]) == [1, 2]"
    (site.folder / "pool.py").write_text(f'import multiprocessing\nif __name__ == "__main__":\n    {pool}\n')
    env = {**array_task(0, (0,)), "PYTHON": sys.executable}
    manifest = site.manifest(15)
    manifest.write_text(manifest.read_text().replace(",c014,", ",c014\x1b[2Jx,"))
    backoff = ("--config", "run.backoff_s=0.2", "--retries", 1)
    done = site.run(manifest, *command(site, f"cd {site.folder}\n{program}"), *backoff, env=env)
    assert done.exit_code == 1
    assert site.processes("sleep 300") == [], "whatever a program leaves running ends with the task"
    assert "\x1b" not in done.stdout, "an id from a file does not steer the terminal"
    times = site.rows("SELECT started_at_ms, ended_at_ms FROM attempt WHERE chunk_id = 'c011' ORDER BY attempt_id")
    assert [later[0] - earlier[1] >= 200 for earlier, later in pairwise(times)] == [True], "it rests meanwhile"
    sql = "SELECT chunk_id, status, attempts, error_class, detections, error FROM chunk ORDER BY 1"
    ends = "\n".join(" | ".join(map(str, row)) for row in site.rows(sql))
    outcomes = site.rows("SELECT outcome, error_class, count(*) FROM attempt GROUP BY 1, 2 ORDER BY 1, 2")
    heard = site.rows("SELECT chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1")
    tries = "\n".join(map(str, [*outcomes, *heard, *site.rows("SELECT verdict, exit_code FROM task")]))
    stdout = "\n".join(line.partition("): ")[0] for line in done.stdout.splitlines())  # the end may be cut off
    said = {"chunks.txt": ends.replace("\x1b", "ESC"), "tries.txt": tries, "stdout.txt": stdout}
    changing = re.compile(r"(?m)(?<=Is a directory: ).*$|(?<=hours in ).*$")
    pages({name: changing.sub("...", text).replace(str(site.folder), "$") for name, text in said.items()})


def test_a_file_without_audio_fails_once_though_a_detector_would_take_it_for_silence(site):
    flac = "text fLaC\\x80\\x00\\x00\\x22" + 10 * "\\x00" + "\\x0a\\xc4\\x42\\xf0" + 20 * "\\x00"
    files = "good: 1 s\nnone: text\nword: text a letter\ncut: 0 of 8 s\nflac: " + flac + "\nother: text OggS, not ours"
    write_files(re.sub("(?m)^", "rec/", files.replace(":", ".wav:")), site.folder)
    listed = [f"rec,{path.stem},{path},0,1000,,," for path in (site.folder / "rec").iterdir()]
    (site.folder / "m.csv").write_text("\n".join([MANIFEST_HEADER, *listed, ""]))
    silence = command(site, 'echo start_time,end_time,label,score > "$2"')
    for source, *cut in (("rec",), ("m.csv", "--config", "run.cut=false")):
        site.out = site.folder / f"out of {source}"
        assert site.run(site.folder / source, *silence, *cut).exit_code == 1
        ends = site.rows("SELECT chunk_id, attempts, status, error_class FROM chunk ORDER BY 1")
        assert ends == [
            ("cut", 1, "failed", "broken_audio"), ("flac", 1, "failed", "empty_file"), ("good", 1, "done", None),
            ("none", 1, "failed", "empty_file"), ("other", 1, "done", None), ("word", 1, "failed", "not_audio"),
        ]  # fmt: skip


def test_an_engine_that_never_works_is_given_up_long_before_the_last_chunk(site):
    fails = command(site, "echo the model is missing >&2; exit 1")
    done = site.run(site.manifest(60), *fails, "--retries", 0, "--json")
    assert (done.exit_code, len(done.json["failed"])) == (3, 20), "enough to name"
    assert "no chunk was done" in done.json["note"] and "the model is missing" in done.json["note"]
    counts = dict(site.rows("SELECT status, count(*) FROM chunk GROUP BY status"))
    assert counts == {"failed": 25, "pending": 35}
    assert site.rows("SELECT verdict, exit_code FROM task JOIN decision ON code = 'gave_up'") == [("failed", 3)]


def test_an_engine_that_cannot_work_is_found_out_before_any_chunk(site):
    manifest = site.manifest(3)
    refused = site.run(manifest, "--command", "no-such-program {input} {output}", *ONE_WORKER)
    assert_refused(refused, 3, "'no-such-program'", "command -v no-such-program")
    engine = (*hawkears_options(site.folder), "--simulate", 2)
    for model in (site.folder / "root" / "data" / "ckpt").iterdir():
        model.rename(model.with_suffix(".gone"))
    assert_refused(site.run(manifest, *engine, env=environ()), 3, "has no models", "hawkears init")
    assert not site.out.exists()


def test_a_result_that_nobody_reads_changes_no_exit_code(site):
    """A pipe that is closed, a full disk, no stdout at all; and all of it in ASCII."""
    site.manifest(1)
    env = site.environ({"PYTHONIOENCODING": "ascii"})
    for number, where in enumerate(["| head -c 1; exit ${PIPESTATUS[0]}", "> /dev/full", ">&-", "> read.txt"]):
        line = f"{sys.executable} -m badcjobs run manifest.csv --out run{number} {' '.join(ON_CPU)} {where}"
        assert subprocess.run(["bash", "-c", line], env=env, cwd=site.folder, stderr=subprocess.DEVNULL).returncode == 0
        site.out = site.folder / f"run{number}"
        assert site.rows("SELECT verdict, exit_code FROM task") == [("done", 0)]
    assert "x real time" in (site.folder / "read.txt").read_text()


def test_a_recording_that_could_not_be_written_is_not_called_one(site):
    folder = site.folder / "vanishing"
    folder.mkdir()
    program = site.start("record", "--out", folder / "x.sqlite", "--simulate", 1, "--duration", 1)
    wait_for((folder / "x.sqlite").exists, "the first publication")
    (folder / "x.sqlite").unlink()
    folder.rmdir()
    done = program.wait()
    assert done.exit_code == 4
    assert "not published" in done.stdout


def environ(**others):
    return {**fake_package_environ(), "HOME": "/nonexistent", **others}  # the caches of a test are its own


@pytest.mark.parametrize("memory", ["host", "oom"])
def test_where_chunks_run_out_of_memory_auto_goes_on_with_fewer_workers(site, memory):
    """The thread setting of the job script is for another program."""
    cores = {**array_task(0, (0,)), "SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0"}
    options = (*hawkears_options(site.folder), "--simulate", 1, "--no-emit-gpu-telemetry", "--workers-per-gpu", "auto")
    crowd = {"FAKE_HAWKEARS_CROWD": f"3:{memory}", "FAKE_HAWKEARS_S": "0.2"}
    done = site.run(site.manifest(60), *options, env=environ(**cores, **crowd))
    assert (done.exit_code, site.rows("SELECT count(*) FROM chunk WHERE status = 'done'")) == (0, [(60,)]), done.stderr
    said = site.rows(
        "SELECT figures ->> 'workers', reason FROM decision WHERE code LIKE 'workers.%' ORDER BY at_ms, rowid"
    )
    assert [value for value, _ in said][:2] == [3, 2] and "2 instead of 3: chunks ran out of memory" in said[1][1]
    assert "workers are forked from process" in done.stderr


LONG_S = 40
# Two threads have no room for it, one has not either, and for its pieces of 24 s one has.
ROOM = {"FAKE_HAWKEARS_ROOM_S": "30", "FAKE_HAWKEARS_EARS": "loud"}
BROKEN = {
    "c017": b"OggS#fake SIGSEGV", "c023": b"no audio", "c043": b"RIFF, but not for long", "c050": b"OggS#fake oom",
    "c051": b"",
}  # fmt: skip
LOUD = [(5.0, 6.0), (19.5, 22.0), (35.0, 36.0)]  # the second lies across the joint, at 21 s


def run_with_a_long_one(site, long, *others):
    """Run 60 chunks, one of them a long one, on the stand-in package and two simulated devices."""
    manifest, audio = site.manifest(60, prefix=long[0]), site.folder / "audio"
    make_wav(audio / f"{long}.wav", LONG_S, 1000, loud=LOUD, tone_hz=100)
    lines = manifest.read_text().splitlines()
    lines[int(long[1:]) + 1] = f"long,{long},{audio}/{long}.wav,0,{LONG_S * 1000},0,,"
    manifest.write_text("\n".join(lines) + "\n")
    for name, content in BROKEN.items():
        (audio / f"{name}.wav").write_bytes(content)
    options = (*hawkears_options(site.folder, "--threads=2"), "--simulate", 2, "--json", *others)
    return site.run(manifest, *options, env=environ(**ROOM), timeout_s=90)


def test_poison_and_bad_audio_are_named_and_a_chunk_that_is_too_long_is_done_in_pieces(site):
    mixed = run_with_a_long_one(site, "c025")
    assert mixed.exit_code == 1, mixed.stderr
    assert {chunk["chunk_id"]: chunk["error_class"] for chunk in mixed.json["failed"]} == {
        "c017": "engine_crash", "c023": "not_audio", "c043": "broken_audio",
        "c050": "out_of_memory", "c051": "empty_file",
    }  # fmt: skip
    assert mixed.json["chunks"] == {"done": 55, "failed": 4, "poison": 1}
    assert site.count("attempt", "outcome = 'failed' AND chunk_id = 'c017'") == 2, "twice alone, and no third time"
    lost = site.rows("SELECT count(DISTINCT chunk_id) FROM attempt WHERE outcome = 'lost'")
    assert lost[0][0] <= 4, "only what was in progress beside the poison was tried again"
    heard = site.rows("SELECT start_ms, end_ms FROM detection WHERE chunk_id = 'c025' ORDER BY start_ms")
    assert heard == [(5000, 6000), (19_500, 22_000), (35_000, 36_000)], "those of both halves, on its own time"
    assert site.rows("SELECT audio_s, detections FROM chunk WHERE chunk_id = 'c025'") == [(LONG_S, 3)]
    tries = "SELECT outcome, error_class, pieces FROM attempt WHERE chunk_id = 'c025' AND outcome != 'lost'"
    oom = ("failed", "out_of_memory", None)
    assert site.rows(f"{tries} ORDER BY attempt_id") == [oom, oom, ("done", None, 2)]
    ((seconds, why),) = site.rows("SELECT figures ->> 'limit_s', reason FROM decision WHERE code = 'memory_limit.met'")
    assert seconds == LONG_S
    assert why.startswith("a chunk ran out of memory: ") and f"{LONG_S} s or more is cut into pieces" in why
    assert not list(site.folder.rglob("*~*s.wav")), "no piece is left behind"

    before = set(site.task_databases())
    later = run_with_a_long_one(site, "d030", "--shard", "0/5", "--no-resume")
    assert later.exit_code == 0, later.stderr
    (database,) = set(site.task_databases()) - before
    found = "SELECT chunk_id, a.pieces, attempts, detections FROM chunk JOIN attempt a USING (chunk_id)"
    assert rows(database, f"{found} WHERE audio_s = ?", LONG_S) == [("d030", 2, 1, 3)], "a later task starts with them"
    ((why,),) = rows(database, "SELECT reason FROM decision WHERE code = 'memory_limit.learned'")
    assert why.startswith("learned by an earlier task: audio of ")


RED, TWO_LINES, TURNED, LETTERS = "\x1b[31mred", "a\nb", "a\u202eb", "Ñandú鳥"
# One line of a log, or what visibly belongs to the one before it.
LINE_OF_A_LOG = re.compile(r"\d{4}-\d\d-\d\dT[\d:]{8} (INFO|WARNING|ERROR) |    \| ")


def test_names_and_an_engines_words_reach_neither_terminal_nor_log_as_they_are(site):
    engine = site.script("engine", r"""printf 'no \033[2J luck\n\342\200\256turned\007\n' >&2; exit 3""")
    manifest, names = site.manifest(5), (RED, TWO_LINES, TURNED, LETTERS)
    for number, name in enumerate(names):
        manifest.write_text(manifest.read_text().replace(f",c00{number},", f',"{name}",'))
    done = site.run(manifest, "--command", f"{engine} {{input}} {{output}}", *ONE_WORKER, "--retries", 1)
    assert done.exit_code != 0
    reported = site.task_database().with_suffix(".log").read_text()
    assert not [
        words for words in (r"rec0/\x1b[31mred: try 1 failed (", r"\u202eturned\x07", LETTERS) if words not in reported
    ]
    assert [line for line in (reported + done.stderr).splitlines() if not LINE_OF_A_LOG.match(line)] == []
    merged = site.badcjobs("merge", site.out)
    report, document = site.badcjobs_each([("report", site.out), ("report", site.out, "--json")])
    texts = [
        reported,
        report.stdout,
        (site.out / "report.html").read_text(),
        *(text for one in (done, merged, document) for text in (one.stdout, one.stderr)),
    ]
    assert [line for text in texts for line in text.split("\n") if not line.isprintable()] == []
    assert r"\x1b[31mred" in report.stdout
    assert {chunk["chunk_id"] for chunk in document.json["failed_chunks"]} >= {*names}


def test_a_name_that_is_not_utf8_is_one_recording_that_failed_in_every_kind_of_source(site):
    good = make_wav(site.folder / "birds" / "good.wav")
    shutil.copy(good, site.folder / "birds" / os.fsdecode(b"bad\xff.wav"))
    shutil.copy(good, site.folder / "birds" / os.fsdecode(b"notes.\xff"))
    (site.folder / "list.txt").write_bytes(b"birds/good.wav\nbirds/bad\xff.wav\n")
    (site.folder / "rows.csv").write_bytes(
        b"recording_id,chunk_id,source_path\ngood,good,birds/good.wav\nbad\xff,bad\xff,birds/bad\xff.wav\n"
    )
    for source in ("birds", "list.txt", "rows.csv"):
        site.out = site.folder / f"run-{source}"
        assert [site.run(site.folder / source, *ON_CPU).exit_code for _ in range(2)] == [1, 1]
        found = rows(site.merged(), "SELECT replace(chunk_id, 'birds/', ''), status, error FROM chunk ORDER BY 1")
        assert [row[:2] for row in found] == [(r"bad\xff", "failed"), ("good", "done")]
        assert rf"mv -n $'{site.folder}/birds/bad\xff.wav' {site.folder}/birds/bad_.wav" in found[0][2]
        checked = site.badcjobs("check", site.folder / source, "--json", "--", *ON_CPU).json
        assert "1 mistake in rows or sources" in str(checked["findings"])
