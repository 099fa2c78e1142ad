"""The rules of ``badcjobs check``: facts in, and on a page of each topic every finding with the line that fixes it.

The facts stand in tests/data/check_facts.txt. Each rule is seen to fire and, beside it, not to: by one task, one
second, one GB less.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rooms import planning
from rooms.cluster import Asked, BatchScript, Call, Mistake, parse_signal, parse_sinfo
from rooms.planning import Site, check_facts, fine, problem, warning
from support.brief import literal
from support.pages import Pages

FILE = Path(__file__).parents[2] / "data" / "check_facts.txt"
TOPICS = dict(block.split("\n", 1) for block in FILE.read_text().split("=== ")[1:])  # subjects, then a line each
SITES = {
    "sockeye": planning.find_site("sockeye", Path()),
    "mine": Site("mine"),
    "sum": Site("sum", bill_cpu=1, bill_memory_gb=1, bill_gpu=10, node_memory_gb=100),
}
SCRATCH = planning.FolderFacts("/scratch/lab/july", "/scratch/lab/july", "lustre, shared", shared=True)
START = Call(9, "exec badcjobs run m.csv --out o", before=("exec",))
SCRIPT = BatchScript(
    "job.sbatch", {"open-mode": "append"}, signal=parse_signal("B:USR1@180"), calls=(START,), modules=("gcc", "cuda")
)
USUAL = {  # where only a part of a fact is given
    "site": Site(""),
    "script": SCRIPT,
    "merge": replace(SCRIPT, calls=(replace(START, command="merge"),)),
    "slurm": planning.SlurmFacts(),
    "gpus": planning.GpuFacts((), "nvml", "it says why"),
    "source": planning.SourceFacts(0, 0.0, 0),
    "modules": planning.ModuleFacts(("gcc", "cuda"), True, ("gcc/9.4.0", "cuda/11.8")),
}
WRONG = (Mistake(" line 3: sbatch has no option --x", "#SBATCH --y"),)
NODES = {
    "n1": "n1|gpu|up|idle|infinite|0/64/0/64|Fast|gpu:a100:4|gpu:a100:4|180000|\n",
    "n2": "n2|short|up|idle|infinite|0/64/0/64|gpu_mem_32|gpu:v100:8|gpu:v100:8|180000|\n",
    "n3": "n3|cpu|up|idle|infinite|0/64/0/64|(null)|(null)|(null)|180000|\n",
}
CLUSTERS = {
    "there": parse_sinfo("".join(NODES.values())),
    "drained": parse_sinfo("".join(NODES.values()).replace("cpu|up|idle", "cpu|up|drained")),
    "many": parse_sinfo("".join(NODES["n1"].replace("gpu|", f"p{number}|", 1) for number in range(9))),
    "cpu": parse_sinfo(NODES["n3"]),
}
SBATCH = {  # exit code and words of sbatch --test-only, recorded with a real 22.05
    "taken": (0, "sbatch: Job 41 to start at 2026-11-15T21:41:19 using 1 processors on nodes gpu0 in partition gpu\n"),
    "invalid": (
        1,
        "sbatch: error: invalid partition specified: x\nallocation failure: Invalid partition name specified\n",
    ),
    "nowhere": (1, "allocation failure: Requested node configuration is not available\n"),  # also for drained nodes
    "busy": (1, "sbatch: error: Unable to contact slurm controller (connect failure)\n"),
    "poor": (1, "--> Checking allocation...\nsbatch: error: no credit left\n"),
    "mute": (1, ""),
}


def parse_call(text: str) -> Call:
    """Return a call of badcjobs: the words before it, ``-`` for none, and its other fields behind semicolons."""
    before, *more = text.split("; ")
    values = {name: literal(value) for name, _, value in (one.partition("=") for one in more)}
    return replace(START, before=tuple(before.strip("-").split()), **values)


def parse(name: str, text: str) -> Any:
    if name == "script.signal":
        return parse_signal(text) if text else None
    if name == "script.calls":
        return tuple(map(parse_call, text.split(" | "))) if text else ()
    if name == "trial":
        return planning.parse_trial(*SBATCH[text]) if text in SBATCH else literal(text)
    if name in ("out", "submit", "temporary"):
        return replace(SCRATCH, path=text, real=text)
    if name == "log_folders":
        return tuple(replace(SCRATCH, path=path, real=path, missing="gone" in path) for path in text.split(", "))
    if name == "cluster":
        return CLUSTERS[text]
    return WRONG if text == "WRONG" else literal(text)


def facts_of(line: str) -> planning.PreflightFacts:
    """Build facts from words: ``tasks=9`` is asked for, ``out=/x out.missing=True`` is what is known about a folder."""
    facts: dict[str, Any] = {"home": "/home/ada"}
    asked: dict[str, Any] = {}
    for name, _, text in (word.partition("=") for word in shlex.split(line)):
        value = parse(name, text)
        part, _, key = name.partition(".")
        if name in SITES:
            facts["site"] = SITES[name]
        elif name in USUAL:
            facts["script" if name == "merge" else name] = USUAL[name]
        elif key:
            facts[part] = replace(facts.get(part) or USUAL[part], **{key: value})
        elif name in Asked.__dataclass_fields__:
            asked[name] = value
        else:
            facts[name] = value
    start = facts["script"].start if "script" in facts else None
    return planning.PreflightFacts(**facts, asked=Asked(**asked), start=start)


@pytest.mark.parametrize("topic", TOPICS)
def test_every_rule_fires_where_it_should_and_nowhere_else(topic: str, pages: Pages) -> None:
    subjects, *cases = TOPICS[topic].splitlines()
    lines = []
    for case in filter(None, cases):
        lines.append(f"# {case}")
        for one in check_facts(facts_of(case)):
            assert one.severity == "fine" or one.fix
            assert "\n" not in one.text + (one.fix or "")
            if one.subject in subjects.split(", "):
                lines.append(f"  {one.severity} {one.subject}: {' / '.join([one.text, *one.details])}")
                lines += [f"    try: {one.fix}"] if one.fix else []
    pages({"rules.txt": "\n".join(lines)})


def test_the_worst_comes_first_only_lines_to_paste_are_long_and_a_name_cannot_steer_the_terminal(pages: Pages) -> None:
    long = problem("out", "word " * 60, "--out " + "x" * 150, ("line 1: first", "line 2: second"))
    found = [fine("array", "100 tasks"), warning("submit folder", "a\x1b[31mb", "cd a\x1b"), long, fine("x", "")]
    pages({"all.txt": planning.remarks_text(found), "none.txt": planning.remarks_text([found[0]])})
