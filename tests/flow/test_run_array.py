"""``badcjobs run`` alone and inside an array, as Slurm's variables say: whose part, whose files, what is left."""

import re
import shutil
import socket

from support.audio import make_wav
from support.badcjobs_program import ON_CPU, array_task, assert_refused, rows


def parts(site):
    """Return the chunks in each task's database, with what is not done marked."""
    marked = "chunk_id || iif(status = 'done', '', ' ' || status)"
    sql = f"SELECT group_concat({marked}, ', ') FROM (SELECT * FROM chunk ORDER BY chunk_id)"
    return {path.stem: rows(path, sql)[0][0] or "" for path in site.task_databases()}


ONE_TASK = {
    "attempts that join their worker and device, within its life": """
        SELECT count(*) FROM attempt a
        JOIN worker w ON w.worker_id = a.worker_id AND w.device_id = a.device_id AND w.engine = 'demo'
        JOIN device d ON d.device_id = a.device_id
        JOIN chunk c USING (recording_id, chunk_id, worker_id)
        WHERE a.started_at_ms >= w.started_at_ms AND a.ended_at_ms <= w.ended_at_ms""",
    "devices that worked": "SELECT count(DISTINCT device_id) FROM attempt",
    "devices with samples while a chunk ran": """SELECT count(DISTINCT s.device_id) FROM sample s JOIN attempt a
        ON a.device_id = s.device_id AND s.at_ms BETWEEN a.started_at_ms AND a.ended_at_ms""",
    "samples outside of the task's life": """SELECT count(*) FROM sample s LEFT JOIN device d USING (device_id, task_id)
        LEFT JOIN task t USING (task_id) WHERE t.task_id IS NULL OR d.device_id IS NULL
        OR NOT s.at_ms BETWEEN t.started_at_ms AND t.ended_at_ms""",
    "the machine is recorded": "SELECT count(*) > 3 AND min(memory_used_bytes) > 0 FROM host_sample",
    "what a device does not give is null": "SELECT max(tensor_percent), max(fan_percent) FROM sample",
    "start to end in ms": "SELECT ended_at_ms - started_at_ms BETWEEN 500 AND 60000, job_id LIKE 'local%-%' FROM task",
    "integrity": "SELECT * FROM pragma_integrity_check",
    "decisions": "SELECT code FROM decision",
}


def test_outside_slurm_one_task_does_all_its_rows_join_and_nothing_is_done_twice(site, pages):
    manifest = site.manifest(12)
    manifest.write_text(manifest.read_text().replace(f"{site.folder}/audio/", ""))
    root = ("--root", site.folder / "audio")
    work = (manifest, *root, "--engine", "demo", "--engine-arg=--burn-s=0.15", "--simulate", 2, "--interval", 0.05)
    done = site.run(*work)
    assert done.exit_code == 0, done.stderr
    said = [f"{name}: {site.rows(sql)}" for name, sql in ONE_TASK.items()]
    node = socket.gethostname().split(".")[0]
    assert re.fullmatch(rf"local\d{{13}}-\d+_0\.r0\.{re.escape(node)}", site.task_database().stem)
    assert len(list(site.out.rglob("*"))) == 4, "run.toml, tasks, a database and a log"
    log = site.task_database().with_suffix(".log").read_text().splitlines()
    assert "shard 0/1: 12 chunks" in log[2] + log[3] and "task ends: done, exit code 0" in log[-1]
    assert len(log) <= 12, "the life of a task in about ten lines"
    assert list(site.local.iterdir()) == []
    assert site.processes() == []
    assert not (site.out / "learned.json").exists(), "one worker for each device, as no one asked for more"
    assert len(done.stdout.splitlines()) <= 8
    speed = re.search(r"[\d,.]+ × real time", done.stdout)[0]
    assert speed in site.badcjobs("merge", site.out).stdout, "one task, one speed"
    again = site.run(*work, "--json")
    assert (again.exit_code, again.json["chunks"]) == (0, {"skipped": 12})
    assert again.json["telemetry"] == "not needed: no chunks were pending"
    assert 0 < again.json["wall_s"] < 60
    assert (len(site.task_databases()), site.count("attempt"), site.count("worker")) == (2, 12, 2)
    pages({"rows.txt": "\n".join(said)})


def test_the_parts_of_an_array_are_disjoint_and_complete_and_its_shape_is_frozen(site):
    """An array 1-5:2 of which only the first task ran; then ``--array=3,5``, a new job of another shape."""
    manifest = site.manifest(8)
    first = site.run(manifest, *ON_CPU, env=array_task(1, (1, 3, 5), step=2))
    assert first.exit_code == 0, first.stderr
    site.run_tasks(manifest, *ON_CPU, envs=[array_task(index, (3, 5), job_id=5000) for index in (3, 5)])
    chunks = ("c000, c003, c006", "c001, c004, c007", "c002, c005")
    names = [f"{name}.r0.gpu-01" for name in ("4821_1", "5000_3", "5000_5")]
    assert parts(site) == dict(zip(names, chunks, strict=True))
    there = sorted(path.name for path in (site.out / "tasks").iterdir())
    assert there == [f"{name}.{ending}" for name in names for ending in ("log", "sqlite")]
    columns = "job_id, array_index, restart, node, shard_index, shard_count, verdict"
    assert site.rows(f"SELECT {columns} FROM task") == [
        ("4821", 1, 0, "gpu-01", 0, 3, "done"), ("5000", 3, 0, "gpu-01", 1, 3, "done"),
        ("5000", 5, 0, "gpu-01", 2, 3, "done"),
    ]  # fmt: skip
    assert "first = 1\nstep = 2\ncount = 3" in (site.out / "run.toml").read_text()
    before = sorted(site.out.rglob("*"))
    refused = site.run(manifest, *ON_CPU, env=array_task(2, (2, 7)))
    assert_refused(refused, 2, "array index 2 is not part", "sbatch --array=1-5:2")
    assert sorted(site.out.rglob("*")) == before


def test_the_tasks_of_a_step_share_the_part_of_their_task_or_are_refused(site):
    listed = site.folder / "manifests.txt"
    manifests = [site.manifest(2, name=f"{name}.csv", prefix=name) for name in ("dawn", "dusk")]
    listed.write_text("".join(f"{path}\n" for path in manifests))
    refused = site.run(site.manifest(3), *ON_CPU, env=array_task(5, (1, 2, 5)))
    assert_refused(refused, 2, "not report those of a list: 1,2,5", "sbatch --array=0-2")
    refused = site.run(listed, *ON_CPU, env=array_task(0, (0,)))
    assert_refused(refused, 2, "2 manifests", "1 task", "sbatch --array=0-1")
    for wrong in ("0", "1.5", "65"):
        refused = site.run(site.manifest(1), *ON_CPU, f"--workers-per-gpu={wrong}")
        assert_refused(refused, 2, f'--workers-per-gpu = "{wrong}" must be a whole number from 1 to 64, or auto')
    assert not site.out.exists()
    task = array_task(2, (1, 2))
    steps = [{**task, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(procid)} for procid in (0, 1)]
    for source, shares in ((listed, ("dusk000", "dusk001")), (site.manifest(8), ("c002, c006", "c003, c007"))):
        site.run_tasks(source, *ON_CPU, envs=steps)
        assert parts(site) == {f"4821_2.r0.gpu-01.p{procid}": shares[procid] for procid in (0, 1)}
        assert site.rows("SELECT procid FROM task") == [(0,), (1,)]
        shutil.rmtree(site.out)


def test_a_requeued_task_does_only_what_is_left_and_does_not_look_into_its_siblings(site):
    """It uses Slurm's own scratch folder, and its ``--shard`` wins over the array."""
    manifest, tasks, scratch = site.manifest(4), site.out / "tasks", site.folder / "slurm-tmpdir"
    tasks.mkdir(parents=True)
    sibling, of_another_job = tasks / "4821_1.r0.gpu-02.sqlite", tasks / "4700_1.r0.gpu-02.sqlite"
    sibling.write_bytes(b"a sibling's: this must not even be opened")
    of_another_job.write_bytes(b"another job's: this is looked into")
    scratch.mkdir()
    broken = site.folder / "audio" / "c002.wav"
    broken.write_bytes(b"not audio")
    env = {**array_task(0, (0, 1, 2)), "SLURM_TMPDIR": str(scratch)}
    first = site.run(manifest, *ON_CPU, "--shard", "0/2", env=env)
    assert (first.exit_code, f"{scratch}/" in first.stderr, list(scratch.iterdir())) == (1, True, [])
    assert f"{of_another_job.name} cannot be read" in first.stderr and sibling.name not in first.stderr
    broken.write_bytes((site.folder / "audio" / "c001.wav").read_bytes())
    of_another_job.unlink()
    sibling.unlink()
    assert site.run(manifest, *ON_CPU, "--shard", "0/2", env={**env, "SLURM_RESTART_COUNT": "1"}).exit_code == 0
    assert parts(site) == {"4821_0.r0.gpu-01": "c000, c002 failed", "4821_0.r1.gpu-01": "c000 skipped, c002"}


def test_a_task_without_a_share_ends_well_and_an_array_over_a_run_without_one_is_refused(site):
    for name in ("north/dawn.wav", "south.wav"):
        make_wav(site.folder / "audio" / name, 0.3, 1000)
    done = site.run(site.folder / "audio", *ON_CPU, "--json", env={"SLURM_JOB_ID": "4821", "SLURMD_NODENAME": "gpu-01"})
    assert (done.exit_code, done.json["chunks"]) == (0, {"done": 2})
    names = site.rows("SELECT recording_id, status, audio_s FROM chunk ORDER BY 1")
    assert names == [("north/dawn", "done", 0.3), ("south", "done", 0.3)]
    refused = site.run(site.folder / "audio", *ON_CPU, env=array_task(0, (0, 1)))
    assert_refused(refused, 2, "without an array")
    shutil.rmtree(site.out)
    done = site.run(site.folder / "audio", *ON_CPU, env=array_task(2, (0, 1, 2)))
    assert (done.exit_code, parts(site)) == (0, {"4821_2.r0.gpu-01": ""})
    assert site.rows("SELECT verdict, workers FROM task") == [("done", 0)]
