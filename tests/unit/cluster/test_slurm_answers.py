"""What Slurm's programs answer, and what is made of it: states, ends, numbers, a verdict; one line for each change."""

import itertools
import re
from pathlib import Path

import pytest
from rooms import cluster
from rooms.cluster import cluster_text, describe, parse_sinfo, sum_gpus
from rooms.devices import call_sbatch, parse_job_id
from rooms.model import JobStates, Submitted
from rooms.root import NotHere, RunFolder, SubmitSettings, SystemClock, Unanswered
from rooms.store import MergeOrder, merge
from support.behaviour import pretty
from support.brief import page
from support.cases import read_blocks, read_data, read_parts
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

SLURM = cluster.Slurm()
JOB = Submitted("4821", "4822", (0, 1, 2))
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Install a program that gives one answer after the other, the last one for ever; return how it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(*texts, name="squeue"):
        cases = "".join(f"{number}) {text}\n;;\n" for number, text in enumerate(texts[:-1], 1))
        asked = folder / f"{name}.asked"
        asked.unlink(missing_ok=True)
        note = f'printf "%s\\n" "$*" >> {asked}'
        (folder / name).write_text(f"#!/bin/sh\n{note}\ncase $(wc -l < {asked}) in\n{cases}*) {texts[-1]}\n;;\nesac\n")
        (folder / name).chmod(0o755)
        return asked

    return install


def lines(*rows):
    return f"cat <<'END'\n{chr(10).join(rows)}\nEND"


def order_of(tasks, out):
    more = {"run_arguments": ("run",), "cpu_workers": 0, "mistakes": []}
    return cluster.make_order(SubmitSettings(tasks=tasks), None, None, out=out, **more)


ASKED = "-h -r -t all -j 4821,4822 -O JobArrayID:40,State:20,exit_code:20,Reason:80"
STATES = read_parts("squeue_answers.txt")


def test_states_reasons_and_exit_codes_come_from_one_answer(answers, pages, monkeypatch):
    found = {}
    for name, text in STATES.items():
        asked = answers(lines(*text.splitlines()))
        states = SLURM.states(JOB)
        assert asked.read_text() == f"{ASKED}\n"
        ended = "ended" if cluster.has_ended(states) else "not ended"
        found[name] = [states, ended, cluster.progress_line(JOB, states, 7, 20)]
    for many, of in ((0, 20), (1, 20), (19, 20), (20, 20), (21, 20), (1999, 2000), (0, 0)):
        states = JobStates({0: "COMPLETED", 1: "RUNNING"}, "PENDING")
        found[f"{many} of {of}"] = cluster.progress_line(JOB, states, many, of)
    for state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "CONFIGURING", "FAILED"):
        ends = [cluster.has_ended(JobStates(*one)) for one in (({0: "TIMEOUT", 1: state},), ({0: "NODE_FAIL"}, state))]
        found[f"{state} of a task, of the merge job"] = ends
    pages({"states.txt": page(found)})
    orders = itertools.permutations({0: "RUNNING", 1: "FAILED", 2: "PENDING"}.items())
    assert len({cluster.progress_line(JOB, JobStates(dict(order)), 0, 1) for order in orders}) == 1
    answers(FORGOTTEN)
    assert SLURM.states(JOB) == JobStates({}, None)
    answers("exit 7")
    with pytest.raises(Unanswered, match="squeue ended with 7"):
        SLURM.states(JOB)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotHere) as refused:
        SLURM.states(JOB)
    assert (refused.value.exit_code, refused.value.fix) == (3, "run this on a login node of the cluster")


def test_a_silent_controller_is_asked_on_every_half_minute(answers, caplog, tmp_path):
    running = lines("4821_0 RUNNING 0", "4821_1 PENDING 0", "4822 PENDING 0")
    ended = lines("4822 COMPLETED 0")
    asked = answers(lines("4821_0 PENDING 0"), running, running, SILENT, SILENT, running, SILENT, ended)
    clock, reported = HandClock(), []
    started_s = clock.monotonic_s()
    order = order_of(2, tmp_path)
    result = cluster.SubmitResult(JOB, cluster.ArrayPlan(order, cluster.SourceSurvey(20), {}), found=False)
    end = cluster.follow(SLURM, result, clock, cluster.POLL_S, reported.append)
    assert asked.read_text().splitlines() == [ASKED] * 8
    assert clock.monotonic_s() - started_s == 7 * 30
    assert [line.rpartition("tasks: ")[2] for line in reported] == [
        "1 pending, 2 ended", "1 pending, 1 running, 1 ended; merge pending", "3 ended; merge completed",
    ], "one for each change"  # fmt: skip
    assert (end.array, end.merge) == ({}, "COMPLETED")
    assert len([one for one in caplog.messages if one.startswith("slurm does not answer; trying again: ")]) == 2


def test_a_followed_job_counts_published_chunks_and_remembers_every_end(answers, tmp_path):
    run, reported = tmp_path / "run", []
    TaskFile(run, index=0, states={"c0": "done", "c1": "failed"}).write()
    TaskFile(run, index=0, job_id="4000", states={"c5": "done", "c6": "done"}).write()
    order = order_of(3, run)

    def tell(line):
        reported.append(line)
        if len(reported) == 1:
            TaskFile(run, index=1, states={"c2": "done", "c3": "skipped"}).write()
            (run / "tasks" / "4821_2.r0.gpu1.sqlite").write_bytes(b"x" * 4096)

    for redo_all in (False, True):
        answers(lines("4821_0 TIMEOUT 0", "4821_1 FAILED 512", "4821_2 RUNNING 0"), lines("4822 COMPLETED 0"))
        result = cluster.SubmitResult(
            JOB, cluster.ArrayPlan(order, cluster.SourceSurvey(20), {}, redo_all=redo_all), found=False
        )
        end = cluster.follow(SLURM, result, HandClock(), cluster.POLL_S, tell)
        assert (end.array, end.exit_codes, end.merge) == ({0: "TIMEOUT", 1: "FAILED"}, {1: 2}, "COMPLETED")
    assert [line.partition(" of 20")[0].rpartition(": ")[2] for line in reported] == ["3", "4", "2", "2"]


NUMBERS, SAYS = (one.splitlines()[1:] for one in read_blocks("sbatch_answers.txt"))


def test_an_answer_of_sbatch_is_sure_unless_it_may_have_been_lost(answers, tmp_path, pages, caplog):
    named = Path("/a b|c/logs/.submission_file_1.sh")
    answers(lines("Welcome", "7|/other.sh", f"x|{named}", f"4821|{named}"))
    assert [cluster.query_number(one) for one in (named, Path("/other"))] == ["4821", None]
    script, found = tmp_path / "job.sh", {text: parse_job_id(text.replace("⏎", "\n")) for text in NUMBERS}
    script.touch()
    for text in SAYS:
        asked = answers(text, name="sbatch")
        found[text] = call_sbatch(script, "--parsable")
        assert asked.read_text() == f"--parsable {script}\n"
    found["no script"] = call_sbatch(Path("/nowhere/job.sh"))
    pages({"answers.txt": page(found)})
    answers("echo Slurm temporarily unable to accept job >&2; exec sleep 60", name="sbatch")
    answer = call_sbatch(script, patience_s=0.6)
    assert (answer.job_id, answer.sure) == (None, False)
    assert answer.said.splitlines() == ["sbatch did not answer within 1 s", "Slurm temporarily unable to accept job"]
    assert caplog.messages == ["sbatch has not answered yet; waiting up to 1 s"], "long before"


def test_the_end_of_a_task_is_told_by_squeue_accounting_or_its_last_attempt(answers, tmp_path):
    job, run = Submitted("4821", None, (0, 1, 2, 3)), RunFolder(tmp_path / "run")

    def ends(codes=None, **known):
        array = {int(key.removeprefix("t")): state for key, state in known.items()}
        found = SLURM.ends(job, JobStates(array, None, codes or {}), run)
        assert [one.log.name for one in found] == [f"4821_{index}_0_log.out" for index in range(4)]
        return [(one.state, one.exit_code, one.did_all_chunks) for one in found]

    unknown = (None, None, False)
    assert ends() == [unknown] * 4
    assert ends({0: 3, 1: 4}, t0="FAILED", t1="COMPLETED", t2="RUNNING") == [
        ("FAILED", 3, False), ("COMPLETED", None, False), unknown, unknown,
    ]  # fmt: skip
    TaskFile(run.path, index=0, verdict="stopped", states={"c0": "pending"}).write()
    TaskFile(run.path, index=0, restart=1, states={"c0": "done"}, started_at_ms=START_MS + 60_000).write()
    TaskFile(run.path, index=1, verdict="failed", states={"c1": "failed"}).write()
    TaskFile(run.path, index=2, job_id="4000", states={"c2": "done"}).write()
    merge(MergeOrder([run.path], run.job_database), SystemClock())
    own = [("COMPLETED", 0, False), ("FAILED", 0, True), unknown, unknown]
    assert ends() == own
    assert ends(t0="TIMEOUT", t1="OUT_OF_MEMORY") == [("TIMEOUT", 0, True), ("OUT_OF_MEMORY", 0, True), *own[2:]]
    said = lines("Welcome", "4821_0|FAILED", "4821_2|CANCELLED by 1000", "4821_3|PENDING", "77_3|FAILED", "4821_3|")
    asked = answers(said, name="sacct")
    assert [state for state, *_ in ends(t0="TIMEOUT")] == ["TIMEOUT", "FAILED", "CANCELLED", None]
    assert asked.read_text() == "-n -X -P -j 4821 -o JobID,State\n"
    ends(t0="COMPLETED", t1="COMPLETED", t2="COMPLETED", t3="FAILED")
    assert asked.read_text().count("\n") == 1, "no one is asked what is known"


def test_an_attempt_has_made_progress_if_it_has_settled_a_chunk(tmp_path):
    run = RunFolder(tmp_path)
    for restart, states in ((0, {"c0": "done", "c3": "pending"}), (10, {"c0": "pending"})):
        TaskFile(tmp_path, index=0, restart=restart, verdict="stopped", states=states).write()
    (run.tasks / "4821_3.r0.gpu1.sqlite").write_bytes(b"x" * 4096)
    known = [cluster.made_progress(run.tasks, f"4821_{name}") for name in ("0.r0", "0.r10", "3.r0", "9.r0")]
    assert known == [True, False, None, None]


def test_a_task_did_all_its_chunks_if_its_last_attempt_did(tmp_path):
    ways = {  # the states of the chunks of each attempt
        1: {0: ("done", "pending"), 1: ("skipped", "failed")}, 2: {0: ("done", "skipped"), 10: ("skipped", "pending")},
        3: {1: ("pending",), 9: ("pending",), 10: ("poison",)}, 4: {0: ("done",), 1: ()}, 0: {0: ("done",)},
    }  # fmt: skip
    for index, attempts in ways.items():
        for restart, states in attempts.items():
            chunks = {f"c{number}": state for number, state in enumerate(states)}
            TaskFile(tmp_path, index=index, restart=restart, states=chunks).write()
    run = RunFolder(tmp_path)
    (run.tasks / "4821_5.r0.gpu1.sqlite").write_bytes(b"x" * 4096)
    did = [cluster.did_all_chunks(run, "4821", index) for index in (1, 2, 3, 4, 5, 9, None)]
    assert did == [True, False, True, False, False, False, True], "without an array it is index 0"


# state, exit code and whether it did all its chunks, of each task
ENDS = dict(line.split(": ") for line in read_data("task_ends.txt").splitlines())


def end(text, index, log=Path("/nowhere/4821_0_0_log.out")):
    state, code, did_all = [*text.split(), "", ""][:3]
    return cluster.TaskOutcome(index, state.strip("-") or None, int(code) if code else None, log, bool(did_all))


def test_the_verdict_the_headline_and_the_lines_follow_from_the_ends(tmp_path, pages):
    cases = {name: [end(one, i) for i, one in enumerate(filter(None, text.split(", ")))] for name, text in ENDS.items()}
    cases["no array"] = [end("FAILED 1", None)]
    reported = {}
    for name, ends in cases.items():
        verdict = cluster.verdict_of(ends)
        reported[name] = [verdict, cluster.headline("4821", verdict, ends), *cluster.end_lines("4821", ends)]
    log = tmp_path / "4821_1_0_log.out"
    ends = [end("COMPLETED", 0), end("FAILED 9", 1, log)]
    for name, text in (("no log", None), ("an empty log", ""), ("a log", "x" * 3000 + "\nmodule: command not found\n")):
        if text is not None:
            log.write_text(text)
        error = cluster.no_task_started("4821", ends, then="the same command")
        shown = re.sub("x{9,}", lambda one: f"{len(one[0])} × x", str(error))
        reported[f"no one began, {name}"] = [error.exit_code, *shown.splitlines()]
    reported["with a log"] = cluster.end_lines("4821", ends)
    pages({"ends.txt": page(reported).replace(str(tmp_path), "LOGS")})


VIEWS, *blocks = read_data("sinfo_views.txt").split("=== ")
SINFO = dict(block.split("\n", 1) for block in blocks)
RECORDED, UNEVEN = SINFO["recorded"], SINFO["uneven"]


def test_the_table_its_advice_and_where_a_job_fits_best(pages):
    said = {}
    for name, where, gpus, kind in (view.split(" | ") for view in VIEWS.splitlines()[4:]):
        text = "".join(SINFO[one] for one in where.split(" + "))
        view = describe(parse_sinfo(text), int(gpus), kind.replace("-", "") or None)
        said[f"{name.replace(' ', '-')}.txt"] = cluster_text(view, 100)
        for width in (60, 80):
            tables, advice = cluster_text(view, width).rsplit("\n\n", 1)
            texts = [*tables.splitlines(), *(line for line in advice.splitlines() if "badcjobs" not in line)]
            assert name == "long names" or max(map(len, texts)) <= width, name
        if name in ("recorded", "several nodes", "of a kind"):
            said[f"{name.replace(' ', '-')}.json"] = pretty({key: view[key] for key in view if key != "nodes"})
    said["nodes.json"] = pretty(describe(parse_sinfo(RECORDED), 2, None)["nodes"][:4])

    def best(text, gpus, kind=None):
        found = describe(parse_sinfo(text), gpus, kind)["best"]
        return found and {key: found[key] for key in ("partition", "node", "free")}

    places = [(1, None), (2, None), (3, None), (4, "v100"), (1, "a100"), (2, "a100"), (5, None)]
    found = {f"recorded, {gpus} of {kind or 'any'}": best(RECORDED, gpus, kind) for gpus, kind in places}
    pages({**said, "best.txt": page({**found, **{f"uneven, {n}": best(UNEVEN, n) for n in (8, 9, 21)}})})


CELLS = read_data("sinfo_cells.txt").splitlines()  # GRES and GRES_USED, as clusters write them
NODE_STATES = """idle mixed mixed- planned idle~ idle# allocated completing idle* mixed* drained draining drained*
    down down* reserved maint idle$ mixed@ idle% idle! fail unknown inval mixed^ DRAINED*"""
NODES = {name[6:]: text for name, text in SINFO.items() if name.startswith("node: ")}


def test_cells_and_states_are_understood_whatever_their_form(pages):
    cells, states = {}, {}
    for cell in CELLS:
        gres, used = cell.split(" ")
        (found,) = parse_sinfo(f"n|gpu|up|idle|1:00|0/2/0/2|(null)|{gres}|{used}|9|\n").nodes
        cells[cell] = [f"{one.kind}: {one.used} of {one.total} used" for one in found.gpus]
    for state in NODE_STATES.split():
        (found,) = parse_sinfo(
            f"n1|gpu*|up|{state}|7-00:00:00|0/24/0/24|(null)|gpu:v100:4|gpu:v100:0(IDX:N/A)|180000|\n"
        ).nodes
        states[state] = [f"{found.free()} free", found.why_not, "takes jobs" if found.why_not is None else "takes none"]
    nodes = {name: [[one, one.why_not, one.free()] for one in parse_sinfo(text).nodes] for name, text in NODES.items()}
    pages({"cells.txt": page(cells), "states.txt": page(states), "nodes.txt": page(nodes)})


def test_gpus_are_found_by_feature_and_counted_by_kind():
    assert [one.name for one in parse_sinfo(NODES["features"]).gpu_nodes("gpu_mem_32")] == ["n1"]
    assert sum_gpus(parse_sinfo(RECORDED).nodes, "a100") == {"total": 3, "used": 2, "free": 1, "unreachable": 0}
