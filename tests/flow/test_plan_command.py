"""``badcjobs plan``: its shards and scripts run as they are, wrong input is answered, and no draft is left."""

from __future__ import annotations

import signal
import sys
from datetime import datetime, timedelta

from support.audio import make_wav
from support.badcjobs_program import Site, assert_refused
from support.slow_files import slow_files, somebody_waits
from support.waiting import wait_for

# 0.6 s of audio in each chunk: the time of a task holds about four of them
SMALL = ("--rate", 0.005, "--time", 20, "--config", "plan.margin=1.2", "--parallel", 2)


def test_a_written_plan_passes_check_and_does_everything_exactly_once(site: Site) -> None:
    manifest = site.manifest(5)
    make_wav(site.folder / "audio" / "st1" / "r1.wav", 10, 1000, loud=[(1.0, 2.0), (7.0, 8.0)], tone_hz=100)
    (site.folder / "list.txt").write_text("audio/st1/r1.wav\n")
    run = ("--engine", "demo", "--engine-arg=--burn-s=0.01", "--chunk-length", 4, "--overlap", 1)
    more = ("--config", f"run.out={site.out}", "--out", "plan", "--json", "--", *run)
    made = site.badcjobs("plan", manifest, "list.txt", "--rate", 0.05, "--time", 12, *SMALL[4:], *more)
    assert made.exit_code == 0, made.stderr
    (script,), many = made.json["scripts"], made.json["tasks"]["count"]
    assert many > 1
    checked = site.badcjobs("check", script, "--json")
    assert (checked.exit_code, checked.json["verdict"]) == (0, "ready"), checked.stdout
    program = {"BADCJOBS": str(site.script("badcjobs", f'exec {sys.executable} -m badcjobs "$@"'))}
    done = site.badcjobs("submit", script, "--cluster", "local", "--json", "--", "--simulate", 2, env=program)
    assert done.exit_code == 0, done.stderr
    summary, rows = done.json["summary"], made.json["source"]["chunks"]
    assert (summary["done"], summary["tries"], summary["completeness"]["complete"]) == (rows, rows, True)
    site.out = site.out / "wave-1"
    found = site.rows("SELECT chunk_id, is_cut, detections FROM chunk WHERE status = 'done'")
    assert sorted(found)[:5] == [(f"c{n:03d}", 0, n % 3) for n in range(5)]
    assert sorted(found)[5:] == [("r1_0_4000", 1, 1), ("r1_3000_7000", 1, 0), ("r1_6000_10000", 1, 1)]
    assert len(site.task_databases()) == many


REFUSED = {  # words after plan MANIFEST → what is said
    "": ("no measured speed for this engine", "badcjobs probe AUDIO", "--rate"),
    "--rate 400 --time late": ("--time", "late", "H:M:S"),
    "--rate 400 --margin 2": ("No such option: --margin", "--config plan.margin=2"),
    "--rate 400 --chunk-length 9": ("manifest.csv --rate 400 -- --chunk-length 9",),
    "--rate 400 --site odd.toml": ("gpu_hours = nan", "array_tasks = -3", "gpus = 'x'"),
}


def test_the_same_command_says_the_same_and_wrong_input_gets_one_clear_answer(site: Site) -> None:
    manifest = site.manifest(3)
    odd = 'name = "odd"\n[limits]\ngpu_hours = nan\narray_tasks = -3\n[plan]\ngpus = "x"\n'
    (site.folder / "odd.toml").write_text(odd)
    (site.folder / "wrong.csv").write_text(manifest.read_text() + "rec9,c9,x.wav,5,1,0,,\n")
    asked = ("plan", manifest, *SMALL, "--site", "sockeye", "--gpus-per-task", 1)
    commands = [
        asked,
        asked,
        ("plan", "wrong.csv", "--rate", 400),
        *(("plan", manifest, *words.split()) for words in REFUSED),
    ]
    first, second, wrong, *refused = site.badcjobs_each(commands)
    assert first.exit_code == 0 and first.stdout == second.stdout
    end = datetime.fromisoformat(first.stderr.partition("finished on ")[2].split()[0])
    assert timedelta(minutes=4) < end - datetime.now().astimezone() < timedelta(minutes=12)
    assert wrong.exit_code == 1 and "line 5: end_ms 1 is not after start_ms 5" in wrong.stdout
    for outcome, words in zip(refused, REFUSED.values(), strict=True):
        assert_refused(outcome, 2, *words)


def test_a_plan_that_is_told_to_end_ends_although_it_waits_for_a_file_and_leaves_no_draft(site: Site) -> None:
    make_wav(site.folder / "audio" / "slow.wav", 5, 100)
    for signum, exit_code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)):
        waits = site.start("plan", "audio", "--rate", 400, "--out", "plan", env=slow_files(site))
        wait_for(lambda: somebody_waits(site), "a plan that reads the header")
        assert [path.name.split(".")[1] for path in site.folder.glob(".*.tmp")] == ["plan"]
        waits.send(signum)
        assert waits.wait(60).exit_code == exit_code
        assert not any("plan" in path.name for path in site.folder.iterdir())
        (site.folder / "slow-files" / "somebody-waits").unlink()
