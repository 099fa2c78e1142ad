"""A whole task whose engine runs behind another program, which talks: a report for each process, the same results."""

from __future__ import annotations

import shlex

import pytest
from support.badcjobs_program import Site, assert_refused
from support.fake_hawkears import make_fake_root
from support.fake_hawkears_package import fake_package_environ
from support.fake_prefix import install_fake_prefix

DEMO = ("--engine", "demo", "--simulate", 2, "--config", "run.publish_every_s=60")
COPY = "sh -c 'echo start_time,end_time,label,score > {output}' {input}"


def prefix(site: Site, **how: float) -> list[object]:
    program = install_fake_prefix(site.folder / "bin", **how)
    return ["--engine-prefix", f"{shlex.quote(str(program))} {shlex.quote(str(site.folder))}/{{worker}}"]


def test_an_engine_behind_a_talkative_program_finds_the_same_and_each_process_leaves_its_report(site: Site) -> None:
    source = site.manifest(10)
    assert site.run(source, *DEMO).exit_code == 0
    plain = site.rows("SELECT chunk_id, start_ms, end_ms, label FROM detection ORDER BY 1, 2")
    site.out = site.folder / "behind"
    ended = site.run(source, *DEMO, *prefix(site, report_s=0.5))
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT chunk_id, start_ms, end_ms, label FROM detection ORDER BY 1, 2") == plain
    reports = sorted(site.folder.glob("*.report"))
    assert len(reports) == 2, "a report for each of the two workers"
    assert reports[0].stem.endswith("-1") and reports[1].stem.endswith("-2")


def test_a_command_runs_behind_it_too(site: Site) -> None:
    ended = site.run(site.manifest(3), "--engine", "command", "--command", COPY, "--simulate", 1, *prefix(site))
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 3)]
    assert len(list(site.folder.glob("*.report"))) == 3


def test_hawkears_runs_behind_it_too(site: Site) -> None:
    root = make_fake_root(site.folder / "root")
    ended = site.run(site.manifest(4), "--hawkears-python", "python3", "--hawkears-root", root, "--simulate", 1,
                     *prefix(site), env=fake_package_environ())  # fmt: skip
    assert ended.exit_code == 0, ended.stderr
    assert site.rows("SELECT status, count(*) FROM chunk GROUP BY status") == [("done", 4)]
    check, worker = sorted(site.folder.glob("*.report"), reverse=True)
    assert check.stem.endswith("-check") and worker.stem.endswith("-1"), "it is also asked behind it what it can do"


@pytest.mark.parametrize(
    ("prefix", "exit_code", "said"),
    [("no-such-program -x", 3, "no-such-program"), ("'", 2, "cannot be read"), ("  ", 2, "empty")],
)
def test_a_prefix_that_cannot_be_started_is_refused_before_anything_starts(
    site: Site, prefix: str, exit_code: int, said: str
) -> None:
    assert_refused(site.run(site.manifest(3), *DEMO, "--engine-prefix", prefix), exit_code, said)
