"""Devices: what badcjobs gpus says of them, which ones a run works on and locks, and what its workers see of them."""

import re
import shutil
import signal
import time
from pathlib import Path

from rooms.model import InventoryDevice, Reading
from support.badcjobs_program import QUICK, array_task, assert_refused, rows
from support.cases import DATA, read_data
from support.fake_nvml import fake_nvml_environ, fake_slice_uuid, fake_uuid, no_driver
from support.recorded_tape import write_recording
from support.waiting import wait_for

SIMULATED = "GPU-51a0d000-0000-4000-8000-{:012d}"
IN_ARRAY = array_task(0, (0, 1))


def witness(site, workers):
    """Return a command that dumps its arguments and environment by chunk, once all the workers have come."""
    for folder in ("seen", "met"):
        (site.folder / folder).mkdir()
    at = site.folder
    text = f"""touch {at}/met/$(dirname "$2" | md5sum | cut -c1-12)
while [ $(ls {at}/met | wc -l) -lt {workers} ]; do sleep 0.02; done
(echo "ARGUMENTS=$3 $4 $5 $6"; env) > {at}/seen/$BADCJOBS_CHUNK_ID
echo start_time,end_time,label,score > "$2" """
    script = site.script("witness.sh", text)
    return f"{script} {{input}} {{output}} {{device}} {{device_index}} {{chunk_id}} {{recording_id}}"


def seen(site):
    """Return the environment of each chunk."""
    files = sorted((site.folder / "seen").iterdir())
    return {path.name: dict(line.split("=", 1) for line in path.read_text().splitlines()) for path in files}


def test_each_worker_sees_its_own_device_only_and_its_chunk_also_inside_containers(site):
    """Two workers share each device; one device does not give its power."""
    (site.folder / "devices.toml").write_text('devices = 4\n[[device]]\nindex = 3\nunsupported = ["power_w"]\n')
    index_of = {SIMULATED.format(3): "3", SIMULATED.format(1): "1"}
    given = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "APPTAINERENV_LANG": "C", "MY": "own", **IN_ARRAY}
    env = {**given, "CUDA_VISIBLE_DEVICES": ",".join(index_of)}
    args = ("--command", witness(site, workers=4), "--workers-per-gpu", 2, "--simulate", "devices.toml", "--json")
    done = site.run(site.manifest(24), *args, env=env)
    assert (done.exit_code, done.json["workers"]) == (0, 4), done.stderr
    assert site.rows("SELECT count(*), count(DISTINCT device_id) FROM worker") == [(4, 2)]
    devices = site.rows("SELECT device_index, uuid, token FROM device ORDER BY 1 DESC")
    assert devices == [(int(index), uuid, uuid) for uuid, index in index_of.items()]
    ran_on = dict(site.rows("SELECT c.chunk_id, d.uuid FROM chunk c JOIN device d USING (device_id)"))
    environments = seen(site)
    assert sorted(environments) == sorted(ran_on) == [f"c{i:03d}" for i in range(0, 24, 2)]
    assert set(ran_on.values()) == set(index_of), "one of the two devices had nothing to do"
    outside = site.environ(env)
    for chunk_id, reported in environments.items():
        uuid, recording = ran_on[chunk_id], f"rec{int(chunk_id[1:]) // 3}"
        ours = {"CUDA_VISIBLE_DEVICES": uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        added = {
            **{f"{prefix}{name}": value for name, value in ours.items()
               for prefix in ("", "APPTAINERENV_", "SINGULARITYENV_")},
            "BADCJOBS_DEVICE_UUID": uuid, "BADCJOBS_CHUNK_ID": chunk_id, "BADCJOBS_RECORDING_ID": recording,
            "ARGUMENTS": f"{uuid} {index_of[uuid]} {chunk_id} {recording}",
        }  # fmt: skip
        assert {**outside, **added}.items() <= reported.items()
        others = reported.keys() - outside.keys() - added.keys() - {"PWD", "SHLVL", "_", "OLDPWD"}
        assert others == {"BADCJOBS_TASK", "OMP_NUM_THREADS"}
    gaps = "SELECT device_index, metric, reason FROM gap JOIN device USING (device_id) WHERE metric IS NOT NULL"
    assert site.rows(gaps) == [(3, "power_w", "Not Supported (simulated)")]
    nulls = "SELECT device_index, power_w IS NULL FROM sample JOIN device USING (device_id) GROUP BY 1, 2 ORDER BY 1"
    assert site.rows(nulls) == [(1, 0), (3, 1)]


def test_a_task_without_a_gpu_is_refused_and_leaves_nothing_and_workers_on_the_cpu_need_none(site):
    manifest, run = site.manifest(3), ("--engine", "demo")
    refused = site.run(manifest, *run, env=no_driver())
    assert_refused(refused, 3, "no GPU", "--cpu-workers", "--simulate", "driver")
    twice = site.run(manifest, *run, "--simulate", 2, env={"CUDA_VISIBLE_DEVICES": "0,0"})
    assert_refused(twice, 3, "CUDA_VISIBLE_DEVICES")
    none_granted = site.run(manifest, *run, "--simulate", 2, env=IN_ARRAY)
    assert_refused(none_granted, 3, "Slurm granted no GPU", "#SBATCH")
    assert not site.out.exists()
    args = ("--command", witness(site, workers=2), "--cpu-workers", 2, "--json")
    done = site.run(site.manifest(12), *args, env=no_driver())
    assert done.exit_code == 0, done.stderr
    assert (done.json["devices"], done.json["workers"], done.json["chunks"]) == (0, 2, {"done": 12})
    reported = {
        (reported["CUDA_VISIBLE_DEVICES"], reported["BADCJOBS_DEVICE_UUID"]) for reported in seen(site).values()
    }
    assert reported == {("", "")}
    assert site.rows("SELECT device_id FROM worker") == [(None,), (None,)]
    assert site.count("host_sample") > 0, "the machine itself is recorded all the same"


def test_granted_tokens_are_used_even_where_no_library_can_read_them(site):
    env = {"CUDA_VISIBLE_DEVICES": "0,2", **IN_ARRAY, **no_driver()}
    done = site.run(site.manifest(24), "--command", witness(site, workers=2), env=env)
    assert done.exit_code == 0, done.stderr
    reported = {
        (reported["CUDA_VISIBLE_DEVICES"], reported["BADCJOBS_DEVICE_UUID"]) for reported in seen(site).values()
    }
    assert reported == {("0", ""), ("2", "")}
    devices = site.rows("SELECT token, uuid, backend FROM device ORDER BY token")
    assert devices == [("0", None, "none"), ("2", None, "none")]
    ((wall_ms,),) = site.rows("SELECT max(at_ms) - min(at_ms) FROM host_sample")
    gaps = site.rows("SELECT token, reason, to_ms - from_ms >= 0.9 * ? FROM gap JOIN device USING (device_id)", wall_ms)
    reason = gaps[0][1]
    assert reason.startswith("no driver library to read it with: ")
    assert sorted(gaps) == [("0", reason, 1), ("2", reason, 1)], "one gap for each device, over the whole time"
    assert (site.count("sample"), site.count("alert")) == (0, 0), "what was never there is not lost"
    warnings = [line for line in done.stderr.splitlines() if " WARNING " in line and "recorder was late" not in line]
    assert len(warnings) == 1 and "devices that cannot be read: 2; no driver library" in warnings[0], "\n".join(
        warnings
    )


def test_cards_and_slices_have_a_worker_each_and_a_lost_one_is_a_gap_and_no_failure(site):
    slice_, card, flag = fake_slice_uuid(1, 1), fake_uuid(3), site.folder / "lost"
    command = witness(site, workers=3)  # they wait until this test makes the third
    env = {**fake_nvml_environ(4, mig="1:2", lost=3, lost_while=flag), **IN_ARRAY}
    env["CUDA_VISIBLE_DEVICES"] = f"{slice_},{card}"
    program = site.start_run(site.manifest(8), "--command", command, env=env)
    wait_for(lambda: site.count_now("sample") >= 4, "first samples")
    flag.touch()
    wait_for(lambda: site.count_now("gap", "metric IS NULL AND to_ms - from_ms > 300"), "a gap that grows")
    flag.unlink()
    back_at_ms = time.time() * 1000
    both = "SELECT count(DISTINCT device_id) FROM sample WHERE at_ms > ?"
    wait_for(lambda: (2,) in site.now(both, back_at_ms), "samples of the device that came back")
    (site.folder / "met" / "test").touch()
    done = program.wait()
    assert done.exit_code == 0, done.stderr
    assert {reported["CUDA_VISIBLE_DEVICES"] for reported in seen(site).values()} == {slice_, card}
    assert site.rows("SELECT device_index, uuid, name, backend FROM device ORDER BY 1") == [
        (1, slice_, "Stand-in GPU MIG 1g.4gb", "nvml"), (3, card, "Stand-in GPU", "nvml"),
    ]  # fmt: skip
    found = site.rows(
        """SELECT DISTINCT d.device_index, s.utilization_percent, s.memory_used_bytes, s.temperature_c, s.power_w
           FROM sample s JOIN device d USING (device_id) ORDER BY 1"""
    )
    assert found == [(1, None, 2**29, None, None), (3, 53, 4 * 2**30, 43, 130.0)]
    of_devices = "FROM gap JOIN device USING (device_id) WHERE metric IS NULL AND reason = 'GPU is lost'"
    ((index, from_ms, to_ms),) = site.rows(f"SELECT device_index, from_ms, to_ms {of_devices}")
    inside = "SELECT DISTINCT device_index FROM sample JOIN device USING (device_id) WHERE at_ms > ? AND at_ms < ?"
    assert (index, site.rows(inside, from_ms, to_ms)) == (3, [(1,)]), "the other one was read all the time"
    assert site.count("chunk", "status = 'done'") == site.count("chunk") == 4


ON_DEMO = ("--engine", "demo", "--json", "--simulate")


def loads(site, *loads):
    """Write a simulation in which device i has load i, as the script writes it."""
    script = site.folder / "loads.toml"
    script.write_text("".join(f"[[device]]\nindex = {i}\nload = {load}\n" for i, load in enumerate(loads)))
    return script


def test_a_run_takes_the_freest_devices_records_why_and_does_not_count_its_wait_as_gpu_time(site):
    script = loads(site, "[[0, 95]]", "[[0, 10]]", "[[0, 60]]", "[[0, 95], [2, 1]]", "[[0, 40]]")
    began_ms = time.time() * 1000
    limits = ("--max-gpus", 2, "--config", "run.max_utilization=30", "--config", "run.wait_s=60")
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.1", *limits)
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 2, 2), done.stderr
    assert "waiting for 2 free GPUs: GPU 0 is 95 % busy; " in done.stderr
    found = site.rows("SELECT device_index, uuid, why FROM device ORDER BY device_index")
    assert [row[:2] for row in found] == [(1, SIMULATED.format(1)), (3, SIMULATED.format(3))]
    assert all("one of the 2 most free GPUs: score 0." in why for *_, why in found)
    ((started_at_ms,),) = site.rows("SELECT started_at_ms FROM task")
    assert started_at_ms - began_ms > 1900


def test_inside_slurm_the_granted_gpus_are_used_in_their_order_not_locked_and_all_are_recorded(site):
    script = loads(site, "[[0, 95]]", "[[0, 80]]", "[[0, 0]]")
    env = {**array_task(0, (0,)), "CUDA_VISIBLE_DEVICES": "0,1,2"}
    done = site.run(site.manifest(6), *ON_DEMO, script, "--engine-arg=--burn-s=0.15", "--max-gpus", 2, env=env)
    assert (done.exit_code, done.json["devices"], done.json["workers"]) == (0, 3, 2), done.stderr
    used = "SELECT DISTINCT d.device_index FROM worker w JOIN device d USING (device_id) ORDER BY 1"
    assert site.rows(used) == [(0,), (1,)]
    assert site.rows("SELECT count(DISTINCT device_id) FROM sample") == [(3,)]
    assert not (site.folder / "locks").exists()


def test_a_run_that_gets_no_device_leaves_nothing_and_a_signal_ends_its_wait(site):
    script, manifest = loads(site, "[[0, 95]]", "[[0, 95]]"), site.manifest(3)
    busy = ("--simulate", script, "--max-gpus", 9, "--config", "run.max_utilization=50")  # more than there are
    refused = site.run(manifest, "--engine", "demo", *busy)
    assert_refused(refused, 3, "2 free GPUs requested", "GPU 0 is 95 % busy", "GPU 1 is 95 % busy")
    wait = ("--config", "run.wait_s=600")
    no_engine = site.run(manifest, "--command", "no-such-program {input} {output}", *busy, *wait)
    assert_refused(no_engine, 3, "no-such-program")  # before it waits for a device
    program = site.start_run(manifest, "--engine", "demo", *busy, *wait)
    wait_for(lambda: "waiting for 2 free GPU" in program.stderr, "it waits")
    program.send(signal.SIGTERM)
    assert_refused(program.wait(60), 75, "SIGTERM")
    assert not site.out.exists()


def test_two_runs_started_together_take_different_cards_and_keep_them_until_they_end_or_are_killed(site):
    seen, enough, manifest = site.folder / "seen", site.folder / "enough", site.manifest(2)
    seen.mkdir()
    wait = f"while [ ! -e {enough} ]; do sleep 0.05; done"
    text = f'touch {seen}/$CUDA_VISIBLE_DEVICES\n{wait}\necho start_time,end_time,label,score > "$2"'
    command = f"{site.script('command.sh', text)} {{input}} {{output}}"
    outs = [site.folder / f"run-{name}" for name in ("a", "b")]
    args = (*QUICK, "--command", command, "--max-gpus", 2)
    cards = fake_nvml_environ(4)
    programs = [site.start("run", manifest, "--out", out, *args, env=cards) for out in outs]

    def free(many):
        found = site.badcjobs("gpus", "--json", "--free", many, env=cards)
        return [device["uuid"] for device in found.json["devices"]] if found.exit_code == 0 else [found.json["why"]]

    wait_for(lambda: len(list(seen.iterdir())) == 4, "four cards in use")
    (why,) = free(1)
    for program, out in zip(programs, outs, strict=True):
        assert why.count(f"pid {program.pid}, {out}") == 2, "each holds two"
    later = site.folder / "later"
    waits = site.start("run", manifest, "--out", later, *args, "--config=run.wait_s=60", env=cards)
    wait_for(lambda: (later / "tasks" / ".waiting").is_file(), "it waits")
    monitor = site.badcjobs("monitor", later, "--once")
    assert "tasks are waiting for 2 free GPUs: GPU 0 is locked by run of " in monitor.stdout, monitor.stdout
    waits.send(signal.SIGTERM)
    assert (waits.wait().exit_code, later.exists()) == (75, False)
    programs[0].kill()
    left = set(free(2))
    assert len(left) == 2, "the recorder of the killed one lives on, but holds no lock"
    enough.touch()
    assert programs[1].wait().exit_code == 0
    (database,) = outs[1].glob("tasks/*.sqlite")
    kept = {uuid for (uuid,) in rows(database, "SELECT uuid FROM device")}
    assert (len(kept), kept & left) == (2, set())
    assert len(free(4)) == 4, "a run that has ended holds nothing"


CUDA = "CUDA_VISIBLE_DEVICES"
SHOWN = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "SLURM_JOB_ID", "FAKE_NVML_DEVICES")


def test_gpus_says_what_a_task_has_what_is_free_and_why_for_people_and_scripts(site, pages):
    shutil.copy(DATA / "loads.toml", site.folder)
    tape = [InventoryDevice(i, f"GPU-tape{i}", "Tesla V100", "nvml", memory_total_bytes=16 * 2**30) for i in range(2)]
    said = Reading(utilization_percent=50, memory_used_bytes=4 * 2**30)
    write_recording(site.folder / "tape.sqlite", tape, lambda index, at_s: said, range(60))
    site.script("libnvidia-ml.so.1", "not a library, and in the way of a real one")
    nowhere = {"PATH": "/nowhere"}
    package = f"{Path(__file__).parents[1]}/support/fake_amdsmi:{site.environ()['PYTHONPATH']}"
    machines = {
        "slurm": IN_ARRAY, "bare": {**no_driver(), **nowhere}, "cut": fake_nvml_environ(2, mig="1:1"),
        "broken": {"LD_LIBRARY_PATH": str(site.folder), **nowhere},
        "amd": {**no_driver(), **nowhere, "PYTHONPATH": package, "FAKE_AMDSMI_DEVICES": "4",
                "ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"},
    }  # fmt: skip
    prompts, commands, environs = [], [], []
    for line in read_data("gpus_commands.txt").split("\n\n")[1].splitlines():
        before, _, arguments = line.partition("gpus")
        environ = {}
        for word in before.split():
            environ |= {CUDA: word[5:]} if word.startswith("CUDA=") else machines[word]
        shown = [f"{name}={environ[name]} " for name in (CUDA, *SHOWN) if name in environ]
        prompts.append(f"$ {''.join(shown)}badcjobs gpus{arguments}\n")
        commands.append(("gpus", *arguments.split()))
        environs.append(environ)
    texts = []
    for prompt, done in zip(prompts, site.badcjobs_each(commands, environs), strict=True):
        stderr = re.sub(r".*waiting for .*\n", "", done.stderr)  # how often depends on how busy this machine is
        texts.append(f"{prompt}{done.stdout}{stderr}exit code {done.exit_code}\n")
    has_amd = "there is an AMD GPU, but the Python package amdsmi is not installed (pip install 'badcjobs[amd]')"
    text = "\n".join(texts).replace(f"{site.folder}/", "").replace(has_amd, "no AMD GPU").replace(" \n", "\n")
    pages({"gpus.txt": text})
    assert {file.read_text() for file in (site.folder / "locks").iterdir()} == {""}, "what was locked is given back"
