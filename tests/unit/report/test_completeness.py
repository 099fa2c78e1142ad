"""The proof that a job is complete: every row of the source against the job database, and the commands for the rest."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.devices import find_place
from rooms.model import Allocation, ArrayOrder, ArrayShape, Submitted
from rooms.report import Summary, find_shares, finish_job, index_ranges, indices, page, summarize_database, summary_text
from rooms.root import FrozenRun, RunSettings, SystemClock
from rooms.sources import Shard
from rooms.store import Completeness, MergeOrder, Record, TaskFacts, asked_of, write_record
from support.task_files import START_MS, TaskFile

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms\n"
TASK = TaskFacts("4821_0.r0.gpu1", "4821", 0, 0, "gpu1", 4, "done", 0, 1, 1, START_MS, START_MS + 9, 3, 0, 0, 9.0)


def names(rows: int, prefix: str = "c") -> list[str]:
    return [f"{prefix}{row:04d}" for row in range(rows)]


def write_manifest(path: Path, chunks: Sequence[str]) -> Path:
    """Write a manifest of one recording; nobody needs its audio to count its rows."""
    path.write_text(HEADER + "".join(f"rec,{chunk},{chunk}.wav,0,30000\n" for chunk in chunks))
    return path


@dataclass
class Run:
    """A run folder: run.toml and task databases, as a run leaves them."""

    folder: Path
    source: Path
    shape: ArrayShape | None = None

    def freeze(self) -> None:
        self.folder.mkdir(exist_ok=True)
        wanted = RunSettings(self.folder, source=(str(self.source),), engine="demo")
        (self.folder / "run.toml").write_text(FrozenRun.of(wanted, self.shape, self.folder).to_toml("0.1.0"))

    def task(self, index: int, states: Mapping[str, str], job_id: str = "4821") -> None:
        TaskFile(self.folder, index=index, states=states, job_id=job_id, samples=1).write()

    def summary(self) -> Summary:
        return finish_job(MergeOrder([self.folder], self.folder / "job.sqlite"), SystemClock()).summary

    def proof(self) -> Completeness:
        proof = self.summary().completeness
        assert proof is not None
        return proof


def array_run(tmp_path: Path, rows: int = 8, tasks: int = 4, *, without: Sequence[int] = (), **states: str) -> Run:
    """Return a run whose tasks have done their share, but for the chunks with another state."""
    chunks = names(rows)
    run = Run(tmp_path / "run", write_manifest(tmp_path / "m.csv", chunks), ArrayShape(0, 1, tasks))
    run.freeze()
    for index in range(tasks):
        if index not in without:
            run.task(index, {chunk: states.get(chunk, "done") for chunk in chunks[index::tasks]})
    return run


def alone(tmp_path: Path, states: Mapping[str, str], source: Path) -> Run:
    """Return a run outside Slurm."""
    run = Run(tmp_path / "run", source)
    run.freeze()
    run.task(0, states, job_id="local1-1")
    return run


def counts(proof: Completeness) -> tuple[int | None, ...]:
    return (
        proof.expected, proof.listed, proof.done, proof.failed, proof.poison, proof.pending, proof.elsewhere,
        proof.not_listed, proof.strangers,
    )  # fmt: skip


# --- a source that is as it was ---------------------------------------------------------------------------------------


def elsewhere(tmp_path: Path, *inputs: Path) -> Completeness:
    """Merge into a job database that lies beside no run; return what report says of it then."""
    target = tmp_path / "other" / "job.sqlite"
    target.parent.mkdir(exist_ok=True)
    merged = finish_job(MergeOrder(list(inputs), target), SystemClock()).summary.completeness
    told = summarize_database(target).completeness
    assert told is not None
    assert told == merged
    return told


def test_a_job_with_every_row_done_is_complete_and_needs_no_command(tmp_path: Path) -> None:
    summary = array_run(tmp_path).summary()
    proof = summary.completeness
    assert proof is not None
    assert proof.complete
    assert counts(proof) == (8, 8, 8, 0, 0, 0, 0, 0, 0)
    assert (proof.finish, proof.missing_indices, proof.why_unknown, summary.verdict) == ((), (), None, "done")
    assert "complete    yes: 8 of 8 rows of the source done" in summary_text(summary, "july")


def test_the_rows_of_a_task_that_never_ran_are_expected_and_its_index_is_in_the_command(tmp_path: Path) -> None:
    run = array_run(tmp_path, rows=10, without=[2])
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert not proof.complete
    assert counts(proof) == (10, 8, 8, 0, 0, 0, 0, 2, 0)
    assert (proof.missing_indices, summary.tasks_missing, summary.verdict) == ((2,), (2,), "stopped")
    here = f"badcjobs run {run.source} --out={run.folder} --engine=demo"
    assert proof.finish == ("sbatch --array=2 …", here)
    text = " ".join(summary_text(summary, "july").split())
    assert "no: 8 of 10 rows of the source done; 2 rows of array index 2 not started" in text


def test_every_state_is_counted_and_only_work_left_asks_for_its_array_index(tmp_path: Path) -> None:
    run = array_run(tmp_path, rows=12, c0001="pending", c0002="failed", c0006="poison", c0007="pending")
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert counts(proof) == (12, 12, 8, 1, 1, 2, 0, 0, 0)
    assert proof.finish[0] == "sbatch --array=1,3 …"
    assert summary.verdict == "stopped"
    text = summary_text(summary, "july")
    assert "complete    no: 8 of 12 rows of the source done, 1 failed, 1 poison, 2 pending" in text
    assert "this tries failed and poison rows again" in text


def test_failed_rows_alone_ask_for_their_own_array_indices(tmp_path: Path) -> None:
    summary = array_run(tmp_path, c0002="failed", c0003="poison").summary()
    proof = summary.completeness
    assert proof is not None
    assert (summary.verdict, proof.complete, proof.finish[0]) == ("failed", False, "sbatch --array=2,3 …")


def test_an_index_that_has_no_rows_is_not_missed(tmp_path: Path) -> None:
    proof = array_run(tmp_path, rows=3, tasks=6, without=[3, 4, 5]).proof()
    assert (proof.complete, proof.missing_indices, proof.finish) == (True, (), ())


def test_what_is_left_of_a_run_outside_an_array_is_told_by_its_rows_not_by_its_task(tmp_path: Path) -> None:
    run = array_run(tmp_path, rows=8, c0001="pending")
    run.task(0, {"c0000": "skipped", "c0001": "failed", "c0002": "skipped"}, job_id="local1-1")
    proof = run.proof()
    assert (proof.done, proof.failed, proof.finish[0]) == (7, 1, "sbatch --array=1 …")


def test_an_index_whose_rows_were_done_outside_the_array_is_not_missed(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=[2])
    run.task(0, {"c0002": "done", "c0006": "done"}, job_id="local1-1")
    summary = run.summary()
    assert summary.completeness is not None
    assert (summary.completeness.complete, summary.tasks_missing, summary.verdict) == (True, (), "done")


def test_rows_done_in_a_file_that_is_not_here_are_work_left(tmp_path: Path) -> None:
    proof = array_run(tmp_path, c0003="skipped").proof()
    assert (proof.elsewhere, proof.complete, proof.finish[0]) == (1, False, "sbatch --array=3 …")


def test_a_task_that_listed_only_part_of_its_share_has_work_left(tmp_path: Path) -> None:
    run = array_run(tmp_path, rows=12, without=[1])
    run.task(1, {"c0001": "done"})
    proof = run.proof()
    assert (proof.not_listed, proof.not_listed_examples) == (2, ("rec c0005", "rec c0009"))
    assert (proof.missing_indices, proof.finish[0]) == ((), "sbatch --array=1 …")


# --- a source that has changed ----------------------------------------------------------------------------------------


def test_rows_added_to_the_source_later_are_named_and_make_the_job_unfinished(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    write_manifest(run.source, names(8) + names(10, "new"))
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert counts(proof) == (18, 8, 8, 0, 0, 0, 0, 10, 0)
    assert proof.not_listed_examples == tuple(f"rec new{i:04d}" for i in range(5))
    assert (summary.verdict, proof.finish[0]) == ("stopped", "sbatch --array=0-3 …")
    text = summary_text(summary, "july")
    assert "10 rows in no task" in text
    assert "  in no task: rec new0000\n" in text
    assert "  … and 5 more\n" in text


def test_renamed_rows_are_found_although_their_number_is_the_same(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    write_manifest(run.source, [*names(6), "x1", "x2"])
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert counts(proof) == (8, 8, 6, 0, 0, 0, 0, 2, 2)
    assert (proof.not_listed_examples, proof.strangers_examples) == (("rec x1", "rec x2"), ("rec c0006", "rec c0007"))
    assert summary.verdict == "stopped"
    assert "  not in the source: rec c0006\n" in summary_text(summary, "july")


def test_rows_taken_out_of_the_source_do_not_keep_a_job_from_being_complete(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    write_manifest(run.source, names(5))
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert (proof.complete, proof.expected, proof.strangers, proof.finish) == (True, 5, 3, ())
    assert summary.verdict == "done"
    assert "5 of 5 rows of the source done; 3 rows in the job but not in the source" in summary_text(summary, "a")


def test_a_row_that_the_source_repeats_counts_once(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    write_manifest(run.source, [*names(8), "c0003"])
    proof = run.proof()
    assert (proof.expected, proof.complete) == (8, True)


STATES = ("done", "failed", "poison", "pending", "skipped")


@settings(deadline=None, max_examples=12)
@given(
    st.lists(st.sampled_from((*STATES, None)), min_size=1, max_size=12),
    st.lists(st.sampled_from(STATES), max_size=3),
)
def test_the_numbers_always_add_up(rows: list[str | None], strangers: list[str]) -> None:
    """None is a row of the source that no task has."""
    with tempfile.TemporaryDirectory() as folder:
        chunks = dict(zip(names(len(rows)), rows, strict=True))
        listed = {name: state for name, state in chunks.items() if state}
        source = write_manifest(Path(folder) / "m.csv", list(chunks))
        proof = alone(Path(folder), listed | dict(zip(names(3, "s"), strangers, strict=False)), source).proof()
    states = (proof.done, proof.failed, proof.poison, proof.pending, proof.elsewhere)
    assert states == tuple(rows.count(state) for state in STATES)
    assert (proof.not_listed, proof.strangers) == (rows.count(None), len(strangers))
    assert proof.expected == len(rows)
    assert proof.complete == (rows.count("done") == len(rows))
    assert bool(proof.finish) != proof.complete


# --- a source that cannot be read -------------------------------------------------------------------------------------


def test_a_source_that_is_gone_is_a_remark_and_the_rest_is_told_as_before(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=[2], c0001="pending")
    run.source.unlink()
    summary = run.summary()
    proof = summary.completeness
    assert proof is not None
    assert proof.why_unknown == f"{run.source} does not exist"
    assert counts(proof) == (None, 6, 5, 0, 0, 1, 0, None, None)
    assert (proof.complete, proof.missing_indices, summary.verdict) == (False, (2,), "stopped")
    assert proof.finish[0] == "sbatch --array=1,2 …"
    assert "complete unknown: " in " ".join(summary_text(summary, "july").split())


def test_without_the_source_nobody_can_say_which_index_a_row_left_outside_the_array_belongs_to(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    run.task(0, {"x0001": "pending"}, job_id="local1-1")
    run.source.unlink()
    assert [command.split()[0] for command in run.proof().finish] == ["badcjobs"]


def test_a_finished_job_whose_source_is_gone_stays_done_without_a_command(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    run.source.unlink()
    summary = run.summary()
    assert summary.completeness is not None
    assert (summary.verdict, summary.completeness.finish, summary.completeness.complete) == ("done", (), False)


def test_a_source_that_no_task_would_take_is_a_remark_with_its_first_mistake(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    with run.source.open("a") as file:
        file.write("rec,cut")
    proof = run.proof()
    assert proof.expected is None
    assert proof.why_unknown == f"{run.source} has 1 mistake: line 10: 2 fields where the header has 5"


def test_without_run_toml_nothing_is_expected(tmp_path: Path) -> None:
    run = array_run(tmp_path, c0001="pending")
    (run.folder / "run.toml").unlink()
    proof = run.proof()
    assert (proof.expected, proof.why_unknown) == (None, "no run.toml beside the job database")
    assert (proof.pending, proof.finish) == (1, ())


def test_a_job_database_that_lies_elsewhere_is_compared_with_the_run_of_its_task_files(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=[2], c0001="pending")
    proof = elsewhere(tmp_path, run.folder)
    assert counts(proof) == (8, 6, 5, 0, 0, 1, 0, 2, 0)
    here = f"badcjobs run {run.source} --out={run.folder} --engine=demo"
    assert (proof.why_unknown, proof.finish) == (None, ("sbatch --array=1,2 …", here))


def test_a_job_database_above_the_run_folder_finds_it_by_relative_paths(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    assert finish_job(MergeOrder([run.folder], tmp_path / "all.sqlite"), SystemClock()).summary.facts.file_remarks == ()
    proof = summarize_database(tmp_path / "all.sqlite").completeness
    assert proof is not None
    assert (proof.expected, proof.complete) == (8, True)


def test_a_run_that_was_given_by_two_paths_is_one_run(tmp_path: Path) -> None:
    run = array_run(tmp_path)
    (tmp_path / "link").symlink_to(run.folder)
    halves = sorted((run.folder / "tasks").iterdir())
    assert elsewhere(tmp_path, *halves[:2], *(tmp_path / "link" / "tasks" / path.name for path in halves[2:])).complete


def test_waves_that_are_merged_together_are_proved_by_the_sources_of_all_of_them(tmp_path: Path) -> None:
    waves = []
    for name in ("p", "q"):
        source = write_manifest(tmp_path / f"{name}.csv", names(4, name))
        waves.append(Run(tmp_path / f"wave-{name}", source, ArrayShape(0, 1, 2)))
        waves[-1].freeze()
        waves[-1].task(0, dict.fromkeys(names(4, name)[::2], "done"), job_id=f"48{len(waves)}")
    folders = [wave.folder for wave in waves]
    for wave, name in zip(waves, ("p", "q"), strict=True):
        proof = elsewhere(tmp_path, *folders)
        assert not proof.complete
        assert proof.not_listed_examples[0] == f"rec {names(4, name)[1]}"
        wave.task(1, dict.fromkeys(names(4, name)[1::2], "done"), job_id=wave.folder.name)
    proof = elsewhere(tmp_path, *folders)
    assert counts(proof) == (8, 8, 8, 0, 0, 0, 0, 0, 0)
    assert (proof.complete, proof.why_unknown, proof.finish) == (True, None, ())
    (folders[1] / "run.toml").unlink()
    assert "from several runs, and not all of them have one" in (elsewhere(tmp_path, *folders).why_unknown or "")


@pytest.mark.parametrize("text", ["[run", "run = 3", "[run]\nengine = 'demo'", "[run]\nsource = 'm.csv'"])
def test_a_run_toml_that_cannot_be_used_is_a_remark(tmp_path: Path, text: str) -> None:
    run = array_run(tmp_path, c0001="pending")
    (run.folder / "run.toml").write_text(text)
    proof = run.proof()
    assert proof.expected is None
    assert "run.toml" in (proof.why_unknown or "")
    assert proof.finish == ()


def test_the_comparison_needs_no_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = array_run(tmp_path)
    run.summary()
    write_manifest(run.source, names(9))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    proof = summarize_database(run.folder / "job.sqlite").completeness
    assert proof is not None
    assert proof.expected == 9


# --- kinds of sources and shares --------------------------------------------------------------------------------------


def test_each_line_of_a_list_of_manifests_belongs_to_its_array_index(tmp_path: Path) -> None:
    listed = [write_manifest(tmp_path / f"{name}.csv", names(3, name)) for name in ("dawn", "noon", "dusk")]
    source = tmp_path / "manifests.txt"
    source.write_text("".join(f"{path}\n" for path in listed))
    run = Run(tmp_path / "run", source, ArrayShape(1, 1, 3))
    run.freeze()
    run.task(1, dict.fromkeys(names(3, "dawn"), "done"))
    run.task(3, {**dict.fromkeys(names(3, "dusk"), "done"), "dusk0001": "pending"})
    proof = run.proof()
    assert counts(proof) == (9, 6, 5, 0, 0, 1, 0, 3, 0)
    assert (proof.missing_indices, proof.finish[0]) == ((2,), "sbatch --array=2,3 …")


def test_a_manifest_that_no_array_task_would_take_is_left_to_the_command_without_slurm(tmp_path: Path) -> None:
    listed = [write_manifest(tmp_path / f"{name}.csv", names(2, name)) for name in ("dawn", "noon")]
    source = tmp_path / "manifests.txt"
    source.write_text("".join(f"{path}\n" for path in listed))
    run = Run(tmp_path / "run", source, ArrayShape(0, 1, 1))
    run.freeze()
    run.task(0, dict.fromkeys(names(2, "dawn"), "done"))
    proof = run.proof()
    assert (proof.not_listed, proof.not_listed_examples) == (2, ("rec noon0000", "rec noon0001"))
    assert [command.split()[0] for command in proof.finish] == ["badcjobs"]


def test_the_audio_of_a_folder_and_of_a_list_is_counted_without_opening_it(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    audio.mkdir()
    for name in ("a.wav", "b.flac", "b.wav", "notes.txt"):
        (audio / name).touch()
    listed = tmp_path / "list.txt"
    listed.write_text("# gone since\na.wav\nb.flac\n\nb.wav\n")
    for number, source in enumerate((audio, listed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        proof = alone(folder, {"c": "done"}, source).proof()
        assert counts(proof) == (3, 1, 0, 0, 0, 0, 0, 3, 1)
        assert proof.not_listed_examples == ("a", "b.flac", "b.wav")


@settings(deadline=None)
@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3))
def test_rows_are_shared_out_as_the_tasks_themselves_take_them(first: int, step: int, count: int, tasks: int) -> None:
    shape = ArrayShape(first, step, count)
    taken: dict[int, int] = {}
    for index in range(first, first + count * step, step):
        for procid in range(tasks):
            allocation = Allocation(True, "4821", "gpu1", array_index=index, step_tasks=tasks, procid=procid)
            place = find_place(allocation, shape)
            taken |= {row: index for row in range(60) if Shard(place.index, place.count).takes(row)}
    index_of = find_shares([replace(TASK, shard_count=count * tasks)], shape, by_manifest=False)
    assert index_of is not None
    assert {row: index_of(row, 0) for row in range(60)} == taken


def test_tasks_that_cut_the_source_in_different_ways_share_nothing_out() -> None:
    tasks = [replace(TASK, shard_count=4), replace(TASK, shard_count=8)]
    assert find_shares(tasks, ArrayShape(0, 1, 4), by_manifest=False) is None


def test_progress_is_told_while_rows_are_read(tmp_path: Path) -> None:
    run = alone(tmp_path, dict.fromkeys(names(2), "done"), write_manifest(tmp_path / "m.csv", names(2)))
    run.summary()
    write_manifest(run.source, names(20_001))
    told: list[int] = []
    summarize_database(run.folder / "job.sqlite", told.append)
    assert told == [10_000, 20_000]


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "step", "text"),
    [
        ([], 1, ""),
        ([3], 1, "3"),
        ([7, 3], 1, "3,7"),
        ([3, 4], 1, "3,4"),
        ([3, 7, 8, 9], 1, "3,7-9"),
        ([0, 1, 2, 5, 7, 8, 9], 1, "0-2,5,7-9"),
        ([1, 3, 5, 9], 2, "1-5:2,9"),
        ([1, 3, 5], 1, "1,3,5"),
    ],
)
def test_array_indices_are_written_as_short_as_sbatch_takes_them(values: list[int], step: int, text: str) -> None:
    assert index_ranges(values, step) == text


def test_people_see_the_first_few_ranges() -> None:
    assert indices(range(1000)) == "0-999"
    assert indices(range(0, 30, 2)) == "0,2,4,6,8,10,12,14,16,18,… (15 in total)"


def test_the_command_line_holds_every_setting_that_is_not_a_default_and_nothing_of_one_task() -> None:
    frozen = FrozenRun(
        {
            "source": ("/data/a b.csv", "/data/it's.csv"), "root": "/data/x y", "engine": "command", "interval": 0.5,
            "engine_arg": ("--region=CA NT", "-v"), "command": "prog {input} '{output}'", "retries": 2,
        },
        None,
    )  # fmt: skip
    of_one_task = {"shard": "1/4", "resume": False, "retry_failed": False, "stop_after": "1:00:00"}
    also = {**of_one_task, "cpu_workers": 2, "emit_gpu_telemetry": False, "interval": 9.0, "old": 1}
    assert shlex.split(frozen.command_line(Path("/out/my run"), also)) == [
        "badcjobs", "run", "/data/a b.csv", "/data/it's.csv", "--out=/out/my run", "--engine=command",
        "--engine-arg=--region=CA NT", "--engine-arg=-v", "--command=prog {input} '{output}'", "--root=/data/x y",
        "--cpu-workers=2", "--interval=0.5", "--no-emit-gpu-telemetry",
    ]  # fmt: skip


@pytest.mark.parametrize("source", [tuple(f"/data/{i:060d}.wav" for i in range(100)), ("/data/two\nlines.csv",)])
def test_what_nobody_could_paste_stays_in_run_toml(source: tuple[str, ...]) -> None:
    line = FrozenRun({"source": source, "engine": "demo"}, None).command_line(
        Path("/out"), {"simulate": 2, "engine": "no"}
    )
    assert line == "badcjobs run --config=/out/run.toml --out=/out --simulate=2"


def long_run(tmp_path: Path) -> Run:
    source = tmp_path / ("a rather long name with <b>spaces</b> " * 3) / "manifests of the whole season" / "m.csv"
    source = Path(str(source).replace("</b>", "<b>"))
    source.parent.mkdir(parents=True)
    return alone(tmp_path, {"c0000": "pending"}, write_manifest(source, names(1)))


def test_a_long_command_is_never_cut(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    text = summary_text(run.summary(), "july")
    pasted = text[text.index("    badcjobs run") :]
    shell = f'badcjobs() {{ printf "%s\\n" "$@"; }}\n{pasted}\n'
    given = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert given == ["run", str(run.source), f"--out={run.folder}", "--engine=demo"]


def test_the_page_shows_the_commands_and_the_rows_that_do_not_match_escaped(tmp_path: Path) -> None:
    run = long_run(tmp_path)
    write_manifest(run.source, ["<i>new</i>", "c0000"])
    html = page(run.summary(), "july")
    assert "<pre>badcjobs run " in html
    assert "no: 0 of 2 rows of the source done, 1 pending; 1 row in no task" in html
    assert "rec &lt;i&gt;new&lt;/i&gt;" in html
    assert "<b>" not in html
    assert "<i>" not in html


def test_the_json_document_says_whether_the_job_is_complete(tmp_path: Path) -> None:
    document = array_run(tmp_path, without=[2]).summary().to_dict()["completeness"]
    assert isinstance(document, dict)
    assert (document["complete"], document["expected"], document["missing_indices"]) == (False, 8, (2,))


# --- who ran it, and what really finishes it --------------------------------------------------------------------------


def record(run: Run, job_id: str, asked: dict[str, object] | None) -> None:
    """Leave what submit leaves of a job of Slurm."""
    told = ("run", str(run.source), f"--out={run.folder}", "--engine=demo")
    write_record(run.folder, Record("slurm", Submitted(job_id, None, (0, 1, 2, 3)), told, 8, START_MS, asked))


def asked(run: Run) -> dict[str, object]:
    return asked_of(ArrayOrder(run.folder, ("run",), tasks=4, cpus=2, mem="4G", account="st-pi-1"))


def test_a_submitted_job_is_finished_by_submit_and_names_the_logs_of_who_said_nothing(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=(1, 3))
    record(run, "4821", asked(run))
    log = run.folder / "logs" / "4821_3_0_log.out"  # the other one has not begun, and has none
    log.parent.mkdir()
    log.touch()
    proof = run.proof()
    submitted, here = proof.finish
    assert shlex.split(submitted) == [
        "badcjobs", "submit", str(run.source), f"--out={run.folder}", "--cluster=slurm", "--sbatch=--array=0-3",
        "--account=st-pi-1", "--again", "--", "--engine=demo",
    ]  # fmt: skip
    assert here.startswith("badcjobs run ")
    assert proof.left_indices == proof.missing_indices == (1, 3)
    assert (proof.missing_logs, proof.missing_notes) == ((str(log),), ())


def test_of_an_emulation_that_was_stopped_its_own_words_are_told_and_no_log_that_is_not_there(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=(1, 2, 3))
    notes = {0: "exit code 75", 1: "exit code 1 after 0 s", 2: "never started: the emulation was stopped", 3: None}
    states = {0: "CANCELLED", 1: "FAILED", 2: "CANCELLED", 3: "PENDING"}
    logs = {index: str(run.folder / "logs" / f"4821_{index}.out") for index in notes}
    rows = [{"index": n, "state": states[n], "log": logs[n], "note": notes[n]} for n in notes]
    (run.folder / "logs").mkdir()
    (run.folder / "logs" / "4821.json").write_text(json.dumps({"tasks": rows}))
    Path(logs[1]).touch()
    summary = run.summary()
    assert summary.completeness is not None
    assert summary.completeness.missing_logs == (logs[1],)
    (finding,) = [finding for finding in summary.findings if finding.kind == "tasks_missing"]
    assert finding.evidence[:3] == (
        "array index 1: exit code 1 after 0 s",
        "array index 2: never started: the emulation was stopped",
        "array index 3: never started: the emulation was killed",
    )
    assert "Slurm" not in finding.advice
    Path(logs[1]).unlink()
    assert "logs/" not in summary_text(run.summary(), "run").partition("to finish it")[0]


@pytest.mark.parametrize("job_id", ["4000", "4821"])
def test_a_job_that_was_not_submitted_so_or_by_an_earlier_version_is_finished_by_its_script(
    tmp_path: Path, job_id: str
) -> None:
    run = array_run(tmp_path, without=(1, 3))
    record(run, job_id, asked(run) if job_id == "4000" else None)
    assert run.proof().finish[0] == "sbatch --array=1,3 …"


def test_a_record_that_somebody_has_edited_is_left_alone(tmp_path: Path) -> None:
    run = array_run(tmp_path, without=(2,))
    (run.folder / "submitted.json").write_text("{")
    proof = run.proof()
    assert (proof.finish[0], proof.missing_logs) == ("sbatch --array=2 …", ())


def test_a_run_without_an_array_has_no_indices_left(tmp_path: Path) -> None:
    chunks = names(4)
    run = alone(tmp_path, dict.fromkeys(chunks, "pending"), write_manifest(tmp_path / "m.csv", chunks))
    assert (run.proof().left_indices, len(run.proof().finish)) == ((), 1)
