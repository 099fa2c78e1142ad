"""Chunks that fail, engines that do not work, programs that misbehave: what is tried again, named, or given up."""

from __future__ import annotations

import shutil
import sys
from itertools import pairwise

import pytest
from support.badcjobs_program import ON_CPU, Outcome, Site, array_task, assert_refused, rows
from support.fake_hawkears import make_fake_root
from support.fake_hawkears_package import fake_package_environ
from support.waiting import wait_for

HEADER = "start_time,end_time,label,score"
NOTHING_HEARD = f'echo {HEADER} > "$2"'
ONE_WORKER = ("--cpu-workers", 1, "--no-emit-gpu-telemetry")


def command(site: Site, text: str) -> tuple[object, ...]:
    """Return the options that run a shell script for every chunk."""
    script = site.script("engine.sh", text)
    return "--command", f"{script} {{input}} {{output}}", *ONE_WORKER


def test_one_chunk_of_a_thousand_that_always_fails_is_named_and_the_others_are_done(site: Site) -> None:
    manifest = site.manifest(1000)
    (site.folder / "audio" / "c617.wav").write_bytes(b"RIFF, but not for long")
    done = site.run(manifest, "--engine", "demo", "--simulate", 2)
    assert done.exit_code == 1
    assert "999 done, 1 failed of 1,000" in done.stdout
    (named,) = [line for line in done.stdout.splitlines() if line.startswith("  failed ")]
    assert "rec205 c617 (bad_audio)" in named
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 999), ("failed", 1)]
    assert site.rows("SELECT attempts, error_class FROM chunk WHERE status = 'failed'") == [(3, "bad_audio")]
    assert site.rows("SELECT verdict, exit_code FROM task") == [("failed", 1)]
    assert "c617 failed for good" in site.task_database().with_suffix(".log").read_text()
    assert len(list(site.out.rglob("*"))) <= 4, "however many chunks, a handful of files"


def test_a_chunk_that_fails_at_first_is_tried_again_after_a_growing_rest(site: Site) -> None:
    fails_twice = f"echo >> {site.folder}/tries\n[ $(wc -l < {site.folder}/tries) -gt 2 ] || exit 9\n{NOTHING_HEARD}"
    done = site.run(site.manifest(1), *command(site, fails_twice), "--config", "run.backoff_s=0.2", "--retries", 2)
    assert done.exit_code == 0, done.stderr
    attempts = site.rows(
        "SELECT try_number, outcome, error_class, started_at_ms, ended_at_ms FROM attempt ORDER BY attempt_id"
    )
    assert [attempt[:3] for attempt in attempts] == [
        (1, "failed", "exit_code"), (2, "failed", "exit_code"), (3, "done", None),
    ]  # fmt: skip
    rests_ms = [later[3] - earlier[4] for earlier, later in pairwise(attempts)]
    assert rests_ms[0] >= 200
    assert rests_ms[1] >= 400
    assert site.rows("SELECT status, attempts, error FROM chunk") == [("done", 3, None)]


def test_while_a_chunk_rests_the_others_go_on(site: Site) -> None:
    fails_once = (
        f'[ "$BADCJOBS_CHUNK_ID" != c000 ] || [ -e {site.folder}/tried ] || {{ touch {site.folder}/tried; exit 1; }}'
    )
    done = site.run(site.manifest(4), *command(site, f"{fails_once}\n{NOTHING_HEARD}"), "--config", "run.backoff_s=1")
    assert done.exit_code == 0, done.stderr
    order = [chunk for (chunk,) in site.rows("SELECT chunk_id FROM attempt ORDER BY attempt_id")]
    assert order == ["c000", "c001", "c002", "c003", "c000"]


@pytest.fixture(scope="module")
def misbehaved(shared_site: Site) -> Outcome:
    """A run of a program that behaves in another way for each chunk."""
    program = f"""
        case $BADCJOBS_CHUNK_ID in
        c000) printf '{HEADER}\\n0.5,1.25,AMRO,0.9\\n' > "$2" ;;
        c001) {NOTHING_HEARD} ;;
        c002) exit 0 ;;
        c003) printf '{HEADER}\\n0.5,soon,AMRO,0.9\\n' > "$2" ;;
        c004) printf 'start,end\\n' > "$2" ;;
        c005) echo 'no such model' >&2; exit 3 ;;
        c006) kill -9 $$ ;;
        c007) printf 'recording,name,start_time,end_time,score\\nx,BCCH,0,3,0.75\\n' > "$2" ;;
        c008) printf '{HEADER}\\n' > "$2"; exit 1 ;;
        c009) printf '\\377\\376' > "$2" ;;
        esac"""
    return shared_site.run(shared_site.manifest(10), *command(shared_site, program), "--retries", 1, "--json")


def state(site: Site, chunk_id: str) -> tuple[str, str | None]:
    (found,) = site.rows("SELECT status, error_class FROM chunk WHERE chunk_id = ?", chunk_id)
    return found


def error(site: Site, chunk_id: str) -> str:
    ((text,),) = site.rows("SELECT error FROM chunk WHERE chunk_id = ?", chunk_id)
    return str(text)


def test_a_program_that_writes_its_table_is_done_with_what_it_heard(misbehaved: Outcome, shared_site: Site) -> None:
    assert state(shared_site, "c000") == ("done", None)
    heard = shared_site.rows("SELECT chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY chunk_id")
    assert heard == [("c000", 500, 1250, "AMRO", 0.9), ("c007", 0, 3000, "BCCH", 0.75)]


def test_a_table_with_a_header_alone_means_that_nothing_was_heard(misbehaved: Outcome, shared_site: Site) -> None:
    assert shared_site.rows("SELECT status, detections FROM chunk WHERE chunk_id = 'c001'") == [("done", 0)]


def test_a_program_that_ends_well_without_a_table_has_failed(misbehaved: Outcome, shared_site: Site) -> None:
    assert state(shared_site, "c002") == ("failed", "no_output")


def test_a_table_that_cannot_be_read_is_a_failure_that_says_why(misbehaved: Outcome, shared_site: Site) -> None:
    for chunk_id in ("c003", "c004", "c009"):
        assert state(shared_site, chunk_id) == ("failed", "bad_output")
    assert "line 2, column end_time: 'soon' is not a number" in error(shared_site, "c003")
    assert "column start_time, end_time, label, score is missing" in error(shared_site, "c004")


def test_a_program_that_fails_is_quoted(misbehaved: Outcome, shared_site: Site) -> None:
    assert state(shared_site, "c005") == ("failed", "exit_code")
    assert "exit code 3" in error(shared_site, "c005")
    assert "no such model" in error(shared_site, "c005")


def test_a_table_does_not_make_up_for_a_bad_exit_code(misbehaved: Outcome, shared_site: Site) -> None:
    assert state(shared_site, "c008") == ("failed", "exit_code")


def test_a_chunk_that_kills_its_program_again_and_again_is_poison(misbehaved: Outcome, shared_site: Site) -> None:
    assert state(shared_site, "c006") == ("poison", "worker_died")


def test_every_failed_chunk_is_named_with_its_reason(misbehaved: Outcome) -> None:
    assert misbehaved.exit_code == 1
    named = {chunk["chunk_id"]: chunk["error_class"] for chunk in misbehaved.json["failed"]}
    assert named == {
        "c002": "no_output", "c003": "bad_output", "c004": "bad_output", "c005": "exit_code", "c006": "worker_died",
        "c008": "exit_code", "c009": "bad_output",
    }  # fmt: skip


def test_failed_chunks_are_tried_again_by_the_next_run(site: Site) -> None:
    manifest = site.manifest(3)
    broken = site.folder / "audio" / "c001.wav"
    healthy = broken.read_bytes()
    broken.write_bytes(b"")
    assert site.run(manifest, *ON_CPU).exit_code == 1
    broken.write_bytes(healthy)
    assert site.run(manifest, *ON_CPU).exit_code == 0
    assert rows(site.merged(), "SELECT status, count(*) FROM chunk GROUP BY 1") == [("done", 3)]


def test_an_engine_that_never_works_is_given_up_long_before_the_last_chunk(site: Site) -> None:
    done = site.run(site.manifest(90), *command(site, "echo the model is missing >&2; exit 1"), "--retries", 0)
    assert done.exit_code == 3, done.stderr
    assert "no chunk was done" in done.stdout
    assert "the model is missing" in done.stdout
    counts = dict(site.rows("SELECT status, count(*) FROM chunk GROUP BY status"))
    assert counts["pending"] >= 60, "most chunks must stay as they were, for the next run"
    assert counts["failed"] >= 20
    assert site.rows("SELECT verdict, exit_code FROM task") == [("failed", 3)]


def test_a_program_that_does_not_exist_is_found_out_before_any_chunk(site: Site) -> None:
    refused = site.run(site.manifest(3), "--command", "no-such-program {input} {output}", *ONE_WORKER)
    assert_refused(refused, 3, "'no-such-program'", "command -v no-such-program")
    assert not site.out.exists()


def test_results_that_cannot_be_published_stay_on_the_node_and_the_exit_code_says_so(site: Site) -> None:
    gate = site.folder / "gate"
    program = site.start_run(
        site.manifest(2), *command(site, f"while [ ! -e {gate} ]; do sleep 0.02; done\n{NOTHING_HEARD}")
    )
    wait_for(lambda: site.count_now("attempt"), "a chunk is running")
    shutil.rmtree(site.out)
    gate.touch()
    done = program.wait()
    assert done.exit_code == 4, done.stderr
    assert "Traceback" not in done.stderr
    (kept,) = site.local.iterdir()
    assert f"files stay in {kept}" in done.stdout
    assert rows(kept / "wrapper.sqlite", "SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 2)]


@pytest.mark.parametrize("earlier_runs", [0, 1])
def test_whatever_a_program_leaves_running_ends_with_the_task(site: Site, earlier_runs: int) -> None:
    """A daemon has a session and a process group of its own; a second run in the same job has another name."""
    up = site.folder / "up"
    daemon = f"setsid sh -c 'touch {up}; exec sleep 300' &\nwhile [ ! -e {up} ]; do sleep 0.01; done\n{NOTHING_HEARD}"
    for _ in range(earlier_runs + 1):
        up.unlink(missing_ok=True)
        done = site.run(site.manifest(1), *command(site, daemon), "--no-resume", env=array_task(0, (0, 1)))
        assert done.exit_code == 0, done.stderr
        assert site.processes("sleep 300") == []
    names = [f"4821_0.r{number}.gpu-01.sqlite" for number in range(earlier_runs + 1)]
    assert [path.name for path in site.task_databases()] == names, "a second run in one job overwrites nothing"


def test_a_python_program_may_use_a_pool_of_processes(site: Site) -> None:
    """A pool ends its processes with TERM, which our workers must not make them deaf to."""
    program = site.folder / "pool.py"
    program.write_text(
        f"""
import multiprocessing, sys
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    open(sys.argv[2], "w").write("{HEADER}\\n")
"""
    )
    done = site.run(
        site.manifest(2), "--command", f"{sys.executable} {program} {{input}} {{output}}", *ONE_WORKER, timeout_s=60
    )
    assert done.exit_code == 0, done.stderr


# --- many at once -----------------------------------------------------------------------------------------------------


def test_a_program_for_many_chunks_is_started_once_per_batch_and_one_guilty_chunk_is_found(site: Site) -> None:
    """Its exit code says that something failed and not what: halves tell."""
    script = site.script(
        "many.sh",
        f"""echo >> {site.folder}/starts
        while read -r path; do
            case $path in *c013.wav) echo "cannot hear $path" >&2; exit 3;; esac
            echo {HEADER} > "$2/$(basename "$path" .wav).csv"
        done < "$1"
        """,
    )
    options = ("--command", f"{script} {{inputs}} {{outputs}}", "--engine-arg=--batch=16", *ONE_WORKER, "--retries", 1)
    done = site.run(site.manifest(64), *options)
    assert done.exit_code == 1, done.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 63), ("failed", 1)]
    assert state(site, "c013") == ("failed", "exit_code")
    assert "cannot hear" in error(site, "c013")
    starts = len((site.folder / "starts").read_text().splitlines())
    assert starts == 4 + 2 * 4 + 1, "four batches, one of them halved four times, and the guilty one again"


def test_an_argument_that_the_command_engine_does_not_know_is_found_out_before_any_chunk(site: Site) -> None:
    options = ("--command", "true {inputs} {outputs}", "--engine-arg=--batch=none", *ONE_WORKER)
    assert_refused(site.run(site.manifest(3), *options), 2, "--batch=none", "--engine-arg=--batch=64")


# --- HawkEars, fed ----------------------------------------------------------------------------------------------------


def hawkears(site: Site, *args: str) -> tuple[object, ...]:
    """Return the options that run the stand-in package on two simulated devices."""
    root = make_fake_root(site.folder / "root")
    return (
        "--engine", "hawkears", "--hawkears-python", sys.executable, "--hawkears-root", root, "--simulate", 2,
        *(f"--engine-arg={arg}" for arg in args),
    )  # fmt: skip


def environ(**others: str) -> dict[str, str]:
    return {**fake_package_environ(), "HOME": "/nonexistent", **others}  # the caches of a test are its own


def test_poison_bad_audio_and_too_much_for_the_gpu_among_many_are_named_and_all_others_are_done(site: Site) -> None:
    manifest = site.manifest(200)
    words = {"c017": b"#fake SIGSEGV", "c063": b"no audio", "c101": b"", "c150": b"#fake oom"}
    for name, content in words.items():
        (site.folder / "audio" / f"{name}.wav").write_bytes(content)
    done = site.run(manifest, *hawkears(site, "--threads=2"), "--json", env=environ())
    assert done.exit_code == 1, done.stderr
    assert {chunk["chunk_id"]: chunk["error_class"] for chunk in done.json["failed"]} == {
        "c017": "engine_crash", "c063": "bad_audio", "c101": "bad_audio", "c150": "out_of_memory",
    }  # fmt: skip
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status ORDER BY 1") == [
        ("done", 196), ("failed", 3), ("poison", 1),
    ]  # fmt: skip
    lost = site.rows("SELECT count(DISTINCT chunk_id) FROM attempt WHERE outcome = 'lost'")
    assert lost[0][0] <= 4, "only what was in progress beside the poison was tried again"
    charged = site.rows("SELECT count(*) FROM attempt WHERE chunk_id = 'c017' AND outcome = 'failed'")
    assert charged == [(2,)], "twice alone, and no third time"
    assert site.count("worker") <= 2 + 3 + 2, "a new process for each death, a lean one, and the usual one after it"


def test_a_hawkears_without_models_stops_the_task_at_once(site: Site) -> None:
    options = hawkears(site)
    for model in (site.folder / "root" / "data" / "ckpt").iterdir():
        model.rename(model.with_suffix(".gone"))
    assert_refused(site.run(site.manifest(30), *options, env=environ()), 3, "has no models", "hawkears init")


def test_an_option_that_hawkears_does_not_know_is_refused_in_its_own_words(site: Site) -> None:
    refused = site.run(site.manifest(3), *hawkears(site, "--loudly"), env=environ())
    assert_refused(refused, 2, "No such option: --loudly")


def test_an_unknown_region_stops_the_task_before_it_has_done_anything_wrong(site: Site) -> None:
    done = site.run(site.manifest(50), *hawkears(site, "--region=XX-YY"), env=environ())
    assert done.exit_code == 3, done.stderr
    assert "location XX-YY not found" in done.stdout
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("pending", 50)]


def test_a_device_that_does_not_work_for_the_engine_is_left_alone_and_the_work_goes_on(site: Site) -> None:
    """The chunk that says so takes its worker along; the others do the rest."""
    manifest = site.manifest(30)
    (site.folder / "audio" / "c004.wav").write_bytes(b"#fake lost")
    once = site.folder / "root" / "once"
    done = site.run(manifest, *hawkears(site, "--threads=1"), env=environ(FAKE_HAWKEARS_ONCE=str(once)))
    assert done.exit_code == 0, done.stderr
    assert "stops (gpu_lost)" in done.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 30)]
    assert site.rows("SELECT count(*) FROM attempt WHERE outcome = 'failed'") == [(0,)]
