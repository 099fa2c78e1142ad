"""``badcjobs report`` in all its forms, over a run on two simulated GPUs and one on the CPU."""

import json
import shlex
import shutil
import subprocess
import sys
from contextlib import closing

import pytest
from support.badcjobs_program import ON_CPU, QUICK, assert_refused
from support.brief import without_hints
from support.terminal import Terminal


@pytest.fixture(scope="module")
def july(shared_site):
    """A run on two devices, merged; beside it is one on the CPU."""
    manifest, cpu = shared_site.manifest(10), shared_site.folder / "cpu"
    on_cpu = shared_site.start("run", manifest, "--out", cpu, *QUICK, *ON_CPU)
    done = shared_site.run(manifest, "--engine", "demo", "--engine-arg=--burn-s=0.3", "--simulate", 2)
    assert (done.exit_code, on_cpu.wait().exit_code) == (0, 0), done.stderr
    for merged in shared_site.badcjobs_each([("merge", shared_site.out), ("merge", cpu)]):
        assert merged.exit_code == 0, merged.stderr
    return shared_site.out


def test_every_form_of_a_real_run_is_whole_and_its_time_and_energy_add_up(july, shared_site):
    names = {"--html": "a.html", "--markdown": "a.md", "--prometheus": "a.prom"}
    files = [shared_site.folder / name for name in names.values()]
    files[2].write_text("what was here before\n")
    with files[2].open() as reader:
        together = shared_site.badcjobs("report", july, *(word for pair in names.items() for word in pair), "--json")
        assert reader.read() == "what was here before\n", "a reader who had it open sees the old file to its end"
    assert together.exit_code == 0, together.stderr
    document = json.loads(together.stdout, parse_constant=pytest.fail)
    states = document["states"].values()
    assert {"working", "start_up"} <= set(document["states"])
    assert sum(state["gpu_hours"] for state in states) == pytest.approx(document["gpu_hours"], rel=0.01)
    assert sum(state["energy_wh"] or 0 for state in states) == pytest.approx(document["energy_wh"], rel=0.01)
    for device in document["devices"]:
        assert sum(device["state_energy_j"].values()) == pytest.approx(device["energy_j"], rel=0.01)
        assert sum(device["state_s"].values()) == pytest.approx(document["wall_s"], rel=0.01)
    cost, working_s = document["chunk_cost"], document["states"]["working"]["gpu_hours"] * 3600
    assert cost["gpu_s_mean"] * cost["tries"] == pytest.approx(working_s, rel=0.01)
    (task,) = (july / "tasks").glob("*.sqlite")
    cpu = shared_site.folder / "cpu"
    *printed, alone, compared, itself = shared_site.badcjobs_each(
        [*(("report", july, f"{name}=-") for name in names), ("report", task),
         ("report", july, "--compare", cpu, "--json"),
         ("report", july, "--compare", july / "job.sqlite")]
    )  # fmt: skip
    html = printed[0].stdout
    assert html.startswith("<!doctype html>") and html.endswith("</html>\n")
    assert "pip install 'badcjobs[report]'" in html and 'id="chart-data"' not in html, "without Bokeh, as here"
    assert 'id="device-table"' in html
    written = [path.read_text() for path in files[1:]]
    assert [one.stdout for one in printed[1:]] == written
    assert f'badcjobs_chunks{{run="{july}",state="done"}} 10\n' in printed[2].stdout
    assert alone.stdout.startswith(f"{task.name}: all done – 10 chunks\n")
    assert (compared.json["this"]["title"], compared.json["other"]["title"]) == ("run", "cpu")
    assert compared.json["settings"]["simulate"] == {"this": "2", "other": None}
    assert f"{july} is as fast as {july / 'job.sqlite'}, with " in " ".join(itself.stdout.split())
    assert "same run" not in compared.json["conclusion"]
    assert itself.stdout.splitlines()[-1].startswith(f"next: badcjobs export {july} ")
    assert [other.name for other in shared_site.folder.glob(".*")] == []


def test_colours_are_for_terminals_whose_users_want_them(july, shared_site):
    argv = [sys.executable, "-m", "badcjobs", "report", str(july)]
    for changes, wanted in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with closing(Terminal(argv, shared_site.environ({"TERM": "xterm", **changes}), shared_site.folder)) as terminal:
            assert terminal.end() == 0
        said = terminal.raw
        assert (b"\x1b[32mall done\x1b[0m" in said, b"\x1b" in said) == (wanted, wanted), changes


def test_a_reader_who_has_seen_enough_is_no_failure_and_a_file_that_is_too_large_is_one(july, shared_site):
    line = '"$0" -m badcjobs report "$1" --html /dev/stdout | head -c 9; echo " ${PIPESTATUS[0]}"'
    line += '; "$0" -m badcjobs report "$1" --markdown /dev/stdout > file.md && head -c 5 file.md'
    line += '; ulimit -S -f 4; "$0" -m badcjobs report "$1" --html big.html; echo " $?"'
    argv = ["bash", "-c", line, sys.executable, str(july)]
    reported = subprocess.run(argv, env=shared_site.environ(), cwd=shared_site.folder, capture_output=True, text=True)
    assert reported.stdout == "<!doctype 0\n# run 2\n"
    assert "\n  try: ulimit -f unlimited   (then the same command again)\n" in reported.stderr
    assert not (shared_site.folder / "big.html").exists()


def test_no_command_writes_over_somebodys_data_and_a_wrong_word_is_answered(july, shared_site, pages):
    [task], audio = shared_site.task_databases(), shared_site.folder / "recording.wav"
    shutil.copy(next(path for path in shared_site.folder.rglob("*.wav") if path != audio), audio)
    (shared_site.folder / "a folder").mkdir(exist_ok=True)
    kept = [july / "job.sqlite", july / "run.toml", task]
    before = [path.read_bytes() for path in kept]
    commands = """
        report run --prometheus x.prom --html run/job.sqlite
        export run --format csv -o run/run.toml
        probe recording.wav --out run/run.toml -- --engine demo --simulate 1
        template array --set source=s --set out=o -o run/job.sqlite
        record --simulate 1 --duration 0.1 --force --out run/tasks/TASK
        report run --json --markdown -
        report run --prometheus - --markdown -
        report run --prometheus 'a folder'
        report run --prometheus no/such/x.prom
        report run --compare nowhere
        report run --compare
        report run --wat
    """.strip().splitlines()
    said, typed = [], [shlex.split(one.replace("TASK", task.name)) for one in commands]
    for line, outcome in zip(commands, shared_site.badcjobs_each(typed), strict=True):
        assert_refused(outcome, outcome.exit_code)
        said.append(f"$ badcjobs {line.strip()}\nexit code {outcome.exit_code}\n{outcome.stderr}")
    text = without_hints("\n".join(said)).replace(str(shared_site.folder), "SITE").replace(task.name, "TASK")
    pages({"refusals.txt": text})
    assert [path.read_bytes() for path in kept] == before
    assert not (shared_site.folder / "x.prom").exists()
