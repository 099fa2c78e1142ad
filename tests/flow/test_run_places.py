"""Places and dates through a whole run: who is left out, what a longer list adds, and which change is refused."""

import hashlib
import re
from pathlib import Path

from support.badcjobs_program import ON_CPU, array_task, rows
from support.source_files import write_files

AUDIO = """
july/a/one_20240601.wav: 1 s
july/a/two.wav: 1 s
july/b/two.wav: 1 s
july/b/three.wav: text OggS but nothing more
"""
FIRST = ["one_20240601.wav,,CA-AB", "a/two.wav,20240630,CA-ON", "three.wav,,CA-AB", "gone.wav,,CA-AB"]
PLACES = "SELECT recording_id, region, recorded_on, left_out FROM recording ORDER BY 1"


def write_list(site, *lines):
    (site.folder / "list.csv").write_text("\n".join(["filename,recording_date,region", *lines, ""]))


def run(site, *more, env=None):
    return site.badcjobs("run", "july", "--out", site.out, *ON_CPU, "--filelist=list.csv", *more, env=env)


def test_a_longer_list_is_welcome_and_another_place_for_what_is_done_is_not(site, pages):
    write_files(AUDIO, site.folder)
    write_list(site, *FIRST)
    announced = []

    def tell(name, done):
        said = re.sub(r"(?m)^\S+ (?=WARN|INFO)", "", done.stdout + done.stderr)
        text = "\n".join(line for line in said.splitlines() if "places: " in line or "chunks  " in line)
        announced.append(f"# {name}: exit code {done.exit_code}\n{text}")

    first = run(site)
    tell("one is left out, one fails", first)
    write_list(site, *FIRST[:2], "three.wav,,CA-QC", "b/two.wav,,CA-NT")
    tell("a new row, and another place for what failed", run(site))
    used = hashlib.sha256((site.folder / "list.csv").read_bytes()).hexdigest()
    write_list(site, "one_20240601.wav,20240602,CA-AB", *FIRST[1:])
    unmerged = site.badcjobs("check", "july", "--out", site.out, "--", *ON_CPU, "--filelist=list.csv")
    assert "done: 2 (a/one_20240601.wav, b/two.wav)" in " ".join(unmerged.stdout.split()), "also before a merge"
    merged = site.merged()
    assert site.badcjobs("report", site.out, "--json").json["settings"]["filelist_digest"] == used
    announced += ["# merged", *map(str, rows(merged, PLACES)), str(rows(merged, "SELECT count(*) FROM chunk"))]
    before = sorted(site.out.rglob("*"))
    write_list(site, "one_20240601.wav,20240602,CA-AB", FIRST[1], "b/two.wav,,CA-BC")
    refused = run(site)
    announced.append(
        f"# refused: exit code {refused.exit_code}\n{refused.stderr[refused.stderr.index('badcjobs: error') :]}"
    )
    assert sorted(site.out.rglob("*")) == before
    options = ("july", "--out", site.out, "--", *ON_CPU, "--filelist=list.csv")
    checked, submitted = site.badcjobs("check", *options), site.badcjobs("submit", "--cluster=local", *options)
    words = "another place or date for recordings with chunks that are done: 2 (a/one_20240601.wav, b/two.wav)"
    assert (words in " ".join(checked.stdout.split()), words in submitted.stderr) == (True, True)
    pages({"runs.txt": "\n".join(announced).replace(str(site.folder), "/…")})


def test_a_wrong_list_is_refused_before_anything_is_written_but_is_not_checked_by_each_array_task(site):
    write_files(AUDIO, site.folder)
    write_list(site, "two.wav,,CA-AB")
    commands = [
        ("run", "july", "--out", site.out, *ON_CPU, "--filelist=list.csv"),
        ("submit", "july", "--cluster=local", "--out", site.out, "--", *ON_CPU, "--filelist=list.csv"),
        ("plan", "july", "--rate=100", "--", *ON_CPU, "--filelist=list.csv"),
    ]
    for command in commands:
        refused = site.badcjobs(*command)
        assert (refused.exit_code, "matches two recordings" in refused.stderr) == (2, True), command
    checked = site.badcjobs("check", "july", "--quick", "--out", site.out, "--", *ON_CPU, "--filelist=list.csv")
    assert (checked.exit_code, "matches two recordings" in checked.stdout) == (1, True)
    assert not site.out.exists()
    done = run(site, "--json", env=array_task(0, [0]))
    assert (done.exit_code, done.json["left_out_names"]) == (0, ["a/one_20240601.wav", "b/three.wav"])
    changed = run(site, "--config", "run.filelist_digest=that-of-submit", env=array_task(0, [0]))
    assert (changed.exit_code, "has changed since submit" in changed.stderr) == (2, True)


def test_what_a_run_counts_and_freezes_is_what_check_plan_and_submit_say(site):
    write_files(AUDIO, site.folder)
    write_list(site, *FIRST)
    options = ("--", *ON_CPU, "--filelist=list.csv")
    checked = site.badcjobs("check", "july", "--json", "--out", site.out, *options).json["source"]["places"]
    without_slurm = {"PATH": str(site.folder)}
    last = site.badcjobs("check", "july", "--quick", "--out", "r", *options, env=without_slurm).stdout.splitlines()[-1]
    assert last == f"next: badcjobs run july --out r {' '.join(options[1:])}"
    planned = site.badcjobs("plan", "july", "--json", "--rate=100", *options).json["source"]["places"]
    assert (planned, checked["left_out_names"], checked["unmatched_names"]) == (checked, ["b/two.wav"], ["gone.wav"])
    submitted = site.badcjobs(
        "submit", "july", "--json", "--cluster=local", "--gpus-per-task=0", "--tasks=2", "--out", site.out, *options
    ).json
    assert submitted["chunks"] == 3
    reported = site.badcjobs("report", site.out, "--json").json
    assert (reported["places"]["left_out"], reported["places"]["left_out_names"]) == (1, ["b/two.wav"])
    assert reported["completeness"]["expected"] == 3
    (digest,) = re.findall(r'filelist_sha256 = "(\w+)"', (site.out / "run.toml").read_text())
    assert reported["settings"]["filelist_digest"] == digest
    assert str(Path("list.csv")) in reported["settings"]["filelist"]
    write_list(site, *FIRST, "b/two.wav,,CA-NT")
    again = ("submit", "july", "--again", "--dry-run", "--gpus-per-task=0", "--tasks=2", "--out", site.out)
    assert "#SBATCH --array=0-1\n" in site.badcjobs(*again, *options).stdout, "it was left out"
    for command in (again, ("check", "july", "--quick", "--out", site.out), ("run", "july", "--out", site.out)):
        refused = site.badcjobs(*command, *options[command[0] == "run" : -1])
        assert re.search(
            "holds a run with a list|filelist given was true", " ".join((refused.stdout + refused.stderr).split())
        ), command


def test_only_a_place_switches_the_filter_of_species_on(site):
    write_files(AUDIO, site.folder)
    said = {}
    for options in ("", "--cfg=a.yaml", "--date=0601", "--region=CA-NT", "--lat=61 --lon=-115"):
        words = [f"--engine-arg={word}" for word in options.split()]
        check = ("check", "july", "--quick", "--out", site.out, "--", "--cpu-workers=1", *words)
        said[options] = re.findall("filter of species is off[^;]*", " ".join(site.badcjobs(*check).stdout.split()))
    off = ["filter of species is off"]
    assert said == {"": off, "--cfg=a.yaml": [f"{off[0]}, unless the file of --cfg has one"], "--date=0601": off,
                    "--region=CA-NT": [], "--lat=61 --lon=-115": []}  # fmt: skip


def test_results_keep_their_place_if_a_task_that_should_replace_them_is_stopped(site):
    write_files(AUDIO, site.folder)
    write_list(site, *FIRST[:2])
    run(site)
    write_list(site, *(line.replace("CA-ON", "CA-QC") for line in FIRST[:2]))
    assert run(site, "--no-resume", "--config=run.stop_after=0.0001").exit_code == 75
    assert ("a/two", "CA-ON", "2024-06-30", None) in rows(site.merged(), PLACES)
    assert "a/two.wav" in run(site).stderr
