"""On a machine without Slurm: which devices are free, waiting for them, and two runs that never take the same card."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.badcjobs_program import QUICK, Outcome, Program, Site, array_task, assert_refused, rows
from support.waiting import wait_for

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
NOTHING_HEARD = 'echo start_time,end_time,label,score > "$2"'


def locks(site: Site, name: str = "locks") -> dict[str, str]:
    """Return the environment of a machine whose locks are this test's own."""
    return {"BADCJOBS_LOCK_DIR": str(site.folder / name)}


def loads(site: Site, *loads: str) -> Path:
    """Write a simulation in which device i has load i, as the script writes it."""
    script = site.folder / "loads.toml"
    script.write_text("".join(f"[[device]]\nindex = {i}\nload = {load}\n" for i, load in enumerate(loads)))
    return script


def uuids(outcome: Outcome) -> list[str]:
    return [device["uuid"] for device in outcome.json["devices"]]


@contextmanager
def running(*programs: Program) -> Iterator[None]:
    """Kill programs that a failing test would leave behind."""
    try:
        yield
    finally:
        for program in programs:
            program.kill()


def waiting_command(site: Site, name: str) -> tuple[str, Path, Path]:
    """Return a command that shows its device in a folder and waits for a file; that folder, and that file."""
    seen, enough = site.folder / f"seen-{name}", site.folder / f"enough-{name}"
    seen.mkdir()
    script = site.script(
        f"{name}.sh",
        f"""
        touch {seen}/$CUDA_VISIBLE_DEVICES
        while [ ! -e {enough} ]; do sleep 0.05; done
        {NOTHING_HEARD}
        """,
    )
    return f"{script} {{input}} {{output}}", seen, enough


# --- badcjobs gpus --free ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """What ``gpus --free`` answers on a machine with an idle, a light, a busy and a full device."""
    script = loads(shared_site, "[[0, 95]]", "[[0, 0]]", "[[0, 20]]", "[[0, 60]]")
    asked = {
        "the best": "--free 2 --json",
        "a line to paste": "--free 2",
        "of ours": "--free 1 --json",
        "within limits": "--free 3 --max-utilization 30 --json",
        "for people": "--free 3 --max-utilization 30 --min-memory-mib 9000",
        "more than there are": "--free 5 --wait 60",
    }
    commands = [("gpus", "--simulate", script, *args.split()) for args in asked.values()]
    envs = [dict(locks(shared_site)) for _ in asked]
    envs[2]["CUDA_VISIBLE_DEVICES"] = "0,3"
    return dict(zip(asked, shared_site.badcjobs_each(commands, envs), strict=True))


def test_the_freest_devices_come_with_the_best_first(answers: dict[str, Outcome]) -> None:
    found = answers["the best"]
    assert found.exit_code == 0, found.stderr
    assert uuids(found) == [SIMULATED.format(1), SIMULATED.format(2)]
    scores = [device["score"] for device in found.json["devices"]]
    assert scores == sorted(scores, reverse=True)
    assert all("one of the 2 most free GPUs" in device["why"] for device in found.json["devices"])


def test_people_get_the_line_that_takes_them(answers: dict[str, Outcome]) -> None:
    line = f"export CUDA_VISIBLE_DEVICES={SIMULATED.format(1)},{SIMULATED.format(2)}"
    assert line in answers["a line to paste"].stdout


def test_only_devices_that_this_process_may_use_are_free(answers: dict[str, Outcome]) -> None:
    assert uuids(answers["of ours"]) == [SIMULATED.format(3)]


def test_too_few_free_devices_are_an_answer_for_scripts_and_for_people(answers: dict[str, Outcome]) -> None:
    scripts = answers["within limits"]
    assert (scripts.exit_code, scripts.json["devices"]) == (3, [])
    assert "GPU 0 is 95 % busy" in scripts.json["why"]
    assert_refused(
        answers["for people"], 3, "3 free GPUs requested, not found",
        "GPU 0 is 95 % busy and has 7,", "GPU 3 is 60 % busy", "--wait",
    )  # fmt: skip


def test_more_devices_than_there_are_end_at_once(answers: dict[str, Outcome]) -> None:
    assert_refused(answers["more than there are"], 3, "5 free GPUs requested, but this process may use 4", "--free 4")


def test_gpus_waits_for_a_device_that_becomes_free_and_says_so(site: Site) -> None:
    script = loads(site, "[[0, 95], [2, 1]]")
    found = site.badcjobs(
        "gpus", "--simulate",  script, "--free", 1, "--max-utilization", 10, "--wait", 30,
        "--json", env=locks(site),
    )  # fmt: skip
    assert (found.exit_code, uuids(found)) == (0, [SIMULATED.format(0)]), found.stderr
    assert "waiting for 1 free GPU: GPU 0 is 95 % busy; " in found.stderr
    assert " s left" in found.stderr
    assert not (site.folder / "locks").exists(), "looking locks nothing"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--wait 5", "--wait without --free"),
        ("--max-utilization 5 --min-memory-mib 9", "without --free"),
        ("--free 1 --all", "--all and --free"),
        ("--free 0", "--free"),
        ("--free 1 --max-utilization 101", "101"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(site: Site, args: str, words: str) -> None:
    refused = site.badcjobs("gpus", "--simulate", 1, *args.split())
    assert refused.exit_code == 2
    assert words in refused.stderr


# --- badcjobs run --max-gpus ------------------------------------------------------------------------------------------


def test_a_run_takes_the_freest_devices_and_writes_down_how_they_were_chosen(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 10]]", "[[0, 60]]", "[[0, 0]]")
    done = site.run(
        site.manifest(6), "--engine", "demo", "--engine-arg=--burn-s=0.1", "--simulate",  script,
        "--max-gpus", 2, "--json", env=locks(site),
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert (done.json["devices"], done.json["workers"]) == (2, 2)
    found = site.rows("SELECT device_index, uuid, why FROM device ORDER BY device_index")
    assert [row[:2] for row in found] == [(1, SIMULATED.format(1)), (3, SIMULATED.format(3))]
    assert all("one of the 2 most free GPUs: score 0." in why for *_, why in found)
    after = site.badcjobs("gpus", "--simulate", 4, "--free", 4, "--json", env=locks(site))
    assert after.exit_code == 0, "a run that has ended still holds its devices"


def test_more_gpus_than_there_are_is_no_mistake(site: Site) -> None:
    args = ("--engine", "demo", "--simulate", 2, "--max-gpus", 9, "--json")
    done = site.run(site.manifest(3), *args, env=locks(site))
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 2, 2), done.stderr


def test_inside_a_slurm_job_the_granted_gpus_are_used_in_their_order_and_not_locked(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 0]]")
    env = {**array_task(0, (0, 1)), "CUDA_VISIBLE_DEVICES": "0,1", **locks(site)}
    done = site.run(site.manifest(3), "--engine", "demo", "--simulate", script, "--max-gpus", 1, "--json", env=env)
    assert (done.exit_code, done.json["workers"]) == (0, 1), done.stderr
    assert site.rows("SELECT DISTINCT device_index FROM worker JOIN device USING (device_id)") == [(0,)]


def test_a_run_that_finds_no_free_device_leaves_nothing(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 95]]")
    args = (
        "--engine",
        "demo",
        "--simulate",
        script,
        "--max-gpus",
        1,
        "--config",
        "run.max_utilization=50",
    )
    refused = site.run(site.manifest(3), *args, env=locks(site))
    assert_refused(refused, 3, "1 free GPU requested", "GPU 0 is 95 % busy", "GPU 1 is 95 % busy")
    assert not site.out.exists()


def test_a_missing_engine_is_told_before_anybody_waits_for_a_device(site: Site) -> None:
    began_s = time.monotonic()
    refused = site.run(
        site.manifest(3), "--command", "no-such-program {input} {output}", "--simulate", 1,
        "--max-gpus", 1, "--config", "run.max_utilization=0", "--config", "run.wait_s=50", env=locks(site),
    )  # fmt: skip
    assert_refused(refused, 3, "no-such-program")
    assert time.monotonic() - began_s < 45


def test_a_signal_ends_the_waiting_with_the_code_of_an_orderly_stop(site: Site) -> None:
    script = loads(site, "[[0, 95]]")
    args = (
        "--engine",
        "demo",
        "--simulate",
        script,
        "--max-gpus",
        1,
        "--config",
        "run.max_utilization=50",
    )
    program = site.start_run(site.manifest(3), *args, "--config", "run.wait_s=60", env=locks(site))
    with running(program):
        wait_for(lambda: "waiting for 1 free GPU" in program.stderr, "it waits")
        program.send(signal.SIGTERM)
        done = program.wait(60)
    assert_refused(done, 75, "SIGTERM")
    assert not site.out.exists()


def test_the_time_spent_waiting_is_not_counted_as_gpu_time(site: Site) -> None:
    script = loads(site, "[[0, 95], [4, 1]]")
    began_ms = time.time() * 1000
    args = (
        "--engine",
        "demo",
        "--simulate",
        script,
        "--max-gpus",
        1,
        "--config",
        "run.max_utilization=50",
    )
    done = site.run(site.manifest(2), *args, "--config", "run.wait_s=60", env=locks(site))
    assert done.exit_code == 0, done.stderr
    ((started_at_ms,),) = site.rows("SELECT started_at_ms FROM task")
    assert started_at_ms - began_ms > 3500


def test_a_device_of_a_run_is_nobody_elses_until_that_run_is_killed(site: Site) -> None:
    command, seen, _ = waiting_command(site, "long")
    env = locks(site)
    program = site.start_run(site.manifest(3), "--command", command, "--simulate", 2, "--max-gpus", 1, env=env)
    with running(program):
        wait_for(lambda: list(seen.iterdir()), "its worker is at work")
        (mine,) = [path.name for path in seen.iterdir()]
        other = site.badcjobs("gpus", "--simulate", 2, "--free", 1, "--json", env=env)
        assert other.exit_code == 0, other.stderr
        assert uuids(other) != [mine]
        both = site.badcjobs("gpus", "--simulate", 2, "--free", 2, env=env)
        assert_refused(both, 3, "is locked by run of ", f"pid {program.pid}, {site.out}")
    after = site.badcjobs("gpus", "--simulate", 2, "--free", 2, "--json", env=env)
    assert (after.exit_code, len(after.json["devices"])) == (0, 2), "the recorder lives on, but holds no lock"


def start_a_pair(site: Site, manifest: Path, attempt: int) -> list[set[str]]:
    """Start two runs at once, each of which keeps its devices until both have shown theirs; return what each took."""
    command, seen, enough = waiting_command(site, f"pair{attempt}")
    outs = [site.folder / f"run{attempt}-{name}" for name in ("a", "b")]
    args = (*QUICK, "--command", command, "--simulate", 4, "--max-gpus", 2, "--no-emit-gpu-telemetry")
    env = locks(site, f"locks{attempt}")
    programs = [site.start("run", manifest, "--out", out, *args, env=env) for out in outs]
    with running(*programs):
        wait_for(lambda: len(list(seen.iterdir())) == 4, f"four cards in use, attempt {attempt}")
        enough.touch()
        ends = [program.wait() for program in programs]
    assert [end.exit_code for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    databases = [database for out in outs for database in out.glob("tasks/*.sqlite")]
    return [{uuid for (uuid,) in rows(database, "SELECT uuid FROM device")} for database in databases]


def test_two_runs_started_together_never_pick_the_same_card(site: Site) -> None:
    manifest = site.manifest(2)
    with ThreadPoolExecutor(max_workers=3) as pool:
        pairs = list(pool.map(lambda attempt: start_a_pair(site, manifest, attempt), range(6)))
    assert [[len(taken) for taken in pair] for pair in pairs] == [[2, 2]] * 6
    assert all(one.isdisjoint(other) for one, other in pairs)
