"""Every bench that needs no GPU, at a small scale, and the one that makes the README's pictures."""

import json
import os
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import chromium
from support.fake_hawkears import install_fake_hawkears, make_fake_root
from support.fake_mps import install_fake_mps
from support.fake_nvml import fake_nvml_environ
from support.file_calls import FileCalls
from support.stand_ins import install

BENCH = Path(__file__).parents[1] / "bench"
README = Path(__file__).parents[2] / "README.md"


def run_bench(name, *words, **environ):
    """Run a bench as a user does, for a shorter time than this test may take."""
    command = [sys.executable, BENCH / f"{name}.py", *words]
    env = {**os.environ, **environ}
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.parametrize("name", ["dispatch", "merge", "monitor", "plan", "report_page", "scale", "writing"])
def test_a_bench_keeps_its_promises_at_a_small_scale(name, tmp_path):
    """Counts and memory: times are judged by hand, on a machine that does nothing else."""
    if name == "report_page":
        chromium()
    if name == "writing":
        FileCalls(tmp_path, tmp_path)  # has a compiler
    done = run_bench(name, "--small", "--folder", tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (0, []), done.stdout + done.stderr
    assert "BROKEN" not in done.stdout and " kept" in done.stdout


@pytest.fixture
def hawkears(tmp_path):
    """A folder as tests/hawkears/install makes it, with the stand-in."""
    folder = tmp_path / "hawkears"
    (folder / "venv" / "bin").mkdir(parents=True)
    install_fake_hawkears(folder / "venv" / "bin").with_name("python-of-hawkears").rename(folder / "venv/bin/python")
    make_fake_root(folder / "root")
    return folder


def test_kills_of_everybody_lose_nothing_and_leave_nothing(hawkears, tmp_path):
    environ = {**install_fake_mps(tmp_path / "bin"), **fake_nvml_environ(1), "FAKE_HAWKEARS_S": "0.2"}
    small = ["--kills", 7, "--workers", 2, "--recordings", 16, "--scale", 0.02, "--pause", 0.5, "--folder", tmp_path]
    done = run_bench("kills", "--hawkears", hawkears, *small, **environ)
    assert (done.returncode, done.stdout.count(" kept")) == (0, 5), done.stdout + done.stderr


def test_the_cheapest_choice_of_a_plan_is_run_and_what_it_is_billed_compared(hawkears, tmp_path):
    """On a stand-in, whose chunks all take as long, only a plan that must be exact is judged: it fails."""
    usual = re.search(r"Without a GPU: ``(.*)``", (BENCH / "bill.py").read_text())[1].split()
    small = ["--cores", 2, "--recordings", 4, *usual, "--promise", 0.001, "--folder", tmp_path]
    done = run_bench("bill", "--hawkears", hawkears, *small)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout + done.stderr
    verdict = r"billed for the cheapest +0\.\d\d units +within 0\.001% +BROKEN\n"
    assert re.search(rf"→ cheapest, .*(\n.*)*{verdict}", done.stdout)


@pytest.fixture
def throughput(hawkears, tmp_path):
    """Run the README's bench of throughput in small, on a stand-in of HawkEars and one of NVIDIA's daemon."""
    folder, programs = hawkears, tmp_path / "bin"
    log = 'printf "NEW CLIENT 7 from user 0\\n%.0s" $CLIENTS >"$CUDA_MPS_LOG_DIRECTORY/control.log"'
    install(programs / "nvidia-cuda-mps-control", f'#!/bin/sh\n[ "$1" != -d ] || {log}\n')
    path = f"{programs}:{os.environ['PATH']}"

    def run(*words, clients=3):
        usual = re.search(r" tests/bench/throughput.py (.*)", README.read_text())[1].split()
        small = ["--simulate", "1", "--scale", "0.02", "--cores", "2", "--rounds", "1", "--out", tmp_path / "all.json"]
        here = [*usual, "--hawkears", folder, "--folder", tmp_path]
        numbers = " ".join(map(str, range(clients)))
        done = run_bench("throughput", *here, *small, *words, PATH=path, FAKE_HAWKEARS_S="0", CLIENTS=numbers)
        assert not [*tmp_path.glob("badcjobs-bench-*")], "a folder stayed behind"
        return done, json.loads((tmp_path / "all.json").read_text()) if (tmp_path / "all.json").exists() else None

    return run


@pytest.mark.parametrize(("audio", "hours"), [("long", (6, 30)), ("30s", (6,))])
def test_throughput_ranks_all_sets_by_hand_and_repeats_the_best_of_them_with_badcjobs(throughput, audio, hours):
    done, found = throughput("--promise", "0", "--audio", audio, "--only", *hours)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    ranked = [run for run in found["runs"] if run["purpose"] == "rank"]
    names = [f"by hand, {way}{mps}" for way in ("1 × 3", "3 × 2", "2 × 1") for mps in ("", ", MPS")]
    assert [run["way"] for run in ranked] == names
    best = min((run for run in ranked if "MPS" not in run["way"]), key=lambda run: run["seconds"])
    for each in hours:
        repeated = [run for run in found["runs"] if run["purpose"] == f"{each}h"]
        assert {best["way"], "badcjobs run"} <= {run["way"] for run in repeated}
        assert {round(run["audio_h"], 3) for run in repeated} == {each * 0.02}
    assert [(each["promised"], each["ratio"] > 0) for each in found["promises"]] == [(0, True)] * len(hours)
    assert [(each["differ"], each["found"] > 10) for each in found["detections"]] == [([], True)]
    assert done.stdout.count("| badcjobs run |") == len(hours)


@pytest.mark.parametrize(
    ("words", "clients", "said"),
    [
        (["--compare", "0"], 3, "at least 0.95 ×    BROKEN"),
        (["--promise", "0", "--", "--engine-arg=--min_score=0.9"], 3, "at most 0, of some BROKEN"),
        (["--by-hand", "2x1+mps"], 1, "NoMps: 1 of 2 processes were connected"),
    ],
    ids=["slower than promised", "other detections", "MPS not used"],
)
def test_throughput_can_lose(throughput, words, clients, said):
    done, _ = throughput("--by-hand", "2x1", "--only", 6, "--audio", "long", *words, clients=clients)
    assert (done.returncode, said in done.stdout + done.stderr) == (1, True), done.stdout + done.stderr


def test_throughput_promises_more_with_more_cores_and_repeats_the_best_sets():
    bench = runpy.run_path(str(BENCH / "throughput.py"))
    long, short = bench["Kind"]("long", 1800, 4, 300), bench["Kind"]("30s", 30, 60)
    cases = [(long, 30, 4), (long, 30, 6), (long, 30, 16), (long, 6, 16), (short, 30, 16)]
    assert [bench["promised"](*case) for case in cases] == [0.95, 1.1, 1.25, 0.95, 0.95]
    few, close, best, mps, slow = ((1, 3, False), (3, 2, False), (6, 1, False), (6, 1, True), (3, 2, True))
    ranked = {few: 80, close: 28.3, best: 27, mps: 24, slow: 25}
    sets = {bench["HandSet"](*each): seconds for each, seconds in ranked.items()}
    assert bench["contenders"](sets) == [close, best, mps]
    sets[bench["HandSet"](*mps)] = sets[bench["HandSet"](*slow)] = 27.5
    assert bench["contenders"](sets) == [close, best]


def test_throughput_leaves_out_sets_for_which_mps_does_not_work(throughput):
    words = ["--by-hand", "2x1", "2x1+mps", "--only", 6, "--audio", "long", "--promise", "0"]
    done, found = throughput(*words, clients=1)
    assert (done.returncode, {run["way"] for run in found["runs"]}) == (0, {"by hand, 2 × 1", "badcjobs run"})
    assert "by hand, 2 × 1, MPS: left out: 1 of 2 processes were connected" in done.stdout


def test_every_picture_of_the_readme_is_made_and_none_is_blank(tmp_path):
    chromium()
    done = run_bench("pictures", "--out", tmp_path, "--tasks", 8)
    assert done.returncode == 0, done.stderr[-3000:]
    widths = {"timeline": 1024, "live": 1280, "terminal": 1280}
    expected = {f"{name}-{shade}.png": width for name, width in widths.items() for shade in ("light", "dark")}
    assert {path.name for path in tmp_path.iterdir()} == {*expected}
    for name, width in expected.items():
        data = (tmp_path / name).read_bytes()
        wide, high = struct.unpack(">II", data[16:24])
        assert (data[:4], wide, high >= 300) == (b"\x89PNG", width, True), name
        assert len(data) > wide * high / 200, f"{name} is plain paper, which is packed into less than that"
    assert "tasks       8 (7 done, 1 failed)" in done.stdout
