"""A whole task with a profiler before its first worker: a report in the run folder, the same results, no harm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.badcjobs_program import Site, assert_refused
from support.fake_profiler import install_fake_profiler

DEMO = ("--engine", "demo", "--simulate", 2, "--engine-arg=--burn-s=0.02")
DETECTIONS = "SELECT recording_id, chunk_id, start_ms, end_ms, label, score FROM detection ORDER BY 1, 2, 3"


def with_profiler(site: Site, name: str = "nsys", *, fault: str = "") -> dict[str, str]:
    program = install_fake_profiler(site.folder / "bin", name, fault=fault)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


def reports(site: Site) -> list[Path]:
    return sorted((site.out / "profiles").glob("*"))


@pytest.mark.parametrize(("name", "look"), [("nsys", "nsys stats"), ("ncu", "ncu --import")])
def test_a_profiled_run_leaves_a_report_and_finds_the_same(site: Site, name: str, look: str) -> None:
    source = site.manifest(20)
    assert site.run(source, *DEMO).exit_code == 0
    expected = site.rows(DETECTIONS)
    site.out = site.folder / "profiled"
    ended = site.run(source, *DEMO, "--profile", name, "--profile-chunks", 4, env=with_profiler(site, name))
    assert ended.exit_code == 0, ended.stderr
    assert site.rows(DETECTIONS) == expected != []
    assert site.rows("SELECT DISTINCT attempts, status FROM chunk") == [(1, "done")]
    assert site.count("attempt") == 20
    (report,) = reports(site)
    assert report.name == f"{site.task_database().stem}.{name}-rep"
    assert "badcjobs.workers.demo_worker" in json.loads(report.read_text())["program"]
    assert f"profile: {report}; to look at it: {look} {report}" in ended.stderr
    assert list(site.local.iterdir()) == []


def test_a_profiler_that_fails_costs_nothing_but_the_profile(site: Site) -> None:
    ended = site.run(site.manifest(10), *DEMO, "--profile", "nsys", env=with_profiler(site, fault="dies"))
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 10)]
    assert reports(site) == []
    assert "nsys has left no report" in ended.stderr


def test_a_profiler_that_is_not_here_is_refused_before_anything_starts(site: Site) -> None:
    empty = site.folder / "empty"
    empty.mkdir()
    ended = site.run(site.manifest(3), *DEMO, "--profile", "ncu", env={"PATH": str(empty)})
    assert_refused(ended, 3, "--profile ncu: there is no program 'ncu' on PATH", "command -v ncu")
    assert not site.out.exists()


def test_wrong_wishes_are_named_together(site: Site) -> None:
    ended = site.run(site.manifest(3), *DEMO, "--profile", "gprof", "--profile-chunks", 0)
    assert_refused(ended, 2, "--profile gprof is not known; profilers are nsys, ncu", "must be at least 1")
    assert_refused(site.run(site.manifest(3), *DEMO, "--profile-chunks", 5), 2, "--profile-chunks goes with --profile")


def test_later_tasks_of_the_run_need_not_profile(site: Site) -> None:
    source = site.manifest(4)
    first = site.run(source, *DEMO, "--shard", "0/2", "--profile", "nsys", env=with_profiler(site))
    second = site.run(source, *DEMO, "--shard", "1/2")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert len(reports(site)) == 1
