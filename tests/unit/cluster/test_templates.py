"""Templates: a shell reads back what was filled in; what sbatch would not take is refused with a line to paste."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.cluster import Template, fill_template, list_templates, read_script
from rooms.planning import PreflightFacts, check_script
from rooms.root import BadInput, Project
from support.brief import page
from support.pages import Pages

TEMPLATES = {template.name: template for template in list_templates()}
NONE = Project()
BARE = {"PATH": "/usr/bin:/bin"}


def filled(name: str, *given: str, complete: bool = False) -> Template:
    return fill_template(name, given, NONE, complete=complete)


def run(text: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash"], input=text, text=True, capture_output=True, env={**BARE, **env})


def test_every_template_can_be_submitted_as_it_is_and_is_as_the_preflight_wants_it() -> None:
    assert sorted(TEMPLATES) == ["apptainer-array", "array", "merge", "multinode", "single", "sockeye-array"]
    for name, template in TEMPLATES.items():
        assert subprocess.run(["bash", "-n"], input=template.text, text=True).returncode == 0
        lines = template.text.splitlines()
        assert max(map(len, lines)) <= 120 and 20 < len(template.about) < 110
        found = read_script(template.text, name, {})
        facts = PreflightFacts(found.asked, script=found, start=found.start)
        assert found.calls and not [one for one in check_script(facts) if one.severity != "fine"], name
        assert filled(name).text == template.text, "without settings it stays as it is"
        own = [f"{key}={value}" for key, value in template.to_dict()["keys"].items() if value and "<" not in value]  # type: ignore[attr-defined]
        again = filled(name, *own).text.replace("##SBATCH", "#SBATCH").replace("'", "")
        assert again.splitlines() == template.text.replace("##SBATCH", "#SBATCH").replace("'", "").splitlines(), name


def test_without_source_out_or_program_a_template_stops_with_the_line_to_submit() -> None:
    for env, code, words in (
        ({"OUT": "out"}, 2, "SOURCE is not set"),
        ({"SOURCE": "in.csv"}, 2, "OUT is not set"),
        ({"SOURCE": "a", "OUT": "b", "BADCJOBS": "/no/badcjobs"}, 3, "program '/no/badcjobs' not found on gpu7"),
    ):
        done = run(TEMPLATES["array"].text, SLURMD_NODENAME="gpu7", **env)
        assert (done.returncode, words in done.stderr, "try: sbatch --export=ALL," in done.stderr) == (code, True, True)


def test_the_multinode_script_gives_its_steps_the_cores_that_the_job_has(tmp_path: Path) -> None:
    """Since Slurm 22.05 srun does not inherit them from sbatch, and a task would work with one core."""
    (tmp_path / "srun").symlink_to("/bin/echo")
    for more, cores in (({"SLURM_CPUS_PER_TASK": "6"}, 6), ({}, 1)):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SOURCE": "m.csv", "OUT": "o", "BADCJOBS": "true", **more}
        before, _, after = run(TEMPLATES["multinode"].text, **env).stdout.partition(" true ")
        assert (f"--cpus-per-task={cores}" in before.split(), after.startswith("run m.csv --out o")) == (True, True)


VALUES = st.text(st.sampled_from("ab }\"'$`\\!*~ä(){x-"), min_size=1, max_size=12).filter(lambda text: text[0] != "~")


@settings(max_examples=8)
@given(st.lists(VALUES, min_size=20, max_size=20))
def test_the_shell_sees_exactly_the_value_that_was_given(values: list[str]) -> None:
    scripts = [filled("single", f"source={value}").text.splitlines() for value in values]
    chosen = [line for lines in scripts for line in lines if line.startswith(': "${SOURCE:=')]
    done = run("\n".join(f'unset SOURCE\n{line}\nprintf "%s\\n" "$SOURCE"' for line in chosen))
    assert done.stdout.splitlines() == values, done.stderr


def test_options_arguments_and_set_up_lines_are_filled_in_where_they_belong(tmp_path: Path) -> None:
    text = filled("array", "time=1-00:00:00", "account=st-pi-1", "gpus_per_node=2", "job-name=two words", "qos=q").text
    lines = text.splitlines()
    wanted = ("time=1-00:00:00", "account=st-pi-1", "gpus-per-node=2", "job-name='two words'", "qos=q")
    assert {f"#SBATCH --{one}" for one in wanted} <= {*lines}
    assert len(lines) == len(TEMPLATES["array"].text.splitlines()) and "your-account" not in text
    assert not any(line.startswith("#SBATCH --partition") for line in lines), "what is not set stays a comment"
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done; echo $STAGE\n')
    show.chmod(0o755)
    told = filled(
        "single", "source=s", "out=o", f"badcjobs={show}", "args=--max-gpus 2", "args=--engine-arg '--region=a b'",
        "setup=export STAGE=one", "setup=export STAGE=$STAGE-two",
    )  # fmt: skip
    assert run(told.text, BADCJOBS_ARGS="--retries 3").stdout.splitlines() == [
        "run", "s", "--out", "o", "--workers-per-gpu", "auto", "--max-gpus", "2", "--engine-arg", "--region=a b",
        "--retries", "3", "one-two",
    ]  # fmt: skip
    twice = filled("sockeye-array", "setup=module load gcc cuda").text
    assert twice.count("module load gcc cuda") == 1, "it has the line already"
    opens = [TEMPLATES[name].open for name in ("array", "sockeye-array", "apptainer-array", "merge")]
    assert opens == [("source", "out"), ("account", "source", "out"), ("image", "source", "out"), ("out",)]
    assert filled("sockeye-array", "account=st-a-1-gpu", "out=x").open == ("source",)


def test_what_sbatch_takes_is_taken_and_everything_else_is_refused_with_a_line_that_fixes_it(pages: Pages) -> None:
    text = (Path(__file__).parents[2] / "data" / "template_settings.txt").read_text()
    said = {}
    for name, *cases in (part.splitlines() for part in text.split("=== ")[1:]):
        for case in (one.replace("⏎", "\n").split(" | ") for one in cases):
            which = "multinode" if case[0].startswith("nodes=") else "array" if name == "taken" else name
            if name == "taken":
                filled(which, *case)
                continue
            with pytest.raises(BadInput) as refused:
                filled(which, *case, complete=True)
            said[f"{which}: {'|'.join(case)!r}"] = str(refused.value).splitlines()
    filled("merge", "dependency=afterany:1:2", "account=st-pi-1")
    filled("sockeye-array.sbatch", "account=st-pi-1-gpu", complete=True)
    pages({"refused.txt": page(said)})
