"""``badcjobs demo``, the whole path with nothing installed; and run.toml, which every task of a run must agree with."""

import signal
from pathlib import Path

from rooms.cli import make_audio
from rooms.model import ArrayShape
from rooms.root import FrozenRun
from support.badcjobs_program import ON_CPU, array_task, assert_refused, rows
from support.fake_nvml import fake_nvml_environ
from support.waiting import wait_for


def test_the_first_task_freezes_what_all_share_and_others_must_agree(site):
    manifest = site.manifest(6)
    both = [site.start_run(manifest, *ON_CPU, "--retries", n, env=array_task(n, (0, 1))) for n in (0, 1)]
    ends = [program.wait() for program in both]  # they start together, and want different things
    assert sorted(end.exit_code for end in ends) == [0, 2]
    (refused,) = [end for end in ends if end.exit_code == 2]
    assert_refused(refused, 2, "retries: different from", "--out")
    assert sorted(path.name for path in site.out.iterdir()) == ["run.toml", "tasks"], "and nothing half written"
    assert (len(site.task_databases()), list(site.local.iterdir())) == (1, [])
    frozen = FrozenRun.read(site.out / "run.toml")
    (retries,) = [n for n, end in enumerate(ends) if end.exit_code == 0]
    assert (frozen.settings["retries"], frozen.array) == (retries, ArrayShape(0, 1, 2))
    # The same source under another spelling, and what concerns one task alone, may differ.
    alone = ("--engine", "demo", "--simulate", 1, "--config", "run.grace_s=3", "--retries", retries)
    env = {"CUDA_VISIBLE_DEVICES": "0", **array_task(1 - retries, (0, 1), job_id=5000)}
    assert site.run(Path("manifest.csv"), *alone, env=env).exit_code == 0
    assert site.rows("SELECT count(*), min(status), max(status) FROM chunk") == [(3, "done", "done")] * 2


def test_a_secret_is_only_in_run_toml_and_job_scripts_which_only_their_owner_can_read(site):
    echo = site.script("engine.sh", 'echo "$* is wrong" >&2; echo "so $2 is" >&2; exit 5')
    words = (f"env DB_PASSWORD=HUNTER2 {echo} --token HUNTER2 {{input}} {{output}}", "--engine", "command")
    run = ("--command", *words, "--simulate", 1, "--retries", 0)
    source = site.manifest(3)
    assert site.badcjobs("submit", source, "--out", site.out, "--cluster", "local", "--", *run).exit_code == 1
    forms = ("--html", "r.html", "--markdown", "r.md", "--prometheus", "r.prom", "--json")
    report = site.badcjobs("report", site.out, *forms).json
    assert "so *** is" in str(report["failed_chunks"])
    (line,) = report["completeness"]["finish"]
    assert site.badcjobs(*line.split()[1:]).exit_code == 1, "the line to paste has the secret from run.toml"
    site.badcjobs("monitor", site.out, "--once")
    site.badcjobs("export", site.out, "--format", "badc", "--out", "badc")
    site.badcjobs("plan", source, "--rate", 9, "--out", "plan", "--", *run)
    files = [path for path in site.folder.rglob("*") if path.is_file() and b"HUNTER2" in path.read_bytes()]
    secret = {str(path.relative_to(site.folder)): path.stat().st_mode & 0o777 for path in files}
    assert secret == {"run/run.toml": 0o600, "plan/wave-1.sbatch": 0o600}
    other = [str(word).replace("HUNTER2", "HUNTER3") for word in run]
    assert site.badcjobs("run", source, "--out", site.out, *other).exit_code == 1, "another secret is the same run"


def test_bytecode_is_kept_in_our_cache_if_nvmls_binding_has_none_beside_it(site):
    """The wrapper compiles it, and the recorder finds it: it would need 15 MiB for that."""
    nowhere = {"PYTHONPYCACHEPREFIX": str(site.folder / "nowhere"), "PYTHONDONTWRITEBYTECODE": "1"}
    env = {**fake_nvml_environ(1), **nowhere}
    program = site.start_run(site.manifest(60), "--engine", "demo", "--workers-per-gpu", 1, env=env)
    wait_for(lambda: site.count_now("sample"), "the recorder works")
    (recorder,) = site.recorders()
    cache = Path(site.environ()["XDG_CACHE_HOME"]) / "badcjobs" / "python-cache"
    assert f"pycache_prefix={cache}" in recorder.cmdline()
    program.send(signal.SIGTERM)
    assert program.wait().exit_code in (0, 75), program.stderr
    assert {path.name.split(".")[0] for path in cache.rglob("*.pyc")} >= {"pynvml", "run_task"}
    assert not Path(nowhere["PYTHONPYCACHEPREFIX"]).exists(), "programs of chunks write none"


def test_a_demo_ends_with_the_merged_summary_and_leaves_a_whole_run(site):
    in_a_job_without_gpus = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""}
    done = site.badcjobs("demo", "--out", site.out, env=in_a_job_without_gpus)
    assert done.exit_code == 0, done.stderr
    words = ("all done", "4 (4 done)", "audio-hours per GPU-hour", "× real time", "report.html", "badcjobs run ")
    assert [word for word in words if word not in done.stdout] == []
    whole = ("  database ", "  report ", "  each task ", "next: ")  # paths, and a command to paste: never folded
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(whole)) <= 100
    assert (site.out / "report.html").read_text().startswith("<!doctype html>")
    job = site.out / "job.sqlite"
    assert rows(job, "SELECT chunks, done, detections > 0 FROM job_summary") == [(96, 96, 1)]
    assert rows(job, "SELECT count(DISTINCT uuid), count(*) FROM device") == [(4, 8)]
    assert (len(site.task_databases()), list(site.local.iterdir()), site.processes()) == (4, [], [])


def test_a_second_demo_in_the_same_folder_leaves_the_audio_alone_so_that_what_is_done_stays(tmp_path):
    make_audio(tmp_path)  # it exists
    assert list(tmp_path.iterdir()) == []
