"""``badcjobs plan``, ``probe`` and ``check`` as a shell runs them.

Plans run as they are; a probe finds what simulated cards can take, and later runs keep to it; a check leaves nothing.
"""

import re
import shlex
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from rooms.workers import read_probes, to_json
from support.audio import make_wav
from support.badcjobs_program import assert_refused, rows
from support.brief import without_hints
from support.fake_hawkears import fake_package_environ, install_fake_hawkears, make_fake_root
from support.slow_files import slow_files, somebody_waits
from support.source_files import write_files
from support.waiting import wait_for

# 0.6 s of audio in each chunk: the time of a task holds about four of them
SMALL = ("--rate", 0.005, "--time", 20, "--config", "plan.margin=1.2", "--parallel", 2)


def test_a_written_plan_passes_check_and_does_everything_exactly_once(site):
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


def test_options_after_the_dashes_leave_those_of_the_file(site):
    (site.folder / "badcjobs.toml").write_text('[run]\nengine = "demo"\nengine_arg = ["--burn-s=0.3"]\n')
    refused = site.badcjobs("plan", site.manifest(3), "--", "--chunk-length", 20)
    assert_refused(refused, 2, "no measured speed", "demo --burn-s=0.3")


def test_the_same_command_says_the_same_and_a_row_that_is_left_out_is_named(site):
    manifest = site.manifest(3)
    (site.folder / "wrong.csv").write_text(manifest.read_text() + "rec9,c9,x.wav,5,1,0,,\n")
    asked = ("plan", manifest, *SMALL, "--site", "sockeye", "--gpus-per-task", 1)
    first, second, wrong = site.badcjobs_each([asked, asked, ("plan", "wrong.csv", "--rate", 400)])
    assert first.exit_code == 0 and first.stdout == second.stdout
    assert first.stdout.endswith(" --out=plan --config=submit.account=NAME-gpu\n"), "which the scripts of the site need"
    pasted = site.badcjobs(*shlex.split(first.stdout.splitlines()[-1].removeprefix("next: badcjobs ")))
    assert pasted.exit_code == 1 and re.search(r"next: sbatch .*\(once the problems are fixed\)", pasted.stdout)
    assert f"{site.folder}/plan/results is not below /scratch, " in " ".join(pasted.stdout.split()), "as check says"
    end = datetime.fromisoformat(first.stderr.partition("finished on ")[2].split()[0])
    assert timedelta(minutes=4) < end - datetime.now().astimezone() < timedelta(minutes=12)
    assert wrong.exit_code == 1 and "line 5: end_ms 1 is not after start_ms 5" in wrong.stdout


def test_a_plan_that_is_told_to_end_ends_although_it_waits_for_a_file_and_leaves_no_draft(site):
    make_wav(site.folder / "audio" / "slow.wav", 5, 100)
    for signum, exit_code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)):
        waits = site.start("plan", "audio", "--rate", 400, "--out", "plan", env=slow_files(site))
        wait_for(lambda: somebody_waits(site), "a plan that reads the header")
        assert [path.name.split(".")[1] for path in site.folder.glob(".*.tmp")] == ["plan"]
        waits.send(signum)
        assert waits.wait(60).exit_code == exit_code
        assert not any("plan" in path.name for path in site.folder.iterdir())
        (site.folder / "slow-files" / "someone-waits").unlink()


MIB_PER_S = 4  # of audio, with one thread; as usual the demo engine takes twice that
MODELS = (("Big", 500), ("Small", 300), ("Big", 500))
DEMO = ("--engine", "demo", f"--engine-arg=--memory-per-s={MIB_PER_S}", "--engine-arg=--burn-s=0.1")
QUICK = ("--config", "probe.lengths_s=[20, 100]", "--config", "probe.trial_s=0.1")


def probe(site, *of_run, more=(), **options):
    """Start a probe with these options of run, and more of its own."""
    audio = make_wav(site.folder / "night é.wav", 5, 1000, tone_hz=100)
    return site.start("probe", audio, *QUICK, *more, "--", *of_run, **options)


def cards(site, *models):
    card = '[[device]]\nindex = {}\nname = "{}"\nmemory_total_mib = {}\n'
    script = site.folder / "cards.toml"
    script.write_text("".join(card.format(index, *model) for index, model in enumerate(models or MODELS)))
    return ("--simulate", script)


def store(site):
    return Path(site.environ()["XDG_CACHE_HOME"]) / "badcjobs" / "probe.json"


def tried(outcome):
    return [line.partition(" INFO    ")[2] for line in outcome.stderr.splitlines() if ": trying " in line]


def test_each_model_has_its_limit_which_is_kept_and_a_later_run_cuts_what_is_too_long(site):
    html = site.folder / "probe.html"
    found = probe(site, *DEMO, *cards(site), more=("--json", "--html", html)).wait()
    assert found.exit_code == 0, found.stderr
    big, small = found.json["gpus"]
    for gpu, (name, mib) in zip((big, small), MODELS, strict=False):
        assert (gpu["gpu"], gpu["memory_bytes"], gpu["finished"]) == (name, mib * 2**20, True)
        assert gpu["result"]["longest_s"] <= mib / MIB_PER_S / 2 < gpu["result"]["too_long_s"]
        for trial in gpu["trials"]:
            wanted = MIB_PER_S * 2**20 * trial["length_s"] * (1 if trial["lean"] else 2)
            seen = pytest.approx(wanted, rel=0.01) if trial["outcome"] == "fits" else None  # by the recorder
            assert trial["peak_bytes"] == seen
    assert small["result"]["lean_longest_s"] <= 75 < small["result"]["lean_too_long_s"]
    assert big["result"]["lean_longest_s"] == 100  # all that was to be tried
    lines = [line for line in tried(found) if line.startswith("Big")]
    assert len(lines) == len(set(lines)), "cards of one model share its trials"
    assert all(words in html.read_text() for words in ("Small, 300 MiB", "← best", "badcjobs[report]"))
    again = probe(site, *DEMO, *cards(site)).wait()
    assert (again.exit_code, tried(again)) == (0, [])
    assert "already known" in again.stdout and "← best" in again.stdout
    wanted = "next: badcjobs plan SOURCE -- --engine=demo --engine-arg=--memory-per-s=4 --engine-arg=--burn-s=0.1"
    assert again.stdout.splitlines()[-1] == wanted
    for name, seconds in (("long", 80), ("short", 5)):
        make_wav(site.folder / "long" / f"{name}.wav", seconds, 1000, loud=[(1, 2)], tone_hz=100)
    done = site.run(site.folder / "long", *DEMO, *cards(site, ("Small", 300), ("Big", 500)), "--max-gpus", 1)
    assert done.exit_code == 0, done.stderr
    assert site.rows("SELECT recording_id, outcome, pieces > 1 FROM attempt ORDER BY recording_id") == [
        ("long", "done", True), ("short", "done", None),
    ]  # fmt: skip
    ((seconds, why),) = site.rows(
        "SELECT figures ->> 'limit_s', reason FROM decision WHERE code = 'memory_limit.probed'"
    )
    assert seconds == pytest.approx(small["result"]["lean_safe_s"], abs=0.01)
    assert why.startswith("found by badcjobs probe: audio of ")


def test_a_probe_that_is_stopped_or_killed_goes_on_where_it_was_and_a_damaged_file_is_refused(site):
    file, half = site.folder / "mine.json", to_json([])[:-5]
    arguments = (*DEMO, *cards(site, ("Big", 500)), "--no-emit-gpu-telemetry")
    file.write_text(half)
    assert_refused(
        probe(site, *arguments, more=("--out", file)).wait(), 2, "is damaged, or not from badcjobs probe", "mv "
    )
    assert file.read_text() == half
    file.unlink()
    known = set()
    for signum, exit_code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        program = probe(site, *arguments, more=("--out", file, "--json"))
        wait_for(lambda program=program: "× real time" in program.stderr, "a trial has ended")
        program.send(signum)
        stopped = program.wait(timeout_s=40)
        assert stopped.exit_code == exit_code, stopped.stderr
        assert not known & set(tried(stopped))
        (before,) = read_probes(file)
        known |= {f"Big: trying {trial.length_s:g} s" for trial in before.trials}
        assert known and not before.finished
        if signum == signal.SIGINT:
            assert "stopped by SIGINT; finished trials are stored" in stopped.json["notes"][0]
            assert not list(site.local.iterdir())
    done = probe(site, *arguments, more=("--out", file, "--json")).wait()
    assert done.exit_code == 0, done.stderr
    named = probe(site, *arguments, more=("--out", "mine.json")).wait().stdout.splitlines()[-1]
    assert named.startswith("next: badcjobs plan SOURCE --from mine.json -- --engine=demo ")
    words = shlex.split(named.removeprefix("next: badcjobs ").replace("SOURCE", shlex.quote("night é.wav")))
    assert "a probe of Big" in site.badcjobs(*words).stdout
    assert tried(done) and not known & set(tried(done))
    (gpu,) = done.json["gpus"]
    assert gpu["finished"] and {trial["length_s"] for trial in gpu["trials"]} >= {t.length_s for t in before.trials}


def test_a_command_is_probed_by_its_words_and_what_fails_for_another_reason_is_not_kept(site):
    failing = site.script("fail.sh", "echo 'it is broken' >&2; exit 3")
    full = '[ "$(stat -L -c %s "$1")" -gt 100000 ] && { echo "CUDA out of memory. Tried to allocate" >&2; exit 1; }'
    fussy = site.script("fussy.sh", f'{full}\necho start_time,end_time,label,score > "$2"')
    plain = ("--simulate", 1, "--no-emit-gpu-telemetry")
    refused = probe(site, "--command", f"{failing} {{input}} {{output}}", *plain, more=("--json",)).wait()
    assert_refused(refused, 1, "for another reason than its memory (exit_code)", "it is broken")
    assert not store(site).exists()
    done = probe(site, "--command", f"{fussy} {{input}} {{output}}", *plain).wait()
    assert done.exit_code == 0, done.stderr
    (probed,) = read_probes(store(site))
    assert probed.result.longest_s < 50 < probed.result.too_long_s
    assert all(trial.peak_bytes is None for trial in probed.trials)
    assert "peak memory is not known" in done.stdout
    assert probed.key.engine_version.startswith("fussy.sh ")


def test_hawkears_is_tried_with_as_many_chunks_at_once_as_it_has_threads(site):
    make_fake_root(site.folder / "root")
    options = ("--hawkears-python", sys.executable, "--hawkears-root", site.folder / "root", "--engine-arg=--threads=2")
    # Both threads together have room for 70 s, so one alone for twice as much as each.
    environ = {**fake_package_environ(), "FAKE_HAWKEARS_ROOM_S": "70", "HOME": "/nonexistent"}
    kept = site.folder / "kept"
    more = ("--config", f"probe.keep={kept}", "--json")
    done = probe(site, "--engine", "hawkears", *options, "--simulate", 1, more=more, env=environ).wait()
    assert done.exit_code == 0, done.stderr
    (gpu,) = done.json["gpus"]
    assert (gpu["chunks_at_once"], gpu["engine_version"].partition(",")[0]) == (2, "2.3.0")
    for lean, room_s in (("", 35), ("lean_", 70)):
        assert gpu["result"][f"{lean}longest_s"] <= room_s < gpu["result"][f"{lean}too_long_s"]
    (database,) = kept.glob("tasks/*.sqlite")
    assert rows(database, "SELECT count(*) FROM attempt WHERE error_class = 'out_of_memory'") >= [(2,)]


def test_without_a_gpu_the_cpu_can_be_measured_and_the_time_is_kept_to(site):
    quick = ("--config", "probe.lengths_s=[20, 20]", "--config", "probe.trial_s=60")  # which no 4 chunks take
    late = probe(site, "--engine", "demo", "--engine-arg=--burn-s=9", "--cpu-workers", 1, more=("--time", "0:01"))
    done = probe(site, "--engine", "demo", "--cpu-workers", 1, more=(*quick, "--json")).wait()
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("too short to count: repeated with more chunks") == 1
    (gpu,) = done.json["gpus"]
    assert (gpu["gpu"], gpu["result"]["longest_s"], gpu["result"]["too_long_s"]) == ("cpu", 20, None)
    ended = late.wait()
    assert ended.exit_code == 75, ended.stderr
    assert "the time is over" in ended.stdout and "--time" in ended.stdout


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
SHOWN = ("engine", "source", "account", "merge account", "signal", "array", "GPU-hours", "time")


def test_the_words_of_submit_and_of_run_are_judged(site, pages):
    folder = site.folder
    site.manifest(6)
    (folder / "own.sbatch").write_text(SCRIPT)
    make_fake_root(folder / "hawkears")
    path = f"{install_fake_hawkears(folder / 'bin').parent}:/usr/bin:/bin"
    commands = [("check", "--json", *words.format(folder=folder).split()) for words in ANSWERED]
    before = {*folder.iterdir()}
    found = site.badcjobs_each(commands, [{"PATH": path, "HOME": str(folder / "nobody")}] * len(commands))
    assert {*folder.iterdir()} == before, "a check leaves nothing behind"
    said = []
    for words, outcome in zip(ANSWERED, found, strict=True):
        document = outcome.json
        asked = {key: value for key, value in document["asked"].items() if value not in (None, [], False)}
        said.append(f"$ {words} → exit code {outcome.exit_code}\n  asked: {asked}\n  source: {document['source']}")
        shown = [one for one in document["findings"] if one["subject"] in SHOWN]
        said += [f"  {one['severity']} {one['subject']}: {one['text']}" for one in shown]
    pages({"answers.txt": "\n".join(said).replace(str(folder), "HERE")})


WRONG = """
plan manifest.csv
plan manifest.csv --rate 400 --time late
plan manifest.csv --rate 400 --margin 2
plan manifest.csv --rate 400 --chunk-length 9
plan manifest.csv --rate 400 --site odd.toml
probe empty.wav notes.wav pipe.wav missing.wav . -- --engine demo --simulate 1
probe empty.wav --config probe.margin_percent=99 --config probe.lengths_s=[0,10] -- --engine demo --simulate 1
probe good.wav --out notes.wav/probe.json -- --engine demo --simulate 1
probe good.wav --html nowhere/probe.html -- --engine demo --simulate 1
check --site atlantis
plan manifest.csv --rate 400 --site atlantis
template array --config site=atlantis
check nowhere.sbatch
check -- --engine kazoo
check --time noon
check manifest.csv --engine demo
"""


def test_wrong_input_is_refused_before_anything_is_started(site, pages):
    write_files("empty.wav: 0 s\nnotes.wav: text no audio\ngood.wav: 1 s\npipe.wav: pipe", site.folder)
    odd = 'name = "odd"\n[limits]\ngpu_hours = nan\narray_tasks = -3\nbirds = 3\n[plan]\ngpus = "x"\n'
    (site.folder / "odd.toml").write_text(odd)
    site.manifest(3)
    lines, said = [*WRONG.strip().splitlines(), "probe good.wav -- --engine demo"], []
    *refused, no_gpu = site.badcjobs_each([line.split() for line in lines])
    assert_refused(no_gpu, 3, "no GPU here to probe", "--cpu-workers 1")
    for line, one in zip(lines, refused, strict=False):
        assert_refused(one, 2)
        said.append(f"$ {line}\n{without_hints(one.stderr)}")
    text = re.sub(r"cannot be decoded: .*", "cannot be decoded: …", "\n".join(said))  # what the library says
    pages({"refusals.txt": text.replace(str(site.folder), "HERE")})
    assert not any(map(tried, [*refused, no_gpu])) and not store(site).exists()


def test_a_template_asks_for_the_gpus_of_a_node_and_for_cores_and_memory_of_the_same_workers(site):
    """Also the script in the README, which is the fastest request on Sockeye."""
    for gpus in ("gpus = 2\n", ""):
        text = f'name = "mine"\n[node]\n{gpus}cpus = 8\nmemory_gb = 64\n'
        (site.folder / f"mine{len(gpus)}.toml").write_text(text)
    fastest = ("--config", "plan.prefer=fastest", "--config")
    readme = (Path(__file__).parents[2] / "README.md").read_text().partition("```bash\n")[2].partition("```")[0]
    length = re.search(r"badcjobs run .* --chunk-length (\d+)\n", readme)[1]
    commands = {
        "2 8 27G": ("array", *fastest, "site=mine9.toml"),
        "1 4 14G": ("single", *fastest, "site=mine9.toml"),
        "2 4 14G": ("array", "--config", "site=mine9.toml"),
        "4 8 27G": ("array", *fastest, "site=mine0.toml"),
        "3 6 20G": ("array", *fastest, "site=mine9.toml", "--set=gpus-per-node=3"),
        requested(readme): ("sockeye-array", *fastest, "site=sockeye", "--config", f"run.chunk_length={length}"),
    }
    made = site.badcjobs_each([("template", *words) for words in commands.values()])
    assert [requested(one.stdout) for one in made] == [*commands]


def requested(script):
    options = ("gpus-per-node", "cpus-per-task", "mem")
    return " ".join(re.search(rf"^#SBATCH --{option}=(\S+)", script, re.MULTILINE)[1] for option in options)


def test_a_script_that_is_shown_is_alone_on_stdout(site):
    here = ("submit", site.manifest(2), "--out", "run", "--cluster", "local", "--dry-run", "--", "--engine", "demo")
    filled = ("template", "array", "--set", "source=july.csv", "--set", "out=run")
    billed = ("submit", site.manifest(2), "--out", "run", "--config", "site=sockeye", "--account", "x-gpu", "--dry-run")
    asked = [(*billed, "--mem", mem, "--", "--engine", "demo") for mem in ("8G", "0")]
    *others, slurm, whole = site.badcjobs_each([filled, here, *asked])
    cost = "1 GPU × 6 = 6, 8 GB × 5 = 40, 2 cores × 1 = 2; the largest counts: 40 an hour for each task\n"
    assert re.search(f"^badcjobs: billing: .*{cost}", slurm.stderr, re.MULTILINE)
    text = r"^badcjobs: billing: memory costs 150.0 times what the GPUs cost: .*\n  try: --mem 7G "
    assert re.search(text, whole.stderr, re.MULTILINE)
    for shown in (*others, slurm, whole):
        assert shown.stdout.startswith("#!/bin/bash\n") and "next:" not in shown.stdout
        subprocess.run(["bash", "-n"], input=shown.stdout, text=True, check=True)
        assert "\nbadcjobs: next: badcjobs " in f"\n{shown.stderr}"
