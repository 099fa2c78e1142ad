"""Where a run's settings come from, and run.toml, which every task of a run must agree with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.badcjobs_program import ON_CPU, QUICK, Site, array_task, assert_refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def write_config(site: Site, text: str) -> Path:
    path = site.folder / "settings.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def begun(shared_site: Site) -> Site:
    """A run whose first task is over."""
    done = shared_site.run(shared_site.manifest(4), *ON_CPU, "--engine-arg=--threshold=0.3", env=array_task(0, (0, 1)))
    assert done.exit_code == 0, done.stderr
    return shared_site


def test_the_first_task_freezes_what_all_tasks_share(begun: Site) -> None:
    frozen = tomllib.loads((begun.out / "run.toml").read_text())
    assert frozen["run"] == {
        "source": [str(begun.folder / "manifest.csv")], "engine": "demo", "engine_arg": ["--threshold=0.3"],
        "interval": 0.1, "retries": 2,
    }  # fmt: skip
    assert frozen["array"] == {"first": 0, "step": 1, "count": 2}


def test_a_later_task_with_other_settings_is_refused_and_every_key_is_named(begun: Site) -> None:
    before = (begun.out / "run.toml").read_bytes()
    refused = begun.run(begun.folder / "manifest.csv", *ON_CPU, "--retries", 5, env=array_task(1, (0, 1)))
    assert_refused(refused, 2, "engine_arg, retries: different from", "retries was 2, now 5", "--out")
    assert (begun.out / "run.toml").read_bytes() == before


def test_the_same_source_under_another_spelling_is_the_same_source(begun: Site) -> None:
    done = begun.run(Path("manifest.csv"), *ON_CPU, "--engine-arg=--threshold=0.3", env=array_task(1, (0, 1)))
    assert done.exit_code == 0, done.stderr


def test_what_concerns_one_task_alone_may_differ(begun: Site) -> None:
    done = begun.run(
        begun.folder / "manifest.csv", "--engine", "demo", "--engine-arg=--threshold=0.3", "--simulate", 1,
        "--config", "run.backoff_s=0.3", "--config", "run.grace_s=3",
        env={"CUDA_VISIBLE_DEVICES": "0", **array_task(0, (0, 1), job_id=5000)},
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr


def test_two_tasks_that_start_together_share_one_run_toml(site: Site) -> None:
    manifest = site.manifest(6)
    both = [site.start_run(manifest, *ON_CPU, env=array_task(index, (0, 1))) for index in (0, 1)]
    assert [program.wait().exit_code for program in both] == [0, 0]
    assert tomllib.loads((site.out / "run.toml").read_text())["array"]["count"] == 2
    assert sorted(path.name for path in site.out.iterdir()) == ["run.toml", "tasks"], "and nothing half written"
    assert site.rows("SELECT count(*), count(DISTINCT status), min(status) FROM chunk") == [(3, 1, "done")] * 2


def test_two_tasks_that_start_together_with_other_settings_are_not_both_content(site: Site) -> None:
    manifest = site.manifest(6)
    both = [site.start_run(manifest, *ON_CPU, "--retries", index, env=array_task(index, (0, 1))) for index in (0, 1)]
    ends = [program.wait() for program in both]
    assert sorted(end.exit_code for end in ends) == [0, 2]
    (refused,) = [end for end in ends if end.exit_code == 2]
    assert "retries: different from" in refused.stderr
    assert len(site.task_databases()) == 1
    assert list(site.local.iterdir()) == []


# --- --config ------------------------------------------------------------------------------------------------------


def test_the_flags_lie_over_the_settings_file(site: Site) -> None:
    config = write_config(
        site,
        """
        [run]
        engine = "demo"
        engine_arg = ["--burn-s=0"]
        simulate = 3
        retries = 7
        interval = 1
        """,
    )
    done = site.run(site.manifest(2), "--config", config, "--simulate", 1, "--json")
    assert done.exit_code == 0, done.stderr
    assert done.json["devices"] == 1
    frozen = tomllib.loads((site.out / "run.toml").read_text())["run"]
    assert (frozen["engine"], frozen["retries"], frozen["interval"]) == ("demo", 7, 0.1)


def test_the_settings_file_may_hold_everything_but_the_run_folder(site: Site) -> None:
    config = write_config(
        site, f'[run]\nsource = ["{site.manifest(2)}"]\nengine = "demo"\ncpu_workers = 1\nemit_gpu_telemetry = false\n'
    )
    done = site.badcjobs("run", "--out", site.out, "--config", config)
    assert done.exit_code == 0, done.stderr
    assert "2 done of 2" in done.stdout


def test_a_run_toml_is_a_settings_file_for_another_run(begun: Site) -> None:
    done = begun.badcjobs("run", "--out", begun.folder / "again", "--config", begun.out / "run.toml", *ON_CPU, *QUICK)
    assert done.exit_code == 0, done.stderr
    again = tomllib.loads((begun.folder / "again" / "run.toml").read_text())
    assert again["run"] == tomllib.loads((begun.out / "run.toml").read_text())["run"]


def test_all_mistakes_of_file_and_flags_are_named_at_once(site: Site) -> None:
    config = write_config(
        site,
        """
        speed = "fast"
        [run]
        retrys = 3
        retries = "three"
        engine_arg = "--burn-s=1"
        simulate = true
        interval = 0
        """,
    )
    refused = site.run(
        site.manifest(1), "--config", config, "--engine", "fax", "--config", "run.grace_s=-1", "--interval", 0
    )
    assert_refused(
        refused, 2, "line 2: speed: unknown key", "retrys: unknown key; did you mean run.retries?",
        'line 5: [run] retries = "three" must be a whole number',
        'engine_arg = "--burn-s=1" must be a list of strings', "simulate = true must be a string",
        "interval = 0.0 must be at least 0.01", "--config run.grace_s = -1.0",
    )  # fmt: skip
    options = site.run(site.manifest(1), "--engine", "fax", "--interval", 0)
    assert_refused(options, 2, '--engine = "fax" must be one of', "--interval = 0.0 must be at least 0.01")
    assert not site.out.exists()
