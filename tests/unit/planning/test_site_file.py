"""Site files: Sockeye's own, somebody else's, and one with mistakes; and the project file that init makes of one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from rooms.planning import Site, find_here, find_site, project_text
from rooms.root import BadInput, Project, RunSettings, SubmitSettings
from support.pages import Pages

FILES = (Path(__file__).parents[2] / "data" / "sites.txt").read_text().split("=== ")[1:]


def test_sockeyes_limits_come_with_badcjobs_and_only_the_name_of_a_site_is_needed(tmp_path: Path, pages: Pages) -> None:
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


def test_init_writes_what_is_found_here_and_every_other_key_as_a_comment(tmp_path: Path, pages: Pages) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\n[node]\ngpus = 2\n')
    (tmp_path / "plain.toml").write_text('name = "plain"\n')
    for name in ("slurm/sbatch", "engine/hawkears"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch(mode=0o755)
    said = []
    for path, site in (("", None), ("slurm", "sockeye"), ("slurm engine", "mine.toml"), ("", "./plain.toml")):
        environ = {"PATH": ":".join(str(tmp_path / one) for one in path.split())}
        found, values = find_here(environ, tmp_path, site)
        words = [f"{name}: {text}" for name, text in found if name != "GPUs"]  # those of the machine of the tests
        (tmp_path / "badcjobs.toml").write_text(project_text(values))
        project = Project.read([], tmp_path)
        first, usual = (one.make(RunSettings, {"source": ["a"]}, "run") for one in (project, Project()))
        assert first == usual
        made = project.make(SubmitSettings, {}, "submit")
        submit = {key: value for key, value in asdict(made).items() if value != getattr(SubmitSettings(), key)}
        said.append("\n".join([f"## PATH={path}, site {site}", *words, f"{values}", f"read as {submit}", ""]))
    text = project_text(find_here({"PATH": str(tmp_path / "slurm")}, tmp_path, "sockeye")[1])
    pages({"found.txt": "\n".join(said).replace(str(tmp_path), "HERE"), "badcjobs.toml": text})
