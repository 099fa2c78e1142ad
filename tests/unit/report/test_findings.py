"""What is found in a job: the labelled jobs of support/traces.py, and cases that are told in a few facts."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from rooms.cli import read_topic
from rooms.model import MemoryHeld
from rooms.report import KINDS, SEVERITIES, Finding, find, general_words, summarize
from rooms.store import (
    AlertFacts,
    Completeness,
    DecisionFacts,
    DeviceFacts,
    DeviceWork,
    ErrorFacts,
    FailedChunk,
    GapFacts,
    JobFacts,
    MetricFacts,
    StateTime,
    TaskFacts,
    UnderWay,
)
from rooms.workers import Ramp, plan_start
from support.traces import Trace, all_traces, diagnose, healthy

OF_LOW_BUSY = ("start_up", "waiting_for_audio", "cpu_bound", "too_few_workers", "tail", "low_busy")
RIGHT = 0.95
KNOWN_MISSES: frozenset[str] = frozenset()  # names of labelled jobs that are diagnosed wrong; each with its reason
UGLY = re.compile(r"\b(?:None|nan|inf)\b|\b1 (?:chunks|tasks|devices|GPUs|nodes|workers|tries|gaps|alerts|processes)\b")


# --- the labelled jobs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def diagnosed() -> list[tuple[Trace, tuple[Finding, ...]]]:
    return [(trace, diagnose(trace)) for trace in all_traces()]


def main_cause(found: tuple[Finding, ...]) -> str | None:
    return next((finding.kind for finding in found if finding.kind in OF_LOW_BUSY), None)


def is_right(trace: Trace, found: tuple[Finding, ...]) -> bool:
    kinds = {finding.kind for finding in found}
    wanted = trace.also | ({trace.main} if trace.main else set())
    return main_cause(found) == trace.main and wanted <= kinds <= wanted | trace.may


def test_nearly_all_labelled_jobs_are_diagnosed_right(diagnosed) -> None:
    misses, confusion = {}, Counter()
    for trace, found in diagnosed:
        confusion[trace.main or "busy", main_cause(found) or "busy"] += 1
        if not is_right(trace, found):
            wanted = [*([trace.main] if trace.main else []), *sorted(trace.also)]
            misses[trace.name] = f"{trace.name}: wanted {wanted}, found {[finding.kind for finding in found]}"
    for (label, answer), many in sorted(confusion.items()):
        print(f"{label:>18} → {answer:<18} {many:>3}")
    print(f"{len(diagnosed) - len(misses)} of {len(diagnosed)} right", *misses.values(), sep="\n  ")
    assert len(diagnosed) >= 36
    assert len(misses) <= (1 - RIGHT) * len(diagnosed), misses
    assert misses.keys() <= KNOWN_MISSES, misses


def test_nothing_is_found_where_all_is_well(diagnosed) -> None:
    well = {trace.name for trace in healthy()}
    found = {trace.name: [finding.kind for finding in found] for trace, found in diagnosed if trace.name in well}
    assert len(found) >= 6
    assert not any(found.values()), found


def test_the_labelled_jobs_know_every_kind_of_finding(diagnosed) -> None:
    labelled = {kind for trace, _ in diagnosed for kind in (*trace.also, trace.main) if kind}
    assert labelled == set(KINDS)


def test_every_finding_is_a_sentence_with_numbers_and_something_to_do(diagnosed) -> None:
    for trace, found in diagnosed:
        for finding in found:
            said = (finding.sentence, *finding.evidence, finding.advice, *finding.lines, *finding.subjects)
            assert finding.kind in KINDS and finding.severity in SEVERITIES
            assert finding.sentence.endswith(".") and "\n" not in finding.sentence, trace.name
            assert finding.advice.endswith(".")
            assert finding.evidence and any(re.search(r"\d", line) for line in finding.evidence)
            assert all(text and text.isprintable() and len(text) < 260 for text in said), said
            assert not any(UGLY.search(text) for text in said), said


def test_no_finding_sends_the_reader_to_a_name_that_only_scripts_know(diagnosed) -> None:
    names = re.compile(rf"\b(?:{'|'.join(kind for kind in KINDS if '_' in kind)})\b")
    for trace, found in diagnosed:
        for finding in found:
            said = (finding.sentence.partition(" for good: ")[0], finding.advice)
            assert not any(names.search(words) for words in said), (trace.name, said)


def test_silence_is_a_problem_until_another_attempt_has_done_the_rest(diagnosed) -> None:
    silent = {
        trace.name: finding.severity
        for trace, found in diagnosed
        for finding in found
        if finding.kind == "tasks_silent"
    }
    assert silent.pop("a silent attempt, whose next one did the rest") == "note"
    assert len(silent) == 4 and set(silent.values()) == {"problem"}


def test_a_silent_task_whose_work_another_attempt_is_doing_is_not_said_to_be_done() -> None:
    silent = replace(TASK, verdict=None, exit_code=None, heard_at_ms=TASK.last_sign_ms, silent_after_s=120.0)
    after_ms = TASK.last_sign_ms + 60_000
    again = replace(TASK, name="1_0.r0.gpu2", verdict=None, exit_code=None, pending=8, started_at_ms=after_ms,
                    last_sign_ms=after_ms + 300_000)  # fmt: skip
    for left, said, advice in (
        (8, "another attempt has taken over its work.", "There is nothing to do."),
        (0, "other tasks have done their work.", "Nothing is left to do."),
    ):
        facts = replace(job((silent, replace(again, pending=left))), chunks={"done": 10, "pending": left})
        (finding,) = find(summarize(facts, now_ms=again.last_sign_ms))
        assert (finding.kind, finding.severity) == ("tasks_silent", "note")
        assert finding.sentence == f"1 of 2 tasks went silent before the end; {said}"
        assert finding.advice.endswith(f". {advice}")


@pytest.mark.parametrize(("cluster", "said"), [("local", "start the emulation again."), ("slurm", "submit again.")])
def test_where_a_silent_task_was_emulated_nobody_is_sent_to_slurm(cluster: str, said: str) -> None:
    task = replace(TASK, verdict=None, exit_code=None, pending=9, heard_at_ms=TASK.last_sign_ms, silent_after_s=120.0)
    facts = replace(job((task,)), chunks={"pending": 9})
    proof = Completeness(None, None, 9, 0, 0, 0, 9, 0, 0, 0, finish=(f"badcjobs submit m.csv --cluster={cluster}",))
    summary = replace(summarize(facts, now_ms=TASK.last_sign_ms + 600_000), completeness=proof)
    (advice,) = [finding.advice for finding in find(summary) if finding.kind == "tasks_silent"]
    assert advice.endswith(f"{said} The command is under “to finish it”.")
    assert ("squeue" in advice) == (cluster == "slurm")


def test_the_worst_comes_first(diagnosed) -> None:
    for _, found in diagnosed:
        ranks = [SEVERITIES.index(finding.severity) for finding in found]
        assert ranks == sorted(ranks)


def test_no_line_to_paste_has_a_hole_in_it(diagnosed) -> None:
    lines = {line for _, found in diagnosed for finding in found for line in finding.lines}
    assert not [line for line in lines if "…" in line or "..." in line]


def test_lines_for_slurm_can_be_pasted(diagnosed) -> None:
    option = re.compile(
        r"#SBATCH --(mem=\d+G|time=\d+:\d\d:00|cpus-per-task=\d+|gpus-per-node=\d+|array=0-\d+|exclude=[\w,.\[\]-]+"
        r"|signal=B:USR1@\d+)"
    )
    lines = {line for _, found in diagnosed for finding in found for line in finding.lines if line.startswith("#")}
    assert len(lines) > 8
    assert all(option.fullmatch(line) for line in lines), lines


def test_the_guide_has_a_line_for_every_kind() -> None:
    page = read_topic("report")
    for kind in KINDS:
        assert re.search(rf"^    {kind} +[A-Z]", page, re.MULTILINE), kind
    assert not re.search(r"[{}]", page)


def test_a_finding_is_described_without_figures() -> None:
    template = "{of}{many:count other_process other_processes} reduced {many:its|their} clock to {of_time}{rest}."
    assert general_words(template) == "N other processes reduced their clock to …"


# --- a few facts ------------------------------------------------------------------------------------------------------

START_MS = 1_800_000_000_000
HOUR_S = 3600.0
TASK = TaskFacts(
    "1_0.r0.gpu1", "1", 0, 0, "gpu1", None, "done", 0, 1, 1, START_MS, START_MS + 3_600_000, 500, 0, 0, 1e6,
    engine="hawkears", workers=2, cpus=8, cpu_mean_cores=2.0,
)  # fmt: skip
DEVICE = DeviceFacts(
    "1_0.r0.gpu1", "gpu1", 0, "GPU-1", "0", "Tesla V100", "nvml", 32 * 2**30, 3600, 4 * 2**30, 60, 200.0, None, None,
    HOUR_S, 0.0, work=DeviceWork(2, 500, 0, 0, 1e6, 14.0, 16.0, 20.0, START_MS + 3_599_000),
)  # fmt: skip


def states(busy: float, **seconds: float) -> dict[str, StateTime]:
    spent = {"working": HOUR_S, **seconds}
    return {name: StateTime(s, s, s * busy if name == "working" else 0.0, None) for name, s in spent.items()}


def job(
    tasks: tuple[TaskFacts, ...] = (TASK,),
    devices: tuple[DeviceFacts, ...] = (replace(DEVICE, states=states(0.9)),),
    **more: object,
) -> JobFacts:
    chunks = {"done": sum(task.done for task in tasks)}
    facts = JobFacts(tasks, devices, chunks, sum(t.audio_s for t in tasks), 0, 500, (), (), (), ())
    return replace(facts, **more)  # type: ignore[arg-type]


def found_in(facts: JobFacts, missing: tuple[int, ...] = ()) -> list[str]:
    return [finding.kind for finding in find(summarize(facts, missing))]


def test_a_job_without_anything_has_no_findings() -> None:
    assert found_in(job((), ())) == []
    assert found_in(job()) == []


def test_cores_that_are_all_in_use_are_the_cause_and_not_the_number_of_workers() -> None:
    slow = (replace(DEVICE, states=states(0.2)),)
    assert found_in(job((replace(TASK, cpu_mean_cores=7.2),), slow)) == ["cpu_bound"]
    assert found_in(job((replace(TASK, cpu_mean_cores=1.9),), slow)) == ["too_few_workers"]
    assert found_in(job((replace(TASK, cpu_mean_cores=0.4),), slow)) == ["waiting_for_audio"]
    assert found_in(job((replace(TASK, cpu_mean_cores=None),), slow)) == ["low_busy"]


def test_workers_are_judged_by_the_time_in_which_they_had_a_chunk() -> None:
    times = {"working": StateTime(2400.0, 2400.0, 240.0, None), "idle": StateTime(1200.0, 1200.0, 0.0, None)}
    work = replace(DEVICE.work, last_end_ms=START_MS + 2_400_000)
    facts = job((replace(TASK, cpu_mean_cores=0.95),), (replace(DEVICE, states=times, work=work),))
    assert found_in(facts) == ["too_few_workers"]  # half a core each is what they took over the whole hour


def test_a_device_that_does_not_tell_its_power_can_still_be_found_idle() -> None:
    times = {"working": StateTime(HOUR_S, 0.0, 0.2 * HOUR_S, None)}
    assert found_in(job(devices=(replace(DEVICE, states=times),))) == ["too_few_workers"]


def test_what_the_ramp_has_tried_is_not_suggested_again() -> None:
    facts = job((replace(TASK, cpu_mean_cores=5.0),), (replace(DEVICE, states=states(0.2)),))

    def after(rates: list[float], cores: int) -> list[str]:
        """Let the real ramp measure these rates, one number of workers after the other."""
        ramp, now_s, work, step = Ramp(1, cores, 1, settled=False), 0.0, 0.0, None
        while not ramp.settled:
            rate = rates[ramp.workers - 1]
            for _ in range(2):
                step = ramp.observe(
                    now_s, work_done=work, chunks_done=round(work), chunks_left=10**6, all_warm=True, memory_share=0.1,
                    memory_held=None,
                )  # fmt: skip
                now_s, work = now_s + 100, work + 100 * rate
        assert step is not None
        decision = DecisionFacts("workers_per_gpu", "Tesla V100", step.workers, step.reason, 1)
        return found_in(replace(facts, decisions=(decision,)))

    assert after([10, 18, 18.1], cores=16) == ["low_busy"]
    assert after([10, 18, 26, 33, 40], cores=5) == ["cpu_bound"]


def test_where_main_memory_kept_the_ramp_from_more_workers_that_is_what_to_ask_for() -> None:
    task = replace(TASK, cpu_mean_cores=5.0, memory_limit_bytes=16 * 2**30)
    slow = job((task,), (replace(DEVICE, states=states(0.2)),))
    begun = plan_start(cpus=32, devices=4, memory_bytes=139 * 2**30, known=None, granted_bytes=16 * 2**30)
    ramp, step = Ramp(1, 8, 1, settled=False, granted_bytes=16 * 2**30), None
    for now_s in (0.0, 100.0):
        step = ramp.observe(
            now_s, work_done=now_s, chunks_done=round(now_s), chunks_left=10**6, all_warm=True, memory_share=0.1,
            memory_held=MemoryHeld(at_s=now_s, memory_bytes=11 * 2**30),
        )  # fmt: skip
    assert step is not None
    for reason in (begun[2], step.reason):
        decisions = (DecisionFacts("workers_per_gpu", "Tesla V100", 1, reason, 1),)
        (finding,) = find(summarize(replace(slow, decisions=decisions)))
        assert (finding.kind, finding.lines) == ("too_few_workers", ("#SBATCH --mem=32G",))
        assert any("the job has" in line for line in finding.evidence)


def test_a_minute_of_gpu_time_is_not_worth_a_word() -> None:
    short = {name: StateTime(110.0, 110.0, 10.0, None) for name in ("working",)}
    assert found_in(job(devices=(replace(DEVICE, states=short),))) == []


def test_a_short_last_task_does_not_accuse_a_long_job() -> None:
    task = replace(TASK, name="1_1.r0.gpu1", array_index=1, last_sign_ms=START_MS + 310_000, done=5)
    starting = {"start_up": StateTime(300.0, 300.0, 0.0, None), "working": StateTime(10.0, 10.0, 9.0, None)}
    other = replace(DEVICE, task=task.name, states=starting)
    assert found_in(job((TASK, task), (replace(DEVICE, states=states(0.9)), other))) == []


def test_a_device_that_says_nothing_is_not_accused() -> None:
    silent = {"working": StateTime(HOUR_S, 0.0, None, None)}
    assert found_in(job(devices=(replace(DEVICE, states=silent),))) == []


def test_a_recording_without_an_engine_is_nobodys_waste() -> None:
    task = replace(TASK, engine=None, workers=0, done=0)
    idle = {"idle": StateTime(HOUR_S, HOUR_S, 0.0, None)}
    assert found_in(job((task,), (replace(DEVICE, states=idle, work=DeviceWork()),))) == []


def test_a_task_that_is_still_running_was_not_killed() -> None:
    running = replace(TASK, verdict=None, exit_code=None, pending=100)
    assert found_in(job((running,))) == []
    assert found_in(job((replace(running, slurm_state="RUNNING"),))) == []
    assert found_in(job((replace(running, slurm_state="NODE_FAIL"),))) == ["tasks_killed"]


def test_a_gpu_that_cuda_lost_is_told_without_telemetry_too() -> None:
    work = replace(DEVICE.work, gave_up="gpu_lost", lost=2)
    assert found_in(job(devices=(replace(DEVICE, states=states(0.9), work=work),))) == ["device_lost"]


def test_an_alert_of_the_hardware_names_its_node() -> None:
    alert = AlertFacts("ecc", "critical", 1, 1, 60.0, 3.0, None, "device 0 has new uncorrected memory errors (3)")
    facts = job(alerts=(alert,), alert_nodes={"ecc": ("gpu7",)})
    (finding,) = find(summarize(facts))
    assert finding.lines == ("#SBATCH --exclude=gpu7",) and finding.subjects == ("gpu7",)


def on_nodes(many: int, hot: int) -> JobFacts:
    devices = tuple(
        replace(
            DEVICE, node=f"gpu{n:02}", device_id=n, states=states(0.9),
            throttled={"hw_thermal_slowdown": 1800} if n <= hot else {},
        )
        for n in range(1, many + 1)
    )  # fmt: skip
    return job((replace(TASK, node="gpu01"),), devices)


@pytest.mark.parametrize(
    "many, hot, lines",
    [
        (44, 4, ("#SBATCH --exclude=gpu01,gpu02,gpu03,gpu04",)),
        (44, 5, ()),
        (44, 21, ()),
        (20, 3, ()),
        (1, 1, ("#SBATCH --exclude=gpu01",)),
        (3, 1, ("#SBATCH --exclude=gpu01",)),
    ],
)
def test_few_hot_nodes_are_left_out_and_many_point_to_a_common_cause(many: int, hot: int, lines: tuple[str]) -> None:
    facts = on_nodes(many, hot)
    finding = next(f for f in find(summarize(facts)) if f.kind == "throttled_thermal")
    assert finding.lines == lines
    assert len(finding.subjects) == hot  # the texts show the first few
    common = f"{hot} of {many} nodes are affected: this points to a common cause, not to single nodes"
    assert (common in finding.evidence) == (not lines)


def test_all_nodes_to_leave_out_stand_in_one_line_because_sbatch_takes_the_last_alone() -> None:
    alert = AlertFacts("ecc", "critical", 1, 1, 60.0, 3.0, None, "device 0 has new uncorrected memory errors (3)")
    facts = replace(on_nodes(44, 2), alerts=(alert,), alert_nodes={"ecc": ("gpu07",)})
    worst, hot = find(summarize(facts))
    assert (worst.kind, worst.lines) == ("ecc_errors", ("#SBATCH --exclude=gpu01,gpu02,gpu07",))
    assert (hot.kind, hot.lines) == ("throttled_thermal", ())
    assert hot.advice.endswith("The --exclude line above includes it.")


def test_a_large_loss_is_told_though_its_share_is_small_and_the_larger_one_comes_first() -> None:
    def lost(waiting_h: float, starting_h: float = 0.0) -> list[Finding]:
        spent = {"waiting": waiting_h * HOUR_S, "start_up": starting_h * HOUR_S, "working": 950 * HOUR_S}
        times = {state: StateTime(s, s, s if state == "working" else 0.0, None) for state, s in spent.items()}
        task = replace(TASK, last_sign_ms=START_MS + round(1000 * sum(spent.values())))
        work = replace(DEVICE.work, last_end_ms=task.last_sign_ms)
        facts = job((task,), (replace(DEVICE, states=times, work=work),))
        return list(find(summarize(facts)))

    assert lost(9.0) == [] and lost(15.0) == []  # little; 1.6 %
    assert [(f.kind, f.severity) for f in lost(25.0)] == [("waiting_for_audio", "note")]
    waiting, starting = lost(65.0, 40.0)
    assert (waiting.kind, waiting.severity, starting.kind, starting.severity) == (
        "waiting_for_audio", "warning", "start_up", "note",
    )  # fmt: skip
    assert waiting.sentence == "Waiting for the next chunk took 6 % of the GPU time."
    assert waiting.gpu_hours == pytest.approx(65.0)
    assert [f.kind for f in lost(60.0, 80.0)] == ["start_up", "waiting_for_audio"]


def test_chunks_that_were_done_again_are_no_success() -> None:
    assert found_in(job(conflicts=3, again_gpu_s=20.0)) == []  # of a task that was killed before it could say so
    (finding,) = find(summarize(job(conflicts=250, again_gpu_s=1800.0)))
    assert (finding.kind, finding.severity, finding.gpu_hours) == ("done_again", "warning", 0.5)
    assert finding.sentence == "250 chunks were done more than once."
    assert "30.0 GPU-minutes, 50 % of the GPU time" in finding.evidence
    assert "--no-resume" in finding.advice


def test_what_a_task_had_under_way_is_lost_once_it_is_silent() -> None:
    task = replace(TASK, verdict=None, exit_code=None, pending=9, heard_at_ms=TASK.last_sign_ms, silent_after_s=120.0)
    device = replace(
        DEVICE, energy_integrated_j=7200.0, states={"working": StateTime(HOUR_S, 1800.0, 3000.0, 7200.0)},
        under_way=UnderWay(2, 900.0, 600.0, 1200.0, 900.0),
    )  # fmt: skip
    facts = replace(job((task,), (device,)), chunks={"done": 500, "pending": 9})
    runs, silent = (summarize(facts, now_ms=TASK.last_sign_ms + late_ms) for late_ms in (60_000, 600_000))
    killed = summarize(replace(facts, tasks=(replace(task, slurm_state="NODE_FAIL"),)))
    assert (runs.devices[0].state_s, runs.devices[0].work.lost) == ({"working": HOUR_S}, 0)
    for over in (silent, killed):
        (its,) = over.devices
        assert (its.state_s, its.work.lost) == ({"working": 2700.0, "lost": 900.0}, 2)
        assert ({state: time.busy_s for state, time in its.states.items()}, its.state_energy_j) == (
            {"working": 2400.0, "lost": 600.0}, {"working": 6000.0, "lost": 1200.0},
        )  # fmt: skip
        assert its.measured_s == {"working": 1350.0, "lost": 450.0}
        assert over.gpu_hours == pytest.approx(sum(state.gpu_hours for state in over.states.values()))
    all_of_it = replace(device, under_way=UnderWay(2, HOUR_S - 1e-9, 3000.0, 7200.0, HOUR_S - 1e-9))
    silent_all = summarize(replace(facts, devices=(all_of_it,)), now_ms=TASK.last_sign_ms + 600_000)
    assert silent_all.states.keys() == {"lost"}
    assert [finding.kind for finding in find(runs)] == []
    assert [finding.kind for finding in find(silent)] == ["tasks_silent", "lost_work"]


def test_tries_in_flight_of_a_running_task_are_not_lost() -> None:
    facts = job((replace(TASK, verdict=None, exit_code=None, pending=100),), lost_gpu_s=900.0)
    assert found_in(facts) == []
    cut_short = replace(DEVICE, states=states(0.9), work=replace(DEVICE.work, lost=3))
    assert found_in(replace(facts, devices=(cut_short,))) == ["lost_work"]


def test_a_killed_task_whose_work_was_done_by_another_asks_for_nothing() -> None:
    killed = replace(TASK, name="1_0.r0.gpu2", verdict="killed", exit_code=None, done=0)
    for word, advice in (
        ("TIMEOUT", "Its time limit was reached. Nothing is left to do."),
        (None, "The reason is not known. Nothing is left to do."),
    ):
        facts = job((TASK, replace(killed, slurm_state=word)))
        (finding,) = find(summarize(facts))
        assert (finding.kind, finding.severity, finding.lines) == ("tasks_killed", "note", ())
        assert advice in finding.advice and "submit" not in finding.advice
        assert any(f"{word} (1 task)" in figure for figure in finding.evidence) == (word is not None)


def test_a_killed_task_whose_work_another_attempt_is_doing_is_not_said_to_be_done() -> None:
    killed = replace(TASK, verdict="killed", exit_code=None, done=4)
    again = replace(TASK, name="1_0.r1.gpu2", verdict=None, exit_code=None, pending=8,
                    started_at_ms=TASK.last_sign_ms + 6000, last_sign_ms=TASK.last_sign_ms + 9000)  # fmt: skip
    facts = replace(job((killed, again)), chunks={"done": 4, "pending": 8})
    (finding,) = find(summarize(facts))
    assert (finding.kind, finding.severity) == ("tasks_killed", "note")
    assert finding.sentence == "1 of 2 tasks was killed; another attempt has taken over its work."
    assert finding.advice.endswith(". There is nothing to do.")
    ended = replace(facts, tasks=(killed, replace(again, verdict="stopped", exit_code=130)))
    (finding, *_) = find(summarize(ended))
    assert finding.sentence == "1 of 2 tasks was killed; a later attempt continued and has ended, too."
    assert finding.advice.endswith(". The rest is under “to finish it”.")
    elsewhere = replace(facts, tasks=(killed, replace(again, array_index=1, shard_count=2)))
    (finding,) = find(summarize(elsewhere))
    assert (finding.severity, finding.sentence) == ("problem", "1 of 2 tasks was killed.")
    of_all = replace(facts, tasks=(replace(killed, array_index=1, shard_count=2), replace(again, shard_count=1)))
    (finding,) = find(summarize(of_all))
    assert finding.severity == "note", "a run of all that is left has its work, too"


def test_rows_beyond_the_end_of_a_sound_file_are_not_called_unreadable_files() -> None:
    errors = ("/a.wav has 61.000 s of audio and nothing after 70.000 s",
              "/a.wav ends at 61.000 s, before the end of the chunk from 55.000 s to 65.000 s", "RIFF?")  # fmt: skip
    chunks = tuple(FailedChunk("r", f"c{n}", "failed", 3, "bad_audio", error) for n, error in enumerate(errors))
    facts = replace(job(failed=chunks), chunks={"done": 500, "failed": 3})
    rows, files = find(summarize(facts))
    assert rows.sentence == "2 chunks failed for good: bad_audio, a row beyond the end of its file."
    assert "end_ms" in rows.advice and "cannot be read" not in rows.advice
    assert "cannot be read" in files.advice and files.subjects == ("r/c2",)


def test_outside_slurm_nobody_speaks_of_slurm() -> None:
    killed = replace(TASK, job_id="local1800000000000-7", verdict="killed", exit_code=None, pending=5)
    facts = replace(job((killed,)), chunks={"done": 500, "pending": 5})
    (finding,) = find(summarize(facts))
    assert finding.sentence == "1 task was killed; 5 chunks left."
    assert finding.severity == "problem" and "start the run again" in finding.advice
    assert "Slurm" not in " ".join((finding.sentence, *finding.evidence, finding.advice))


def test_a_job_on_the_cpu_is_told_unless_it_was_asked_for() -> None:
    facts = job((replace(TASK, devices=0),), (), cpu_tries=500, cpu_audio_s=7200.0)
    (finding,) = find(summarize(facts))
    assert (finding.kind, finding.severity) == ("ran_on_cpu", "note")
    assert finding.sentence == "No GPU was used: 500 chunks ran on the CPU."
    assert "2.0 hours of audio in 1 task" in finding.evidence
    assert found_in(replace(facts, last_settings={"cpu_workers": 4})) == []


def test_many_are_told_with_their_thousands() -> None:
    killed = [replace(TASK, name=f"1_{n}", array_index=n, verdict="killed", pending=1) for n in range(24)]
    facts = job((TASK, *killed, *[replace(TASK, name=f"2_{n}") for n in range(1975)]))
    finding = next(f for f in find(summarize(facts)) if f.kind == "tasks_killed")
    assert finding.sentence == "24 of 2,000 tasks were killed; 24 chunks left."


def test_of_very_many_failed_chunks_it_is_said_that_only_some_are_named() -> None:
    chunks = tuple(FailedChunk(f"r{n}", f"r{n}", "failed", 3, "bad_audio", "no header") for n in range(1000))
    facts = replace(job(failed=chunks), chunks={"done": 10, "failed": 3000})
    (finding,) = find(summarize(facts))
    assert finding.sentence.startswith("3,000 chunks failed") and len(finding.subjects) == 1000
    assert "only the first 1,000 of 3,000 failed chunks are listed" in finding.evidence


def test_failed_tries_that_cost_much_are_told_though_no_chunk_is_missing() -> None:
    error = ErrorFacts("worker_died", 40, 40, 40, 1, "Killed")
    assert found_in(job(errors=(error,), failed_gpu_s=900.0)) == ["failed_chunks"]
    assert found_in(job(errors=(error,), failed_gpu_s=20.0)) == []


def test_failures_are_told_class_by_class_and_harmless_for_a_terminal() -> None:
    chunks = (
        FailedChunk("a", "a\x1b[2J", "failed", 3, "bad_audio", "no header\x07"),
        FailedChunk("b", "b", "failed", 3, "no_space", "disk full"),
        FailedChunk("c", "c", "poison", 2, "hang", "silent"),
    )
    facts = replace(job(failed=chunks), chunks={"done": 10, "failed": 2, "poison": 1})
    found = find(summarize(facts))
    assert Counter(finding.kind for finding in found) == {"failed_chunks": 2, "poison_chunks": 1}
    assert all(text.isprintable() for finding in found for text in (*finding.evidence, *finding.subjects))


def test_node_memory_that_ran_out_asks_for_more() -> None:
    task = replace(TASK, memory_limit_bytes=16 * 2**30, memory_peak_bytes=12 * 2**30)
    facts = job((task,), errors=(ErrorFacts("host_memory", 4, 4, 4, 1, "std::bad_alloc"),))
    (finding,) = find(summarize(facts))
    assert finding.kind == "memory_request" and finding.lines == ("#SBATCH --mem=24G",)


def test_a_request_for_next_time_has_a_margin_and_is_rounded_up() -> None:
    task = replace(TASK, memory_limit_bytes=64 * 2**30, memory_peak_bytes=10 * 2**30, time_limit_s=72 * HOUR_S)
    facts = job((task,))
    lines = [line for finding in find(summarize(facts)) for line in finding.lines]
    assert lines == ["#SBATCH --mem=13G", "#SBATCH --time=1:25:00"]


def test_nothing_is_called_too_much_while_a_task_goes_on() -> None:
    task = replace(TASK, memory_limit_bytes=64 * 2**30, memory_peak_bytes=10 * 2**30, time_limit_s=72 * HOUR_S,
                   cpus=64, cpu_mean_cores=4.0)  # fmt: skip
    goes_on = replace(task, name="1_1.r0.gpu1", array_index=1, verdict=None, exit_code=None, pending=9)
    too_much = ["memory_request", "time_request", "cpus_request"]
    assert found_in(job((task, replace(goes_on, verdict="done", exit_code=0)))) == too_much
    assert found_in(job((task, goes_on))) == []


def test_a_task_that_ended_just_in_time_is_told_so() -> None:
    assert found_in(job((replace(TASK, time_limit_s=3700.0),))) == ["time_request"]


def test_unused_cores_are_kept_where_more_workers_could_use_them() -> None:
    task = replace(TASK, cpus=48)
    assert found_in(job((task,))) == ["cpus_request"]
    assert found_in(job((task,), (replace(DEVICE, states=states(0.2)),))) == ["too_few_workers"]


def test_missing_tasks_send_the_reader_to_the_command_that_finishes_the_job() -> None:
    facts = job()
    proof = Completeness(1000, None, 500, 500, 0, 0, 0, 0, 500, missing_indices=(3,), finish=("sbatch --array=3 x",))
    (finding,) = find(summarize(facts, (3,), proof))
    assert finding.kind == "tasks_missing" and finding.lines == ()
    assert finding.advice.endswith("The command is under “to finish it”.")


def test_a_metric_that_a_device_does_not_have_is_no_gap() -> None:
    gaps = (GapFacts("Not Supported", "energy_j", 1, HOUR_S, 1),)
    assert found_in(job(gaps=gaps)) == []


def test_a_utilization_that_reads_zero_at_light_load_does_not_accuse_the_engine_of_using_the_cpu() -> None:
    def held(rises_to: float) -> DeviceFacts:
        memory = MetricFacts(100, 0.3 * 2**30, rises_to, rises_to, rises_to, rises_to)
        return replace(DEVICE, states=states(0.001), metrics={"memory_used_bytes": memory})

    assert found_in(job(devices=(held(0.9 * 2**30),))) == ["too_few_workers"]  # a model was loaded
    assert found_in(job(devices=(held(0.3 * 2**30),))) == ["ran_on_cpu"]


def test_energies_are_compared_only_as_far_as_both_were_measured() -> None:
    def energies(counted_s: float) -> DeviceFacts:
        return replace(
            DEVICE, states=states(0.9), energy_counter_j=180.0 * counted_s, energy_counter_span_s=counted_s,
            energy_integrated_j=200.0 * HOUR_S,
        )  # fmt: skip

    assert found_in(job(devices=(energies(HOUR_S),))) == ["energy_disagrees"]
    assert found_in(job(devices=(energies(0.8 * HOUR_S),))) == []


def test_two_devices_never_make_a_straggler() -> None:
    fast, slow = replace(DEVICE, states=states(0.9)), replace(DEVICE, device_id=1, states=states(0.9))
    work = replace(DEVICE.work, audio_s=3e5, chunk_p50_s=40.0)
    assert found_in(job(devices=(fast, replace(slow, work=work)))) == []
