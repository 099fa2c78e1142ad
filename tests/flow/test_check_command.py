"""``badcjobs check`` as a shell runs it: what its words mean, the verdict as exit code, wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.badcjobs_program import Outcome, Site, assert_refused
from support.fake_hawkears import install_fake_hawkears, make_fake_root

SCRIPT = """#!/bin/bash
#SBATCH --array=0-3
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
exec badcjobs run "$SOURCE" --out "$OUT" $BADCJOBS_ARGS
"""
OF_SUBMIT = (
    "-o x --cluster local --root . --again --dry-run --wait --tasks 200 --parallel 2 --gpus-per-task 4 --cpus 8"
    " --mem 64G --time 72:00:00 --constraint gpu_mem_32 --sbatch=--partition=gpu --site sockeye"
)
ANSWERED = {  # words → exit code
    "--out results -- --hawkears-root {folder}": 1,  # no models
    "--out results -- --hawkears-root {folder}/hawkears": 0,
    "own.sbatch manifest.csv --out results --time 30 -- --engine demo": 0,
    f"manifest.csv {OF_SUBMIT} -- --engine demo": 1,
    "manifest.csv --account st-lab-1-gpu --config site=sockeye -- --engine demo": 0,
}
REFUSED = {  # words → what is said
    "--site atlantis": ("atlantis", "sockeye"),
    "nowhere.sbatch": ("nowhere.sbatch",),
    "-- --engine kazoo": ("kazoo", "hawkears"),
    "--time noon": ("--time", "noon", "H:M:S"),
    "manifest.csv --engine demo": ("No such option: --engine", "badcjobs check manifest.csv -- --engine demo"),
    "--site wrong.toml": ("birds", "array_tasks"),
}


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    folder = shared_site.folder
    shared_site.manifest(6)
    (folder / "own.sbatch").write_text(SCRIPT)
    (folder / "wrong.toml").write_text('name = "x"\n[limits]\nbirds = 3\n')
    make_fake_root(folder / "hawkears")
    path = f"{install_fake_hawkears(folder / 'bin').parent}:/usr/bin:/bin"
    commands = [("check", "--json", *words.format(folder=folder).split()) for words in ANSWERED]
    commands += [("check", *words.split()) for words in REFUSED]
    before = sorted(path.name for path in folder.iterdir())
    found = shared_site.badcjobs_each(commands, [{"PATH": path, "HOME": str(folder / "nobody")}] * len(commands))
    assert sorted(path.name for path in folder.iterdir()) == before, "a check leaves nothing behind"
    return dict(zip((*ANSWERED, *REFUSED), found, strict=True))


def test_the_words_of_submit_and_of_run_are_those_that_are_judged(
    answers: dict[str, Outcome], shared_site: Site
) -> None:
    assert {words: answers[words].exit_code for words in ANSWERED} == ANSWERED
    models, hawkears, variables, submit, merging = (answers[words].json for words in ANSWERED)
    texts = [
        {one["subject"]: one["text"] for one in found["findings"]} for found in (models, hawkears, variables, merging)
    ]
    assert texts[0]["engine"].startswith("HawkEars has no models in")
    assert texts[1]["engine"] == "hawkears can be started here"
    assert texts[2]["source"].startswith("6 chunks") and texts[2]["engine"] == "demo can be started here"
    assert texts[2]["out"].startswith(str(Path(shared_site.folder, "results")))
    assert variables["asked"]["time_s"] == 1800
    assert texts[3]["account"] == "st-lab-1-gpu ends in -gpu" and "merge account" not in texts[3]
    assert merging["asked"]["merge_account"] == "st-lab-1", "as submit would pay it"
    asked = ("tasks", "gpus_per_task", "cpus", "time_s", "partition", "constraint", "memory_gb_per_node")
    assert [submit["asked"][name] for name in asked] == [200, 4, 8, 72 * 3600, "gpu", "gpu_mem_32", 64]
    assert "Slurm" in {one["subject"] for one in submit["findings"]} and submit["source"]["chunks"] == 6


def test_wrong_usage_exits_2_and_says_what_is_known(answers: dict[str, Outcome]) -> None:
    for words, said in REFUSED.items():
        assert_refused(answers[words], 2, *said)
