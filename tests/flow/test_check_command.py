"""``badcjobs check`` as a shell runs it: what its words mean, the verdict as exit code, wrong usage."""

from __future__ import annotations

from support.badcjobs_program import Site, assert_refused
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.pages import Pages

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
ANSWERED = (
    "--out results -- --hawkears-root {folder}",  # no models
    "--out results -- --hawkears-root {folder}/hawkears",
    "own.sbatch manifest.csv --out results --time 30 -- --engine demo",
    f"manifest.csv {OF_SUBMIT} -- --engine demo",
    "manifest.csv --account st-lab-1-gpu --config site=sockeye -- --engine demo",
)
REFUSED = {  # words → what is said
    "--site atlantis": ("atlantis", "sockeye"),
    "nowhere.sbatch": ("nowhere.sbatch",),
    "-- --engine kazoo": ("kazoo", "hawkears"),
    "--time noon": ("--time", "noon", "H:M:S"),
    "manifest.csv --engine demo": ("No such option: --engine", "badcjobs check manifest.csv -- --engine demo"),
    "--site wrong.toml": ("birds", "array_tasks"),
}


SHOWN = ("engine", "source", "account", "merge account", "signal", "array", "GPU-hours", "time")


def test_the_words_of_submit_and_of_run_are_judged_and_wrong_usage_exits_2(site: Site, pages: Pages) -> None:
    folder = site.folder
    site.manifest(6)
    (folder / "own.sbatch").write_text(SCRIPT)
    (folder / "wrong.toml").write_text('name = "x"\n[limits]\nbirds = 3\n')
    make_fake_root(folder / "hawkears")
    path = f"{install_fake_hawkears(folder / 'bin').parent}:/usr/bin:/bin"
    commands = [("check", "--json", *words.format(folder=folder).split()) for words in ANSWERED]
    commands += [("check", *words.split()) for words in REFUSED]
    before = sorted(path.name for path in folder.iterdir())
    found = site.badcjobs_each(commands, [{"PATH": path, "HOME": str(folder / "nobody")}] * len(commands))
    assert sorted(path.name for path in folder.iterdir()) == before, "a check leaves nothing behind"
    said = []
    for words, outcome in zip(ANSWERED, found, strict=False):
        document = outcome.json
        asked = {key: value for key, value in document["asked"].items() if value not in (None, [], False)}
        said.append(f"$ {words} → exit code {outcome.exit_code}\n  asked: {asked}\n  source: {document['source']}")
        shown = [one for one in document["findings"] if one["subject"] in SHOWN]
        said += [f"  {one['severity']} {one['subject']}: {one['text']}" for one in shown]
    pages({"answers.txt": "\n".join(said).replace(str(folder), "HERE")})
    for outcome, known in zip(found[len(ANSWERED) :], REFUSED.values(), strict=True):
        assert_refused(outcome, 2, *known)
