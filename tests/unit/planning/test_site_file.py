"""Site files: Sockeye's own, somebody else's, and one with mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.planning import Site, find_site, parse_site
from rooms.root import BadInput


def test_sockeyes_limits_come_with_badcjobs(tmp_path: Path) -> None:
    site = find_site("sockeye", tmp_path)
    assert (site.array_tasks, site.queued_jobs, site.gpu_hours, site.time_h) == (10_000, 10_000, 2400, 168)
    assert (site.node_gpus, site.node_cpus, site.node_memory_gb, site.files) == (4, 24, 180, 10_000_000)
    assert (site.bill_cpu, site.bill_memory_gb, site.bill_gpu, site.bill_rule) == (1.0, 5.0, 6.0, "max")
    assert (site.modules, site.account_ends_with) == (("gcc", "cuda"), "-gpu")
    assert site.writable == ("/scratch",)
    assert "~" in site.read_only
    assert "~" in site.no_submit


def test_a_file_of_ones_own_may_leave_everything_but_its_name_out(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[limits]\narray_tasks = 500\n')
    assert find_site("./mine.toml", tmp_path) == Site("mine", array_tasks=500)


def test_unknown_keys_and_wrong_values_are_named_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'colour = 1\n[limits]\narray_task = 5\ngpu_hours = "many"\ntime_h = true\nfiles = 1.5\n'
        '[folders]\nread_only = "~"\n[billing]\nrule = "mean"\ncpu = -1\n'
    )
    with pytest.raises(BadInput) as refused:
        find_site("mine.toml", tmp_path)
    why = refused.value.why or ""
    for word in ("colour", "array_task:", "gpu_hours", "time_h", "files", "read_only", "max, sum", "cpu = -1", "name"):
        assert word in why
    assert "array_tasks" in why  # the keys there are
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("document", "word"),
    [({}, "name is missing"), ({"name": ""}, "name must be"), ({"name": "x", "limits": 3}, "[limits]")],
)
def test_a_single_mistake_is_the_message_itself(document: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_site(document, "mine.toml")
    assert word in refused.value.what
    assert "mine.toml" in (refused.value.why or "")


@pytest.mark.parametrize("name", ["narval", "./narval.toml", "broken.toml"])
def test_a_site_that_is_not_there_or_no_toml_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "broken.toml").write_text("name = \n")
    with pytest.raises(BadInput) as refused:
        find_site(name, tmp_path)
    assert name.removeprefix("./") in str(refused.value)
