"""Sources read for a plan, and what is written of it: nothing lost, nothing twice, the same every time."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rooms.model import FITS, AudioHeader, Chunk, Probed, ProbeKey, ProbeResult, Trial
from rooms.planning import (
    SOURCE_REMARKS,
    Planned,
    PlanOrder,
    Speed,
    apply_rules,
    plan_sources,
    plan_text,
    read_sources,
    version_here,
)
from rooms.root import BadInput, DatabaseProblem, PlanSettings, Project, RunSettings, SubmitSettings, SystemClock
from rooms.sources import WHOLE, open_sources, read_header
from rooms.store import MergeOrder, merge
from rooms.workers import subject_of, to_toml
from support.audio import make_wav
from support.powerless import powerless_folder
from support.task_files import START_MS, TaskFile

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
SHA256 = "ab" * 32


def write_manifest(path: Path, *rows: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([HEADER, *rows, ""]))
    return path


def rows_of(many: int, folder: str = "audio") -> list[str]:
    return [
        f"r{n // 4},c{n},{folder}/r{n // 4}.wav,{n % 4 * 30_000},{n % 4 * 30_000 + 30_000},0,{SHA256},x"
        for n in range(many)
    ]


def plan(
    cwd: Path, *sources: Path | str, environ: Mapping[str, str] | None = None, rate: float | None = 400.0, **order: Any
) -> Planned:
    flags = {"source": [str(one) for one in sources], **order.pop("flags", {})}
    file = order.pop("config", None)
    project = Project() if file is None else Project.read([str(file)], cwd)
    return plan_sources(PlanOrder(flags=flags, project=project, rate=rate, **order), environ or {}, cwd)


def text_of(planned: Planned) -> str:
    return plan_text(planned)


def listed(folder: Path, wave: str) -> list[tuple[str, str, int, int | None]]:
    """Return what the tasks of a wave would do, as they read it."""
    (root,) = re.findall(r"^    --root=(.*)$", (folder / f"{wave}.sbatch").read_text(), re.M) or [None]
    sources = open_sources([folder / wave / "tasks.txt"], root=root and Path(root))
    return [(one.recording_id, one.chunk_id, one.start_ms, one.end_ms) for one in sources.chunks(WHOLE)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- reading ----------------------------------------------------------------------------------------------------------


def test_rows_that_say_their_end_are_planned_without_their_audio(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(40))
    planned = plan(tmp_path, manifest)
    assert planned.plan.audio_hours == pytest.approx(40 * 30 / 3600)
    (remark,) = planned.plan.remarks
    assert (remark.severity, remark.details) == ("note", ("audio/r0.wav",))
    assert "the first file of 1 folder is missing or cannot be used" in remark.text


def test_of_a_first_file_that_is_no_audio_or_may_not_be_looked_at_the_reason_is_told() -> None:
    with powerless_folder() as folder:
        make_wav("closed/a.wav", 3, 1000)
        Path("closed").chmod(0)
        Path("b/x").mkdir(parents=True)
        manifest = write_manifest(folder / "m.csv", "a,a,closed/a.wav,0,3000,0,,", "b,b,b/x,0,3000,0,,")
        (remark,) = plan(folder, manifest).plan.remarks
        assert remark.details == ("cannot access closed/a.wav: Permission denied", "a folder, not an audio file: b/x")


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_a_pipe_is_left_out_and_named(tmp_path: Path, kind: str) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 3, 1000)
    os.mkfifo(tmp_path / "audio" / "pipe.wav")  # whoever opens it waits for ever
    manifest = write_manifest(tmp_path / "m.csv", "a,a,audio/a.wav,,,0,,", "b,b,audio/pipe.wav,,,0,,")
    (problem,) = plan(tmp_path, "audio" if kind == "folder" else manifest).plan.remarks
    assert (problem.severity, problem.subject) == ("problem", "left out")
    below = "" if kind == "folder" else "audio/"
    assert problem.details[0].endswith(f"a pipe, a socket or a device, not an audio file: {below}pipe.wav")


def test_headers_tell_the_length_of_files_and_of_rows_without_an_end(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 4, 1000)
    make_wav(tmp_path / "audio" / "b.wav", 6, 1000)
    manifest = write_manifest(tmp_path / "m.csv", "a,a,audio/a.wav,1000,,0,,", "b,b,audio/b.wav,,,0,,")
    assert plan(tmp_path, tmp_path / "audio").plan.survey.lengths.total_ms == 10_000
    assert plan(tmp_path, manifest).plan.survey.lengths.total_ms == 9_000


def test_recordings_that_are_cut_are_planned_chunk_by_chunk(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 60, 100, tone_hz=10)
    planned = plan(
        tmp_path, "audio", flags={"chunk_length": 20.0, "overlap": 5.0}, out=Path("p"), submit=SubmitSettings(time="15")
    )
    survey = planned.plan.survey
    assert (survey.lengths.rows, survey.cut) == (4, 4)
    assert listed(tmp_path / "p", "wave-1") == [
        ("a", "a_0_20000", 0, 20_000), ("a", "a_15000_35000", 15_000, 35_000), ("a", "a_30000_50000", 30_000, 50_000),
        ("a", "a_45000_60000", 45_000, 60_000),
    ]  # fmt: skip
    script = (tmp_path / "p" / "wave-1.sbatch").read_text()
    assert "--chunk-length" not in script  # the rows say it
    assert f"--root={tmp_path}/audio/" in script


def test_what_cannot_be_measured_is_counted_named_and_planned(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    make_wav(audio / "good.wav", 4, 1000)
    make_wav(audio / "Zürich ♪.wav", 2, 1000)
    make_wav(audio / "empty.wav", 0, 1000)
    (audio / "cut short.wav").write_bytes(b"RIFF\0\0\0\0WAVEfmt ")
    (audio / "nothing.flac").write_bytes(b"")
    planned = plan(tmp_path, audio, out=Path("p"))
    survey = planned.plan.survey
    assert (survey.lengths.rows, survey.lengths.unknown, survey.empty, survey.mistakes.rows) == (5, 1, 2, 0)
    text = text_of(planned)
    assert "cut short.wav\n" in text
    assert "2 files without any audio" in text
    assert "empty.wav\n" in text
    assert "nothing.flac\n" in text
    assert "planned with the mean of the others, 3.0 s" in " ".join(text.split())
    assert [chunk_id for _, chunk_id, _, _ in listed(tmp_path / "p", "wave-1")] == [
        "Zürich ♪", "cut short", "empty", "good", "nothing",
    ]  # fmt: skip


def test_files_with_different_sample_rates_are_counted_by_rate(tmp_path: Path) -> None:
    for number, rate_hz in enumerate((1000, 2000, 2000)):
        make_wav(tmp_path / "audio" / f"{number}.wav", 8, rate_hz, tone_hz=100)
    survey = plan(tmp_path, "audio", flags={"chunk_length": 4.0}).plan.survey
    assert (survey.walk.measured, dict(survey.walk.rates_hz)) == (3, {1000: 1, 2000: 2})
    remarks = plan(tmp_path, "audio").plan.remarks
    assert ["1 file with 1,000 Hz, 2 files with 2,000 Hz" in one.text for one in remarks] == [True]


def test_a_project_file_that_cuts_is_used_and_the_shards_say_where_chunks_begin_and_end(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 60, 100, tone_hz=10)
    text = '[run]\nsource = ["audio"]\nchunk_length = 20\n[submit]\ntime = "15"\n'
    (tmp_path / "badcjobs.toml").write_text(text)
    planned = plan_sources(PlanOrder({}, Project.read([], tmp_path), rate=400.0, out=Path("p")), {}, tmp_path)
    assert planned.plan.survey.lengths.rows == 3
    assert [row[2:] for row in listed(tmp_path / "p", "wave-1")] == [(0, 20_000), (20_000, 40_000), (40_000, 60_000)]
    assert f"    --config={tmp_path}/badcjobs.toml" in (tmp_path / "p" / "wave-1.sbatch").read_text().splitlines()


def test_the_workers_that_a_config_names_are_those_of_the_script(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 1, 1000)
    (tmp_path / "w2.toml").write_text("[run]\nworkers_per_gpu = 2\n")
    written = plan(tmp_path, "audio", config=Path("w2.toml"), out=Path("plans")).written
    text = written[0][0].read_text(encoding="utf-8")
    assert text.rindex("--workers-per-gpu=2") > text.index("--workers-per-gpu auto")


def break_off(path: Path, there_s: float) -> None:
    make_wav(path, 8, 1000, tone_hz=100)
    os.truncate(path, 44 + round(there_s * 2000))


def test_of_files_that_break_off_what_is_there_is_planned_and_what_is_not_will_fail(tmp_path: Path) -> None:
    break_off(tmp_path / "audio" / "a.wav", 3)
    break_off(tmp_path / "audio" / "header alone.wav", 0)
    flags = {"chunk_length": 4.0, "overlap": 2.0}  # 0 to 4 and 2 to 8 s of each
    planned = plan(tmp_path, "audio", flags=flags, out=Path("p"))
    made, whole = planned.plan, plan(tmp_path, "audio").plan
    assert (made.survey.lengths.rows, made.survey.cut, made.survey.nothing_there) == (4, 4, 2)
    assert (made.survey.lengths.total_ms, made.survey.shared_ms) == (3000 + 1000, 1000)
    assert (whole.survey.lengths.total_ms, whole.survey.nothing_there, whole.survey.empty) == (3000, 1, 0)
    assert whole.survey.cut == 0, "all of a file is no part of a longer one"
    assert [row[2:] for row in listed(tmp_path / "p", "wave-1")] == 2 * [(0, 4000), (2000, 8000)]
    (remark,) = (one for one in made.remarks if one.subject == "broken off")
    assert remark.text.startswith("2 files with less audio than the header says")
    assert remark.text.endswith("; 2 chunks without any of it will fail")
    assert remark.details == (
        "a.wav (its header says 8 s, the file has 3 s)", "header alone.wav (its header says 8 s, the file has 0 s)",
    )  # fmt: skip


def test_a_row_without_an_end_whose_file_breaks_off_is_planned_as_a_file_of_a_folder_is(tmp_path: Path) -> None:
    break_off(tmp_path / "audio" / "a.wav", 3)
    made = plan(tmp_path, write_manifest(tmp_path / "m.csv", "a,a,audio/a.wav,,,0,,", "b,b,audio/a.wav,,,0,,")).plan
    assert (made.survey.lengths.total_ms, made.survey.walk.measured) == (6000, 1)
    assert dict(made.survey.walk.rates_hz) == {1000: 1}
    assert made.survey.walk.remarks.broken_examples == ["audio/a.wav (its header says 8 s, the file has 3 s)"]


def test_there_is_nothing_to_plan_where_every_file_is_a_header_alone(tmp_path: Path) -> None:
    break_off(tmp_path / "audio" / "a.wav", 0)
    with pytest.raises(BadInput, match="its 1 chunk has none") as refusal:
        plan(tmp_path, "audio")
    assert refusal.value.why == "a.wav (its header says 8 s, the file has 0 s)"


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_files_that_cannot_be_read_are_counted_apart_with_the_reason(tmp_path: Path, kind: str) -> None:
    for name in ("a", "b"):
        make_wav(tmp_path / "audio" / f"{name}.wav", 3, 1000)
    (tmp_path / "audio" / "noise.wav").write_bytes(b"no header")
    manifest = write_manifest(tmp_path / "m.csv", *(f"{one},{one},{one}.wav,,,0,," for one in ("a", "b", "noise")))

    def read_badly(path: str) -> AudioHeader:
        return AudioHeader(unreadable="Input/output error") if path.endswith("b.wav") else read_header(path)

    sources = open_sources([tmp_path / "audio" if kind == "folder" else manifest], root=tmp_path / "audio")
    found = read_sources(replace(sources, read_header=read_badly), None, lambda rows: None)
    assert (found.lengths.unknown, found.unreadable, found.without_length) == (2, 1, 1)
    problem, note = apply_rules(SOURCE_REMARKS, SimpleNamespace(survey=found))
    assert (problem.severity, problem.subject, problem.details) == (
        "problem", "unreadable", ("b.wav: Input/output error",),
    )  # fmt: skip
    assert problem.fix == f"ls -l {tmp_path}/audio/b.wav"
    assert (note.subject, note.details) == ("unknown length", ("noise.wav",))


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_of_audio_that_is_missing_a_plan_does_not_say_that_a_run_would_refuse_it(tmp_path: Path, kind: str) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 3, 1000)
    (tmp_path / "audio" / "b.wav").symlink_to("gone.wav")
    manifest = write_manifest(tmp_path / "m.csv", "a,a,audio/a.wav,,,0,,", "b,b,audio/b.wav,,,0,,")
    (problem,) = plan(tmp_path, "audio" if kind == "folder" else manifest).plan.remarks
    assert problem.text == "1 row cannot be planned: badcjobs run would fail it, for the audio cannot be used"


def test_a_folder_that_may_not_be_looked_into_is_left_out_and_is_no_row() -> None:
    with powerless_folder() as folder:
        make_wav("audio/a.wav", 3, 1000)
        make_wav("closed/a.wav", 3, 1000)
        for name in ("audio/x", "audio/y", "closed"):
            Path(name).mkdir(mode=0, exist_ok=True)
            Path(name).chmod(0)
        found = plan(folder, "audio", "closed").plan
        (problem,) = found.remarks
        assert problem.text.startswith("2 closed folders and 1 whole source cannot be planned")
        assert problem.details[0] == f"{folder}/audio contains a folder that cannot be read: x/ (Permission denied)"
        assert problem.fix == f"ls -ld {folder}/audio/x"


def test_where_no_file_can_be_read_the_reason_is_told(tmp_path: Path) -> None:
    with powerless_folder() as folder:
        make_wav("audio/a.wav", 3, 1000).chmod(0)
        with pytest.raises(BadInput, match="the length of the audio is not known: 1 file cannot be read") as refusal:
            plan(folder, "audio")
        assert refusal.value.why == "a.wav: Permission denied"


def test_rows_that_a_run_would_refuse_are_left_out_and_all_of_them_written_down(tmp_path: Path) -> None:
    wrong = [f"r9,w{n},audio/x.wav,5000,4000,0,,," for n in range(30)]
    rows = ["r9,e,audio/x.wav,5000,4000,0,,", *rows_of(8), "r0,c0,audio/r0.wav,0,30000,0,,", "n,n,gone.wav,,,0,,"]
    manifest = write_manifest(tmp_path / "m.csv", *rows, *wrong)
    with manifest.open("ab") as file:
        file.write(b"r8,c8,audio/\xff.wav,0,30000,0,,\n")
    planned = plan(tmp_path, manifest, out=Path("p"))
    (remark,) = (one for one in planned.plan.remarks if one.subject == "left out")
    assert remark.severity == "problem"
    assert remark.text.startswith("34 rows cannot be planned")
    assert remark.text.endswith("badcjobs run would refuse them, or fail those whose audio cannot be used")
    assert remark.details[0] == f"{manifest} line 2: end_ms 4000 is not after start_ms 5000"
    assert remark.details[1] == f"{manifest} line 11: chunk id 'c0' of recording 'r0' is already on line 3"
    assert remark.details[-1] == "… and 14 more"
    assert planned.plan.survey.lengths.rows == 8
    assert [chunk_id for _, chunk_id, *_ in rows_in(tmp_path / "p")] == [f"c{n}" for n in range(8)]
    assert planned.left_out == tmp_path / "p" / "left-out.txt"
    reasons = (tmp_path / "p" / "left-out.txt").read_text().splitlines()
    assert len(reasons) == 34
    assert any("line 12: no such file: gone.wav" in line for line in reasons)
    assert any(line.endswith("is not UTF-8") for line in reasons)


def test_rows_are_counted_and_not_mistakes_and_a_broken_manifest_is_named_with_its_reason(tmp_path: Path) -> None:
    good = write_manifest(tmp_path / "m.csv", *rows_of(3), ",,,x,y,0,,")
    broken = tmp_path / "semicolons.csv"
    broken.write_text(f"{HEADER.replace(',', ';')}\n" + "a;b;c;0;1;0;;\n" * 3)
    planned = plan(tmp_path, good, broken, out=Path("p"))
    survey = planned.plan.survey
    assert (survey.lengths.rows, survey.mistakes.rows, len(survey.mistakes.whole)) == (3, 1, 1)
    (remark,) = (one for one in planned.plan.remarks if one.subject == "left out")
    assert remark.text.startswith("1 row and 1 whole source cannot be planned")
    assert remark.details[-1].startswith(f"{broken} lacks the columns recording_id, chunk_id, source_path (its header")
    assert len((tmp_path / "p" / "left-out.txt").read_text().splitlines()) == len(remark.details) == 6
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, write_manifest(tmp_path / "only.csv"))
    assert refused.value.what.startswith("there is nothing to plan: 1 whole source cannot be used")
    assert refused.value.why == f"{tmp_path / 'only.csv'} has a header but no rows"


def test_a_source_that_is_not_there_is_named_before_a_speed_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, "nope", rate=None)
    assert "nope" in refused.value.what


def rows_in(folder: Path) -> list[list[str]]:
    import csv

    found = []
    for path in sorted(folder.glob("wave-*/task-*.csv")):
        with path.open(newline="") as file:
            found += list(csv.reader(file))[1:]
    return found


def test_a_folder_whose_name_is_no_text_costs_only_itself(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "good.wav", 4, 1000)
    bad = tmp_path / "audio" / b"\xff".decode(errors="surrogateescape")
    make_wav(bad / "x.wav", 4, 1000)
    planned = plan(tmp_path, "audio", out=Path("p"))
    assert (planned.plan.survey.lengths.rows, planned.plan.survey.mistakes.rows) == (1, 1)
    assert "not UTF-8" in planned.plan.survey.mistakes.examples(1)[0][0]


def test_equal_names_in_two_folders_are_named_and_planned_once(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        make_wav(tmp_path / folder / "a.wav", 4, 1000)
    planned = plan(tmp_path, "one", "two")
    assert (planned.plan.survey.lengths.rows, planned.plan.survey.mistakes.rows) == (1, 1)
    assert "already in" in planned.plan.survey.mistakes.examples(1)[0][0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "contains no audio"),
        (lambda path: path.write_text(""), "is empty"),
        (lambda path: path.write_text(HEADER + "\n"), "nothing to plan"),
        (lambda path: None, "does not exist"),
    ],
)
def test_an_empty_source_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path / "source")
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, "source", out=Path("p"))
    assert words in str(refused.value)
    assert list(tmp_path.glob("*p*")) == []


# --- where the speed comes from ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_no_speed_is_refused(tmp_path: Path, rate: float) -> None:
    with pytest.raises(BadInput, match="is not a speed"):
        plan(tmp_path, write_manifest(tmp_path / "m.csv", *rows_of(4)), rate=rate)


def test_without_any_measurement_nothing_is_made_up(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, manifest, rate=None, environ={"HOME": str(tmp_path)})
    assert "no measured speed for this engine" in refused.value.what
    for word in ("--from RUN", "badcjobs probe AUDIO", "--rate"):
        assert word in (refused.value.fix or "")


def write_probes(path: Path, *models: str, subject: str = "hawkears") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    result = ProbeResult(600.0, None, 600.0, 300.0, 431.5)
    trial = Trial(300.0, False, FITS, 3, 2.0, 431.5, host_peak_bytes=3 * 2**30)
    keys = [ProbeKey(model, 16 << 30, "hawkears", "2.3.0", subject) for model in models]
    path.write_text(to_toml([Probed(key, (trial,), result) for key in keys]))
    return path


def test_what_a_probe_has_found_is_used_where_nothing_else_is_said(tmp_path: Path) -> None:
    write_probes(tmp_path / ".cache" / "badcjobs" / "probe.toml", "Tesla V100")
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    made = plan(tmp_path, manifest, rate=None, environ={"HOME": str(tmp_path)}).plan
    assert made.speed.audio_hours_per_gpu_hour == pytest.approx(43.15)  # chunks of 30 s, and one trial of 300 s
    assert made.speed.curve == ((300.0, 431.5),)
    assert "a probe of Tesla V100" in made.speed.origin
    assert made.asking.mem_gb == 5  # 1.2 × 3 GiB + 1


def test_the_speed_of_a_job_whose_merge_is_out_of_date_comes_with_the_merge_command(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    task = TaskFile(tmp_path / "july", states={"a": "done"}, ended_at_ms=None).write()
    merge(MergeOrder([tmp_path / "july"], tmp_path / "july" / "job.sqlite"), SystemClock())
    assert plan(tmp_path, manifest, rate=None, speed_from=Path("july")).plan.speed.doubts == ()
    os.utime(task, (START_MS // 1000 + 9000,) * 2)  # published again
    made = plan(tmp_path, manifest, rate=None, speed_from=Path("july"))
    (remark,) = [remark for remark in made.plan.remarks if remark.subject == "speed"]
    assert "1 task database has changed since; what was done since is not in this speed" in remark.text
    assert remark.fix == f"badcjobs merge {tmp_path / 'july'}"


def test_probes_of_another_engine_or_of_several_models_do_not_decide(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    two = write_probes(tmp_path / "two.toml", "Tesla V100", "NVIDIA H200")
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, manifest, rate=None, speed_from=two)
    assert "knows the speed of 2 models" in refused.value.what
    assert "NVIDIA H200, 16.0 GiB: 431.5" in (refused.value.why or "")
    other = write_probes(tmp_path / "other.toml", "Tesla V100", subject="hawkears --region=CA")
    with pytest.raises(BadInput, match="no finished probe of this engine") as refused:
        plan(tmp_path, manifest, rate=None, speed_from=other)
    assert "it has: hawkears --region=CA" in (refused.value.why or "")
    (tmp_path / "broken.toml").write_text("version = ")
    with pytest.raises(BadInput, match="cannot be used"):
        plan(tmp_path, manifest, rate=None, speed_from=Path("broken.toml"))


def test_the_probe_that_is_advised_has_the_options_of_the_plan_and_the_file_that_it_reads(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    flags = {"engine": "demo", "engine_arg": ["--burn-s=1", "--threshold=0.3"]}
    arguments = "--engine=demo --engine-arg=--burn-s=1 --engine-arg=--threshold=0.3"
    line, store = f"badcjobs probe AUDIO '--out=my a100.toml' -- {arguments}", Path("my a100.toml")
    for write in (lambda: None, lambda: write_probes(tmp_path / store, "Tesla V100", subject="demo")):
        write()
        with pytest.raises(BadInput) as refused:
            plan(tmp_path, manifest, rate=None, speed_from=store, flags=flags)
        assert (refused.value.fix or "").startswith(f"{line}   (or --from RUN")
    write_probes(tmp_path / store, "Tesla V100", subject="demo --burn-s=1 --threshold=0.3")
    made = plan(tmp_path, manifest, rate=None, speed_from=store, flags=flags).plan
    fixes = [remark.fix for remark in made.remarks if remark.subject == "speed"]
    again = "AUDIO --again --config 'probe.lengths_s=[30, 3600]'"
    assert line.replace("AUDIO", again) in fixes  # chunks of 30 s, and one trial of 300 s
    (tmp_path / "w2.toml").write_text("[run]\nworkers_per_gpu = 2\n")
    order = {"flags": flags, "config": Path("w2.toml"), "environ": {"XDG_CACHE_HOME": str(tmp_path / "cache")}}
    write_probes(tmp_path / "cache" / "badcjobs" / "probe.toml", "V100", subject="demo --burn-s=1 --threshold=0.3")
    advised = plan(tmp_path, manifest, rate=None, **order).plan.speed.remedy
    assert advised == line.replace(" '--out=my a100.toml'", "") + " --workers-per-gpu=2"


def test_the_mean_length_says_of_which_chunks_it_is(tmp_path: Path) -> None:
    for name, length_s in (("a", 4), ("b", 6), ("c", 0)):
        make_wav(tmp_path / "audio" / f"{name}.wav", length_s, 1000)
    assert "in 3 chunks; mean 5.0 s (of the 2 with audio), longest 6.0 s" in text_of(plan(tmp_path, "audio"))
    (tmp_path / "audio" / "c.wav").unlink()
    assert "in 2 chunks; mean 5.0 s, longest 6.0 s" in text_of(plan(tmp_path, "audio"))


def test_of_several_probes_that_of_this_version_and_these_workers_counts_and_is_named(tmp_path: Path) -> None:
    """Neither the one that comes last in the file, nor the newest of them."""
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    (tmp_path / "prog").write_text("#!/bin/sh\n")
    flags = {"engine": "command", "command": f"sh {tmp_path / 'prog'} {{input}} {{output}}"}
    settings = Project().make(RunSettings, {"source": ["m.csv"], **flags}, "plan")
    here = version_here(settings, {}, tmp_path)
    assert here is not None and here.startswith("sh prog ")
    os.utime(tmp_path / "prog", (1, 1))
    assert version_here(settings, {}, tmp_path) == here, "a copy is the same program"
    (tmp_path / "prog").write_text("#!/bin/zh\n")
    assert version_here(settings, {}, tmp_path) != here, "and what was changed is another, if it is as long"
    (tmp_path / "prog").write_text("#!/bin/sh\n")

    def probed(rate: float, at: str, version: str = "sh prog 0000", workers: int = 1) -> Probed:
        key = ProbeKey("V100", 16 << 30, "command", version, subject_of(settings), workers, workers)
        found = ProbeResult(30.0, None, 30.0, 30.0, rate)
        return Probed(key, (Trial(30.0, False, FITS, 3, 2.0, rate),), found, True, f"2026-07-0{at}T12:00:00Z")

    def planned(*probes: Probed, config: Path | None = Path("w1.toml")) -> tuple[Speed, list[str]]:
        (tmp_path / "p.toml").write_text(to_toml(probes))
        (tmp_path / "w1.toml").write_text("[run]\nworkers_per_gpu = 1\n")
        made = plan(tmp_path, manifest, rate=None, speed_from=Path("p.toml"), flags=flags, config=config).plan
        return made.speed, [remark.text for remark in made.remarks if remark.subject == "speed"]

    mine, two, other, newer = (
        probed(100, "1", here), probed(200, "2", here, workers=2), probed(300, "3"), probed(400, "4", "sh prog zzzz")
    )  # fmt: skip
    speed, notes = planned(mine, two, other, newer)
    assert (speed.audio_hours_per_gpu_hour, notes) == (100.0, [])
    assert f"command ({here}), 1 worker per GPU, 1 chunk at once" in speed.origin
    speed, notes = planned(mine, two, other, newer, config=None)  # the scripts say auto: any number may come of it
    assert speed.audio_hours_per_gpu_hour == 200.0
    assert "the newest of 2 probes that it could be; not taken: V100, 16.0 GiB, command (" in notes[0]
    _, notes = planned(two)
    assert notes == ["it was measured with 2 workers per GPU, and the tasks will have 1 worker per GPU"]
    speed, notes = planned(newer, other)
    assert speed.audio_hours_per_gpu_hour == 400.0
    assert f"the one here is another ({here})" in notes[0]
    assert "the newest of 2 probes that it could be; not taken: V100, 16.0 GiB, command (sh prog 0000)" in notes[1]
    with pytest.raises(BadInput) as refused:
        planned(mine, replace(mine, key=replace(mine.key, memory_bytes=32 << 30)))
    assert refused.value.why == "V100, 16.0 GiB: 100.0\nV100, 32.0 GiB: 100.0"


def test_hours_of_chunks_that_overlap_come_with_those_of_the_recordings(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / "a.wav", 90, 100)
    make_wav(tmp_path / "audio" / "b.wav", 10, 100)
    planned = plan(tmp_path, "audio", flags={"chunk_length": 10.0, "overlap": 8.0})
    assert planned.plan.recording_hours == pytest.approx(100 / 3600)
    assert planned.plan.audio_hours > 4 * 100 / 3600
    assert "out of 0.028 hours of recordings (chunks overlap)" in " ".join(text_of(planned).split())
    plain = plan(tmp_path, "audio", flags={"chunk_length": 10.0})
    assert plain.plan.recording_hours == plain.plan.audio_hours
    assert "of recordings" not in text_of(plain)


def test_a_wrong_option_is_explained_by_the_help_of_plan_and_one_gpu_alone_has_to_start_up_too(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, manifest, flags={"chunk_length": -1.0})
    assert refused.value.fix == "badcjobs plan --help"
    text = " ".join(text_of(plan(tmp_path, manifest)).split())
    assert "1 GPU takes 5 min 00 s, start-up included" in text


def test_a_run_that_was_never_merged_is_named_with_the_command_that_does_it(tmp_path: Path) -> None:
    (tmp_path / "first" / "tasks").mkdir(parents=True)
    with pytest.raises(DatabaseProblem) as refused:
        plan(tmp_path, write_manifest(tmp_path / "m.csv", *rows_of(4)), rate=None, speed_from=Path("first"))
    assert "badcjobs merge" in (refused.value.fix or "")


# --- writing ----------------------------------------------------------------------------------------------------------


def test_the_same_source_gives_the_same_plan_byte_for_byte(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(200))
    order: dict[str, Any] = {"rate": 0.5, "submit": SubmitSettings(time="20"), "out": Path("p")}
    first = plan(tmp_path, manifest, **order)
    files = files_of(tmp_path / "p")
    (tmp_path / "p").rename(tmp_path / "old")
    second = plan(tmp_path, manifest, **order)
    assert files_of(tmp_path / "p") == files
    assert text_of(first) == text_of(second)
    assert len(files) == first.plan.tasks + 3
    assert first.plan.tasks == 34


def test_shards_hold_every_row_once_in_order_and_balanced(tmp_path: Path) -> None:
    rows = [f"r{n},c{n},a/r{n}.wav,0,{1000 + n * 37 % 5000},0,,x" for n in range(500)]
    manifest = write_manifest(tmp_path / "m.csv", *rows)
    planned = plan(tmp_path, manifest, rate=0.5, submit=SubmitSettings(time="25"), out=Path("p"))
    assert [row[1] for row in rows_in(tmp_path / "p")] == [f"c{n}" for n in range(500)]
    assert (tmp_path / "p" / "wave-1" / "tasks.txt").read_text().splitlines() == [
        str(tmp_path / "p" / "wave-1" / f"task-{n:04}.csv") for n in range(planned.plan.tasks)
    ]
    seconds = [share.audio_ms / 1000 for share in planned.plan.sizing.shares]
    assert planned.plan.tasks > 3
    assert max(seconds) - min(seconds) <= 6


def test_names_with_commas_quotes_and_line_ends_come_through(tmp_path: Path) -> None:
    make_wav(tmp_path / "audio" / 'a,"b"\n\rc.wav', 4, 1000)
    make_wav(tmp_path / "more" / "d\ne.wav", 4, 1000)
    plan(tmp_path, "audio", "more", out=Path("p"))
    assert [key[:2] for key in listed(tmp_path / "p", "wave-1")] == [('a,"b"\n\rc', 'a,"b"\n\rc'), ("d\ne", "d\ne")]


def test_shards_carry_every_column_of_the_manifests_they_are_made_of(tmp_path: Path) -> None:
    more = 'observer,notes,sha256,end_ms,"a, b",overlap_ms,notes,start_ms,source_path,chunk_id,recording_id'
    (tmp_path / "more.csv").write_text(
        f'{more}\nÉva,"wind, rain",{SHA256},9000,7,1500,"two\nlines",0,x.wav,c0,r0\n,,,9000,,,,0,x.wav,c1,r0\n'
    )
    (tmp_path / "other.csv").write_text(
        "recording_id,chunk_id,source_path,end_ms,sha256,sha256,station,observer\nr1,c2,y.wav,8000,1,2,S-1,Ann\n"
    )
    plain = write_manifest(tmp_path / "plain.csv", f"r2,c3,z.wav,0,5000,250,{SHA256},windy")
    plan(tmp_path, plain, "more.csv", "other.csv", out=Path("p"), flags={"root": str(tmp_path)})
    with (tmp_path / "p" / "wave-1" / "task-0000.csv").open(newline="", encoding="utf-8") as file:
        rows = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    times = {"start_ms": "0", "end_ms": "9000"}
    assert rows == [
        {"recording_id": "r2", "chunk_id": "c3", "source_path": "z.wav", "start_ms": "0", "end_ms": "5000",
         "overlap_ms": "250", "sha256": SHA256, "notes": "windy"},
        {"recording_id": "r0", "chunk_id": "c0", "source_path": "x.wav", **times, "overlap_ms": "1500",
         "sha256": SHA256, "notes": "wind, rain", "observer": "Éva", "a, b": "7", "notes (column 7)": "two\nlines"},
        {"recording_id": "r0", "chunk_id": "c1", "source_path": "x.wav", **times, "badcjobs_cut": "as 0-9000"},
        {"recording_id": "r1", "chunk_id": "c2", "source_path": "y.wav", "start_ms": "0", "end_ms": "8000",
         "sha256 (column 5)": "1", "sha256 (column 6)": "2", "station": "S-1", "observer": "Ann"},
    ]  # fmt: skip
    for name in ("x", "y", "z"):
        make_wav(tmp_path / f"{name}.wav", 9, 1000)
    assert [key[1] for key in listed(tmp_path / "p", "wave-1")] == ["c3", "c0", "c1", "c2"]


def in_shards(folder: Path, root: Path) -> list[Chunk]:
    """Return what the tasks of a plan would do, each with nothing but its own shard."""
    shards = sorted(folder.glob("wave-*/task-*.csv"))
    assert len(shards) > 3
    return [chunk for shard in shards for chunk in open_sources([shard], root=root).chunks(WHOLE)]


def test_a_row_is_cut_in_its_shard_as_it_would_be_in_the_whole_source(tmp_path: Path) -> None:
    make_wav(tmp_path / "long.wav", 60, 100, tone_hz=10)
    for number in range(3):
        make_wav(tmp_path / f"own{number}.wav", 30, 100, tone_hz=10)
    stretches = [f"long,l{n},long.wav,{30_000 * n},{30_000 * n + 30_000},0,," for n in range(4)]  # two behind its end
    files = [f"own,o{n},own{n}.wav,{30_000 * n},{30_000 * n + 30_000},0,," for n in range(3)]
    endless = ["long,e0,long.wav,20000,,0,,", "long,e1,long.wav,59000,,0,,"]
    manifest = write_manifest(tmp_path / "m.csv", *stretches, *files, *endless)
    plan(tmp_path, manifest, rate=0.05, submit=SubmitSettings(time="25"), out=Path("p"))
    whole = list(open_sources([manifest], root=None).chunks(WHOLE))
    assert [chunk.is_cut for chunk in whole] == [True] * 4 + [False] * 3 + [True] * 2
    assert in_shards(tmp_path / "p", tmp_path) == whole
    plan(tmp_path, *sorted((tmp_path / "p").glob("wave-*/*.csv")), rate=0.05,
         submit=SubmitSettings(time="25"), out=Path("q"), flags={"root": str(tmp_path)})  # fmt: skip
    assert in_shards(tmp_path / "q", tmp_path) == whole, "also in a plan of a plan"


def test_what_is_cut_out_of_a_recording_stays_so_in_its_shard_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    make_wav(audio / "short.wav", 7, 100, tone_hz=10)
    make_wav(audio / "long.wav", 60, 100, tone_hz=10)
    cutting = {"chunk_length": 4.0, "overlap": 3.0}
    plan(tmp_path, "audio", rate=0.05, submit=SubmitSettings(time="15"), out=Path("p"), flags=cutting)
    make_wav(audio / "long.wav", 6, 100, tone_hz=10)  # it was replaced by a shorter one
    found = in_shards(tmp_path / "p", audio)
    assert all(chunk.is_cut for chunk in found)
    assert found[-1].end_ms == 7000


def test_a_shard_that_somebody_has_spoiled_is_refused(tmp_path: Path) -> None:
    make_wav(tmp_path / "a.wav", 6, 100, tone_hz=10)
    (tmp_path / "m.csv").write_text(f"{HEADER},badcjobs_cut\nr,c,a.wav,0,6000,,,,perhaps\n")
    with pytest.raises(BadInput) as caught:
        list(open_sources([tmp_path / "m.csv"], root=None).chunks(WHOLE))
    assert "badcjobs_cut 'perhaps' is neither" in str(caught.value.why)


def test_relative_paths_keep_their_form_where_one_root_serves_and_become_absolute_where_not(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        make_wav(tmp_path / folder / "audio" / "r0.wav", 120, 100, tone_hz=10)
    one = write_manifest(tmp_path / "one" / "m.csv", *rows_of(2))
    two = write_manifest(tmp_path / "two" / "m.csv", *[row.replace("r0,c", "r0,d") for row in rows_of(2)])
    plan(tmp_path, one, out=Path("p1"))
    assert [row[2] for row in rows_in(tmp_path / "p1")] == ["audio/r0.wav"] * 2
    assert f"--root={tmp_path}/one/" in (tmp_path / "p1" / "wave-1.sbatch").read_text()
    assert [row[6] for row in rows_in(tmp_path / "p1")] == [SHA256] * 2
    plan(tmp_path, one, two, out=Path("p2"))
    paths = [row[2] for row in rows_in(tmp_path / "p2")]
    assert paths == [f"{tmp_path}/{folder}/audio/r0.wav" for folder in ("one", "one", "two", "two")]
    assert "--root" not in (tmp_path / "p2" / "wave-1.sbatch").read_text().partition("ARGS=(")[2]
    assert len(listed(tmp_path / "p2", "wave-1")) == 4


def test_the_scripts_of_a_site_ask_for_what_the_plan_says(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(1200))
    submit = SubmitSettings(time="24:00:00", parallel=10)
    of_submit = '[submit]\naccount = "st-pi-1-gpu"\nsetup = ["source venv/bin/activate"]\n'
    (tmp_path / "x.toml").write_text(f'[run]\nout = "/scratch/x"\n{of_submit}')
    planned = plan(
        tmp_path, manifest, rate=0.004, site="sockeye", submit=submit, out=Path("p"), config="x.toml",
        flags={"engine": "demo", "engine_arg": ["--burn-s=0.1"]},
    )  # fmt: skip
    waves = planned.plan.waves
    assert len(waves) == 2
    text = (tmp_path / "p" / "wave-2.sbatch").read_text()
    for line in (
        "#SBATCH --account=st-pi-1-gpu", f"#SBATCH --array=0-{waves[1].tasks - 1}%10", "#SBATCH --time=24:00:00",
        "#SBATCH --gpus-per-node=4", "#SBATCH --cpus-per-task=24", "#SBATCH --mem=16G", "module load gcc cuda",
        f': "${{SOURCE:={tmp_path}/p/wave-2/tasks.txt}}"', ': "${OUT:=/scratch/x/wave-2}"', "    --engine=demo",
        "    --engine-arg=--burn-s=0.1", f"    --config={tmp_path}/x.toml", "source venv/bin/activate",
    ):  # fmt: skip
        assert line in text.splitlines(), line
    assert json.loads((tmp_path / "p" / "plan.json").read_text())["waves"][1]["tasks"] == waves[1].tasks


def test_the_waves_that_are_written_hold_every_chunk_once_and_their_arrays_every_task(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(1201))
    (tmp_path / "x.toml").write_text('[submit]\naccount = "st-pi-1-gpu"\n')
    planned = plan(
        tmp_path, manifest, rate=0.003, site="sockeye", out=Path("p"),
        submit=SubmitSettings(time="24:00:00"), config=Path("x.toml"),
    )  # fmt: skip
    sizes = [wave.tasks for wave in planned.plan.waves]
    assert sizes[0] > sizes[1] and len(sizes) > 2, "waves of different sizes"
    scripts = [(tmp_path / "p" / f"wave-{number}.sbatch").read_text() for number in range(1, len(sizes) + 1)]
    assert [re.findall(r"^#SBATCH --array=0-(\d+)", text, re.M) for text in scripts] == [[str(n - 1)] for n in sizes]
    lists = [(tmp_path / "p" / f"wave-{number}" / "tasks.txt") for number in range(1, len(sizes) + 1)]
    assert [len(path.read_text().splitlines()) for path in lists] == sizes
    assert [row[1] for row in rows_in(tmp_path / "p")] == [f"c{number}" for number in range(1201)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"site": "sockeye"}, "try: the same command with --config submit.account=NAME"),
        ({"plan": PlanSettings(template="cooking")}, "there is no template 'cooking'"),
        ({"site": "narval"}, "there is no site 'narval'"),
        ({"flags": {"engine": "cooking"}}, '--engine = "cooking" must be one of'),
        ({"flags": {"overlap": 3.0}}, "--chunk-length"),
        ({"out": Path("m.csv")}, "m.csv exists already"),
        ({"out": Path("m.csv/below")}, "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_reading_and_leaves_nothing(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, manifest, **{"out": Path("p"), **changes})
    assert words in str(refused.value)
    assert sorted(tmp_path.iterdir()) == before


def test_a_plan_never_replaces_another(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "m.csv", *rows_of(4))
    plan(tmp_path, manifest, out=Path("p"))
    files = files_of(tmp_path / "p")
    with pytest.raises(BadInput) as refused:
        plan(tmp_path, manifest, out=Path("p"))
    assert "may use its shards" in (refused.value.why or "")
    assert files_of(tmp_path / "p") == files
