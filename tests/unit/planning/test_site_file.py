"""Site files: Sockeye's own, somebody else's, and one with mistakes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from rooms.planning import Site, find_site
from rooms.root import BadInput
from support.pages import Pages

FILES = {
    "all wrong": """
colour = 1
about = ""
[limits]
array_task = 5
gpu_hours = "many"
time_h = true
files = 1.5
[folders]
read_only = "~"
writable = [""]
example = ""
[billing]
rule = "mean"
cpu = -1
gpu = inf
memory_gb = 0
[plan]
gpus = nan
""",
    "no name": "",
    "an empty name": 'name = ""\n',
    "no table": 'name = "x"\nlimits = 3\n',
    "no TOML": "name = \n",
}


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
    for name, text in FILES.items():
        (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(BadInput) as refused:
            find_site("mine.toml", tmp_path)
        why = refused.value.why if name != "no TOML" else ""
        said.append(f"## {name}\n{refused.value.what}\n{why}\ntry: {refused.value.fix}\n")
    for name in ("narval", "./narval.toml"):
        with pytest.raises(BadInput) as refused:
            find_site(name, tmp_path)
        said.append(f"## {name}\n{refused.value.what}\n{refused.value.why}\ntry: {refused.value.fix}\n")
    pages({"refusals.txt": "\n".join(said).replace(str(tmp_path), "HERE")})
