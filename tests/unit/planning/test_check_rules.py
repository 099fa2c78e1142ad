"""The rules of ``badcjobs check``: facts in, and on a page of each topic every finding with the line that fixes it.

Each rule is seen to fire and, beside it, not to: by one task, one second, one GB less.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rooms.cluster import Asked, BatchScript, Call, Mistake, parse_signal, parse_sinfo
from rooms.planning import (
    FolderFacts,
    GpuFacts,
    ModuleFacts,
    PreflightFacts,
    Site,
    SlurmFacts,
    SourceFacts,
    check_facts,
    find_site,
    fine,
    parse_trial,
    problem,
    remarks_text,
    warning,
)
from support.pages import Pages

SOCKEYE, MINE = find_site("sockeye", Path()), Site("mine")
SCRATCH = FolderFacts("/scratch/lab/july", "/scratch/lab/july", "lustre, shared", shared=True)
START = Call(9, "exec badcjobs run m.csv --out o", before=("exec",))
SCRIPT = BatchScript(
    "job.sbatch", {"open-mode": "append"}, signal=parse_signal("B:USR1@180"), calls=(START,), modules=("gcc", "cuda")
)
HOUR_S = 3600
A = Asked


def F(site: Site | None = None, script: BatchScript | None = None, **others: Any) -> PreflightFacts:  # noqa: N802
    start = script.start if script else None
    return PreflightFacts(site=site or Site(""), script=script, start=start, home="/home/ada", **others)


def at(path: str, real: str | None = None, **more: Any) -> FolderFacts:
    return replace(SCRATCH, path=path, real=real or path, **more)


def run(**changes: Any) -> BatchScript:
    return replace(SCRIPT, **changes)


def by(*before: str, text: str = START.text, **changes: Any) -> dict[str, Any]:
    return {"calls": (replace(START, before=before, text=text, **changes),)}


def node(name: str, partition: str, gpus: str, features: str = "(null)", state: str = "idle") -> str:
    """Return the line of sinfo about a node with 64 cores and 180,000 MiB."""
    return f"{name}|{partition}|up|{state}|infinite|0/64/0/64|{features}|{gpus}|{gpus}|180000|\n"


GPUS = node("n1", "gpu", "gpu:a100:4", "Fast"), node("n2", "short", "gpu:v100:8", "gpu_mem_32")
THERE = parse_sinfo("".join([*GPUS, node("n3", "cpu", "(null)")]))
DRAINED = parse_sinfo("".join([*GPUS, node("n3", "cpu", "(null)", state="drained")]))
MANY = parse_sinfo("".join(node("n1", f"p{number}", "gpu:4") for number in range(9)))
TO_STEPS = parse_signal("USR1@180")
SUM = Site("sum", bill_cpu=1, bill_memory_gb=1, bill_gpu=10, node_memory_gb=100)
FREE = {"out": SCRATCH, "on_cluster": True}
SHELL, SRUN = by()["calls"], by("srun")["calls"]
MERGE = run(calls=(replace(START, command="merge"),))
WRONG = (Mistake(" line 3: sbatch has no option --x", "#SBATCH --y"),)
LOADED = ModuleFacts(("gcc", "cuda"), command=True, loaded=("gcc/9.4.0", "cuda/11.8"))
# Recorded with a real 22.05: exit code and words of sbatch --test-only.
TAKEN = (0, "sbatch: Job 41 to start at 2026-11-15T21:41:19 using 1 processors on nodes gpu0 in partition gpu\n")
INVALID = (
    1,
    "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
)
NOWHERE = (1, "allocation failure: Requested node configuration is not available\n")  # also where all nodes are drained
BUSY = (1, "sbatch: error: Unable to contact slurm controller (connect failure)\n")

TOPICS: dict[str, tuple[str, list[PreflightFacts]]] = {
    "out": ("out, room", [
        F(SOCKEYE, **FREE), F(SOCKEYE, out=at("/home/ada/runs")), F(SOCKEYE, out=at("/arc/project/x")), F(SOCKEYE,
            out=at("/arc/projects/x")),
        F(SOCKEYE, out=at("/home/adam/x")), F(SOCKEYE, out=at("/home/ada/s", "/scratch/x")), F(SOCKEYE,
            out=at("/scratch/x", "/home/ada/x")),
        F(SOCKEYE, out=at("/scratch/x", refusal="Read-only file system (/scratch)")), F(out=at("/home/ada/runs",
            missing=True)),
        F(replace(MINE, read_only=("~/a",)), out=at("/home/ada/a/b")), F(out=at("/data", shared=False,
            filesystem="xfs, local")),
        F(out=at("/data", shared=False, filesystem="xfs, local"), on_cluster=True), F(),
        F(out=at("/x", free_bytes=2**30 - 1)), F(out=at("/x", free_bytes=2**30))]),
    "files": ("files", [
        F(SOCKEYE, asked=A(tasks=999_999)), F(SOCKEYE, asked=A(tasks=1_000_000)), F(asked=A(tasks=100)), F(asked=A(),
            out=SCRATCH),
        *(F(site, asked=A(tasks=100), out=at("/x", free_files=many)) for site in (None, SOCKEYE) for many in (1010,
            1009)),
        F(asked=A(tasks=1), out=at("/x", free_files=5))]),
    "folders": ("submit folder, log folder", [
        *(F(SOCKEYE, run(options={} if output is None else {"output": output}), submit=at(folder)) for folder,
            output in (
            ("/home/ada/work", "/scratch/x/%A.log"), ("/home/ada/work", None), ("/scratch/x", None), ("/tmp/x", None),
                ("/tmp/x", "/dev/null"),
            ("/scratch/x", "/arc/project/x/%A.log"), ("/scratch/x", "../../home/ada/%A.log"))),
        F(SOCKEYE, run(options={"chdir": "/arc/project"}), submit=SCRATCH), F(SOCKEYE, submit=at("/arc/project/x")),
            F(None, SCRIPT, submit=at("/home/ada")),
        F(None, SCRIPT, log_folders=(at("/scratch/a b", missing=True), SCRATCH))]),
    "live files": ("live files", [
        F(), F(SOCKEYE, temporary=SCRATCH), F(temporary=SCRATCH), F(temporary=SCRATCH, live_mode="local"),
        F(temporary=at("/tmp", shared=False), live_mode="local"), F(None, run(sets_tmpdir=True), temporary=SCRATCH)]),
    "array": ("array, queue", [
        F(SOCKEYE, asked=A(tasks=9_999)), F(SOCKEYE, asked=A(tasks=10_000)), F(SOCKEYE, asked=A(tasks=10_001)),
            F(asked=A(tasks=50_000)),
        F(SOCKEYE, asked=A(), slurm=SlurmFacts(9)), *(F(asked=A(tasks=tasks, last_index=last),
            slurm=SlurmFacts(1001)) for tasks, last in (
            (1001, None), (1001, 1000), (1002, None), (10, 1000), (10, 1001))),
        F(SOCKEYE, asked=A(tasks=20_000), slurm=SlurmFacts(1001)),
        *(F(asked=A(tasks=tasks), source=SourceFacts(chunks, 0.0, 0, listed)) for tasks, chunks, listed in (
            (96, 96, None), (100, 98, None), (2, 1, None), (3, 0, None), (3, 96, 5), (4, 96, 5), (5, 96, 5), (None, 9,
                5))),
        *(F(None, script, asked=A(array="1,3,5", array_range="1-5:2"), **more) for script, more in (
            (None, FREE), (None, {}), (SCRIPT, FREE), (MERGE, FREE), (run(**by("exec", hidden=True)), FREE), (None,
                {**FREE, "has_begun": True}),
            (run(**by("exec", named=frozenset({"shard"}))), FREE)))]),
    "time and GPU-hours": ("time, GPU-hours", [
        *(F(SOCKEYE, asked=A(tasks=tasks, gpus_per_task=gpus, time_s=hours * HOUR_S)) for tasks, gpus, hours in (
            (25, 4, 24), (25, 4, 25), (100, 4, 72), (600, 4, 12), (601, 4, 12), (10_000, 4, 12), (7, 4, 100), (1, 4,
                1000), (None, 16, 168), (None, 4, 24),
            (None, 2401, 1), (None, 200_000, 1))),
        F(asked=A(tasks=9, gpus_per_task=1, time_s=600)), F(asked=A(tasks=10, gpus_per_task=1, time_s=HOUR_S)),
            F(SOCKEYE, asked=A(tasks=9, gpus_per_task=4)),
        F(SOCKEYE, asked=A(tasks=9, time_s=60)), F(SOCKEYE, asked=A(time_s=168 * HOUR_S)), F(SOCKEYE,
            asked=A(time_s=168 * HOUR_S + 1)),
        *(F(site, asked=A(tasks=tasks, gpus_per_task=4, no_time_limit=True)) for site in (SOCKEYE,
            None) for tasks in (10, 10_000)),
        F(replace(SOCKEYE, time_h=None), asked=A(tasks=10, gpus_per_task=4, no_time_limit=True))]),
    "nodes": ("GPUs, cores, memory, nodes", [
        F(SOCKEYE, asked=A(gpus_per_task=4, gpus_per_node=4, cpus_per_node=24, memory_gb_per_node=180)), F(SOCKEYE,
            asked=A(gpus_per_task=0)),
        F(SOCKEYE, asked=A(gpus_per_node=5, cpus_per_node=25, memory_gb_per_node=180.5)),
        *(F(site, asked=A(gpus_per_node=gpus, cpus_per_node=65, memory_gb_per_node=200, partition=partition),
            cluster=cluster)
          for site, gpus, partition, cluster in (
            (None, 5, "gpu", THERE), (MINE, 9, "short", THERE), (None, 9, None, THERE), (SOCKEYE, 4, "short", THERE),
                (None, 9, "gpu", None), (None, 1, "cpu", THERE))),
        *(F(SOCKEYE, run(**start), asked=asked) for start in (by("exec"), by("srun")) for asked in (
            A(nodes=2, gpus_per_task=8), A(nodes=1, gpus_per_task=4), A(gpus_per_task=5), A(gpus_per_task=4), A())),
        F(None, SCRIPT, asked=A(gpus_per_task=8)), F(None, SCRIPT, asked=A(gpus_per_task=8, gpus_per_node=4)),
            F(SOCKEYE, MERGE, asked=A(nodes=2))]),
    "billing": ("billing", [
        *(F(SOCKEYE, asked=A(gpus_per_task=gpus, memory_gb_per_node=gb, cpus=cpus, nodes=nodes)) for gpus, gb, cpus,
            nodes in (
            (4, 64, 24, None), (8, 64, 48, 2), (8, 16, 48, 2), (9, 21, 48, 2), (4, 4.8, 24, None), (4, 16, 24, None),
                (4, 16.001, 24, None), (4, None, None, None), (1, None, 6, None),
            (1, None, 7, None), (1, 2, 11, None), (1, 2, 10, None), (4, 0, 4, None), (1, 1.3, 2, None))),
        F(SOCKEYE, asked=A(gpus_per_task=1, exclusive=True)), F(SOCKEYE, asked=A(cpus=9)), F(MINE,
            asked=A(gpus_per_task=1)),
        *(F(SUM, asked=A(gpus_per_task=2, memory_gb_per_node=gb, cpus=cpus)) for gb, cpus in ((2, 2), (20, 20), (21,
            21), (2, 21))),
        *(F(replace(SOCKEYE, bill_cpu=4, bill_gpu=gpu), asked=A(gpus_per_task=8, cpus=90,
            nodes=nodes)) for gpu in (0.1, 9) for nodes in (None, 2)),
        F(replace(SOCKEYE, bill_cpu=None, bill_memory_gb=None), asked=A(gpus_per_task=1, memory_gb_per_node=90,
            cpus=9)),
        F(replace(SOCKEYE, bill_memory_gb=7), asked=A(gpus_per_task=7, memory_gb_per_node=90))]),
    "accounts": ("account, merge account", [
        *(F(SOCKEYE, script, asked=asked) for script in (None, SCRIPT, MERGE) for asked in (
            A(account="st-1-gpu"), A(account="st-1"), A(gpus_per_task=4), A(account="<alloc>-gpu", gpus_per_task=4),
                A(account="st-1-gpu", gpus_per_task=4), A())),
        F(SOCKEYE, asked=A(account="st-1-gpu", merge_account="st-2-gpu")), F(SOCKEYE, asked=A(account="st-1-gpu",
            merge_account="st-1")),
        F(SOCKEYE, asked=A(account="-gpu")), F(MINE, asked=A(account="st-1-gpu", gpus_per_task=1))]),
    "names": ("partition, constraint, GPUs, nodes", [
        *(F(asked=asked, cluster=THERE) for asked in (
            A(partition="gpu,short", constraint="[gpu_mem_32|Fast]", node_names=("n2",)), A(partition="gpu,shrt"),
                A(partition="birds"), A(constraint="FAST"),
            A(gpu_options=("--gpus-per-node=a100:2,v100:1", "--gres=gpu:V100,shard:h100:2", "--gpus=4")),
                A(constraint="Fast&gpu_mem_16*2&x.Fast"),
            A(gpu_options=("--gres=gpu:h100:4", "--gres=gpu:h100", "--gpus=h100:2")), A(node_names=("n1", "zzz",
                "zzz")), A(constraint="x", partition="cpu"),
            A(constraint="Fas", partition="gpu"), A(partition="gone", constraint="Fats"))),
        F(asked=A(partition="x"), cluster=MANY), F(asked=A(partition="cpus"), cluster=parse_sinfo(node("n", "cpu",
            "(null)"))), F(asked=A(partition="x"))]),
    "sbatch": ("sbatch, partition, GPU-hours", [
        *(F(None, SCRIPT, trial=parse_trial(*said), cluster=there) for said, there in (
            (TAKEN, THERE), (INVALID, THERE), (NOWHERE, THERE), (NOWHERE, DRAINED), (NOWHERE, None), (BUSY, None), ((1,
                ""), THERE),
            ((1, "--> Checking allocation...\nsbatch: error: no credit left\n"), THERE))),
        *(F(None, SCRIPT, trial=trial, cluster=THERE, asked=A(partition="hidden")) for trial in ((),
            ("Invalid partition",), None)),
        F(SOCKEYE, SCRIPT, trial=("no",), asked=A(tasks=50, gpus_per_task=4, time_s=100 * HOUR_S,
            account="st-x-gpu"))]),
    "script": ("start, signal, log, script, call, dependency", [
        *(F(None, run(**changes)) for changes in (
            {}, {"signal": None}, {"options": {}}, {"options": {"open-mode": "truncate"}}, {"calls": SHELL},
                {"calls": SHELL, "signal": None},
            {"calls": SHELL, "traps_signals": True}, {"calls": SRUN}, {"calls": SRUN, "signal": TO_STEPS},
                {"calls": SRUN, "signal": None}, by("exec", "srun"),
            by("exec", within="a pipeline"), by("srun", within="the background"), {"calls": (*SHELL, *SHELL)},
                {"calls": (*SHELL, *SHELL), "signal": TO_STEPS},
            {"calls": (START, *SHELL)}, {"calls": (START, START)}, {"signal": TO_STEPS},
                {"signal": parse_signal("B:HUP@180")}, {"signal": parse_signal("B:USR1@119")},
            {"signal": parse_signal("B:USR2@120")}, {"mistakes": WRONG, "near_options": WRONG, "wrong_calls": WRONG},
            by("exec", "timeout", text="exec timeout -k 5 100 badcjobs run x"), by("conda",
                text="/opt/conda run -n b srun badcjobs run x"),
            by("timeout", text="timeout 9 badcjobs run x") | {"signal": None}, by("exec", "timeout",
                within="a pipeline"))),
        *(F(None, run(signal=parse_signal(f"B:USR1@{lead_s}")), asked=A(time_s=time_s)) for lead_s, time_s in (
            (600, 600), (600, 360), (600, 361), (180, 180), (180, 181), (180, None))),
        *(F(None, run(**{"calls": MERGE.calls, **changes})) for changes in (
            {"signal": None, "options": {}}, {"options": {"dependency": "afterok:7:8,afterok:9"}},
                {"options": {"dependency": "afterany:7"}}, {"calls": ()},
            {"calls": (), "options": {"dependency": "afterok:7"}}, {"calls": (), "unread": (9, 11)}, {"calls": (),
                "unread": (9,), "wrong_calls": WRONG},
            {"calls": (), "wrong_calls": WRONG}))]),
    "grace and modules": ("grace, modules", [
        *(F(None, script, slurm=SlurmFacts(kill_wait_s=wait_s), grace_s=20) for script, wait_s in (
            (None, None), (None, 25), (None, 24), (None, 3), (MERGE, 3), (run(calls=(), unread=(3,)), 3), (SCRIPT, 3))),
        *(F(SOCKEYE, run(modules=modules)) for modules in (("gcc/9.4.0", "cuda/11.8"), ("cuda",), ("gcc-x",))),
            F(SOCKEYE), F(SOCKEYE, MERGE),
        F(SOCKEYE, run(**by("exec", "apptainer"), modules=())),
        *(F(None, script, modules=found) for script in (None, run(set_up_by="source x.sh")) for found in (
            LOADED, replace(LOADED, loaded=("gcc/9.4.0", "cudax/1"), said="Lmod error: unknown: cuda"), replace(LOADED,
                loaded=()),
            ModuleFacts(("gcc",), command=False), ModuleFacts((), command=True)))]),
    "machine": ("Slurm, clock, GPUs", [
        *(F(out=at("/x", skew_s=skew_s), slurm=SlurmFacts(skew_s=skew_s)) for skew_s in (0.0, 1.9, -2.0, 59.9, 60.0,
            -7200.0, None)),
        F(SOCKEYE), F(slurm=SlurmFacts(trouble="Unable to contact slurm controller")),
        *(F(gpus=GpuFacts(names, backend, "it says why", in_job=in_job), on_cluster=on_cluster) for names, backend,
            in_job, on_cluster in (
            (("V100", "V100", "A100"), "nvml", False, True), ((), "none", False, True), ((), "none", False, False),
                ((), "nvml", True, True),
            (("V100",), "nvidia-smi", False, True), (("GPU",), "none", True, True)))]),
}  # fmt: skip


def short(value: Any) -> str:
    """Return what is special about a value."""
    if isinstance(value, dict | tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(map(short, value.values() if isinstance(value, dict) else value)) + ")"
    if not is_dataclass(value):
        return str(value)
    if isinstance(value, Site):
        return value.name
    plain = {FolderFacts: SCRATCH, BatchScript: SCRIPT, Call: START, PreflightFacts: F()}.get(type(value))
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    usual = {field.name: field.default if plain is None else getattr(plain, field.name) for field in fields(value)}
    return " ".join(f"{name}={short(one)}" for name, one in given.items() if one != usual[name] and name != "start")


@pytest.mark.parametrize("topic", TOPICS)
def test_every_rule_fires_where_it_should_and_nowhere_else(topic: str, pages: Pages) -> None:
    subjects, cases = TOPICS[topic]
    lines = []
    for facts in cases:
        cluster = {id(THERE): "there", id(DRAINED): "drained", id(MANY): "many"}.get(id(facts.cluster), "other")
        lines.append(f"# {short(replace(facts, cluster=cluster if facts.cluster else None))}")  # type: ignore[arg-type]
        for one in check_facts(facts):
            assert one.severity == "fine" or one.fix
            assert "\n" not in one.text + (one.fix or "")
            if one.subject in subjects.split(", "):
                lines.append(
                    f"  {one.severity} {one.subject}: {one.text}" + "".join(f" / {line}" for line in one.details)
                )
                lines += [f"    try: {one.fix}"] if one.fix else []
    pages({"rules.txt": "\n".join(lines)})


def test_the_worst_comes_first_only_lines_to_paste_are_long_and_a_name_cannot_steer_the_terminal(pages: Pages) -> None:
    long = problem("out", "word " * 60, "--out " + "x" * 150, ("line 1: first", "line 2: second"))
    found = [fine("array", "100 tasks"), warning("submit folder", "a\x1b[31mb", "cd a\x1b"), long, fine("x", "")]
    pages({"all.txt": remarks_text(found), "none.txt": remarks_text([found[0]])})
