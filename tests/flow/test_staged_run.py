"""A whole task that reads copies of its audio: the same results, told in the log, nothing left on the node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rooms.root import Project, RunSettings
from support.badcjobs_program import Site, assert_refused
from support.fake_hawkears1 import make_fake_hawkears1
from support.waiting import wait_for

DEMO = ("--engine", "demo", "--simulate", 2, "--engine-arg=--burn-s=0.05")
DETECTIONS = "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1, 2, 3"


def log_of(site: Site) -> str:
    return "".join(path.read_text() for path in sorted((site.out / "tasks").glob("*.log")))


def test_a_staged_run_finds_the_same_says_so_and_leaves_nothing_on_the_node(site: Site) -> None:
    source = site.manifest(30)
    plain = site.run(source, *DEMO, "--config", "run.stage=never")
    assert plain.exit_code == 0, plain.stderr
    expected = site.rows(DETECTIONS)
    site.out = site.folder / "staged"
    staged = site.run(source, *DEMO, "--config", "run.stage=always")
    assert staged.exit_code == 0, staged.stderr
    assert site.rows(DETECTIONS) == expected != []
    assert "audio is copied to this node in advance: run.stage = always" in log_of(site)
    pattern = r"staging: chunks read from copies on this node: (\d+) \(.* MB\), read in place: (\d+)"
    counts = re.search(pattern, log_of(site))
    assert counts is not None, log_of(site)
    assert int(counts[1]) + int(counts[2]) == 30 and int(counts[1]) >= 10
    decisions = site.rows("SELECT value, reason FROM decision WHERE kind = 'staging'")
    assert decisions == [(1.0, "run.stage = always")]
    assert {Path(path).parent for (path,) in site.rows("SELECT audio_path FROM chunk")} == {site.folder / "audio"}
    assert list(site.local.iterdir()) == []


def test_copies_lie_on_the_node_while_a_task_runs(site: Site) -> None:
    program = site.start_run(site.manifest(30), *DEMO, "--config", "run.stage=always")
    copies = wait_for(lambda: list(site.local.glob("*/staged/*/*.wav")), "there are copies")
    assert re.fullmatch(r"c\d+\.wav", copies[0].name)
    assert program.wait().exit_code == 0
    assert list(site.local.iterdir()) == []


def test_without_a_word_local_audio_is_read_where_it_lies(site: Site) -> None:
    ended = site.run(site.manifest(3), *DEMO)
    assert ended.exit_code == 0, ended.stderr
    (line,) = [line for line in log_of(site).splitlines() if "INFO    audio " in line]
    assert "read in place: " in line or "copied to this node in advance: " in line
    assert "read in place: run.stage = never" not in line


def test_an_engine_that_links_its_inputs_works_with_copies(site: Site) -> None:
    root = make_fake_hawkears1(site.folder / "HawkEars")
    ended = site.run(site.manifest(6), "--engine", "hawkears1", "--hawkears-root", root, "--hawkears-python", "python3",
                     "--cpu-workers", 1, "--config", "run.stage=always")  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 6)]


def test_bad_audio_is_named_by_its_own_path(site: Site) -> None:
    source = site.manifest(12)
    (site.folder / "audio" / "c011.wav").write_bytes(b"this is not audio")
    ended = site.run(source, *DEMO, "--config", "run.stage=always", "--retries", 0)
    assert ended.exit_code == 1, ended.stderr
    [(error,)] = site.rows("SELECT error FROM chunk WHERE status = 'failed'")
    assert str(site.folder / "audio" / "c011.wav") in error and str(site.local) not in error


def test_a_wish_that_nobody_knows_is_refused(site: Site) -> None:
    refused = site.badcjobs("run", site.manifest(1), "--out", site.out, *DEMO, "--config", "run.stage=sometimes")
    assert_refused(refused, 2, '--config run.stage = "sometimes" must be one of auto, always, never')


@pytest.mark.parametrize("stage", ["auto", "always", "never"])
def test_the_setting_may_stand_in_a_file(tmp_path: Path, stage: str) -> None:
    config = tmp_path / "lab.toml"
    config.write_text(f'[run]\nstage = "{stage}"\n')
    assert Project.read([str(config)], tmp_path).make(RunSettings, {"source": ["m.csv"]}, "run").stage == stage
