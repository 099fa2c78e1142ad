"""Judges the names in a request: is there such a partition, feature, kind of GPU, node? And what sbatch itself says."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence

from badcjobs.preflight.facts import Asked, NameFacts, Trial
from badcjobs.preflight.finding import PROBLEM, Finding, fine, problem, warning

_MANY = 8  # names in one sentence
_NO_NAME = "()[]&|,"
# What sbatch says both of what never fits and of nodes that are drained today, for which a job would rightly wait.
_PERHAPS_LATER = ("node configuration is not available", "nodes are busy", "not available (down")
# Problems about these are said with a line to paste already; sbatch would say the same, in fewer words.
_SAID_BETTER = {"array", "time", "GPUs", "cores", "memory", "account", "partition", "constraint", "nodes"}
_NOT_NOW = ("Unable to contact", "ocket timed out", "temporarily unable")  # of the controller: it says nothing of a job


def judge_names(asked: Asked, there: NameFacts | None) -> Iterator[Finding]:
    """Compare the names in a request with those that sinfo shows."""
    if there is None:
        return
    for name in _parts(asked.partition):
        if name not in there.partitions:
            text = f"this Slurm has no partition {name} (there: {_listed(there.partitions)})"
            yield problem("partition", text, _other("partition", asked.partition, name, there.partitions, "sinfo -s"))
    for name in _features(asked.constraint):
        if name not in there.features:
            text = f"no node of {there.whose} has the feature {name} (there: {_listed(there.features)})"
            ask = "sinfo -N -O NodeList,Partition,Features"
            known = there.features if there.whose == "this Slurm" else ()  # else it may be that of another partition
            yield problem("constraint", text, _other("constraint", asked.constraint, name, known, ask))
    for option in asked.gpu_options:
        yield from _judge_kinds(option, there)
    for name in asked.node_names:
        if name not in there.nodes:
            text = f"this Slurm has no node {name} (there: {_listed(there.nodes)})"
            yield problem("nodes", text, "sinfo -N   (which nodes are there? or leave --nodelist and --exclude out)")


def _judge_kinds(option: str, there: NameFacts) -> Iterator[Finding]:
    for kind in kinds_of(option):
        if kind.lower() not in there.kinds:
            text = f"no node of {there.whose} has a GPU of kind {kind} (there: {_listed(there.kinds)})"
            any_kind = re.sub(rf"\b{re.escape(kind)}:(?=\d)", "", option)
            right = any_kind if any_kind != option else option.replace(f":{kind}", "")
            yield problem("GPUs", text, f"#SBATCH {right}   (of any kind)")


def kinds_of(option: str) -> list[str]:
    """Return the kinds of GPU that an option names: --gres=gpu:a100:2, --gpus-per-node=v100:1,a100:1."""
    kinds = []
    for one in option.partition("=")[2].split(","):
        words = re.sub(r"\(.*", "", one).removeprefix("gres").lstrip("/:").split(":")
        if option.startswith("--gres"):
            words = words[1:] if words[0] == "gpu" else []
        kinds += [word for word in words[:1] if word and not word.isdecimal()]
    return kinds


def _features(constraint: str | None) -> list[str]:
    """Return the features in ``[a|b]``, ``a&b``, ``a*2&b*1``."""
    words = re.sub(r"\*\d+", "", constraint or "").translate(dict.fromkeys(map(ord, _NO_NAME), " ")).split()
    return list(dict.fromkeys(words))


def _parts(names: str | None) -> list[str]:
    return list(dict.fromkeys(filter(None, (names or "").split(","))))


def _other(option: str, value: str | None, wrong: str, known: Sequence[str], ask: str) -> str:
    """Return the line with the name that was probably meant, or with the only one; else how to find it."""
    near = [one for one in known if one.lower() == wrong.lower()] or difflib.get_close_matches(wrong, known, n=1)
    near = near or list(known if len(known) == 1 else ())
    if not near:
        return f"{ask}   (which are there?)"
    right = re.sub(rf"(?<![\w.-]){re.escape(wrong)}(?![\w.-])", near[0], value or wrong)
    return f"#SBATCH --{option}={shlex.quote(right)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY:,} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more or "none"


def parse_trial(exit_code: int, said: str) -> Trial | None:
    """Read the answer of ``sbatch --test-only``; None where it could not ask the controller either."""
    if exit_code == 0:
        return Trial(None)
    lines = [line.strip().removeprefix("sbatch: error: ") for line in said.splitlines() if line.strip()]
    marked = [line.partition("allocation failure: ")[2] for line in lines if "allocation failure: " in line]
    refusal = (marked or lines or [f"it ended with exit code {exit_code}"])[-1]
    if any(words in refusal for words in _NOT_NOW):
        return None
    return Trial(refusal, tuple(line for line in lines if refusal not in line))


def hear_sbatch(
    findings: Iterable[Finding], named: Iterable[Finding], trial: Trial | None, name: str, *, all_work: bool = False
) -> list[Finding]:
    """Add what ``sbatch --test-only`` says, which has the last word: sinfo does not show everybody every partition.

    ``named`` is what ``judge_names`` has found, ``findings`` are all others about the script ``name``; ``all_work``:
    no node is out of work, so that none can be missed for that reason.
    """
    if trial is None:
        return [*findings, *named]
    if trial.refusal is None:
        return [*findings, fine("sbatch", f"it would take {name} (--test-only)")]
    found = [*findings, *named]
    if not any(one.severity == PROBLEM and one.subject in _SAID_BETTER for one in found):
        found.append(_refused(trial, trial.refusal, name, all_work=all_work))
    return found


def _refused(trial: Trial, refusal: str, name: str, *, all_work: bool) -> Finding:
    text, fix = f"it refuses {name}: {refusal}", f"sbatch --test-only {shlex.quote(name)}"
    if not any(words in refusal for words in _PERHAPS_LATER):
        return problem("sbatch", text, f"{fix}   (until it names a time)", trial.details)
    if all_work:
        return problem("sbatch", f"{text}; no node has all this together", f"{fix}   (and: badcjobs cluster)")
    text += "; no node has all this together, or those that have it are out of work now"
    return warning("sbatch", text, f"{fix}   (and: sinfo -R, badcjobs cluster)")
