"""The names of files, unique for each attempt and saying enough to be skipped by; folders; what a wheel brings."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.cli import read_topic
from rooms.model import TaskKey, stable_id
from rooms.root import BadcjobsError, LocalFolder, RunFolder, file_version, folder, is_there, shell_line, user_cache
from support.databases import names_in
from support.filesystems import powerless_folder
from support.needs import missing

ROOT = Path(__file__).parents[3]
KEY = TaskKey("4821", 7, 0, "gpu3")
BORN = replace(KEY, started_at_ms=1_800_000_000_000)


@pytest.fixture
def run(tmp_path):
    made = RunFolder(tmp_path / "runs" / "july")
    for _ in range(2):
        made.create()
    return made


def test_a_task_is_named_after_its_job_index_restart_node_and_place_in_the_step():
    names = {
        "4821_7.r0.gpu3": KEY, "4821_7.r2.gpu3": replace(KEY, restart=2), "4821_7.r0.gpu3.p0": replace(KEY, procid=0),
        "local1800000000000-42_0.r0.laptop": TaskKey("local1800000000000-42", 0, 0, "laptop"),
        "4821_8.r0.rack_7.r0.gpu3": TaskKey("4821", 8, 0, "rack_7.r0.gpu3"),
    }  # fmt: skip
    out = RunFolder(Path("/out"))
    for name, key in names.items():
        assert (key.name, TaskKey.parse(name)) == (name, key)
        files = [str(out.task_database(key)), str(out.task_log(key))]
        assert files == [f"/out/tasks/{name}.{end}" for end in ("sqlite", "log")]
    for no_task in ("", "notes", "4821_7.r0.", "4821_07.r0.gpu3", "4821_7.r00.gpu3", "x4821_7"):
        assert TaskKey.parse(no_task) is None
    others = (out.run_toml, out.tasks, out.raw, out.job_database, out.report)
    assert [path.name for path in others] == ["run.toml", "tasks", "raw", "job.sqlite", "report.html"]
    # Task databases of different nodes are joined by their ids: a new way to make them would need a new schema.
    assert KEY.task_id == stable_id("4821_7.r0.gpu3") == 96_294_291_038_168
    assert BORN.task_id == 96_294_290_993_438
    assert BORN.task_id >> 17 == KEY.task_id >> 17, "merge reads files in the order of their names' ids"
    assert TaskKey.parse(BORN.name) == BORN
    assert len({BORN, KEY}) == 1


texts = st.lists(st.text("ab_.0", min_size=1, max_size=4), min_size=1, max_size=3)


@given(texts, texts)
def test_ids_of_different_names_differ_and_fit_into_six_bytes(one, other):
    assert 0 <= stable_id(*one) < 2**47 and (one == other or stable_id(*one) != stable_id(*other))


def test_a_claim_is_of_a_name_that_nobody_used_and_leaves_nothing_when_it_is_given_back(run):
    claimed = run.claim(BORN)
    assert (claimed, claimed.task_id, names_in(run.tasks)) == (KEY, BORN.task_id, ["4821_7.r0.gpu3.log"])
    assert [run.claim(KEY).restart for _ in range(2)] == [1, 2], "a second run in the same job is a restart"
    assert run.claim(replace(KEY, restart=5)).restart == 5
    for other in (replace(KEY, node="gpu4"), replace(KEY, array_index=8), replace(KEY, procid=1)):
        assert run.claim(other) == other
        run.give_back(other)
    (run.tasks / "4821_7.r3.gpu3.sqlite").touch()
    assert run.claim(KEY).restart == 4, "a published database is never claimed, even without its log"
    for restart in range(6):
        run.give_back(replace(KEY, restart=restart))
    assert names_in(run.tasks) == ["4821_7.r3.gpu3.sqlite"], "what has been published stays"
    (run.tasks / "4821_7.r3.gpu3.log").touch()
    run.give_back(replace(KEY, restart=3))
    assert len(names_in(run.tasks)) == 2
    for path in run.tasks.iterdir():
        path.unlink()
    (run.path / "run.toml").touch()
    run.give_back(run.claim(KEY))
    assert names_in(run.path) == ["run.toml"]
    (run.path / "run.toml").unlink()
    run.create()
    run.waiting.symlink_to(run.path / "other")
    run.tell_waiting("for GPUs")
    run.waiting.unlink()
    run.give_back(run.claim(KEY))
    assert not run.path.exists()


def test_folders_that_are_closed_or_cannot_be_made_are_refused_and_nothing_is_left_in_them(pages):
    said = []
    with powerless_folder() as home:
        run = RunFolder(home)
        run.create()
        (home / "file").touch()
        refused = {
            "a claim": lambda: run.claim(KEY), "is it there": lambda: is_there(run.tasks / "x"),
            "below a file": RunFolder(home / "file" / "july").create, "none": lambda: folder("no-such-folder"),
            "for a task": lambda: LocalFolder.create(home / "gone", "live-"),
        }  # fmt: skip
        for mode in (0, 0o300, 0o400, 0o500):
            run.tasks.chmod(mode)
            for name, use in refused.items() if mode == 0 else [*refused.items()][: 2 - bool(mode & 0o100)]:
                with pytest.raises(BadcjobsError) as caught:
                    use()
                words = str(caught.value).replace(str(home), "HOME").replace(str(folder("guide").parent), "PACKAGE")
                said.append(f"{name} ({mode:o}): {caught.value.exit_code} {words}")
        run.tasks.chmod(0o700)
        assert (names_in(run.tasks), is_there(home / "file"), is_there(home / "x")) == ([], True, False)
    pages({"refusals.txt": "\n".join(said)})


def test_work_done_earlier_is_looked_for_in_every_database_but_those_of_siblings_and_merged_ones(run):
    asked = ["4700_3.r0.gpu1.sqlite", "4821_7.r0.gpu1.sqlite", "4821_7.r0.gpu1.p1.sqlite", "4821_7.r1.gpu2.sqlite",
             "4821_7.r0.rack_8.r0.gpu3.sqlite", "copied-by-hand.sqlite", "local18-42_0.r0.login1.sqlite"]  # fmt: skip
    for name in (*asked, "4821_71.r0.gpu1.sqlite", "4821_6.r3.gpu1.p1.sqlite", "4821_8.r0.rack_7.r0.gpu3.sqlite",
                 ".4700_0.r0.gpu1.sqlite", ".4700_0.r0.gpu1.sqlite.9.tmp", "4700_0.r0.gpu1.log",
                 "4700_4.r0.gpu1.sqlite"):  # fmt: skip
        (run.tasks / name).touch()
    os.mkfifo(run.tasks / "4700_2.r0.gpu1.sqlite")  # no one ever comes to the end of that
    found = run.earlier_databases(KEY, {"4700_4.r0.gpu1.sqlite"})
    assert [path.name for path in found] == sorted(asked)


def test_every_task_has_a_local_folder_of_its_own_and_the_cache_is_that_of_the_user(tmp_path):
    one, other = LocalFolder.create(tmp_path, "live-"), LocalFolder.create(tmp_path, "live-")
    assert one.path != other.path
    one.scratch.mkdir()
    one.wrapper_file.touch()
    version = file_version(one.wrapper_file)
    assert version == file_version(one.wrapper_file)
    one.wrapper_file.write_text("x")
    assert version != file_version(one.wrapper_file)
    one.remove()
    one.remove()
    assert (names_in(tmp_path), file_version(one.wrapper_file)) == ([other.path.name], None)
    places = [{"XDG_CACHE_HOME": "/c", "HOME": "/h"}, {"HOME": "/h"}, {"XDG_CACHE_HOME": "", "HOME": ""}, {}]
    assert [str(user_cache(one)) for one in places] == ["/c/badcjobs", "/h/.cache/badcjobs", "None", "None"]


def test_a_checkout_has_its_folders_where_users_look_for_them():
    assert (folder("templates"), folder("slurm")) == (ROOT / "templates", ROOT / "slurm")
    assert (folder("templates") / "array.sbatch").read_text().startswith("#!/bin/bash")
    assert {path.stem for path in folder("guide").glob("*.md")} >= {"start", "slurm", "settings", "tables"}


def test_an_installed_wheel_is_a_program_with_its_folders_inside_the_package(tmp_path):
    """Installed with no network, from a copy, so that building leaves nothing in the checkout."""
    absent = [name for name in ("pip", "hatchling") if importlib.util.find_spec(name) is None]
    if absent:
        missing("wheel", f"cannot build a wheel without {', '.join(absent)}")
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    names = ["badcjobs", "templates", "slurm", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *names, source], cwd=ROOT, check=True)
    install = [sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*install, "--target", site, source], check=True)
    shipped = site / "badcjobs" / "_shipped"
    for name in ("templates", "slurm"):
        mine, theirs = (sorted(path.name for path in (home / name).rglob("*")) for home in (ROOT, shipped))
        assert mine == theirs
    assert (site / "badcjobs" / "py.typed").exists()
    assert not (site / "badcjobs" / "guide" / "pictures").exists()  # the README shows them, no command does

    def ask(*words):
        program = [sys.executable, site / "bin" / "badcjobs", *words]
        return subprocess.check_output(program, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, text=True)

    assert ask("--version").startswith("badcjobs ")
    page = read_topic("slurm").replace(str(ROOT / "templates"), str(shipped / "templates"))
    assert ask("guide", "slurm") == f"{page}\n"


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))), max_size=3))
def test_a_line_to_paste_is_one_line_with_the_same_words_and_a_path_is_no_option(words):
    words += ["two words", 'it\'s "quoted"', "new\nline\t\\", os.fsdecode(b"not-utf8-\xff"), "$HOME `x`", "*"]
    line = shell_line("printf", "%s\\0", *words, Path("-dash"), Path("/a\nb"))
    assert line.isprintable()
    said = subprocess.run(["bash", "-c", line], capture_output=True, check=True).stdout
    assert said.split(b"\0")[:-1] == [os.fsencode(word) for word in (*words, "./-dash", "/a\nb")]
