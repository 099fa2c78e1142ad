"""Site files: Sockeye's own, somebody else's, and one with mistakes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from rooms.planning import Site, find_site
from rooms.root import BadInput
from support.pages import Pages

FILES = (Path(__file__).parents[2] / "data" / "sites.txt").read_text().split("=== ")[1:]


def test_sockeyes_limits_come_with_badcjobs_and_a_file_may_leave_everything_but_its_name_out(
    tmp_path: Path, pages: Pages
) -> None:
    site = find_site("sockeye", tmp_path)
    pages({"sockeye.txt": "\n".join(f"{name} = {value}" for name, value in asdict(site).items())})
    assert site.free_cores_per_gpu == 6
    (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "x"\n[limits]\narray_tasks = 500\ngpu_hours = 3\n')
    mine = find_site("./mine.toml", tmp_path)
    assert mine == Site("mine", array_tasks=500, gpu_hours=3)
    assert mine.free_cores_per_gpu is mine.time_s is mine.plan_time_s is None


def test_unknown_keys_and_wrong_values_are_named_all_at_once(tmp_path: Path, pages: Pages) -> None:
    said = []
    files = {f"{number}.toml": text.partition("\n") for number, text in enumerate(FILES)}
    for name, (_, _, text) in files.items():
        (tmp_path / name).write_text(text)
    for name in (*files, "narval", "./narval.toml"):
        with pytest.raises(BadInput) as refused:
            find_site(name, tmp_path)
        heading = files[name][0] if name in files else name
        why = "" if heading == "no TOML" else refused.value.why
        said.append(f"## {heading}\n{refused.value.what}\n{why}\ntry: {refused.value.fix}\n")
    pages({"refusals.txt": "\n".join(said).replace(str(tmp_path), "HERE")})
