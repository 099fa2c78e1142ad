"""Preflight judgements: facts and a site's rules in, findings out, each with its numbers and the line that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rooms.cluster import Asked, BatchScript, Call, Cluster, Mistake, parse_signal, parse_sinfo
from rooms.planning import (
    FolderFacts,
    GpuFacts,
    ModuleFacts,
    PreflightFacts,
    Remark,
    Site,
    SlurmFacts,
    SourceFacts,
    apply_rules,
    below_any,
    find_site,
    fine,
    parse_trial,
    problem,
    remarks_text,
    warning,
)

from badcjobs.planning import place_rules, request_rules, script_rules

SOCKEYE = find_site("sockeye", Path())
HOME = "/home/ada"
SCRATCH = FolderFacts("/scratch/st-lab-1/july", "/scratch/st-lab-1/july", "lustre, shared", shared=True, skew_s=0.0)
START = Call(9, "badcjobs run m.csv --out o", before=("exec",))
SIGNAL = parse_signal("B:USR1@180")
APPEND = {"open-mode": "append"}
SCRIPT = BatchScript("job.sbatch", APPEND, signal=SIGNAL, calls=(START,), modules=("gcc", "cuda"))


def at(path: str, real: str | None = None, **more: object) -> FolderFacts:
    return replace(SCRATCH, path=path, real=real or path, **more)  # type: ignore[arg-type]


ALL = (
    *place_rules.OUT, request_rules.SPACING, *place_rules.PLACES, *request_rules.REQUEST, request_rules.NAMES,
    request_rules.SHARES, script_rules.GRACE, *script_rules.MODULES, *place_rules.MACHINE,
)  # fmt: skip


def facts(site: Site | None = None, script: BatchScript | None = None, **others: Any) -> PreflightFacts:
    start = script.start if script else None
    return PreflightFacts(site=site or Site(""), script=script, start=start, home=HOME, **others)


def about(subjects: str, site: Site | None = None, script: BatchScript | None = None, **others: Any) -> list[Remark]:
    """Return what is said about some subjects."""
    found = apply_rules(ALL, facts(site, script, **others))
    return [one for one in found if one.subject in subjects.split(", ")]


def told(findings: Iterable[Remark]) -> list[tuple[str, str]]:
    """Return severity and subject of each; whoever is not fine must have a line to paste."""
    listed = list(findings)
    assert all(one.fix for one in listed if one.severity != "fine")
    assert all("\n" not in (one.text + (one.fix or "")) for one in listed)
    return [(one.severity, one.subject) for one in listed]


def node(name: str, partition: str, gpus: str, features: str = "(null)") -> str:
    """Return the line of sinfo about an idle node with 64 cores and 180,000 MiB."""
    return f"{name}|{partition}|up|idle|infinite|0/64/0/64|{features}|{gpus}|{gpus}|180000|\n"


def cluster(*lines: str) -> Cluster:
    return parse_sinfo("".join(lines))


def the(severity: str, findings: Iterable[Remark]) -> Remark:
    (found,) = [one for one in findings if one.severity == severity]
    return found


# --- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "site", "expected", "words"),
    [
        (SCRATCH, SOCKEYE, ("fine", "out"), "lustre"),
        (at("/home/ada/runs"), SOCKEYE, ("problem", "out"), "~ (/home/ada)"),
        (at("/arc/project/st-lab-1/x"), SOCKEYE, ("problem", "out"), "compute nodes of sockeye cannot write"),
        (at("/arc/projects/x"), SOCKEYE, ("problem", "out"), "not below /scratch"),
        (at("/tmp/x", shared=False), SOCKEYE, ("problem", "out"), "not below /scratch"),
        (at("/home/ada/scratch/x", "/scratch/st-lab-1/x"), SOCKEYE, ("fine", "out"), "real path: /scratch"),
        (at("/scratch/x", "/home/ada/x"), SOCKEYE, ("problem", "out"), "real path: /home/ada/x"),
        (at("/home/ada/runs"), None, ("fine", "out"), "/home/ada/runs"),
        (at("/data/runs", filesystem="xfs, local", shared=False), None, ("warning", "out"), "xfs, local"),
        (at("/scratch/x", refusal="Read-only file system (/scratch)"), SOCKEYE, ("problem", "out"), "Read-only"),
    ],
)
def test_the_folder_for_results_must_be_writable_where_the_job_runs(
    out: FolderFacts, site: Site | None, expected: tuple[str, str], words: str
) -> None:
    findings = about("out", site, out=out, on_cluster=True)
    assert told(findings)[0] == expected
    assert words in findings[0].text
    assert findings[0].severity == "fine" or "--out " in (findings[0].fix or "")


def test_a_local_disk_is_fine_where_there_is_no_cluster() -> None:
    out = at("/data/runs", shared=False, missing=True)
    assert told(about("out, clock", out=out)) == [("fine", "out"), ("fine", "clock")]


@pytest.mark.parametrize(
    ("skew_s", "severity"), [(0.0, "fine"), (1.9, "fine"), (-3.5, "warning"), (59.0, "warning"), (7200.0, "problem")]
)
def test_a_clock_that_differs_is_said_with_its_seconds(skew_s: float, severity: str) -> None:
    findings = about("clock", out=at("/x", skew_s=skew_s))
    assert told(findings) == [(severity, "clock")]
    assert f"{abs(skew_s):,.1f} s" in findings[0].text
    assert told(about("clock", slurm=SlurmFacts(skew_s=skew_s)))[-1] == (severity, "clock")


def test_a_clock_nobody_could_read_is_not_judged() -> None:
    assert told(about("out, clock", out=at("/x", skew_s=None))) == [("fine", "out")]


def test_a_full_disk_is_seen_before_the_job_is() -> None:
    findings = about("out, room", out=at("/x", free_bytes=5 * 2**20))
    assert "5 MiB" in the("warning", findings).text


@pytest.mark.parametrize(
    ("tasks", "free", "site", "severity", "words"),
    [
        (100, None, SOCKEYE, "fine", "1,010 files"),
        (100, 900, SOCKEYE, "problem", "900"),
        (1_000_000, None, SOCKEYE, "problem", "10,000,010"),
        (100, None, None, "fine", "the limit is not known"),
        (100, 5000, None, "fine", "5,000"),
    ],
)
def test_files_of_the_run_are_compared_with_the_smaller_of_quota_and_room(
    tasks: int, free: int | None, site: Site | None, severity: str, words: str
) -> None:
    (found,) = about("files", site, out=replace(SCRATCH, free_files=free), asked=Asked(tasks=tasks))
    assert (found.severity, found.subject) == (severity, "files")
    assert words in found.text


def test_the_array_that_fits_the_file_quota_is_in_the_fix() -> None:
    (found,) = about("files", out=replace(SCRATCH, free_files=510), asked=Asked(tasks=100))
    assert found.fix == "#SBATCH --array=0-49"


@pytest.mark.parametrize(
    ("folder", "output", "expected"),
    [
        ("/home/ada/work", "/scratch/x/%A.log", [("problem", "submit folder")]),
        ("/home/ada/work", None, [("problem", "submit folder"), ("problem", "log folder")]),
        ("/scratch/x", None, [("fine", "submit folder")]),
        ("/tmp/x", None, [("fine", "submit folder"), ("warning", "log folder")]),
        ("/tmp/x", "/dev/null", [("fine", "submit folder")]),
        ("/scratch/x", "/arc/project/x/%A.log", [("fine", "submit folder"), ("problem", "log folder")]),
        ("/scratch/x", "../../home/ada/%A.log", [("fine", "submit folder"), ("problem", "log folder")]),
    ],
)
def test_submitting_and_logging_from_a_refused_folder_is_a_problem(
    folder: str, output: str | None, expected: list[tuple[str, str]]
) -> None:
    script = replace(SCRIPT, options={} if output is None else {"output": output})
    assert told(about("submit folder, log folder", SOCKEYE, script, submit=at(folder))) == expected


def test_without_a_site_no_folder_is_refused() -> None:
    assert told(about("submit folder, log folder", None, SCRIPT, submit=at("/home/ada"))) == []


@pytest.mark.parametrize(
    ("temporary", "site", "mode", "severity"),
    [
        (None, None, "auto", "fine"),
        (None, SOCKEYE, "auto", "fine"),
        (SCRATCH, SOCKEYE, "auto", "fine"),  # $SLURM_TMPDIR goes before TMPDIR
        (SCRATCH, None, "auto", "warning"),
        (SCRATCH, None, "local", "problem"),
        (at("/tmp", filesystem="ext4, local", shared=False), None, "local", "fine"),
    ],
)
def test_a_live_database_on_a_shared_filesystem_is_not_fine(
    temporary: FolderFacts | None, site: Site | None, mode: str, severity: str
) -> None:
    findings = about("live files", site, temporary=temporary, live_mode=mode)
    assert told(findings) == [(severity, "live files")]
    assert severity == "fine" or "lustre" in findings[0].text


def test_a_folder_is_below_a_rule_by_whole_names() -> None:
    assert below_any("/arc/project2/x", ("/arc/project",), HOME) is None
    assert below_any("/home/ada/a", ("/x", "~/a"), HOME) == "~/a (/home/ada/a)"
    assert below_any("/home/adam", ("~",), HOME) is None


# --- what the job asks for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "last", "site", "slurm", "problems"),
    [
        (100, 99, SOCKEYE, None, []),
        (10_001, None, SOCKEYE, None, ["#SBATCH --array=0-9999"]),
        (2000, None, None, SlurmFacts(max_array_size=1001), ["#SBATCH --array=0-1000"]),
        (1001, 1000, None, SlurmFacts(max_array_size=1001), []),
        (10, 5000, None, SlurmFacts(max_array_size=1001), ["#SBATCH --array=0-9"]),
        (10_000, None, SOCKEYE, None, ["#SBATCH --array=0-9998"]),  # and the merge job
        (20_000, None, SOCKEYE, SlurmFacts(1001), ["#SBATCH --array=0-9999", "#SBATCH --array=0-1000"]),
        (None, None, SOCKEYE, SlurmFacts(1001), []),
        (50_000, None, None, None, []),
    ],
)
def test_an_array_larger_than_allowed_is_refused_with_one_that_is_not(
    tasks: int | None, last: int | None, site: Site | None, slurm: SlurmFacts | None, problems: list[str]
) -> None:
    findings = about("array, queue", site, asked=Asked(tasks=tasks, last_index=last), slurm=slurm)
    told(findings)
    assert [one.fix for one in findings if one.severity == "problem"] == problems


@pytest.mark.parametrize(
    ("tasks", "gpus", "hours", "fix"),
    [
        (25, 4, 24, None),  # 2,400 exactly
        (100, 4, 72, "#SBATCH --time=6:00:00"),
        (10_000, 4, 12, "#SBATCH --array=0-49"),
        (7, 4, 100, "#SBATCH --time=85:42:00"),
        (1, 4, 1000, "#SBATCH --time=168:00:00"),  # 600 would fit the cap, but not the longest time
        (None, 16, 168, "#SBATCH --time=150:00:00"),  # a job without an array is one task
        (None, 4, 24, None),
    ],
)
def test_gpu_hours_over_the_cap_are_shown_as_a_product_with_what_fits(
    tasks: int | None, gpus: int, hours: int, fix: str | None
) -> None:
    (found,) = about("GPU-hours", SOCKEYE, asked=Asked(tasks=tasks, gpus_per_task=gpus, time_s=hours * 3600))
    assert found.severity == ("problem" if fix else "fine")
    assert f"= {(tasks or 1) * gpus * hours:,} GPU-hours" in found.text
    assert "2,400" in found.text
    assert (found.fix or "").startswith(fix or "")


def test_a_product_below_ten_gpu_hours_is_not_rounded_to_another_number() -> None:
    (found,) = about("GPU-hours", asked=Asked(tasks=9, gpus_per_task=1, time_s=600))
    assert "9 tasks × 1 GPU × 0.1667 h = 1.5 GPU-hours" in found.text


@pytest.mark.parametrize("asked", [Asked(), Asked(tasks=9, gpus_per_task=4), Asked(tasks=9, time_s=60)])
def test_gpu_hours_nobody_knows_are_not_judged(asked: Asked) -> None:
    assert about("GPU-hours", SOCKEYE, asked=asked) == []


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked(gpus_per_task=4, gpus_per_node=4, cpus_per_node=24, memory_gb_per_node=180), []),
        (Asked(nodes=2, gpus_per_task=8, gpus_per_node=4, cpus=48, cpus_per_node=24, memory_gb_per_node=180), []),
        (Asked(gpus_per_task=8, gpus_per_node=8), [("problem", "GPUs")]),
        (Asked(cpus_per_node=32), [("problem", "cores")]),
        (Asked(memory_gb_per_node=256), [("problem", "memory")]),
        (Asked(gpus_per_task=0), [("warning", "GPUs")]),
    ],
)
def test_what_a_task_wants_of_a_node_must_fit_into_one(asked: Asked, expected: list[tuple[str, str]]) -> None:
    assert told(about("GPUs, cores, memory", SOCKEYE, asked=asked)) == expected


@pytest.mark.parametrize(
    ("asked", "site", "fix"),
    [
        (Asked(gpus_per_node=9), None, "#SBATCH --gpus-per-node=8   (more: badcjobs template multinode)"),
        (Asked(gpus_per_node=8), None, None),
        (Asked(cpus_per_node=65), None, "#SBATCH --cpus-per-task=64"),
        (Asked(memory_gb_per_node=200), None, "#SBATCH --mem=180000M"),
        (Asked(gpus_per_node=8), SOCKEYE, "#SBATCH --gpus-per-node=4   (more: badcjobs template multinode)"),
        (Asked(gpus_per_node=9), Site("plain"), "#SBATCH --gpus-per-node=8   (more: badcjobs template multinode)"),
    ],
)
def test_what_no_site_file_says_about_a_node_this_slurm_may_say(
    asked: Asked, site: Site | None, fix: str | None
) -> None:
    asked = replace(asked, partition="gpu")
    findings = about("GPUs, cores, memory", site, asked=asked, cluster=cluster(node("n1", "gpu", "gpu:8")))
    assert [one.fix for one in findings] == ([fix] if fix else [])
    assert all("a node of partition gpu has" in one.text for one in findings if site is not SOCKEYE)
    assert site is SOCKEYE or about("GPUs, cores, memory", site, asked=asked) == []


def test_gpus_in_a_partition_that_has_none_are_looked_for() -> None:
    asked, there = Asked(gpus_per_node=1, partition="cpu"), cluster(node("n1", "cpu", "(null)"))
    (found,) = about("GPUs", asked=asked, cluster=there)
    assert (found.severity, found.fix) == ("problem", "sinfo -N -O NodeList,Partition,Gres   (where are GPUs?)")


NAMED = "partition, constraint, GPUs, nodes"
GPUS = node("n1", "gpu", "gpu:a100:4", "Fast"), node("n2", "short", "gpu:v100:4", "gpu_mem_32")
THERE = cluster(*GPUS, node("n3", "cpu", "(null)"))


@pytest.mark.parametrize(
    ("asked", "words", "fix"),
    [
        (Asked(partition="gpu,short", constraint="[gpu_mem_32|Fast]", node_names=("n2",)), None, ""),
        (Asked(gpu_options=("--gpus-per-node=a100:2,v100:1", "--gres=gpu:V100,shard:h100:2", "--gpus=4")), None, ""),
        (Asked(partition="gpu,shrt"), "no partition shrt (there: cpu, gpu, short)", "#SBATCH --partition=gpu,short"),
        (Asked(partition="birds"), "no partition birds", "sinfo -s   (which are there?)"),
        (
            Asked(constraint="Fast&gpu_mem_16*2"),
            "the feature gpu_mem_16 (there: Fast, gpu_mem_32)",
            "#SBATCH --constraint='Fast&gpu_mem_32*2'",
        ),
        (Asked(constraint="FAST"), "the feature FAST ", "#SBATCH --constraint=Fast"),  # Slurm tells them apart
        (Asked(gpu_options=("--gres=gpu:h100:4",)), "a GPU of kind h100 ", "#SBATCH --gres=gpu:4   (of any kind)"),
        (Asked(gpu_options=("--gres=gpu:h100",)), "(there: a100, v100)", "#SBATCH --gres=gpu   (of any kind)"),
        (Asked(gpu_options=("--gpus=h100:2",)), "kind h100", "#SBATCH --gpus=2   (of any kind)"),
        (Asked(node_names=("n1", "zzz")), "no node zzz (there: n1, n2, n3)", "sinfo -N   (which nodes"),
    ],
)
def test_what_is_asked_for_by_name_must_be_there(asked: Asked, words: str | None, fix: str) -> None:
    found = about(NAMED, asked=asked, cluster=THERE)
    assert [one.severity for one in found] == ([] if words is None else ["problem"])
    assert all((words or "") in one.text and (one.fix or "").startswith(fix) for one in found)
    assert about(NAMED, asked=asked) == []


def test_a_cluster_with_one_kind_or_none_says_so() -> None:
    (found,) = about(NAMED, asked=Asked(constraint="x", partition="cpu"), cluster=THERE)
    assert "no node of partition cpu has the feature x (there: none)" in found.text
    many = cluster(*(node("n1", f"p{number}", "gpu:4") for number in range(10)))
    (found,) = about(NAMED, asked=Asked(partition="x"), cluster=many)
    assert found.text.endswith("p6, p7 and 2 more)")


# Recorded with a real 22.05: exit code and words of sbatch --test-only.
TAKEN = (0, "sbatch: Job 41 to start at 2026-11-15T21:41:19 using 1 processors on nodes gpu0 in partition gpu\n")
INVALID = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n"
NOWHERE = "allocation failure: Requested node configuration is not available\n"  # also where all nodes are drained


@pytest.mark.parametrize(
    ("said", "expected", "words"),
    [
        (TAKEN, ("fine", "sbatch"), "it would take job.sbatch"),
        ((1, INVALID), ("problem", "sbatch"), "refuses job.sbatch: Invalid partition name specified"),
        ((1, NOWHERE), ("warning", "sbatch"), "or such nodes are down now"),
        ((1, "--> Checking allocation...\nsbatch: error: no credit left\n"), ("problem", "sbatch"), "no credit left"),
        ((1, ""), ("problem", "sbatch"), "it ended with exit code 1"),
    ],
)
def test_what_sbatch_would_say_is_asked_beforehand(
    said: tuple[int, str], expected: tuple[str, str], words: str
) -> None:
    (found,) = request_rules.check_request(facts(None, SCRIPT, trial=parse_trial(*said)))
    assert told([found]) == [expected]
    assert words in found.text
    assert said[1] != INVALID or found.details == ("invalid partition specified: nope",)


def test_sbatch_has_the_last_word_about_names_and_repeats_nothing_that_is_said_better() -> None:
    def judged(trial: tuple[str, ...] | None, asked: Asked) -> list[tuple[str, str]]:
        return told(request_rules.check_request(facts(SOCKEYE, SCRIPT, trial=trial, asked=asked, cluster=THERE)))

    hidden = Asked(partition="hidden")
    assert judged(parse_trial(*TAKEN), hidden) == [("fine", "sbatch")]
    assert judged(parse_trial(1, INVALID), hidden) == judged(None, hidden) == [("problem", "partition")]
    assert judged(parse_trial(1, NOWHERE), Asked()) == [("problem", "sbatch")]
    too_much = Asked(tasks=50, gpus_per_task=4, time_s=100 * 3600, account="st-x-gpu")
    found = judged(parse_trial(1, INVALID), too_much)
    assert ("problem", "GPU-hours") in found and found[-1] == ("problem", "sbatch")
    assert parse_trial(1, "sbatch: error: Unable to contact slurm controller (connect failure)") is None


MERGING = replace(SCRIPT, calls=(replace(START, command="merge"),))


@pytest.mark.parametrize(
    ("asked", "script", "fix"),
    [
        (Asked(account="st-x-1-gpu"), None, "--config submit.merge_account=st-x-1"),
        (
            Asked(account="st-x-1-gpu", merge_account="st-y-gpu"),
            None,
            "--config submit.merge_account=st-y",
        ),
        (Asked(account="st-x-1-gpu", merge_account="st-x-1"), None, None),
        (Asked(account="st-x-1-gpu"), MERGING, "#SBATCH --account=st-x-1"),
        (Asked(account="st-x-1"), MERGING, None),
        (Asked(account="st-x-1-gpu", gpus_per_task=4), SCRIPT, None),  # it is merged by another job
        (Asked(), None, None),
    ],
)
def test_the_account_of_gpu_jobs_is_not_for_a_merge(asked: Asked, script: BatchScript | None, fix: str | None) -> None:
    found = about("merge account", SOCKEYE, script, asked=asked)
    assert [one.fix for one in found] == ([fix] if fix else [])
    assert about("merge account", Site("x"), script, asked=asked) == []


@pytest.mark.parametrize(
    ("asked", "site", "expected"),
    [
        (Asked(time_s=168 * 3600), SOCKEYE, []),
        (Asked(time_s=169 * 3600), SOCKEYE, [("problem", "time")]),
        (Asked(no_time_limit=True), SOCKEYE, [("problem", "time")]),
        (Asked(no_time_limit=True), None, [("warning", "time")]),
        (Asked(), SOCKEYE, []),  # not said: the partition's own default counts
    ],
)
def test_a_time_must_be_allowed_and_none_at_all_is_not_the_same_as_not_said(
    asked: Asked, site: Site | None, expected: list[tuple[str, str]]
) -> None:
    assert told(about("time", site, asked=asked)) == expected


def test_gpu_hours_without_a_time_limit_have_no_end() -> None:
    asked = Asked(tasks=10, gpus_per_task=4, no_time_limit=True)
    (found,) = about("GPU-hours", SOCKEYE, asked=asked)
    assert (found.severity, found.subject) == ("problem", "GPU-hours")
    assert "10 tasks × 4 GPUs without a time limit have no end" in found.text
    assert (found.fix or "").startswith("#SBATCH --time=60:00:00 ")
    assert about("GPU-hours", asked=asked) == []


@pytest.mark.parametrize(
    ("asked", "start", "expected"),
    [
        (Asked(nodes=2, gpus_per_task=8), START, [("warning", "nodes")]),
        (Asked(nodes=2, gpus_per_task=8), replace(START, before=("srun",)), []),
        (Asked(nodes=1, gpus_per_task=4), START, []),
        (Asked(gpus_per_task=8), START, [("warning", "nodes")]),  # takes two nodes of four
        (Asked(gpus_per_task=4), START, []),
        (Asked(), START, []),
    ],
)
def test_a_task_of_several_nodes_must_be_started_on_all_of_them(
    asked: Asked, start: Call, expected: list[tuple[str, str]]
) -> None:
    assert told(about("nodes", SOCKEYE, replace(SCRIPT, calls=(start,)), asked=asked)) == expected


def test_memory_that_costs_more_than_the_gpus_is_shown_with_its_arithmetic() -> None:
    (found,) = about("billing", SOCKEYE, asked=Asked(gpus_per_task=4, memory_gb_per_node=64, cpus=24))
    assert (found.severity, found.subject) == ("warning", "billing")
    for words in ("13.3 times", "4 GPUs × 6 = 24", "64 GB × 5 = 320", "24 cores × 1 = 24", "320 an hour"):
        assert words in found.text
    assert (found.fix or "").startswith("#SBATCH --mem=16G ")  # 4 GB per GPU: with less an engine may not fit


def test_the_bill_of_several_nodes_counts_what_all_of_them_give() -> None:
    asked = Asked(nodes=2, gpus_per_task=8, gpus_per_node=4, memory_gb_per_node=64, cpus=48, cpus_per_node=24)
    (found,) = about("billing", SOCKEYE, asked=asked)
    for words in ("13.3 times", "8 GPUs × 6 = 48", "128 GB × 5 = 640", "48 cores × 1 = 48"):
        assert words in found.text
    assert (found.fix or "").startswith("#SBATCH --mem=16G ")  # of each node
    assert told(about("billing", SOCKEYE, asked=replace(asked, memory_gb_per_node=16))) == [("fine", "billing")]


@pytest.mark.parametrize(
    ("asked", "site", "severity", "words"),
    [
        (Asked(gpus_per_task=4, memory_gb_per_node=4.8, cpus=24), SOCKEYE, "fine", "24 an hour"),
        (Asked(gpus_per_task=4, memory_gb_per_node=16, cpus=24), SOCKEYE, "fine", "3.3 times"),  # it is needed
        (Asked(gpus_per_task=4, memory_gb_per_node=17, cpus=24), SOCKEYE, "warning", "3.5 times"),
        (Asked(gpus_per_task=4), SOCKEYE, "fine", "4 GPUs × 6 = 24"),
        (Asked(gpus_per_task=1, cpus=24), SOCKEYE, "warning", "cores cost 4.0 times"),
        (Asked(gpus_per_task=4, memory_gb_per_node=0), SOCKEYE, "warning", "180 GB"),  # all of the node
        (
            Asked(gpus_per_task=1, memory_gb_per_node=2, cpus=2),
            Site("sum", bill_cpu=1, bill_memory_gb=1, bill_gpu=10),
            "fine",
            "add up: 14",
        ),
    ],
)
def test_a_bill_counts_the_largest_or_the_sum_as_the_site_says(
    asked: Asked, site: Site, severity: str, words: str
) -> None:
    (found,) = about("billing", site, asked=asked)
    assert found.severity == severity
    assert words in found.text


@pytest.mark.parametrize(
    ("account", "has_script", "expected", "fix"),
    [
        ("st-lab-1-gpu", True, [("fine", "account")], None),
        ("st-lab-1", False, [("problem", "account")], "#SBATCH --account=st-lab-1-gpu"),
        (None, True, [("problem", "account")], "#SBATCH --account=<your allocation>-gpu"),
        (None, False, [("problem", "account")], "#SBATCH --account=<your allocation>-gpu"),
        ("<alloc>-gpu", True, [("problem", "account")], "#SBATCH --account=<your allocation>-gpu"),
    ],
)
def test_an_account_must_end_as_the_site_says(
    account: str | None, has_script: bool, expected: list[tuple[str, str]], fix: str | None
) -> None:
    asked = Asked(account=account, gpus_per_task=4)
    script = SCRIPT if has_script else None
    findings = about("account", SOCKEYE, script, asked=asked)
    assert told(findings) == expected
    without_gpus = replace(asked, gpus_per_task=None)
    assert not has_script or not about("account", SOCKEYE, SCRIPT, asked=without_gpus)
    assert [one.fix for one in findings if one.fix] == ([fix] if fix else [])


@pytest.mark.parametrize(
    ("tasks", "chunks", "listed", "expected"),
    [
        (4, 96, None, []),
        (100, 20, None, [("warning", "array")]),
        (3, 96, 5, [("problem", "array")]),
        (5, 96, 5, []),
        (None, 96, 5, []),
    ],
)
def test_an_array_is_compared_with_what_there_is_to_do(
    tasks: int | None, chunks: int, listed: int | None, expected: list[tuple[str, str]]
) -> None:
    assert told(about("array", asked=Asked(tasks=tasks), source=SourceFacts(chunks, 0.0, 0, listed))) == expected


def test_one_task_has_and_many_have_nothing_to_do() -> None:
    for tasks, words in ((2, "2 tasks for 1 chunk: 1 has nothing"), (3, "3 tasks for 1 chunk: 2 have nothing")):
        (found,) = about("array", asked=Asked(tasks=tasks), source=SourceFacts(1, 0.0, 0, None))
        assert found.text == f"{words} to do"


# --- the script -------------------------------------------------------------------------------------------------------


def test_a_script_as_it_should_be_has_nothing_to_fix() -> None:
    assert told(script_rules.check_script(facts(None, SCRIPT, asked=Asked(time_s=3600)))) == [
        ("fine", "start"),
        ("fine", "signal"),
    ]


@pytest.mark.parametrize(
    ("lead_s", "time_s", "fix"),
    [
        (600, 600, "#SBATCH --signal=B:USR1@180"),
        (3600, 1800, "#SBATCH --signal=B:USR1@180"),
        (180, 120, "#SBATCH --time=1:00:00"),
        (180, 181, None),
        (180, None, None),
    ],
)
def test_a_warning_that_comes_before_the_job_has_begun_is_a_problem(
    lead_s: int, time_s: int | None, fix: str | None
) -> None:
    script = replace(SCRIPT, signal=replace(SIGNAL, lead_s=lead_s))
    said = script_rules.check_script(facts(None, script, asked=Asked(time_s=time_s)))
    found = [one for one in said if one.severity == "problem"]
    assert [(one.subject, one.fix) for one in found] == ([("signal", fix)] if fix else [])


SHELL = replace(START, before=())
SRUN = replace(START, before=("srun",))
MERGE = replace(SHELL, command="merge")
TO_STEPS = replace(SIGNAL, to_script=False)
WRONG = Mistake(" line 3: sbatch has no option --x", "#SBATCH --y")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"signal": None}, [("warning", "signal")]),
        ({"options": {}}, [("warning", "log")]),
        ({"calls": (SHELL,)}, [("problem", "start")]),  # USR1 kills a shell that waits for its child
        ({"calls": (SHELL,), "signal": None}, [("warning", "start"), ("warning", "signal")]),
        ({"calls": (SRUN,), "signal": TO_STEPS}, []),
        ({"calls": (SRUN,)}, [("problem", "start")]),
        ({"calls": (replace(START, before=("exec", "srun")),)}, []),
        ({"calls": (replace(START, within="a pipeline"),)}, [("problem", "start")]),
        ({"calls": (replace(START, within="the background"),)}, [("problem", "start")]),
        ({"calls": (START, SHELL)}, [("problem", "start")]),
        ({"calls": (START, START)}, []),  # two branches
        ({"calls": (SHELL,), "traps_signals": True}, []),  # its own answer, which may be right
        ({"signal": TO_STEPS}, [("warning", "signal")]),
        ({"signal": parse_signal("B:HUP@180")}, [("warning", "signal")]),
        ({"signal": parse_signal("B:USR1@60")}, [("warning", "signal")]),
        ({"signal": parse_signal("B:USR2@120")}, []),
        ({"mistakes": (WRONG, WRONG)}, [("problem", "script"), ("problem", "script")]),
        ({"near_options": (WRONG,)}, [("warning", "script")]),
        ({"wrong_calls": (WRONG,)}, [("problem", "call")]),
        ({"calls": (MERGE,), "options": {"dependency": "afterok:7"}}, [("warning", "dependency")]),
        ({"options": {**APPEND, "dependency": "afterok:7"}}, []),  # the job before need not be an array
        ({"calls": ()}, [("warning", "start")]),
        ({"calls": (), "unread": (9,)}, []),
        ({"calls": (MERGE,), "signal": None, "options": {}}, []),
    ],
)
def test_what_would_keep_signals_or_logs_away_is_found(
    changes: dict[str, object], expected: list[tuple[str, str]]
) -> None:
    script = replace(SCRIPT, **changes)  # type: ignore[arg-type]
    assert [one for one in told(script_rules.check_script(facts(None, script))) if one[0] != "fine"] == expected


@pytest.mark.parametrize(
    ("slurm", "grace_s", "expected"),
    [
        (None, 20, []),
        (SlurmFacts(), 20, []),
        (SlurmFacts(kill_wait_s=30), 20, [("fine", "grace")]),
        (SlurmFacts(kill_wait_s=20), 20, [("warning", "grace")]),
        (SlurmFacts(kill_wait_s=3), 20, [("warning", "grace")]),
    ],
)
def test_the_grace_must_fit_into_what_slurm_gives(
    slurm: SlurmFacts | None, grace_s: float, expected: list[tuple[str, str]]
) -> None:
    assert told(about("grace", slurm=slurm, grace_s=grace_s)) == expected


LOADED = ModuleFacts(("gcc", "cuda"), command=True, loaded=("gcc/9.4.0", "cuda/11.8", "zlib/1.2"))


@pytest.mark.parametrize(
    ("modules", "found", "expected"),
    [
        (("gcc", "cuda"), LOADED, [("fine", "modules")]),
        (("gcc/9.4.0", "cuda/11.8"), None, []),
        (("cuda",), None, [("warning", "modules")]),
        (("gcc", "cuda"), replace(LOADED, loaded=("gcc/9.4.0",), said="unknown: cuda"), [("problem", "modules")]),
        (("gcc", "cuda"), ModuleFacts(("gcc", "cuda"), command=False), [("warning", "modules")]),
    ],
)
def test_modules_that_the_site_wants_are_loaded_and_are_there(
    modules: tuple[str, ...], found: ModuleFacts | None, expected: list[tuple[str, str]]
) -> None:
    assert told(about("modules", SOCKEYE, replace(SCRIPT, modules=modules), modules=found)) == expected


# --- this machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "on_cluster", "severity"),
    [
        (GpuFacts(("V100",), "nvml", "it works"), True, "fine"),
        (GpuFacts((), "none", "no NVIDIA driver on this machine"), True, "fine"),
        (GpuFacts((), "none", "no NVIDIA driver on this machine"), False, "warning"),
        (GpuFacts((), "nvml", "CUDA_VISIBLE_DEVICES is unset", in_job=True), True, "warning"),
        (GpuFacts(("V100",), "nvidia-smi", "no library"), True, "warning"),
        (GpuFacts(("GPU",), "none", "no library", in_job=True), True, "warning"),
    ],
)
def test_no_gpu_is_fine_on_a_login_node_and_nowhere_else(gpus: GpuFacts, on_cluster: bool, severity: str) -> None:
    (found,) = about("GPUs", gpus=gpus, on_cluster=on_cluster)
    assert told([found]) == [(severity, "GPUs")]
    assert gpus.names or gpus.why in found.text


def test_a_slurm_that_does_not_answer_is_a_warning_and_none_at_all_is_fine() -> None:
    assert told(about("Slurm", SOCKEYE)) == [("fine", "Slurm")]
    assert told(about("Slurm", SOCKEYE, slurm=SlurmFacts(trouble="Unable to contact slurm controller"))) == [
        ("warning", "Slurm")
    ]


# --- the text ---------------------------------------------------------------------------------------------------------


def test_the_worst_comes_first_and_only_lines_to_paste_are_longer_than_100() -> None:
    long = problem("out", "word " * 60, "--out " + "x" * 150, ("line 1: first", "line 2: second"))
    text = remarks_text([fine("array", "100 tasks"), warning("submit folder", "hm", "cd /x"), long])
    lines = text.splitlines()
    assert lines[0] == "1 problem and 1 warning: not ready"
    assert [line.split()[0] for line in lines[1:] if line[2:3].strip()] == ["problem", "warning", "fine"]
    assert [line for line in lines if len(line) > 100] == [line for line in lines if "--out xxx" in line]
    assert any(line.strip() == "line 2: second" for line in lines)


def test_without_a_problem_it_is_ready_and_a_name_cannot_steer_the_terminal() -> None:
    assert remarks_text([fine("a", "b")]).startswith("0 problems and 0 warnings: ready to submit\n")
    assert "\x1b" not in remarks_text([warning("out", "a\x1b[31mb", "ls a\x1b")])
