"""A job from its files: what is new since the merge, which file a path means, is it complete, where its page is.

Whether it is complete: every row of the source against the job database, and the commands that do the rest.
"""

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import MISSING, dataclass, fields, replace
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import report
from rooms.cli import files_text
from rooms.model import ArrayOrder, ArrayShape, Place, RecordingName, Submitted
from rooms.report import find_job_database, finish_job, summarize_database, write_whole
from rooms.root import BadcjobsError, BadInput, DatabaseProblem, FrozenRun, RunSettings
from rooms.store import Completeness, MergeOrder, Record, TaskFacts, asked_of, merge, read_job, write_record
from support.cases import read_data
from support.damage import garbage_page, page_with
from support.databases import change
from support.facts import calls
from support.filesystems import largest_file, powerless_folder
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

START_S, LATE_S = START_MS // 1000, START_MS // 1000 + 9 * 3600
CLOCK = HandClock()


def task(folder, index=0, state="pending", ended=False, **changes):
    ends = {} if ended else {"ended_at_ms": None}
    path = TaskFile(folder, index=index, states={f"{index}": state}, samples=1, **ends, **changes).write()
    os.utime(path, (START_S, START_S))
    return path


def merged(folder, target=None):
    target = target or folder / "job.sqlite"
    merge(MergeOrder([folder], target), CLOCK)
    os.utime(target, (START_S + 30,) * 2)
    return target


def test_what_has_happened_to_task_databases_since_the_merge_is_told(tmp_path, pages):
    said = []

    def tell(what, job, at_s=LATE_S):
        summary = summarize_database(job, now_ms=1000 * at_s)
        news, tasks = summary.merged, dict(summary.tasks_by_verdict)
        said.append(f"{what}: {tasks}, {news.changed} changed, {news.new} new, {news.gone} gone")
        said.extend([] if news.command is None else [f"  {news.command}".replace(str(tmp_path), "")])

    run = tmp_path / "run"
    files = [task(run, index) for index in (0, 1, 2)]
    job = merged(run)
    tell("merged", job)
    os.utime(files[0], (START_S + 60,) * 2)  # published again: what it says now, a merge would know
    tell("one is published again, a minute ago", job, START_S + 100)
    tell("one is published again, long ago", job)
    merged(run)
    tell("merged again", job)
    task(run, 0, "done", ended=True, restart=1)
    (run / "tasks" / "notes.sqlite").touch()
    tell("a new one", job)
    tell("a new one, and the job elsewhere", Path(shutil.copy(job, run / "elsewhere.sqlite")))
    other = tmp_path / "other"
    files = [task(other, 0), task(other, 1, "failed", ended=True), task(other, 2)]
    for file in files[1:]:
        os.utime(file, (LATE_S,) * 2)
    job = merged(other)
    copy = shutil.copytree(other, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (copy / "job.sqlite", *(copy / "tasks" / file.name for file in files)):
        os.utime(path, (LATE_S,) * 2)
    tell("a copy with new times", copy / "job.sqlite")
    with (copy / "tasks" / files[1].name).open("ab") as grown:
        grown.write(bytes(4096))
    tell("a copy that has grown", copy / "job.sqlite")
    (tmp_path / "laptop").mkdir()
    tell("a copy of the job alone", Path(shutil.copy(job, tmp_path / "laptop" / "job.sqlite")))
    pages({"news.txt": "\n".join(said)})


def test_a_folder_that_is_closed_to_us_is_neither_up_to_date_nor_missing():
    with powerless_folder() as folder:
        (folder / "m.csv").write_text("recording_id,chunk_id,source_path,start_ms,end_ms\n")
        (folder / "run.toml").write_text(f'[run]\nsource = ["{folder}/m.csv"]\n\n[array]\nfirst=0\nstep=1\ncount=2\n')
        file = task(folder, 0, "done", ended=True)
        job = merged(folder)
        before = summarize_database(job)
        file.parent.chmod(0)
        after = summarize_database(job)
        file.parent.chmod(0o700)
        (folder / "run.toml").chmod(0)
        unread = summarize_database(job).completeness
    assert unread.why_unknown == f"{folder}/run.toml cannot be read: it belongs to nobody"
    assert before.merged.closed is None and [finding.kind for finding in before.findings] == ["tasks_missing"]
    assert after.merged.closed == f"{file.parent} cannot be read: Permission denied"
    assert after.findings == ()


def answer(ask, folder):
    try:
        found = str(ask())
    except BadcjobsError as error:
        found = f"{error.what}\n    why: {error.why}\n    try: {error.fix}"
    return found.replace(str(folder), "")


def test_every_path_that_means_a_job_finds_it_and_others_are_answered(tmp_path, pages):
    for name in ("submitted", "begun"):
        (tmp_path / name / "tasks").mkdir(parents=True)
        job = Submitted("4821", None, (0, 1))
        write_record(tmp_path / name, Record("slurm", job, ("run", "m.csv"), 8, START_MS))
    (tmp_path / "empty").mkdir()
    (tmp_path / "neither" / "tasks").mkdir(parents=True)
    files = [task(tmp_path / name, 0, "done", ended=True) for name in ("begun", "merged")]
    merged(tmp_path / "merged")
    given = ["submitted", "submitted/tasks", "begun", "begun/tasks", "merged", "merged/tasks", "merged/job.sqlite",
             f"merged/tasks/{files[1].name}", "empty", "neither", "neither/tasks", "no/where"]  # fmt: skip
    said = [f"report {one}: {answer(lambda one=one: find_job_database(tmp_path / one), tmp_path)}" for one in given]
    for one in ("submitted", "submitted/tasks", "empty", "neither/tasks"):
        order = MergeOrder([tmp_path / one], tmp_path / "job.sqlite")
        said.append(f"merge {one}: {answer(lambda order=order: finish_job(order, CLOCK).database, tmp_path)}")
    for path in (tmp_path / "merged", tmp_path / "merged" / "tasks", *files, tmp_path / "x.sqlite"):
        said.append(f"default target of {path}: {report.default_target([path])}".replace(str(tmp_path), ""))
    garbled = {"run/job.sqlite": "a", "run/july.db": "b", "job.sqlite": "c"}
    for name, place in garbled.items():
        TaskFile(tmp_path / place / "run", states={"a-chunk-that-failed": "failed"}).write()
        job_path = merged(tmp_path / place / "run", tmp_path / place / name)
        garbage_page(job_path, page_with(job_path, b"a-chunk-that-failed: no luck"))
        said.append(f"read {name}: {answer(lambda path=job_path: read_job(path), tmp_path)}")
        with pytest.raises(DatabaseProblem), report.report_job(job_path, CLOCK):
            pass
    pages({"paths.txt": "\n".join(said)})


def test_a_damaged_task_database_is_reported_as_far_as_it_can_be_read(tmp_path):
    path = TaskFile(tmp_path, states={"a": "done"}).write()
    path.write_bytes(path.read_bytes().replace(b"LOUD sound", b"LOUE sound"))
    with report.report_job(path, CLOCK) as found:
        assert (found.lossy_files, found.summary.facts.chunks) == (1, {"pending": 1})
        assert [name for name, _ in found.summary.facts.file_remarks] == [path.name]


STATES = {"d": "done", "f": "failed", "x": "poison", "p": "pending", "s": "skipped"}


def manifest(path, rows, prefix="c"):
    """Write a manifest of one recording; no one needs its audio to count its rows."""
    chunks = [f"{prefix}{row}" for row in range(rows)] if isinstance(rows, int) else rows
    lines = [f"rec,{chunk},{chunk}.wav,0,30000\n" for chunk in chunks]
    path.write_text("recording_id,chunk_id,source_path,start_ms,end_ms\n" + "".join(lines))
    return path


@dataclass(frozen=True)
class Run:
    """A run folder: run.toml and task databases, merged; and what may become of it then."""

    folder: Path
    source: Path
    shape: ArrayShape | None = None

    def freeze(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        wanted = RunSettings(self.folder, source=(str(self.source),), engine="demo")
        (self.folder / "run.toml").write_text(FrozenRun.of(wanted, self.shape, self.folder).to_toml("0.1.0"))
        return self

    def task(self, key, letters, shards=None, prefix="c", job_id="4821"):
        """Write a task by its array index, or by the number of a job outside Slurm: a letter for the state of each row.

        A space is a row that the task does not have.
        """
        index, number = (key, job_id) if isinstance(key, int) else (0, key)
        chunks = {f"{prefix}{n}": STATES[letter] for n, letter in enumerate(letters) if letter != " "}
        shard = None if shards is None else (index, shards)
        verdict = "stopped" if "p" in letters else "done"
        facts = {"job_id": number, "samples": 0, "devices": 0, "shard": shard, "verdict": verdict}
        TaskFile(self.folder, index=index, states=chunks, **facts).write()
        return self

    def deal(self, letters, *without):
        """Write four tasks, each of which has every fourth row."""
        for index in {*range(4)} - {*without}:
            self.task(index, "".join(x if row % 4 == index else " " for row, x in enumerate(letters)))

    def merge(self, *others, target=None):
        target = target or self.folder / "job.sqlite"
        merge(MergeOrder([self.folder, *others], target, mix=bool(others)), CLOCK)
        return target

    def copy(self, folder):
        """Return a copy, to change something in; its source is its own."""
        shutil.copytree(self.folder, folder / "run")
        return Run(folder / "run", shutil.copy(self.source, folder / self.source.name), self.shape).freeze()

    def rows(self, names):
        manifest(self.source, names.split())

    def write(self, name, text):
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(text.replace("FOLDER", str(self.folder)))

    def remove(self, name):
        (self.folder / name).unlink()

    def record(self, job_id="4821", *, asked=True):
        """Leave what submit leaves of a job of Slurm."""
        words = ("run", str(self.source), f"--out={self.folder}", "--engine=demo")
        options = asked_of(ArrayOrder(self.folder, ("run",), tasks=4, cpus=2, mem="4G", account="st-pi-1"))
        submitted = Submitted(job_id, None, (0, 1, 2, 3))
        write_record(self.folder, Record("slurm", submitted, words, 8, START_MS, options if asked else None))


def reported(job, folder):
    """Return a proof as text: whatever is not as by default."""
    summary = summarize_database(job)
    proof = summary.completeness
    said = [f"{summary.verdict}, {'complete' if proof.complete else 'not complete'}"]
    for field in fields(proof):
        value = getattr(proof, field.name)
        if value and value != (None if field.default is MISSING else field.default):
            said += [f"  {field.name}: {one}" for one in (value if field.name == "finish" else [value])]
    text = re.sub(r"(run.toml cannot be read): .*", r"\1: …", "\n".join(said))  # the words are those of Python
    return text.replace(str(folder), "")


def test_a_job_is_compared_with_its_source_and_what_finishes_it_is_told(tmp_path, pages):
    """Runs of data/proofs.txt, most of an array of four tasks, of a source of eight rows; then each with a change."""
    listed = [manifest(tmp_path / f"{name}.csv", 3, name) for name in ("dawn", "noon", "dusk")]
    (tmp_path / "manifests.txt").write_text("".join(f"{path}\n" for path in listed))
    (tmp_path / "audio").mkdir()
    for name in ("a.wav", "b.flac", "b.wav", "notes.txt"):
        (tmp_path / "audio" / name).touch()
    made, said = dict[str, Run](), []
    for line in read_data("proofs.txt").splitlines():
        name, _, story = line.partition(": ")
        told_of, known, actions = tmp_path, made.get(name.partition(";")[0]), list(calls(story))
        place = tmp_path / (f"changed{len(said)}" if known else f"run of {name}")
        place.mkdir()
        if known is None:
            given = {word: args for word, args, _ in actions}
            source = tmp_path / given["source"][0] if "source" in given else manifest(place / "m.csv", 8)
            shape = given.get("array", (0, 1, 4))
            run = made[name] = Run(place / "run", source, ArrayShape(*shape) if shape else None).freeze()
        else:
            run = known.copy(place)
            told_of = place
        for word, args, values in actions:
            if word not in ("array", "source"):
                getattr(run, word)(*args, **values)
        job = run.folder / "job.sqlite" if known else run.merge()
        said.append(f"## {name}\n{reported(job, told_of)}")
    pages({"proofs.txt": "\n".join(said)})


def test_a_job_database_elsewhere_is_compared_with_the_runs_of_its_task_files(tmp_path, pages):
    def wave(name):
        source = manifest(tmp_path / f"{name}.csv", 4, name)
        run = Run(tmp_path / f"wave-{name}", source, ArrayShape(0, 1, 2)).freeze()
        return run.task(0, "d d", prefix=name, job_id=name)

    first, second = map(wave, "pq")
    (tmp_path / "link").symlink_to(first.folder)
    said = {"above it": reported(first.merge(target=tmp_path / "all.sqlite"), tmp_path)}
    first.task(1, " d d", prefix="p", job_id="p")
    one, other = sorted((first.folder / "tasks").iterdir())
    target = tmp_path / "two paths.sqlite"
    merge(MergeOrder([one, tmp_path / "link" / "tasks" / other.name], target), CLOCK)
    said["given by two paths"] = reported(target, tmp_path)
    (tmp_path / "both").mkdir()
    both = first.merge(second.folder, target=tmp_path / "both" / "job.sqlite")
    said["two waves"] = reported(both, tmp_path)
    second.task(1, " d d", prefix="q", job_id="q")
    said["two waves, done"] = reported(first.merge(second.folder, target=both), tmp_path)
    second.source.unlink()
    said["a source is gone"] = reported(both, tmp_path)
    (second.folder / "run.toml").unlink()
    said["one has no run.toml"] = reported(both, tmp_path)
    pages({"proofs.txt": "\n".join(f"## {name}\n{text}" for name, text in said.items())})


def test_recordings_left_out_are_named_and_neither_done_nor_missing(tmp_path, pages):
    dated, undated, nowhere = (RecordingName(place=place) for place in (
        Place(region="CA-AB", recorded_on="2023-06-01"), Place(51.4, -114.2), Place()))  # fmt: skip
    lost = RecordingName(left_out="no_place")
    run = Run(tmp_path / "run", tmp_path / "m.csv").freeze()
    rows = "".join(f"{name},{name},{name}.wav,0,30000\n" for name in "abcxyz")
    run.source.write_text(f"recording_id,chunk_id,source_path,start_ms,end_ms\n{rows}")
    said = []

    def tell(what, states, *names):
        chunks = {name: STATES[letter] for name, letter in zip("abcxyz", states, strict=False)}
        at = {"job_id": f"local{len(said) + 1}", "engine": "hawkears", "started_at_ms": START_MS + len(said)}
        TaskFile(run.folder, states=chunks, names=dict(zip("abcxyz", names, strict=False)), **at).write()
        job = run.merge()
        summary = summarize_database(job)
        lines = [f"  {name}: {line}" for name, line in report.headlines(summary) if name in ("source", "places")]
        notes = report.export(report.ExportOrder(job, "csv", tmp_path / "out.csv"), BytesIO())[1]
        said.append("\n".join([f"## {what}: {report.verdict_of(summary).outcome}", reported(job, tmp_path), *lines,
                               *(f"  note of the export: {note}" for note in notes)]))  # fmt: skip

    tell("one is in no task", "dddpp", dated, undated, nowhere, lost, lost)
    tell("nothing gives three a place", "sssppp", dated, undated, nowhere, lost, lost, lost)
    tell("two have one now", "sssdfp", dated, undated, nowhere, dated, dated, lost)
    tell("a shorter list", "ssspp", dated, undated, nowhere, lost, lost)
    pages({"job.txt": "\n".join(said)})


@settings(max_examples=8)
@given(st.text("dfxps ", min_size=1, max_size=12), st.text("dfxps", max_size=3))
def test_the_numbers_always_add_up(rows, strangers):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", manifest(Path(folder) / "m.csv", len(rows))).freeze()
        run.task("local1-1", rows)
        run.task("local1-2", strangers, prefix="s")
        proof = summarize_database(run.merge()).completeness
    counted = (proof.done, proof.failed, proof.poison, proof.pending, proof.elsewhere, proof.not_listed)
    assert counted == tuple(map(rows.count, "dfxps "))
    assert (proof.strangers, proof.expected) == (len(strangers), len(rows))
    assert proof.complete == (rows.count("d") == len(rows)) != bool(proof.finish)


def test_progress_is_told_no_temporary_folder_is_needed_and_a_long_command_is_never_cut(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", manifest(tmp_path / "m.csv", 2)).freeze()
    job = run.task("local1-1", "dd").merge()
    manifest(run.source, 20_001)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    heard = []
    summary = summarize_database(job, options=report.SummaryOptions(heard.append))
    assert heard == [10_000, 20_000]
    assert summary.completeness.expected == 20_001
    proof = Completeness(2, None, 1, 1, 0, 0, 0, 0, 1, finish=(shlex.join(["badcjobs", "run", "a b " * 60]),))
    assert report.summary_text(replace(summary, completeness=proof), "july").endswith(f"\n  {proof.finish[0]}")


def test_a_page_is_written_whole_or_not_at_all_and_merge_says_where_it_is(tmp_path):
    task(tmp_path / "run", 0, "done", ended=True)
    job = merged(tmp_path / "run")
    summary, web = summarize_database(job), tmp_path / "web"
    html = report.ReportedJob(job, "run", summary).to_html()
    web.mkdir()
    (web / "june.html").write_text("the page of yesterday")
    (tmp_path / "report.html").symlink_to("web/june.html")
    with largest_file(20_000), pytest.raises(BadInput, match="cannot be written"):
        write_whole(tmp_path / "report.html", html)
    assert [path.read_text() for path in web.iterdir()] == ["the page of yesterday"]
    write_whole(tmp_path / "report.html", html)
    assert (tmp_path / "report.html").is_symlink()
    assert (web / "june.html").read_text().startswith("<!doctype html>")
    assert "<title>june\\udcff" in report.page(summary, "june\udcff"), "a name that is not valid text"
    order, page_path = MergeOrder([tmp_path / "run"], job), tmp_path / "run" / "report.html"
    page_path.mkdir()
    assert files_text(finish_job(order, CLOCK)).endswith("\n  report      not written: Is a directory")
    page_path.rmdir()
    done = finish_job(order, CLOCK, remove_merged=True)
    assert f"\n  report      {page_path}" in files_text(done)
    assert done.to_dict()["files"] == {"read_now": 0, "by_status": {"merged": 1}}
    assert len(done.to_dict()["removed"]["removed"]) == 1 and not list((tmp_path / "run" / "tasks").iterdir())


def test_a_page_is_made_again_only_if_it_would_differ(tmp_path, monkeypatch):
    page_path = tmp_path / "run" / "report.html"
    path = task(tmp_path / "run", 0, "done", ended=False)
    order = MergeOrder([tmp_path / "run"], merged(tmp_path / "run"))

    def is_made_again():
        os.utime(page_path, (0, 0))
        finish_job(order, CLOCK)
        return page_path.stat().st_mtime > 0

    finish_job(order, CLOCK)
    whole = page_path.read_text()
    assert not is_made_again()
    page_path.write_text(whole[:-100])
    assert is_made_again(), "its end was lost"
    for statement in ("UPDATE task SET verdict = 'done'", "UPDATE chunk SET error = 'x'"):
        change(path, statement)
        assert is_made_again() and not is_made_again(), statement
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert is_made_again(), "without charts"


def test_what_record_wrote_as_text_is_reported_and_other_text_is_refused(tmp_path):
    head, rows = "at_ms,device_index,uuid,name,utilization_percent,power_w", []
    for second in range(200):
        rows += [f"{START_MS + 1000 * second},{n},GPU-{n},V100,{40 * n},{'' if n else 100.0}" for n in (0, 1)]
    documents = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    (tmp_path / "a.csv").write_text("\n".join([head, *rows, "17"]))
    (tmp_path / "a.jsonl").write_text("\n".join([*map(json.dumps, documents), '{"at_ms": 1']))
    for path in (tmp_path / "a.csv", tmp_path / "a.jsonl"):
        with report.report_job(path, CLOCK) as found:
            text, (first, second) = found.to_text(), found.to_dict()["devices"]
        assert text.startswith(f"{path.name}: recorded\n") and "6 min 38 s of GPU time in 3 min 19 s" in text
        assert text.endswith(f"\nnext: badcjobs report {path} --html report.html")
        assert (first["load"], second["load"], first["power_mean_w"], second["power_mean_w"]) == (
            "idle", "moderate", 100.0, None)  # fmt: skip
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DatabaseProblem, match="cannot be read"), report.report_job(tmp_path / "b.csv", CLOCK):
        pass


TEN_S = TaskFacts("a", "1", 0, last_sign_ms=10_000, done=2, pending=1)
FRESH = TaskFacts("b", "1", 1, last_sign_ms=10_000, pending=10)


def test_the_end_is_that_of_the_slowest_task_or_of_all_the_work():
    slow, early = replace(TEN_S, done=1, pending=9), replace(FRESH, last_sign_ms=0, heard_at_ms=1000)
    listed = replace(FRESH, pending=0, before=1)
    for running, left, before, end_ms in (
        ([TEN_S], 1, (), 15_000), ([TEN_S], 37, (), 195_000), ([TEN_S], 0, (), None), ([], 5, (1.0,), None),
        ([replace(TEN_S, pending=0)], 5, (), None), ([TEN_S, slow], 10, (), 100_000), ([TEN_S, FRESH], 11, (), 110_000),
        ([TEN_S, replace(FRESH, workers=2)], 11, (), 60_000), ([FRESH], 10, (), None), ([FRESH], 10, (0.05,), 210_000),
        ([FRESH], 10, (0.5, 0.1), 110_000), ([early], 10, (5.0,), 11_000),
        ([replace(early, heard_at_ms=0)], 10, (0.5,), 20_000),
        ([TEN_S, replace(FRESH, pending=0)], 20, (), 76_667), ([TEN_S, listed], 20, (), 110_000),
        ([TEN_S, replace(TEN_S, last_sign_ms=20_000)], 9, (), 50_000),
    ):  # fmt: skip
        ended = [TaskFacts("c", "1", 2, last_sign_ms=100_000, done=100 * pace, state="done") for pace in before]
        assert report.expected_end_ms([*running, *ended], left) == end_ms, (running, left, before)
