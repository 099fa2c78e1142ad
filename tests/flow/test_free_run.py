"""Runs on a machine without Slurm: they take free devices, wait for them, and never take the same card."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.badcjobs_program import QUICK, Program, Site, array_task, assert_refused, rows
from support.waiting import wait_for

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
ON_DEMO = ("--engine", "demo", "--json", "--simulate")


def locks(site: Site, name: str = "locks") -> dict[str, str]:
    """Return the environment of a machine whose locks are this test's own."""
    return {"BADCJOBS_LOCK_DIR": str(site.folder / name)}


def loads(site: Site, *loads: str) -> Path:
    """Write a simulation in which device i has load i, as the script writes it."""
    script = site.folder / "loads.toml"
    script.write_text("".join(f"[[device]]\nindex = {i}\nload = {load}\n" for i, load in enumerate(loads)))
    return script


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
        echo start_time,end_time,label,score > "$2"
        """,
    )
    return f"{script} {{input}} {{output}}", seen, enough


def test_a_run_takes_the_freest_devices_records_why_and_unlocks_them(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 10]]", "[[0, 60]]", "[[0, 0]]")
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.1", "--max-gpus", 2, env=locks(site))
    assert done.exit_code == 0, done.stderr
    assert (done.json["devices"], done.json["workers"]) == (2, 2)
    found = site.rows("SELECT device_index, uuid, why FROM device ORDER BY device_index")
    assert [row[:2] for row in found] == [(1, SIMULATED.format(1)), (3, SIMULATED.format(3))]
    assert all("one of the 2 most free GPUs: score 0." in why for *_, why in found)
    after = site.badcjobs("gpus", "--simulate", 4, "--free", 4, env=locks(site))
    assert after.exit_code == 0, "a run that has ended still holds its devices"


def test_inside_slurm_the_granted_gpus_are_used_in_their_order_not_locked_and_all_are_recorded(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 80]]", "[[0, 0]]")
    env = {**array_task(0, (0,)), "CUDA_VISIBLE_DEVICES": "0,1,2", **locks(site)}
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.15", "--max-gpus", 2, env=env)
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 3, 2), done.stderr
    used = "SELECT DISTINCT d.device_index FROM worker w JOIN device d USING (device_id) ORDER BY 1"
    assert site.rows(used) == [(0,), (1,)]
    assert site.rows("SELECT count(DISTINCT device_id) FROM sample") == [(3,)]
    assert not (site.folder / "locks").exists()


def test_a_run_waits_for_a_device_and_the_wait_is_not_counted_as_gpu_time(site: Site) -> None:
    script = loads(site, "[[0, 95], [2, 1]]")
    began_ms = time.time() * 1000
    limits = ("--config", "run.max_utilization=50", "--config", "run.wait_s=60")
    done = site.run(site.manifest(2), *ON_DEMO, script, "--max-gpus", 9, *limits, env=locks(site))
    assert (done.exit_code, done.json["devices"]) == (0, 1), done.stderr  # more than there are is no mistake
    assert "waiting for 1 free GPU: GPU 0 is 95 % busy; " in done.stderr
    ((started_at_ms,),) = site.rows("SELECT started_at_ms FROM task")
    assert started_at_ms - began_ms > 1900


def test_a_run_that_gets_no_device_leaves_nothing_and_a_signal_ends_its_wait(site: Site) -> None:
    script, manifest = loads(site, "[[0, 95]]", "[[0, 95]]"), site.manifest(3)
    busy = ("--simulate", script, "--max-gpus", 1, "--config", "run.max_utilization=50")
    refused = site.run(manifest, "--engine", "demo", *busy, env=locks(site))
    assert_refused(refused, 3, "1 free GPU requested", "GPU 0 is 95 % busy", "GPU 1 is 95 % busy")
    wait = ("--config", "run.wait_s=600")
    no_engine = site.run(manifest, "--command", "no-such-program {input} {output}", *busy, *wait, env=locks(site))
    assert_refused(no_engine, 3, "no-such-program")  # before it waits for a device
    program = site.start_run(manifest, "--engine", "demo", *busy, *wait, env=locks(site))
    with running(program):
        wait_for(lambda: "waiting for 1 free GPU" in program.stderr, "it waits")
        program.send(signal.SIGTERM)
        assert_refused(program.wait(60), 75, "SIGTERM")
    assert not site.out.exists()


def test_a_device_of_a_run_is_locked_until_that_run_is_killed(site: Site) -> None:
    command, seen, _ = waiting_command(site, "long")
    env = locks(site)
    program = site.start_run(site.manifest(3), "--command", command, "--simulate", 2, "--max-gpus", 1, env=env)
    free = ("gpus", "--simulate", 2, "--json", "--free")
    with running(program):
        wait_for(lambda: list(seen.iterdir()), "its worker is at work")
        (mine,) = [path.name for path in seen.iterdir()]
        other = site.badcjobs(*free, 1, env=env)
        assert [device["uuid"] for device in other.json["devices"]] != [mine], other.stderr
        both = site.badcjobs(*free, 2, env=env)
        assert both.exit_code == 3
        assert f"pid {program.pid}, {site.out}" in both.json["why"]
    after = site.badcjobs(*free, 2, env=env)
    assert len(after.json["devices"]) == 2, "the recorder lives on, but holds no lock"


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
    with ThreadPoolExecutor(max_workers=2) as pool:
        pairs = list(pool.map(lambda attempt: start_a_pair(site, manifest, attempt), range(2)))
    assert [[len(taken) for taken in pair] for pair in pairs] == [[2, 2]] * 2
    assert all(one.isdisjoint(other) for one, other in pairs)
