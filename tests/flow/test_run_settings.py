"""Where a run's settings come from, and run.toml, which every task of a run must agree with."""

from __future__ import annotations

import sys
from pathlib import Path

from support.badcjobs_program import ON_CPU, QUICK, Site, array_task, assert_refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_first_task_freezes_what_all_share_and_others_must_agree(site: Site) -> None:
    manifest = site.manifest(6)
    both = [site.start_run(manifest, *ON_CPU, "--retries", n, env=array_task(n, (0, 1))) for n in (0, 1)]
    ends = [program.wait() for program in both]  # they start together, and want different things
    assert sorted(end.exit_code for end in ends) == [0, 2]
    (refused,) = [end for end in ends if end.exit_code == 2]
    assert_refused(refused, 2, "retries: different from", "--out")
    assert sorted(path.name for path in site.out.iterdir()) == ["run.toml", "tasks"], "and nothing half written"
    assert (len(site.task_databases()), list(site.local.iterdir())) == (1, [])
    frozen = tomllib.loads((site.out / "run.toml").read_text())
    (retries,) = [n for n, end in enumerate(ends) if end.exit_code == 0]
    assert frozen["run"] == {
        "source": [str(manifest)], "engine": "demo", "engine_arg": [], "interval": 0.1, "retries": retries
    }  # fmt: skip
    assert frozen["array"] == {"first": 0, "step": 1, "count": 2}
    # The same source under another spelling, and what concerns one task alone, may differ.
    alone = ("--engine", "demo", "--simulate", 1, "--config", "run.grace_s=3", "--retries", retries)
    env = {"CUDA_VISIBLE_DEVICES": "0", **array_task(1 - retries, (0, 1), job_id=5000)}
    assert site.run(Path("manifest.csv"), *alone, env=env).exit_code == 0
    assert site.rows("SELECT count(*), min(status), max(status) FROM chunk") == [(3, "done", "done")] * 2
    # A run.toml is a settings file for another run, and options lie over it.
    words = ("--config", site.out / "run.toml", "--retries", 3, *ON_CPU, *QUICK)
    again = site.badcjobs("run", "--out", "again", *words)
    assert (again.exit_code, "6 done of 6" in again.stdout) == (0, True), again.stderr
    frozen_again = tomllib.loads((site.folder / "again" / "run.toml").read_text())["run"]
    assert frozen_again == {**frozen["run"], "retries": 3}
