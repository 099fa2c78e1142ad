"""Settings: option, --config KEY=VALUE, badcjobs.toml, default; and run.toml, which freezes those of a run."""

import json
import os
import re
import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import root
from rooms.cli import explain_moved_option, settings_text
from rooms.model import ArrayShape, Billing, parse_patterns
from rooms.planning import project_text
from rooms.root import NAME, SETTINGS, BadInput, FrozenRun, Project, RunSettings, SubmitSettings, check_against, freeze
from support.cases import read_blocks, read_data

CASES = read_blocks("settings_cases.txt")
# A value of --config; options, beside a source; the rest is the file.
GIVEN = re.compile(r"(?m)^(config|options) (.*)\n")


def plain(text, folder):
    return text.replace(str(folder), "FOLDER").encode("utf-8", "backslashreplace").decode()


def changed(made):
    """Return what differs from the defaults."""
    kept = {one.name: getattr(made, one.name) for one in fields(made)}
    default = type(made)()
    return "\n".join(f"    {name} = {value!r}" for name, value in kept.items() if value != getattr(default, name))


def test_what_files_keys_and_options_together_mean(tmp_path, pages):
    (tmp_path / "bad.toml").write_text("[run\n")
    (tmp_path / "latin.toml").write_bytes(b'[run]\nroot = "caf\xe9"\n')
    said = {"right.txt": [], "wrong.txt": []}
    for case in CASES:
        name, _, text = case.partition("\n")
        (tmp_path / NAME).write_text(GIVEN.sub("", text))
        options = {"source": ["m.csv"], **json.loads(dict(GIVEN.findall(text)).get("options", "{}"))}
        try:
            project = Project.read([word for kind, word in GIVEN.findall(text) if kind == "config"], tmp_path)
            answer = changed(project.make(RunSettings, options, "run"))
            said["right.txt"].append(f"{name}\n{answer}" + (f"\n    site {project.site}" if project.site else ""))
        except BadInput as error:
            lines = re.sub(r"(cannot be read)(.|\n)*", r"\1", str(error)).replace("\n", "\n    ")
            said["wrong.txt"].append(f"{name}\n    {lines}")
    pages({name: plain("\n".join(some), tmp_path) for name, some in said.items()})


PROBES = (-1, 0, 0.001, 1, 2.5, 1e9, float("inf"), True, "x", "auto", "", ["a"], [1, 2], [3, 86_400], [3, 86_401])


def test_every_key_takes_what_it_should_and_nothing_else(pages):
    said = []
    for table, keys in SETTINGS.items():
        for key in keys.keys() - {*root.OPTIONS_ONLY} if table in root.TABLES else ():
            right, wrong = [], dict[str, list[Any]]()
            for probe in PROBES:
                try:
                    right.append(Project.parse({table: {key: probe}}).get(table, key))
                except BadInput as error:
                    problem = re.sub(r"^.*? = .*? must", "must", error.what)
                    wrong.setdefault(problem, []).append(probe)
            refused = "".join(f"    {words}: {each}\n" for words, each in wrong.items())
            said.append(f"[{table}] {key}: {right}\n{refused}")
    pages({"keys.txt": "".join(sorted(said))})


def test_the_guide_and_a_new_project_file_name_every_key(tmp_path, pages):
    new = tmp_path / NAME
    new.write_text(project_text({}))
    assert Project.read([str(new)], tmp_path).values["run"] == {}  # comments only
    pages({"settings.txt": settings_text(), "badcjobs.toml": new.read_text()})
    new.write_text(re.sub("(?m)^# (?=[a-z_]+ = )", "", new.read_text()))  # every default and every example is accepted
    project = Project.read([str(new)], tmp_path)
    assert all(project.values[table].keys() == SETTINGS[table].keys() - {*root.OPTIONS_ONLY} for table in root.TABLES)
    options = [one for settings in SETTINGS.values() for one in settings.values() if one.heading]
    assert not [one.key for one in options if one.key.endswith("_s") or len(one.help) > 50]


def test_the_nearest_project_file_is_read_and_other_tables_take_their_options(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    (tmp_path / NAME).write_text("[run]\nretries = 7\n[probe]\nkeep = 'kept'\n")
    assert Project.read([], deep).file == tmp_path / NAME
    (tmp_path / "a" / NAME).write_text("[submit]\nrequeues = 3\n[plan]\nmargin = 2\n")
    project = Project.read(["submit.setup=['module load gcc']"], deep)
    assert (project.file, project.get("run", "retries")) == (tmp_path / "a" / NAME, None)
    assert changed(project.make(SubmitSettings, {"tasks": 4}, "submit")).split("\n") == [
        "    tasks = 4", "    setup = ('module load gcc',)", "    requeues = 3"
    ]  # fmt: skip
    assert project.make(root.PlanSettings, {}, "plan").margin == 2.0
    named = Project.read([str(tmp_path / NAME)], deep)  # --config FILE: no other file is read
    kept = named.make(root.ProbeSettings, {}, "probe").keep
    assert (named.get("run", "retries"), kept) == (7, str(tmp_path / "kept"))
    found = []
    assert named.make(SubmitSettings, {"tasks": 0, "cpus": 2}, "submit", found) == SubmitSettings(cpus=2)
    assert found == ["--tasks = 0 must be at least 1"]


def test_a_task_in_another_folder_gets_the_same_settings(tmp_path):
    (tmp_path / "badc.toml").write_text("[run]\nretries = 7\n")
    given = ["badc.toml", "run.stage=always", "run.root=audio", "alerts.idle_s=9", "submit.tasks=3", "site=mine.toml"]
    project = Project.read(given, tmp_path)
    words = project.run_words({"engine": "demo", "resume": False, "keep_raw": False, "retries": None}, Path("/lab"))
    assert words == [
        f"--config={tmp_path}/badc.toml", "--config=alerts.idle_s=9", "--config=site=/lab/mine.toml", "--no-resume",
        "--engine=demo", "--root=/lab/audio", "--config=run.keep_raw=false", "--config=run.stage=always",
    ]  # fmt: skip


def test_an_option_that_has_moved_is_refused_with_a_line_to_paste(pages):
    said = []
    for line in read_data("moved_options.txt").splitlines():
        words = shlex.split(line)
        option = next(word for word in words if word.startswith("--")).partition("=")[0]
        said.append(f"{line}\n    {explain_moved_option(option, words, words[0])}")
    pages({"moved.txt": "\n".join(said)})


SOME = RunSettings(out=Path("runs/july"), source=("m.csv",), engine="demo")
PATTERNS = parse_patterns(["{study_area}/{location}/*", '{location}_"0+1"_{date}?{time}.wav'])[0]
CUT = replace(SOME, chunk_length_s=300.0, overlap_s=6.0, cut=True)
ALL = replace(CUT, patterns=PATTERNS, root="audio", engine="command", command="x", engine_args=("--a b", "\x7fé"),
              interval_s=0.5, retries=5, billing=Billing(6.0, 5.0, 1.0, "max"))  # fmt: skip


def frozen(chosen=SOME, array=None, cwd="/data"):
    return FrozenRun.of(chosen, array, Path(cwd))


def test_the_first_task_writes_run_toml_and_later_ones_must_agree_with_it(tmp_path, pages):
    path, shape = tmp_path / "run.toml", ArrayShape(1, 4, 3)
    assert FrozenRun.read(path) is None
    first = frozen(ALL, shape)
    path.with_name(f".run.toml.{os.uname().nodename}.{os.getpid()}.tmp").write_text("of a killed task with this number")
    assert freeze(path, first, "0.1.0") == freeze(path, frozen(), "0.2.0") == FrozenRun.read(path) == first
    said = {"run.toml": path.read_text()}
    (tmp_path / "plain").mkdir()
    freeze(tmp_path / "plain" / "run.toml", frozen(), "0.1.0")
    said["plain.toml"] = (tmp_path / "plain" / "run.toml").read_text()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["plain", "run.toml"]
    again = Project.read([str(path)], tmp_path).make(RunSettings, {"out": str(ALL.out)}, "run")
    check_against(first, frozen(again), path)
    of_one_task = {"simulate": "2", "max_gpus": 1, "grace_s": 5.0, "shard": "0/2", "resume": False, "stop_after": "9"}
    check_against(frozen(replace(SOME, telemetry=False, **of_one_task)), frozen(), path)
    check_against(frozen(replace(SOME, source=("july/m.csv",))), frozen(cwd="/data/july"), path)
    shorter, fewer = replace(CUT, cut=None, chunk_length_s=60.0), replace(ALL, patterns=PATTERNS[:1])
    others = {"none": (ALL, SOME), "less": (ALL, fewer), "cut": (ALL, shorter), "then": (SOME, CUT)}
    for name, (before, other) in others.items():
        with pytest.raises(BadInput) as refused:
            check_against(frozen(before, shape), frozen(other), path)
        said[f"other-{name}.txt"] = plain(str(refused.value), tmp_path)
    pages(said)


def test_a_run_toml_that_was_changed_is_refused_by_name(tmp_path, pages):
    path, said = tmp_path / "run.toml", []
    array = "[array]\nfirst = {}\nstep = {}\ncount = 2\n"
    for text in ("[array]\nfirst = 0\n", "array = 7\n", "run = 3\n",
                 array.format('"a"', 1), array.format(0, 0), "recordings = 3\n", "[recordings]\npatterns = [1]\n",
                 "billing = 3\n", "[billing]\nmemory_gb = 5\n", "[billing]\ngpu = '6'\n",
                 "[billing]\ngpu = nan\n", "[billing]\ngpu = 6\ncpu = -1\n", "[billing]\ngpu = true\n",
                 "[billing]\ngpu = 6\nrule = 'most'\n",
                 "[run]\nchunk_length = 'long'\n" + array.format(0.5, 1)):  # fmt: skip
        path.write_text(text)
        with pytest.raises(BadInput) as refused:
            FrozenRun.read(path)
        said.append(f"{text}{plain(str(refused.value), tmp_path)}")
    pages({"refusals.txt": "\n\n".join(said)})
    path.write_text("[run]\nchunk_length = 300\n" + array.format(0, 1))
    read = FrozenRun.read(path)
    assert read is not None and (read.array, read.cutting.chunk_length_s) == (ArrayShape(0, 1, 2), 300.0)
    assert read.settings == {"chunk_length": 300.0}


def test_the_command_that_resumes_a_run_works_from_any_folder(tmp_path, pages):
    given = RunSettings(Path("runs/july"), hawkears_root="../HawkEars", hawkears_python="venv/bin/python",
                       keep_raw=True, simulate="/data/tape", telemetry=False, shard="0/2", resume=False, stop_after="9",
                       retry_failed=False)  # fmt: skip
    also = json.loads(given.to_json(Path("/ada")))
    runs = {"plain": SOME, "all": ALL, "cut": CUT, "python": replace(SOME, engine="hawkears")}
    said = [f"{name}: {frozen(run).command_line(Path('/runs/july'), also)}" for name, run in runs.items()]
    for many in (3961, 3962):  # as long as one line of a terminal can be
        long = frozen(replace(SOME, source=("/" + "x" * many,)))
        line = long.command_line(Path("/out"), {})
        said.append(f"source of {many} letters: {len(line)} {line[:32]}")
    pages({"lines.txt": "\n".join(said), "settings.json": json.dumps({**also, "alerts": None}, indent=1)})


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(max_examples=60)
@given(args=st.lists(texts, max_size=3), command=st.none() | texts, interval_s=st.floats(0.01, 1e6))
def test_any_text_comes_back_as_it_was_written(tmp_path_factory, args, command, interval_s):
    path = tmp_path_factory.getbasetemp() / "any-run.toml"
    run = frozen(replace(SOME, engine_args=tuple(args), command=command, interval_s=interval_s))
    path.write_text(run.to_toml("0.1.0"), encoding="utf-8")
    assert FrozenRun.read(path) == run
