"""What ``check`` says about a job script: its options and calls, Slurm's signals, its log, its modules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from badcjobs.cluster.job_script import CONTAINERS, SPREADING
from badcjobs.planning.findings import (
    Cases,
    Remark,
    RuleSet,
    always,
    fine_if,
    judge_all,
    one_case,
    problem,
    problem_if,
    warning,
    warning_if,
)
from badcjobs.planning.preflight_facts import PreflightFacts

HEARD = ("USR1", "USR2")  # as warnings; see task/stop.py
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_GOOD_LEAD_S = 180
_PUBLISHING_S = 5  # after the grace: the last publication


def judge_script(facts: PreflightFacts) -> Iterator[Remark]:
    """Judge everything that stands in the script itself."""
    if (script := facts.script) is not None:
        yield from (problem("script", f"{script.name}{one.text}", one.fix) for one in script.mistakes)
        yield from (warning("script", f"{script.name}{one.text}", one.fix) for one in script.near_options)
        yield from (problem("call", f"{script.name}{one.text}", one.fix) for one in script.wrong_calls)
        yield from judge_all(_STARTED if script.start else _NOT_STARTED, facts)


# --- a script that starts badcjobs run --------------------------------------------------------------------------------


def _start(facts: PreflightFacts) -> Cases:
    script, start = facts.script, facts.start
    if script is None or start is None:
        return
    signal, keeper = script.signal, start.keeper or ""
    behind = rf"(?:\S*/)?\b{re.escape(keeper)}\b.*?(?=\b(?:{'|'.join(CONTAINERS | SPREADING)})\b|\S*badcjobs)"
    without = re.sub(behind, "", start.text, count=1) if keeper else start.text
    hints = {"timeout": "   (the time limit is #SBATCH --time)"}
    hints |= {name: f"   (behind a line with {name} activate)" for name in ("conda", "mamba", "micromamba")}
    in_shell = [one for one in script.starts if not one.by_exec]
    yield {
        "where": f"{script.name} line {start.line}",
        "in_shell": in_shell,
        "lines": [str(one.line) for one in in_shell],
        "signal": signal and signal.signum.name.removeprefix("SIG"),
        "to_script": signal is not None and signal.to_script,
        "to_steps": start.by_srun and (signal is None or not signal.to_script),
        "without_exec": start.text.removeprefix("exec "),
        "keeper_hint": hints.get(keeper, ""),
        "without_keeper": without if without.startswith(("exec", "srun")) else f"exec {without}",
    }


def _signal(facts: PreflightFacts) -> Cases:
    script, start = facts.script, facts.start
    if script is None or start is None:
        return
    signal = script.signal
    name = signal.signum.name.removeprefix("SIG") if signal else ""
    who = f"--signal={'B:' if signal and signal.to_script else ''}{name}"
    long_enough = (facts.asked.time_s or 0) > 2 * _GOOD_LEAD_S
    yield {
        "signal": signal,
        "name": name,
        "said": f"{who}@{signal.lead_s if signal else 0}",
        "good": f"{'' if start.by_srun and not start.by_exec else 'B:'}USR1@{_GOOD_LEAD_S}",
        "longer": f"{who}@{_GOOD_LEAD_S}" if long_enough else "--time=1:00:00",
    }


_STARTED = (
    RuleSet(
        "start",
        _start,
        fine_if(lambda f: f.script.traps_signals, "{where}: the script answers signals itself (trap)"),
        problem_if(
            lambda f: f.start.keeper and f.start.within is None and f.signal,
            "{where} starts badcjobs behind {start.keeper}, which gets {signal}, dies of it and does not hand it on",
            "{without_keeper}{keeper_hint}",
        ),
        warning_if(
            lambda f: f.start.keeper and f.start.within is None,
            "{where} starts badcjobs behind {start.keeper}, which would not hand on an early warning",
            "{without_keeper}{keeper_hint}",
        ),
        fine_if(lambda f: not f.in_shell, "{where} starts badcjobs with exec"),
        fine_if(lambda f: f.to_steps, "{where} starts badcjobs with srun"),
        problem_if(
            lambda f: f.to_script and len(f.in_shell) > 1,
            "{script.name} starts badcjobs more than once (line {lines:list}), and a shell waits for each: it gets"
            " {signal} and dies of it",
            "exec badcjobs run SOURCE… --out DIR   (all sources in one run; or one job for each)",
        ),
        problem_if(
            lambda f: f.to_script and f.start.within,
            "{where} starts badcjobs in {start.within}, where exec does not reach the job's own shell: the shell gets"
            " {signal} and dies of it",
            "exec {without_exec}   (outside of {start.within}; what it says is in Slurm's log)",
        ),
        problem_if(
            lambda f: f.to_script,
            "{where} does not start badcjobs with exec: the shell gets {signal} and dies of it",
            "exec {without_exec}",
        ),
        warning_if(
            always,
            "{where} does not start badcjobs with exec: the shell keeps Slurm's signals",
            "exec {without_exec}",
        ),
    ),
    RuleSet(
        "signal",
        _signal,
        warning_if(
            lambda f: f.signal is None,
            "{script.name} asks for no early warning: at the time limit tasks have only KillWait to end in order",
            "#SBATCH --signal={good}",
        ),
        problem_if(
            lambda f: f.asked.time_s is not None and f.signal.lead_s >= f.asked.time_s,
            "{said} warns at once: the time limit is {asked.time_s:,} s, so every task stops before it has begun",
            "#SBATCH {longer}",
        ),
        warning_if(
            lambda f: f.name not in HEARD,
            "{script.name}: {said} is not a warning to badcjobs; it listens for " + " and ".join(HEARD),
            "#SBATCH --signal={good}",
        ),
        warning_if(
            lambda f: not f.signal.to_script and not f.start.by_srun,
            "{script.name}: {said} without B: reaches srun steps alone, and this script starts badcjobs without srun",
            "#SBATCH --signal={good}",
        ),
        warning_if(
            lambda f: f.signal.lead_s < _LEAST_LEAD_S,
            f"{{script.name}}: {{said}} is short: Slurm may be 30 s late; ask for {_LEAST_LEAD_S} s or more",
            "#SBATCH --signal={good}",
        ),
        fine_if(always, "{said} warns the task {signal.lead_s} s before its end"),
    ),
    RuleSet(
        "log",
        one_case,
        warning_if(
            lambda f: not f.script.options.get("open-mode", "").startswith("a"),
            "{script.name} has no --open-mode=append: a task that is requeued overwrites its first log",
            "#SBATCH --open-mode=append",
        ),
    ),
)


# --- a script that does not -------------------------------------------------------------------------------------------


def _dependency(facts: PreflightFacts) -> Cases:
    dependency = facts.script.options.get("dependency", "") if facts.script else ""
    if facts.script and "afterok:" in dependency and "merge" in {call.command for call in facts.script.calls}:
        yield {"dependency": dependency, "right": dependency.replace("afterok:", "afterany:")}


def _not_started(facts: PreflightFacts) -> Cases:
    if facts.script and not facts.script.wrong_calls:
        yield {"unread": [str(line) for line in facts.script.unread]}


_NOT_STARTED = (
    RuleSet(
        "dependency",
        _dependency,
        warning_if(
            always,
            "{script.name}: --dependency={dependency} is never met once a task of the array has failed, and the merge"
            " waits for ever",
            "#SBATCH --dependency={right}   (merge says itself what is missing)",
        ),
    ),
    RuleSet(
        "start",
        _not_started,
        fine_if(
            lambda f: f.unread,
            "not judged: line {unread:list} of {script.name} names badcjobs in a way that cannot be read here",
        ),
        warning_if(
            lambda f: not f.script.calls,
            "{script.name} does not start badcjobs run itself",
            "exec badcjobs run SOURCE --out DIR   (as its last line)",
        ),
    ),
)


# --- the grace, and modules -------------------------------------------------------------------------------------------


def _grace(facts: PreflightFacts) -> Cases:
    """Compare what running chunks get after TERM with what Slurm gives before KILL; a merge has no chunk to end."""
    script, kill_wait_s = facts.script, facts.slurm.kill_wait_s if facts.slurm else None
    if kill_wait_s is not None and (script is None or script.start is not None or script.unread):
        yield {"shorter_s": max(0, kill_wait_s - _PUBLISHING_S)}


def _unloaded(facts: PreflightFacts) -> Cases:
    """Find what the site wants and the script does not load; an image brings its own."""
    if facts.script is not None and facts.start is not None and not facts.start.contained:
        named = [word.partition("/")[0] for word in facts.script.modules]
        yield {"unloaded": [word for word in facts.site.modules if word not in named]}


def _modules(facts: PreflightFacts) -> Cases:
    if (found := facts.modules) is None or not found.wanted:
        return
    missing = [one for one in found.wanted if not any(f"{there}/".startswith(f"{one}/") for there in found.loaded)]
    yield {
        "line": f"module load {' '.join(found.wanted)}",
        "missing": missing,
        "said": f": {found.said}" if found.said else "",
        "set_up_by": facts.script.set_up_by if facts.script else None,
        "first": "".join(missing[:1]).partition("/")[0],
    }


GRACE = RuleSet(
    "grace",
    _grace,
    warning_if(
        lambda f: f.slurm.kill_wait_s < f.grace_s + _PUBLISHING_S,
        "Slurm kills {slurm.kill_wait_s} s after TERM (KillWait), but chunks get {grace_s:g} s to end (--grace)",
        "badcjobs run … --grace {shorter_s}",
    ),
    fine_if(
        always,
        "Slurm waits {slurm.kill_wait_s} s between TERM and KILL; chunks get {grace_s:g} s of it",
    ),
)
MODULES = (
    RuleSet(
        "modules",
        _unloaded,
        warning_if(
            lambda f: f.unloaded,
            "{script.name} does not load {unloaded:list}",
            "module load {site.modules:words}   (in the script, before badcjobs)",
        ),
    ),
    RuleSet(
        "modules",
        _modules,
        warning_if(
            lambda f: not f.modules.command,
            "this machine has no module command, so nothing is known about {modules.wanted:list}",
            "bash -lc '{line}'   (on a login node of the cluster)",
        ),
        fine_if(lambda f: not f.missing, "{line} works here"),
        warning_if(
            lambda f: f.set_up_by,
            "{missing:list} cannot be loaded{said} (tried here without the script's {set_up_by})",
            "module avail {first}",
        ),
        problem_if(always, "{missing:list} cannot be loaded{said}", "module avail {first}"),
    ),
)
