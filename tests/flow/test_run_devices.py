"""Which devices a task works on, what its workers see of them, and what becomes of devices that do not answer."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.badcjobs_program import Program, Site, array_task, assert_refused
from support.fake_nvml import fake_nvml_environ, fake_nvml_folder, fake_slice_uuid, fake_uuid
from support.waiting import wait_for

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
SLOWLY = ("--engine", "demo", "--engine-arg=--burn-s=0.15")  # so that every worker gets something to do
NOTHING_HEARD = 'echo start_time,end_time,label,score > "$2"'


def machine_without_driver() -> dict[str, str]:
    """Return what to add to the environment so that no NVML answers, even on a machine that has one."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    return {"LD_LIBRARY_PATH": str(fake_nvml_folder())}  # without FAKE_NVML_DEVICES: no driver is loaded


def witness(site: Site, workers: int = 1) -> str:
    """Return a command that writes down what it was told about its device, once all the workers have come."""
    for folder in ("seen", "met"):
        (site.folder / folder).mkdir()
    script = site.script(
        "witness.sh",
        f"""
        touch {site.folder}/met/$(dirname "$2" | md5sum | cut -c1-12)
        while [ $(ls {site.folder}/met | wc -l) -lt {workers} ]; do sleep 0.02; done
        told="$CUDA_VISIBLE_DEVICES|$BADCJOBS_DEVICE_UUID|$BADCJOBS_CHUNK_ID|$3|$4|$5|$6"
        echo "$told" > {site.folder}/seen/$BADCJOBS_CHUNK_ID
        {NOTHING_HEARD}
        """,
    )
    return f"{script} {{input}} {{output}} {{device}} {{device_index}} {{chunk_id}} {{recording_id}}"


def what_was_seen(site: Site) -> dict[str, list[str]]:
    return {path.name: path.read_text().rstrip("\n").split("|") for path in sorted((site.folder / "seen").iterdir())}


def test_a_token_picks_one_device_out_of_many(site: Site) -> None:
    done = site.run(site.manifest(4), "--command", witness(site), "--simulate", 4, env={"CUDA_VISIBLE_DEVICES": "2"})
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT device_index, uuid, token FROM device") == [(2, SIMULATED.format(2), "2")]
    assert site.rows("SELECT d.device_index FROM worker w JOIN device d USING (device_id)") == [(2,)]
    assert {seen[0] for seen in what_was_seen(site).values()} == {SIMULATED.format(2)}


def test_each_worker_sees_its_own_device_only_and_is_told_its_chunk(site: Site) -> None:
    tokens = {"CUDA_VISIBLE_DEVICES": f"{SIMULATED.format(3)},{SIMULATED.format(1)}", **array_task(0, (0, 1))}
    done = site.run(site.manifest(24), "--command", witness(site, workers=2), "--simulate", 4, env=tokens)
    assert done.exit_code == 0, done.stderr
    seen = what_was_seen(site)
    assert sorted(seen) == [f"c{i:03d}" for i in range(0, 24, 2)]
    ran_on = dict(site.rows("SELECT c.chunk_id, d.uuid FROM chunk c JOIN device d USING (device_id)"))
    index_of = {SIMULATED.format(3): "3", SIMULATED.format(1): "1"}
    for chunk_id, told in seen.items():
        uuid = ran_on[chunk_id]
        recording = f"rec{int(chunk_id[1:]) // 3}"
        assert told == [uuid, uuid, chunk_id, uuid, index_of[uuid], chunk_id, recording]
    assert set(ran_on.values()) == set(index_of), "one of the two devices had nothing to do"


def test_a_worker_is_pinned_inside_containers_too_and_the_rest_of_its_environment_stays(site: Site) -> None:
    script = site.script("env.sh", f"env > {site.folder}/env-$BADCJOBS_CHUNK_ID\n{NOTHING_HEARD}")
    given = {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "APPTAINERENV_LANG": "C", "MY": "own"}
    env = {**given, **array_task(0, (0, 1))}
    done = site.run(site.manifest(2), "--command", f"{script} {{input}} {{output}}", "--simulate", 4, env=env)
    assert done.exit_code == 0, done.stderr
    (dump,) = site.folder.glob("env-*")
    seen = dict(line.split("=", 1) for line in dump.read_text().splitlines())
    mine = seen["BADCJOBS_DEVICE_UUID"]
    assert mine in (SIMULATED.format(3), SIMULATED.format(1))
    for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_"):
        assert seen[f"{prefix}CUDA_VISIBLE_DEVICES"] == mine
        assert seen[f"{prefix}CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    ours = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"}
    kept = {name: value for name, value in site.environ(env).items() if name not in ours}
    assert kept.items() <= seen.items()
    added = {name for name in seen if name not in site.environ(env)} - {"PWD", "SHLVL", "_", "OLDPWD"}
    containers = {f"{prefix}{name}" for name in ours for prefix in ("APPTAINERENV_", "SINGULARITYENV_")}
    assert added == containers | {
        "BADCJOBS_DEVICE_UUID", "BADCJOBS_CHUNK_ID", "BADCJOBS_RECORDING_ID", "BADCJOBS_TASK", "OMP_NUM_THREADS",
    }  # fmt: skip


def test_the_slices_of_a_card_are_given_to_one_worker_each(site: Site) -> None:
    slices = [fake_slice_uuid(1, 0), fake_slice_uuid(1, 1)]
    env = {**fake_nvml_environ(2, mig="1:2"), **array_task(0, (0, 1)), "CUDA_VISIBLE_DEVICES": ",".join(slices)}
    done = site.run(site.manifest(24), "--command", witness(site, workers=2), env=env)
    assert done.exit_code == 0, done.stderr
    assert {tuple(told[:2]) for told in what_was_seen(site).values()} == {(uuid, uuid) for uuid in slices}
    assert site.rows("SELECT uuid, device_index FROM device ORDER BY uuid") == [(uuid, 1) for uuid in slices]
    assert site.rows("SELECT count(DISTINCT device_id) FROM sample") == [(2,)]


def test_max_gpus_caps_the_workers_but_all_granted_devices_are_recorded(site: Site) -> None:
    env = {**array_task(0, (0,)), "CUDA_VISIBLE_DEVICES": "0,1,2"}  # outside Slurm: test_free_run.py
    done = site.run(site.manifest(6), *SLOWLY, "--simulate", 3, "--max-gpus", 2, "--json", env=env)
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 3, 2)
    assert site.rows("SELECT DISTINCT d.device_index FROM worker w JOIN device d USING (device_id) ORDER BY 1") == [
        (0,), (1,),
    ]  # fmt: skip
    assert site.rows("SELECT count(DISTINCT device_id) FROM sample") == [(3,)]


def test_several_workers_may_share_a_device(site: Site) -> None:
    done = site.run(site.manifest(6), *SLOWLY, "--simulate", 1, "--workers-per-gpu", 2, "--json")
    assert (done.exit_code, done.json["workers"]) == (0, 2)
    assert site.rows("SELECT count(*), count(DISTINCT pid), count(DISTINCT device_id) FROM worker") == [(2, 2, 1)]


def test_without_a_gpu_the_task_ends_at_once_with_3_and_leaves_nothing(site: Site) -> None:
    refused = site.run(site.manifest(3), "--engine", "demo", env=machine_without_driver())
    assert_refused(refused, 3, "no GPU", "--cpu-workers", "--simulate", "driver")
    assert not site.out.exists()


def test_a_variable_that_grants_nothing_is_obeyed(site: Site) -> None:
    refused = site.run(site.manifest(3), "--engine", "demo", "--simulate", 2, env={"CUDA_VISIBLE_DEVICES": "0,0"})
    assert_refused(refused, 3, "CUDA_VISIBLE_DEVICES")


def test_a_slurm_job_that_asked_for_no_gpu_takes_none(site: Site) -> None:
    refused = site.run(site.manifest(3), "--engine", "demo", "--simulate", 2, env=array_task(0, (0, 1)))
    assert_refused(refused, 3, "Slurm granted no GPU", "#SBATCH")


def test_cpu_workers_go_on_without_a_gpu(site: Site) -> None:
    done = site.run(
        site.manifest(12),
        "--command",
        witness(site, workers=2),
        "--cpu-workers",
        2,
        "--json",
        env=machine_without_driver(),
    )
    assert done.exit_code == 0, done.stderr
    assert (done.json["devices"], done.json["workers"], done.json["chunks"]) == (0, 2, {"done": 12})
    assert {tuple(seen[:2]) for seen in what_was_seen(site).values()} == {("", "")}
    assert site.rows("SELECT device_id FROM worker") == [(None,), (None,)]
    assert site.count("host_sample") > 0, "the machine itself is recorded all the same"


def test_granted_tokens_are_used_even_where_no_library_can_read_them(site: Site) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0,2", **array_task(0, (0, 1)), **machine_without_driver()}
    done = site.run(site.manifest(24), "--command", witness(site, workers=2), env=env)
    assert done.exit_code == 0, done.stderr
    assert {(seen[0], seen[1], seen[3]) for seen in what_was_seen(site).values()} == {("0", "", "0"), ("2", "", "2")}
    assert site.rows("SELECT token, uuid, backend FROM device ORDER BY token") == [
        ("0", None, "none"), ("2", None, "none"),
    ]  # fmt: skip
    gaps = site.rows("SELECT d.token, g.reason FROM gap g JOIN device d USING (device_id) ORDER BY 1")
    assert [token for token, _ in gaps] == ["0", "2"], "one gap for each device, over the whole time"
    assert all("driver" in reason for _, reason in gaps)
    assert site.count("sample") == 0
    warnings = [line for line in done.stderr.splitlines() if " WARNING " in line and "recorder was late" not in line]
    assert len(warnings) == 1 and "driver" in warnings[0], "\n".join(warnings)


@contextmanager
def a_long_run(site: Site, env: dict[str, str]) -> Iterator[Program]:
    """Start a run whose chunks wait for the file ``enough``; it is killed when the test fails before that."""
    script = site.script("wait.sh", f"while [ ! -e {site.folder}/enough ]; do sleep 0.05; done\n{NOTHING_HEARD}")
    program = site.start_run(site.manifest(4), "--command", f"{script} {{input}} {{output}}", env=env)
    try:
        yield program
    finally:
        program.kill()


# --- the real binding, on a stand-in library -----------------------------------------------------------------------


def test_nvml_readings_reach_the_task_database(site: Site) -> None:
    env = {**fake_nvml_environ(4), **array_task(0, (0, 1)), "CUDA_VISIBLE_DEVICES": "1,3"}
    done = site.run(site.manifest(8), *SLOWLY, env=env)
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT device_index, uuid, name, backend FROM device ORDER BY 1") == [
        (1, fake_uuid(1), "Stand-in GPU", "nvml"), (3, fake_uuid(3), "Stand-in GPU", "nvml"),
    ]  # fmt: skip
    found = site.rows(
        """SELECT DISTINCT d.device_index, s.utilization_percent, s.memory_used_bytes, s.temperature_c, s.power_w
           FROM sample s JOIN device d USING (device_id) ORDER BY 1"""
    )
    assert found == [(1, 51, 2 * 2**30, 41, 110.0), (3, 53, 4 * 2**30, 43, 130.0)]


def test_an_nvml_device_that_is_lost_in_mid_run_becomes_a_gap_and_not_a_failure(site: Site) -> None:
    flag = site.folder / "lost"
    env = fake_nvml_environ(2, lost=1, lost_while=flag)
    with a_long_run(site, env) as program:
        wait_for(lambda: site.count_now("sample") >= 4, "first samples")
        flag.touch()
        wait_for(lambda: site.count_now("gap", "to_ms - from_ms > 300"), "a gap that grows")
        flag.unlink()
        back_at_ms = time.time() * 1000
        both = "SELECT count(DISTINCT device_id) FROM sample WHERE at_ms > ?"
        wait_for(lambda: (2,) in site.now(both, back_at_ms), "samples of the device that came back")
        (site.folder / "enough").touch()
        done = program.wait()
    assert done.exit_code == 0, done.stderr
    ((reason, metric, from_ms, to_ms),) = site.rows(
        """SELECT g.reason, g.metric, g.from_ms, g.to_ms FROM gap g JOIN device d USING (device_id)
           WHERE d.device_index = 1 AND g.metric IS NULL"""
    )
    assert "lost" in reason.lower()
    assert metric is None
    inside = (
        "SELECT count(*) FROM sample JOIN device USING (device_id) WHERE device_index = ? AND at_ms > ? AND at_ms < ?"
    )
    assert site.rows(inside, 1, from_ms, to_ms) == [(0,)]
    assert site.rows(inside, 0, from_ms, to_ms) != [(0,)], "the other device was read all the time"
    assert site.count("chunk", "status = 'done'") == site.count("chunk")


# --- simulated faults ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(shared_site: Site) -> Iterator[Site]:
    """A run on three simulated devices: one without an energy counter, one that is lost for a while, one healthy."""
    script = shared_site.folder / "faults.toml"
    script.write_text(
        """
        devices = 3
        [[device]]
        index = 0
        unsupported = ["energy_j", "power_w"]
        [[device]]
        index = 1
        lost_at_s = 0.9
        back_at_s = 1.4
        """
    )
    done = shared_site.run(
        shared_site.manifest(12), "--engine", "demo", "--engine-arg=--burn-s=0.5", "--simulate",  script,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    yield shared_site


def test_a_metric_that_a_device_does_not_give_is_null_and_has_a_gap_of_its_own(faulty: Site) -> None:
    values = "SELECT DISTINCT energy_j, power_w FROM sample JOIN device USING (device_id) WHERE device_index = 0"
    assert faulty.rows(values) == [(None, None)]
    gaps = faulty.rows(
        """SELECT d.device_index, g.metric, g.reason FROM gap g JOIN device d USING (device_id)
           WHERE g.metric IS NOT NULL ORDER BY g.metric"""
    )
    assert gaps == [(0, "energy_j", "Not Supported (simulated)"), (0, "power_w", "Not Supported (simulated)")]
    others = "SELECT count(*) FROM sample JOIN device USING (device_id) WHERE device_index > 0 AND power_w IS NULL"
    assert faulty.rows(others) == [(0,)]


def test_a_simulated_device_that_is_lost_for_a_while_has_a_gap_and_then_samples_again(faulty: Site) -> None:
    ((from_ms, to_ms, reason),) = faulty.rows(
        """SELECT from_ms, to_ms, reason FROM gap g JOIN device d USING (device_id)
           WHERE d.device_index = 1 AND g.metric IS NULL"""
    )
    assert reason == "GPU is lost (simulated)"
    assert to_ms - from_ms >= 400
    samples = "SELECT count(*) FROM sample JOIN device USING (device_id) WHERE device_index = 1 AND at_ms {} ?"
    assert faulty.rows(samples.format(">="), to_ms) != [(0,)]


def test_the_worker_on_a_lost_device_goes_on_with_its_chunks(faulty: Site) -> None:
    assert faulty.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 12)]


# --- AMD, on a stand-in package ---------------------------------------------------------------------------------------


def test_workers_on_amd_devices_see_theirs_through_rocr_alone(site: Site) -> None:
    package = Path(__file__).parents[1] / "support" / "fake_amdsmi"
    search_path = [str(package), *filter(None, [site.environ().get("PYTHONPATH")])]
    env = {
        **machine_without_driver(), **array_task(0, (0, 1)), "PYTHONPATH": ":".join(search_path),
        "FAKE_AMDSMI_DEVICES": "4", "ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1",
    }  # fmt: skip
    script = site.script("env.sh", f"env > {site.folder}/env-$BADCJOBS_CHUNK_ID\n{NOTHING_HEARD}")
    done = site.run(site.manifest(2), "--command", f"{script} {{input}} {{output}}", env=env)
    assert done.exit_code == 0, done.stderr
    ((uuid, index, backend),) = site.rows("SELECT uuid, device_index, backend FROM device")
    assert (index, backend) == (3, "amd")
    (dump,) = site.folder.glob("env-*")
    seen = dict(line.split("=", 1) for line in dump.read_text().splitlines())
    for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_"):
        assert seen[f"{prefix}ROCR_VISIBLE_DEVICES"] in (uuid, "3")
    assert seen["BADCJOBS_DEVICE_UUID"] == uuid
    assert not {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(seen)
