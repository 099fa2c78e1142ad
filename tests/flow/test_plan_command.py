"""``badcjobs plan``: what a campaign takes, in words and as JSON; and its shards and scripts, which run as they are."""

from __future__ import annotations

import signal
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from support.audio import make_wav
from support.badcjobs_program import Outcome, Site, assert_refused
from support.slow_files import slow_files, somebody_waits
from support.waiting import wait_for

LOCAL = ("--cluster", "local")
# 0.6 s of audio in each chunk: the time of a task holds about four of them
SMALL = ("--rate", 0.005, "--time", 20, "--config", "plan.margin=1.2", "--parallel", 2)


def plan(site: Site, *words: object) -> Outcome:
    return site.badcjobs("plan", *words)


def own_program(site: Site) -> dict[str, str]:
    """Return the variable by which scripts start this badcjobs."""
    program = site.script("badcjobs", f'exec {sys.executable} -m badcjobs "$@"')
    return {"BADCJOBS": str(program)}


def test_a_written_plan_passes_check_and_does_everything_exactly_once(site: Site) -> None:
    manifest = site.manifest(9)
    engine = ("--engine", "demo", "--engine-arg=--burn-s=0.01")
    results = ("--config", f"run.out={site.out}")
    made = plan(site, manifest, *SMALL, *results, "--out", "plan", "--json", "--", *engine)
    assert made.exit_code == 0, made.stderr
    (script,) = made.json["scripts"]
    assert made.json["tasks"]["count"] == 3
    checked = site.badcjobs("check", script, "--json")
    assert (checked.exit_code, checked.json["verdict"]) == (0, "ready"), checked.stdout
    done = site.badcjobs("submit", script, *LOCAL, "--json", "--", "--simulate", 2, env=own_program(site))
    assert done.exit_code == 0, done.stderr
    summary = done.json["summary"]
    assert (summary["done"], summary["tries"], summary["completeness"]["complete"]) == (9, 9, True)
    site.out = site.out / "wave-1"
    found = site.rows("SELECT chunk_id FROM chunk WHERE status = 'done'")
    assert sorted(found) == [(f"c{n:03d}",) for n in range(9)]
    assert len(site.task_databases()) == 3


def test_a_plan_from_a_job_uses_what_that_job_has_measured(site: Site) -> None:
    manifest = site.manifest(6)
    assert site.run(manifest, "--engine", "demo", "--simulate", 2).exit_code == 0
    site.merged()
    made = plan(site, manifest, "--from", site.out, "--json")
    assert made.exit_code == 0, made.stderr
    speed = made.json["speed"]
    assert speed["origin"] == f"measured in {site.out}"
    assert speed["audio_hours_per_gpu_hour"] > 0
    assert speed["start_up_s"] > 0
    assert made.json["margin"]["start_up_measured"] is True
    assert "measured" in made.json["tasks"]["mem_why"]
    assert speed["devices"] == ["2 × Simulated GPU"]


def test_recordings_cut_on_the_fly_are_written_as_rows_that_run(site: Site) -> None:
    make_wav(site.folder / "audio" / "st1" / "r1.wav", 10, 1000, loud=[(1.0, 2.0), (7.0, 8.0)], tone_hz=100)
    make_wav(site.folder / "audio" / "st1" / "r2.wav", 3.2, 1000, tone_hz=100)
    of_run = ("--chunk-length", 4, "--overlap", 1, "--engine", "demo")
    made = plan(site, "audio", "--rate", 0.05, "--out", "plan", "--json", "--", *of_run)
    assert made.exit_code == 0, made.stderr
    assert (made.json["source"]["chunks"], made.json["source"]["cut"]) == (4, 3)
    script = made.json["scripts"][0]
    done = site.badcjobs("submit", script, *LOCAL, "--json", "--", "--simulate", 2, env=own_program(site))
    assert done.exit_code == 0, done.stderr
    assert done.json["summary"]["done"] == 4
    site.out = site.folder / "plan" / "results" / "wave-1"
    rows = site.rows("SELECT recording_id, chunk_id, is_cut FROM chunk ORDER BY recording_id, start_ms")
    assert rows == [
        ("st1/r1", "r1_0_4000", 1), ("st1/r1", "r1_3000_7000", 1), ("st1/r1", "r1_6000_10000", 1),
        ("st1/r2", "r2_0_3200", 0),
    ]  # fmt: skip


def test_the_same_command_says_the_same_and_the_day_of_the_end_beside_it(site: Site) -> None:
    manifest = site.manifest(6)
    words = (manifest, *SMALL, "--site", "sockeye", "--gpus-per-task", 1)
    first, second = site.badcjobs_each([("plan", *words)] * 2)
    assert first.exit_code == 0, first.stderr
    assert first.stdout == second.stdout
    assert "finished    after 11 min 00 s of running with 2 GPUs" in first.stdout, first.stdout
    now = datetime.now().astimezone()
    end = datetime.fromisoformat(first.stderr.partition("finished on ")[2].split()[0])
    assert timedelta(minutes=8) < end - now < timedelta(minutes=12)


def test_wrong_input_gets_one_clear_answer_and_nothing_is_written(site: Site) -> None:
    manifest = site.manifest(3)
    odd = 'name = "odd"\n[limits]\ngpu_hours = nan\narray_tasks = -3\n[plan]\ngpus = "x"\n'
    (site.folder / "odd.toml").write_text(odd)
    (site.folder / "none").mkdir()
    cases: list[tuple[tuple[object, ...], tuple[str, ...]]] = [
        ((manifest,), ("no measured speed for this engine", "badcjobs probe AUDIO", "--rate")),
        ((manifest, "--rate", 400, "--time", "late"), ("--time", "late", "H:M:S")),
        ((manifest, "--rate", 400, "--account", "x"), ("No such option: --account",)),
        ((manifest, "--rate", 400, "--margin", 2), ("No such option: --margin", "--config plan.margin=2")),
        ((manifest, "--rate", 400, "--chunk-length", 9), (f"badcjobs plan {manifest} --rate 400 -- --chunk-length 9",)),
        ((manifest, "--rate", 400, "--site", "odd.toml"), ("gpu_hours = nan", "array_tasks = -3", "gpus = 'x'")),
        (("none", "--rate", 400, "--out", "plan"), ("contains no audio",)),
    ]
    for outcome, (_, words) in zip(site.badcjobs_each([("plan", *args) for args, _ in cases]), cases, strict=True):
        assert_refused(outcome, 2, *words)
    assert not Path(site.folder / "plan").exists()


def test_an_interrupt_ends_a_plan_that_waits_for_a_file_and_what_folders_hide_is_told(site: Site) -> None:
    make_wav(site.folder / "audio" / "a.wav", 5, 100)
    make_wav(site.folder / "audio" / ".old" / "b.wav", 5, 100)
    assert "passed over: 1 hidden name is skipped (the first: .old/)" in plan(site, "audio", "--rate", 400).stdout
    make_wav(site.folder / "audio" / "slow.wav", 5, 100)
    waits = site.start("plan", "audio", "--rate", 400, "--out", "plan", env=slow_files(site))
    wait_for(lambda: somebody_waits(site), "a plan that reads the header")
    waits.send(signal.SIGINT)
    assert waits.wait(60).exit_code == 130
    assert not any("plan" in path.name for path in site.folder.iterdir())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_plan_that_is_told_to_end_leaves_no_draft(site: Site, name: str) -> None:
    make_wav(site.folder / "audio" / "slow.wav", 5, 100)
    waits = site.start("plan", "audio", "--rate", 400, "--out", "plan", env=slow_files(site))
    wait_for(lambda: somebody_waits(site), "a plan that reads the header")
    assert [path.name.split(".")[1] for path in site.folder.glob(".*.tmp")] == ["plan"]
    waits.send(signal.Signals[name])
    ended = waits.wait(60)
    assert (ended.exit_code, ended.stderr) == (-signal.Signals[name], "")
    assert not any("plan" in path.name for path in site.folder.iterdir())


def test_rows_that_cannot_be_planned_make_exit_code_1_and_are_named(site: Site) -> None:
    manifest = site.manifest(3)
    with manifest.open("a") as file:
        file.write("rec9,c9,x.wav,5,1,0,,\n")
    made = plan(site, manifest, "--rate", 400)
    assert made.exit_code == 1, made.stderr
    assert "1 problem" in made.stdout.splitlines()[0]
    assert "line 5: end_ms 1 is not after start_ms 5" in made.stdout
