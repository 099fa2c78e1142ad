"""Rules of ``check`` about a job script: its options and calls, Slurm's signals, its log, its modules."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.planning.findings import (
    Advice,
    Cases,
    Remark,
    apply_rules,
    fine_if,
    problem,
    problem_if,
    rules,
    warning,
    warning_if,
)
from badcjobs.planning.preflight_facts import PreflightFacts
from badcjobs.report.rules import PROBLEM, WARNING

WARNING_SIGNALS = ("USR1", "USR2")  # before the time limit
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_GOOD_LEAD_S = 180
_PUBLISHING_S = 5  # after the grace: the last publication


def check_script(facts: PreflightFacts) -> Iterator[Remark]:
    """Check everything in the script itself."""
    script = facts.script
    if script is None:
        return
    for mistake in script.mistakes:
        yield problem("script", f"{script.name}{mistake.text}", mistake.fix)
    for mistake in script.ignored:
        yield warning("script", f"{script.name}{mistake.text}", mistake.fix)
    for mistake in script.wrong_calls:
        yield problem("call", f"{script.name}{mistake.text}", mistake.fix)
    yield from apply_rules(_STARTED if script.start else _NOT_STARTED, facts)


# --- a script that starts badcjobs run --------------------------------------------------------------------------------


def _start(facts: PreflightFacts) -> Cases:
    """Look at the line that starts badcjobs, and at the signal before the time limit."""
    script = facts.script
    start = facts.start
    if script is None or start is None:
        return
    signal = script.signal
    to_script = signal is not None and signal.to_script
    prefix = "B:" if to_script else ""
    name = ""
    lead_s = 0
    if signal is not None:
        name = signal.signum.name.removeprefix("SIG")
        lead_s = signal.lead_s
    has_time = (facts.asked.time_s or 0) > 2 * _GOOD_LEAD_S
    by_srun_alone = start.by_srun and not start.by_exec
    in_shell = [call for call in script.starts if not call.by_exec]
    yield {
        "where": f"{script.name} line {start.line}",
        "in_shell": in_shell,
        "lines": [str(call.line) for call in in_shell],
        "to_script": to_script,
        "severity": PROBLEM if to_script else WARNING,
        "fate": f"is killed by {name}" if to_script else "does not pass on Slurm's signals",
        "without_exec": start.text.removeprefix("exec "),
        "signal": signal,
        "name": name,
        "said": f"--signal={prefix}{name}@{lead_s}",
        "good": f"USR1@{_GOOD_LEAD_S}" if by_srun_alone else f"B:USR1@{_GOOD_LEAD_S}",
        "longer": f"--signal={prefix}{name}@{_GOOD_LEAD_S}" if has_time else "--time=1:00:00",
    }


_STARTED = (
    rules("start", _start)(
        fine_if("{where}: the script answers signals itself (trap)", when="script.traps_signals"),
        fine_if("{where} starts badcjobs with exec", when=lambda f: not f.in_shell),
        fine_if("{where} starts badcjobs with srun", when=lambda f: f.start.by_srun and not f.to_script),
        problem_if(
            "{script.name} starts badcjobs more than once (line {lines:list}), and a shell waits for each: it {fate}",
            "exec badcjobs run SOURCE… --out DIR   (all sources in one run; or one job for each)",
            lambda f: f.to_script and len(f.in_shell) > 1,
        ),
        Advice("{severity}", "{where} does not start badcjobs with exec: the shell {fate}", "exec {without_exec}"),
    ),
    rules("signal", _start)(
        warning_if(
            "{script.name} asks for no early warning: at the time limit tasks have only KillWait to stop",
            "#SBATCH --signal={good}",
            lambda f: f.signal is None,
        ),
        problem_if(
            "{said} warns at once: the time limit is {asked.time_s:,} s, so every task stops before it has begun",
            "#SBATCH {longer}",
            lambda f: f.asked.time_s is not None and f.signal.lead_s >= f.asked.time_s,
        ),
        warning_if(
            "{script.name}: {said} is not a warning to badcjobs, which handles " + " and ".join(WARNING_SIGNALS),
            "#SBATCH --signal={good}",
            lambda f: f.name not in WARNING_SIGNALS,
        ),
        warning_if(
            "{script.name}: {said} without B: reaches srun steps alone, and this script starts badcjobs without srun",
            "#SBATCH --signal={good}",
            lambda f: not f.signal.to_script and not f.start.by_srun,
        ),
        warning_if(
            f"{{script.name}}: {{said}} is short: Slurm may be 30 s late; ask for {_LEAST_LEAD_S} s or more",
            "#SBATCH --signal={good}",
            lambda f: f.signal.lead_s < _LEAST_LEAD_S,
        ),
        fine_if("{said} warns the task {signal.lead_s} s before its end"),
    ),
    rules("log")(
        warning_if(
            "{script.name} has no --open-mode=append: a task that is requeued overwrites its first log",
            "#SBATCH --open-mode=append",
            lambda f: not f.script.options.get("open-mode", "").startswith("a"),
        )
    ),
)


# --- a script that does not -------------------------------------------------------------------------------------------


def _not_started(facts: PreflightFacts) -> Cases:
    script = facts.script
    if script is None:
        return
    dependency = script.options.get("dependency", "")
    merges = any(call.command == "merge" for call in script.calls)
    yield {
        "dependency": dependency if merges and "afterok:" in dependency else None,
        "right": dependency.replace("afterok:", "afterany:"),
        "unread": [str(line) for line in script.unread],
    }


_NOT_STARTED = (
    rules("dependency", _not_started)(
        warning_if(
            "{script.name}: --dependency={dependency} is never met once a task of the array has failed, and the merge"
            " never starts",
            "#SBATCH --dependency={right}   (merge reports what is missing)",
            when="dependency",
        )
    ),
    rules("start", _not_started)(
        fine_if(
            "not checked: line {unread:list} of {script.name} names badcjobs in a way that cannot be read here",
            when=lambda f: f.unread and not f.script.wrong_calls,
            checked=False,
        ),
        warning_if(
            "{script.name} does not start badcjobs run itself",
            "exec badcjobs run SOURCE --out DIR   (as its last line)",
            lambda f: not f.script.calls and not f.script.wrong_calls,
        ),
    ),
)


# --- the grace, and modules -------------------------------------------------------------------------------------------


def _grace(facts: PreflightFacts) -> Cases:
    """Compare what running chunks get after TERM with what Slurm gives before KILL; a merge has no chunk to end."""
    kill_wait_s = None if facts.slurm is None else facts.slurm.kill_wait_s
    script = facts.script
    has_chunks = script is None or script.start is not None or bool(script.unread)
    if kill_wait_s is not None and has_chunks:
        yield {"shorter_s": max(0, kill_wait_s - _PUBLISHING_S)}


def _unloaded(facts: PreflightFacts) -> Cases:
    """Find what the site wants and the script does not load; an image brings its own."""
    if facts.script is not None and facts.start is not None and not facts.start.contained:
        named = [word.partition("/")[0] for word in facts.script.modules]
        yield {"unloaded": [word for word in facts.site.modules if word not in named]}


def _modules(facts: PreflightFacts) -> Cases:
    modules = facts.modules
    if modules is None or not modules.wanted:
        return
    loaded = [f"{module}/" for module in modules.loaded]
    missing = [module for module in modules.wanted if not any(one.startswith(f"{module}/") for one in loaded)]
    message = f": {modules.said}" if modules.said else ""
    unseen = None if facts.script is None else facts.script.set_up_by
    if unseen:
        message += f" (tested here without the script's {unseen})"
    yield {
        "line": f"module load {' '.join(modules.wanted)}",
        "missing": missing,
        "said": message,
        "severity": WARNING if unseen else PROBLEM,
        "first": missing[0].partition("/")[0] if missing else "",
    }


GRACE = rules("grace", _grace)(
    warning_if(
        "Slurm kills {slurm.kill_wait_s} s after TERM (KillWait), but chunks get {grace_s:g} s to end ([run] grace_s)",
        "badcjobs run … --config run.grace_s={shorter_s}",
        lambda f: f.slurm.kill_wait_s < f.grace_s + _PUBLISHING_S,
    ),
    fine_if("Slurm waits {slurm.kill_wait_s} s between TERM and KILL; chunks get {grace_s:g} s of it"),
)
MODULES = (
    rules("modules", _unloaded)(
        warning_if(
            "{script.name} does not load {unloaded:list}",
            "module load {site.modules:words}   (in the script, before badcjobs)",
            when="unloaded",
        )
    ),
    rules("modules", _modules)(
        warning_if(
            "this machine has no module command, so {modules.wanted:list} cannot be checked",
            "bash -lc '{line}'   (on a login node of the cluster)",
            lambda f: not f.modules.command,
        ),
        fine_if("{line} works here", when=lambda f: not f.missing),
        Advice("{severity}", "{missing:list} cannot be loaded{said}", "module avail {first}"),
    ),
)
