"""Runs on a machine without Slurm: they take free devices, wait for them, and never take the same card."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from support.badcjobs_program import QUICK, Site, array_task, assert_refused, rows
from support.waiting import wait_for

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
ON_DEMO = ("--engine", "demo", "--json", "--simulate")


def locks(site: Site) -> dict[str, str]:
    """Return the environment of a machine whose locks are this test's own."""
    return {"BADCJOBS_LOCK_DIR": str(site.folder / "locks")}


def loads(site: Site, *loads: str) -> Path:
    """Write a simulation in which device i has load i, as the script writes it."""
    script = site.folder / "loads.toml"
    script.write_text("".join(f"[[device]]\nindex = {i}\nload = {load}\n" for i, load in enumerate(loads)))
    return script


def test_a_run_takes_the_freest_devices_records_why_and_does_not_count_its_wait_as_gpu_time(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 10]]", "[[0, 60]]", "[[0, 95], [2, 1]]", "[[0, 40]]")
    began_ms = time.time() * 1000
    limits = ("--max-gpus", 2, "--config", "run.max_utilization=30", "--config", "run.wait_s=60")
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.1", *limits, env=locks(site))
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 2, 2), done.stderr
    assert "waiting for 2 free GPUs: GPU 0 is 95 % busy; " in done.stderr
    found = site.rows("SELECT device_index, uuid, why FROM device ORDER BY device_index")
    assert [row[:2] for row in found] == [(1, SIMULATED.format(1)), (3, SIMULATED.format(3))]
    assert all("one of the 2 most free GPUs: score 0." in why for *_, why in found)
    ((started_at_ms,),) = site.rows("SELECT started_at_ms FROM task")
    assert started_at_ms - began_ms > 1900


def test_inside_slurm_the_granted_gpus_are_used_in_their_order_not_locked_and_all_are_recorded(site: Site) -> None:
    script = loads(site, "[[0, 95]]", "[[0, 80]]", "[[0, 0]]")
    env = {**array_task(0, (0,)), "CUDA_VISIBLE_DEVICES": "0,1,2", **locks(site)}
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.15", "--max-gpus", 2, env=env)
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 3, 2), done.stderr
    used = "SELECT DISTINCT d.device_index FROM worker w JOIN device d USING (device_id) ORDER BY 1"
    assert site.rows(used) == [(0,), (1,)]
    assert site.rows("SELECT count(DISTINCT device_id) FROM sample") == [(3,)]
    assert not (site.folder / "locks").exists()


def test_a_run_that_gets_no_device_leaves_nothing_and_a_signal_ends_its_wait(site: Site) -> None:
    script, manifest = loads(site, "[[0, 95]]", "[[0, 95]]"), site.manifest(3)
    busy = ("--simulate", script, "--max-gpus", 9, "--config", "run.max_utilization=50")  # more than there are
    refused = site.run(manifest, "--engine", "demo", *busy, env=locks(site))
    assert_refused(refused, 3, "2 free GPUs requested", "GPU 0 is 95 % busy", "GPU 1 is 95 % busy")
    wait = ("--config", "run.wait_s=600")
    no_engine = site.run(manifest, "--command", "no-such-program {input} {output}", *busy, *wait, env=locks(site))
    assert_refused(no_engine, 3, "no-such-program")  # before it waits for a device
    program = site.start_run(manifest, "--engine", "demo", *busy, *wait, env=locks(site))
    try:
        wait_for(lambda: "waiting for 2 free GPU" in program.stderr, "it waits")
        program.send(signal.SIGTERM)
        assert_refused(program.wait(60), 75, "SIGTERM")
    finally:
        program.kill()
    assert not site.out.exists()


def test_two_runs_started_together_take_different_cards_and_keep_them_until_they_end_or_are_killed(site: Site) -> None:
    seen, enough, manifest = site.folder / "seen", site.folder / "enough", site.manifest(2)
    seen.mkdir()
    wait = f"while [ ! -e {enough} ]; do sleep 0.05; done"
    text = f'touch {seen}/$CUDA_VISIBLE_DEVICES\n{wait}\necho start_time,end_time,label,score > "$2"'
    command = f"{site.script('command.sh', text)} {{input}} {{output}}"
    outs = [site.folder / f"run-{name}" for name in ("a", "b")]
    args = (*QUICK, "--command", command, "--simulate", 4, "--max-gpus", 2)
    programs = [site.start("run", manifest, "--out", out, *args, env=locks(site)) for out in outs]

    def free(many: int) -> list[str]:
        found = site.badcjobs("gpus", "--simulate", 4, "--json", "--free", many, env=locks(site))
        return [device["uuid"] for device in found.json["devices"]] if found.exit_code == 0 else [found.json["why"]]

    try:
        wait_for(lambda: len(list(seen.iterdir())) == 4, "four cards in use")
        (why,) = free(1)
        for program, out in zip(programs, outs, strict=True):
            assert why.count(f"pid {program.pid}, {out}") == 2, "each holds two"
        programs[0].kill()
        left = set(free(2))
        assert len(left) == 2, "the recorder of the killed one lives on, but holds no lock"
        enough.touch()
        assert programs[1].wait().exit_code == 0
    finally:
        for program in programs:
            program.kill()
    (database,) = outs[1].glob("tasks/*.sqlite")
    kept = {uuid for (uuid,) in rows(database, "SELECT uuid FROM device")}
    assert (len(kept), kept & left) == (2, set())
    assert len(free(4)) == 4, "a run that has ended holds nothing"
