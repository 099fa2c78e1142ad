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


TAKEN = (
    "array=0-99%10", "array=1-7:2", "array=1,2,3", "array=4", "time=12:00:00", "time=90", "mem=16G", "mem=16gb",
    "mem=0",
    "gpus-per-node=4", "gpus_per_node=v100:4", "nodes=1", "nodes=2-4", "cpus-per-task=24", "partition=gpu,short",
    "constraint=gpu_mem_32&v100", "constraint=[a]", "signal=B:USR2@300", "open-mode=truncate", "output=logs/%x.log",
    "out=/scratch/~x", "setup=module load gcc", "time=4|signal=B:USR1@239", "time=2-00:00:00|signal=B:USR1@99999",
)  # fmt: skip
# template → what is set, several settings parted by a bar
REFUSED = {
    "array": (
        "array=potato", "array=9-0", "array=1,3,5,7", "array=1,2,6,7%2", "time=noon", "time=unlimited", "time=2",
        "time=3",
        "mem=lots", "gpus-per-node=many", "gpus-per-node=0", "nodes=none", "nodes=4-2", "nodes=0", "cpus-per-task=0",
        "account=my account", "account=<alloc>", "partition=gpu short", "qos=<qos>", "constraint=gpu mem",
        "signal=B:BIRD@60", "open-mode=a", "signal=B:USR1@99999", "signal=USR2@43200", "out=~/results",
        "time=4|signal=B:USR1@300", "signal=B:USR1@99999|time=5:00:00", "account=a|account=b", "colour=red",
        "account=a|out=two words|args=--x 1|args=--y|account=b", "account=a\nrm", "time", "out=", "args=don't",
    ),
    "sockeye-array": (
        "account=st-pi-1", "account=-gpu", "mem=1G", "account=st-lab-1|array=potato|colour=red",
        "acount=x|time|mem=1G|mem=2G|out=|args=don't",
    ),
    "merge": ("dependency=4821",),
    "nothing": ("a=b",),
}  # fmt: skip


def test_what_sbatch_takes_is_taken_and_everything_else_is_refused_at_once_with_a_line_that_mends_it(
    pages: Pages,
) -> None:
    for settings_ in TAKEN:
        filled("multinode" if "nodes=" in settings_ else "array", *settings_.split("|"))
    filled("merge", "dependency=afterany:1:2", "account=st-pi-1")
    filled("sockeye-array.sbatch", "account=st-pi-1-gpu", complete=True)
    said = {}
    for name, cases in REFUSED.items():
        for case in cases:
            which = "multinode" if case.startswith("nodes=") else name
            with pytest.raises(BadInput) as refused:
                filled(which, *case.split("|"), complete=True)
            said[f"{which}: {case!r}"] = str(refused.value).splitlines()
    pages({"refused.txt": page(said)})


def test_a_project_file_fills_in_what_is_not_set(tmp_path: Path) -> None:
    (tmp_path / "badcjobs.toml").write_text(
        '[run]\nsource = ["july.csv"]\nout = "runs/july"\n[submit]\naccount = "st-lab-1-gpu"\ntime = "3:00:00"\n'
        'tasks = 8\nparallel = 2\nsetup = ["module load x"]\ncpus = 5\ngpus_per_task = 3\n'
    )
    project = Project.read((), tmp_path)
    lines = fill_template("sockeye-array", ["time=1:00:00"], project, complete=True).text.splitlines()
    wanted = ("account=st-lab-1-gpu", "time=1:00:00", "array=0-7%2", "cpus-per-task=5", "gpus-per-node=3")
    assert {*(f"#SBATCH --{one}" for one in wanted), "module load x"} <= {*lines}
    assert {f': "${{SOURCE:={tmp_path}/july.csv}}"', f': "${{OUT:={tmp_path}/runs/july}}"'} <= {*lines}
