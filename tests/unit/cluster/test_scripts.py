"""Job scripts as sbatch and a shell read them: options, calls of badcjobs, mistakes; and what the emulation asks.

The inputs stand in tests/data, what is understood of them in the pages.
"""

import re
import subprocess

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import cluster
from rooms.cli import app, make_parser
from rooms.model import default_cpus, default_mem
from rooms.planning import Job, Site, check_script
from rooms.root import BadInput, Project, RunSettings, SubmitSettings, folder
from support.brief import brief, literal, page
from support.cases import read_data

PARSE = make_parser(typer.main.get_command(app))
CALLS, OPTIONS, REQUESTS, FORMS = (
    [one.replace("⏎", "\n").replace("␍", "\r") for one in part.split("\n")[1:-1]]
    for part in read_data("job_lines.txt").split("# --- ")[1:]
)
WHOLE = read_data("whole_job.sbatch")


def script(*lines):
    return "\n".join(["#!/bin/bash", *lines, ""])


def read(text, environ=None):
    found = cluster.read_script(text, "job.sbatch", environ or {}, "/july", parse=PARSE)
    known = {key: one for key, one in brief(found).items() if key not in ("name", "options")}
    if found.call is not None:
        known["call"]["is"] = [name for name in ("by_exec", "by_srun", "contained") if getattr(found.call, name)]
    return known


def options(text):
    """Return what a script asks for with these options, of which a GPU would be missed."""
    return {key: one for key, one in read(script(f"#SBATCH {text}", "badcjobs run m")).items() if key != "call"}


def test_what_is_understood_of_a_script_is_what_sbatch_and_the_shell_make_of_it(pages):
    known = {"OUT": "/scratch/other", "NAME": "birds", "X": "cuda", "SLURM_ARRAY_TASK_ID": "3"}
    wins = {"SBATCH_TIMELIMIT": "60", "SBATCH_ACCOUNT": "a", "SBATCH_SIGNAL": "", "SBATCH_GPUS": "9"}
    whole = {
        "as it is": read(WHOLE), "variables": read(WHOLE, known),
        "exported": read(WHOLE.replace("#SBATCH --open", "#SBATCH --export=ALL,NAME=me\n#SBATCH --open"), known),
        "elsewhere": read(WHOLE.replace("#SBATCH --open", "#SBATCH -D sub\n#SBATCH --open").replace("/scratch", "res")),
        "environment wins": read(WHOLE, wins),
    }  # fmt: skip
    pages({
        "whole.txt": page(whole),
        "calls.txt": page({one: read(script(one)) for one in CALLS}),
        "options.txt": page({one: options(one) for one in OPTIONS}),
        "forms.txt": page({name: read(text) for name, text in (one.split(": ", 1) for one in FORMS)}),
    })  # fmt: skip


def test_options_on_the_command_line_win_and_a_script_is_known_by_its_ending(pages):
    found = {}
    for wishes in read_data("wishes.txt").splitlines():
        options, known = cluster.submit_words(SubmitSettings(**literal(wishes))), {"SBATCH_TIMELIMIT": "60"}
        found[wishes] = [options, cluster.read_script(WHOLE, "job.sbatch", known, "", PARSE, options).asked]
    pages({"asked.txt": page(found)})
    assert [*filter(cluster.is_job_script, ("a.sbatch", "b.sh", "c.csv", "sbatch"))] == ["a.sbatch", "b.sh"]


def requested(text, *options):
    try:
        found = cluster.read_script_request(text, options)
    except BadInput as error:
        return str(error).splitlines()
    return {key: one for key, one in brief(found).items() if key != "options"}


def test_what_the_emulation_makes_of_a_request_and_what_it_refuses(pages):
    after = ("", "##SBATCH -t 9", "ls", "#SBATCH -t 7")  # none of these counts
    texts = {one: requested(script("# why", f"#SBATCH {one}", *after)) for one in REQUESTS}
    texts["options win"] = requested(script("#SBATCH --array=0-3 --gpus-per-node=4"), "--array=7", "--gpus-per-node=1")
    for path in sorted(folder("templates").glob("*.sbatch")):
        texts[path.name] = requested(path.read_text())
    texts["no interpreter"] = requested("echo hello\n")
    pages({"requests.txt": page(texts)})


TEMPLATES = {template.name: template for template in cluster.list_templates()}
BARE = {"PATH": "/usr/bin:/bin"}


def filled(name, *given, complete=False):
    return cluster.fill_template(name, given, Project(), complete=complete)


def run(text, **env):
    return subprocess.run(["bash"], input=text, text=True, capture_output=True, env={**BARE, **env})


def test_every_template_can_be_submitted_as_it_is_and_is_as_the_preflight_wants_it():
    assert sorted(TEMPLATES) == ["apptainer-array", "array", "merge", "multinode", "single", "sockeye-array"]
    for name, template in TEMPLATES.items():
        assert subprocess.run(["bash", "-n"], input=template.text, text=True).returncode == 0
        lines = template.text.splitlines()
        assert max(map(len, lines)) <= 120 and 20 < len(template.about) < 110
        claims = re.findall(r"workers per GPU|GiB each|the four GPUs|The GPUs of a complete node", template.text)
        assert claims == [], "its numbers may be replaced, and its comments stay"
        found = cluster.read_script(template.text, name, {}, "", PARSE)
        job = Job(found.asked, Site(""), RunSettings(), found)
        assert found.call and not [one for one in check_script(job) if one.severity != "fine"], name
        assert filled(name).text == template.text, "without settings it stays as it is"
        if "merge" not in name:
            keys = template.to_dict()["keys"]
            gpus = int(keys["gpus-per-node"])
            assert (int(keys["cpus-per-task"]), keys["mem"]) == (default_cpus(gpus), default_mem(gpus)), name
        own = [f"{key}={value}" for key, value in template.to_dict()["keys"].items() if value and "<" not in value]  # type: ignore[attr-defined]
        again = filled(name, *own).text.replace("##SBATCH", "#SBATCH").replace("'", "")
        assert again.splitlines() == template.text.replace("##SBATCH", "#SBATCH").replace("'", "").splitlines(), name


def test_a_template_stops_with_the_line_to_submit_or_gives_its_steps_the_cores_that_the_job_has(tmp_path):
    for env, code, words in (
        ({"OUT": "out"}, 2, "SOURCE is not set"),
        ({"SOURCE": "in.csv"}, 2, "OUT is not set"),
        ({"SOURCE": "a", "OUT": "b", "BADCJOBS": "/no/badcjobs"}, 3, "program '/no/badcjobs' not found on gpu7"),
    ):
        done = run(TEMPLATES["array"].text, SLURMD_NODENAME="gpu7", **env)
        assert (done.returncode, words in done.stderr, "try: sbatch --export=ALL," in done.stderr) == (code, True, True)
    (tmp_path / "srun").symlink_to("/bin/echo")  # which since Slurm 22.05 does not inherit the cores from sbatch
    for more, cores in (({"SLURM_CPUS_PER_TASK": "6"}, 6), ({}, 1)):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SOURCE": "m.csv", "OUT": "o", "BADCJOBS": "true", **more}
        before, _, after = run(TEMPLATES["multinode"].text, **env).stdout.partition(" true ")
        assert (f"--cpus-per-task={cores}" in before.split(), after.startswith("run m.csv --out o")) == (True, True)


VALUES = st.text(st.sampled_from("ab }\"'$`\\!*~ä(){x-"), min_size=1, max_size=12).filter(lambda text: text[0] != "~")


@settings(max_examples=8)
@given(st.lists(VALUES, min_size=20, max_size=20))
def test_the_shell_sees_exactly_the_value_that_was_given(values):
    scripts = [filled("single", f"source={value}").text.splitlines() for value in values]
    chosen = [line for lines in scripts for line in lines if line.startswith(': "${SOURCE:=')]
    done = run("\n".join(f'unset SOURCE\n{line}\nprintf "%s\\n" "$SOURCE"' for line in chosen))
    assert done.stdout.splitlines() == values, done.stderr


def test_options_arguments_and_set_up_lines_are_filled_in_where_they_belong(tmp_path):
    text = filled("array", "time=1-00:00:00", "account=st-pi-1", "gpus_per_node=2", "job-name=two words", "qos=q").text
    before, after = TEMPLATES["array"].text.splitlines(), text.splitlines()
    changed = [one.removeprefix("#SBATCH --") for one, other in zip(after, before, strict=True) if one != other]
    assert changed == ["job-name='two words'", "gpus-per-node=2", "time=1-00:00:00", "account=st-pi-1", "qos=q"]
    show = tmp_path / "show"
    show.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done; echo $STAGE\n')
    show.chmod(0o755)
    reported = filled(
        "single", "source=s", "out=o", f"badcjobs={show}", "args=--max-gpus 2", "args=--engine-arg '--region=a b'",
        "setup=export STAGE=one", "setup=export STAGE=$STAGE-two",
    )  # fmt: skip
    assert run(reported.text, BADCJOBS_ARGS="--retries 3").stdout.splitlines() == [
        "run", "s", "--out", "o", "--max-gpus", "2", "--engine-arg", "--region=a b", "--retries", "3", "one-two",
    ]  # fmt: skip
    twice = filled("sockeye-array", "setup=module load gcc cuda").text
    assert twice.count("module load gcc cuda") == 1, "it has the line already"
    opens = [TEMPLATES[name].open for name in ("array", "sockeye-array", "apptainer-array", "merge")]
    assert opens == [("source", "out"), ("account", "source", "out"), ("image", "source", "out"), ("out",)]
    assert filled("sockeye-array", "account=st-a-1-gpu", "out=x").open == ("source",)


def test_what_sbatch_takes_is_taken_and_everything_else_is_refused_with_a_line_that_fixes_it(pages):
    text, said = read_data("template_settings.txt"), {}
    for name, *cases in (part.splitlines() for part in text.split("=== ")[1:]):
        for case in (one.replace("⏎", "\n").split(" | ") for one in cases):
            which = "array" if name == "taken" else name
            if name == "taken":
                filled("multinode" if case[0].startswith("nodes=") else which, *case)
                continue
            with pytest.raises(BadInput) as refused:
                filled(which, *case, complete=True)
            said[f"{which}: {'|'.join(case)!r}"] = str(refused.value).splitlines()
    filled("merge", "dependency=afterany:1:2", "account=st-pi-1")
    filled("sockeye-array.sbatch", "account=st-pi-1-gpu", complete=True)
    pages({"refused.txt": page(said)})
    own = Project.parse({"submit": {"gpus_per_task": 4}})
    assert "--gpus-per-node=2" in cluster.fill_template("array", ["gpus_per_node=2"], own, complete=True).text
