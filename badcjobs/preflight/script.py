"""Judges a job script: will badcjobs hear Slurm's signals, and does a second start keep the log of the first?

What it loads before is ``modules.py``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import Asked, Mistake, ScriptFacts, SlurmFacts, Start, WarningSignal
from badcjobs.preflight.finding import Finding, fine, problem, warning

HEARD = ("USR1", "USR2")  # as warnings; see badcjobs/stop.py
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_GOOD_LEAD_S = 180
_PUBLISHING_S = 5  # after the grace: the last publication


def judge_script(script: ScriptFacts, asked: Asked) -> Iterator[Finding]:
    """Judge everything that stands in the script itself."""
    for mistake in script.mistakes:
        yield problem("script", f"{script.name}{mistake.text}", mistake.fix)
    for mistake in script.near_options:
        yield warning("script", f"{script.name}{mistake.text}", mistake.fix)
    for mistake in script.wrong_calls:
        yield problem("call", f"{script.name}{mistake.text}", mistake.fix)
    if script.afterok is not None:
        yield warning("dependency", f"{script.name}{script.afterok.text}", script.afterok.fix)
    if script.start is None:
        if not script.other_commands:
            text = f"{script.name} does not start badcjobs run itself"
            yield warning("start", text, "exec badcjobs run SOURCE --out DIR   (as its last line)")
        return
    yield from _judge_start(script, script.start)
    yield from _judge_signal(script, script.start, asked)
    if not script.append:
        text = f"{script.name} has no --open-mode=append: a task that is requeued overwrites its first log"
        yield warning("log", text, "#SBATCH --open-mode=append")


def _judge_start(script: ScriptFacts, start: Start) -> Iterator[Finding]:
    where = f"{script.name} line {start.line}"
    to_steps = start.by_srun and (script.signal is None or not script.signal.to_script)
    if start.keeper is not None and start.within is None and not start.looped and not _is_trapped(script):
        yield _is_kept(script, start.keeper, where)
    elif all(one.by_exec and one.within is None for one in script.starts or (start,)):
        yield fine("start", f"{where} starts badcjobs with exec")
    elif to_steps and start.within == "a pipeline" and not script.pipefail:
        text = f"{where} runs badcjobs in a pipeline: the exit code is that of the last program in it"
        yield warning("start", text, f"{start.text}   (without |; what it says is in Slurm's log)")
    elif to_steps:
        yield fine("start", f"{where} starts badcjobs with srun")
    elif not _is_trapped(script):
        yield _keeps_signals(script, start, where)


def _is_kept(script: ScriptFacts, keeper: Mistake, where: str) -> Finding:
    """Say that a program between Slurm and badcjobs does not hand on what it hears."""
    text, fix = f"{where} starts badcjobs behind {keeper.text}", keeper.fix
    if "conda" in keeper.text or "mamba" in keeper.text:
        fix += f"   (behind a line with {keeper.text} activate)"
    elif keeper.text == "timeout":
        fix += "   (the time limit is #SBATCH --time)"
    if script.signal is not None:
        return problem("start", f"{text}, which gets {script.signal.name}, dies of it and does not hand it on", fix)
    return warning("start", f"{text}, which would not hand on an early warning", fix)


def _is_trapped(script: ScriptFacts) -> bool:
    """Say whether the script answers the signal itself; whether its answer is right is beyond us."""
    return (script.signal.name if script.signal else "TERM") in script.traps


def _keeps_signals(script: ScriptFacts, start: Start, where: str) -> Finding:
    """Say that a shell stands between Slurm and badcjobs, and how to take it away."""
    fix = f"exec {start.text.removeprefix('exec ')}"
    others = [one for one in script.starts if not (one.by_exec and one.within is None)]
    if start.looped or len(others) > 1:
        lines = ", ".join(str(one.line) for one in others or [start])
        text = f"{script.name} starts badcjobs more than once (line {lines}), and a shell waits for each"
        fix = "exec badcjobs run SOURCE… --out DIR   (all sources in one run; or one job for each)"
    elif start.within is not None:
        text = f"{where} starts badcjobs in {start.within}, where exec does not reach the job's own shell"
        fix += f"   (outside of {start.within}; what it says is in Slurm's log)"
    else:
        text = f"{where} does not start badcjobs with exec"
    if script.signal is not None and script.signal.to_script:
        return problem("start", f"{text}: the shell gets {script.signal.name} and dies of it", fix)
    return warning("start", f"{text}: the shell keeps Slurm's signals", fix)


def _judge_signal(script: ScriptFacts, start: Start, asked: Asked) -> Iterator[Finding]:
    signal = script.signal
    line = f"#SBATCH --signal={'' if start.by_srun and not start.by_exec else 'B:'}USR1@{_GOOD_LEAD_S}"
    if signal is None:
        text = f"{script.name} asks for no early warning: at the time limit tasks have only KillWait to end in order"
        yield warning("signal", text, line)
        return
    said = f"--signal={'B:' if signal.to_script else ''}{signal.name}@{signal.lead_s}"
    if asked.time_s is not None and signal.lead_s >= asked.time_s:
        text = f"{said} warns at once: the time limit is {asked.time_s:,} s, so every task stops before it has begun"
        keep = f"#SBATCH --signal={'B:' if signal.to_script else ''}{signal.name}@{_GOOD_LEAD_S}"
        yield problem("signal", text, keep if asked.time_s > 2 * _GOOD_LEAD_S else "#SBATCH --time=1:00:00")
    elif mistake := _signal_mistake(signal, start):
        yield warning("signal", f"{script.name}: {said} {mistake}", line)
    else:
        yield fine("signal", f"{said} warns the task {signal.lead_s} s before its end")


def _signal_mistake(signal: WarningSignal, start: Start) -> str | None:
    if signal.name not in HEARD:
        return f"is not a warning to badcjobs; it listens for {' and '.join(HEARD)}"
    if not signal.to_script and not start.by_srun:
        return "without B: reaches srun steps alone, and this script starts badcjobs without srun"
    if signal.lead_s < _LEAST_LEAD_S:
        return f"is short: Slurm may be 30 s late; ask for {_LEAST_LEAD_S} s or more"
    return None


def judge_grace(slurm: SlurmFacts | None, grace_s: float) -> Iterator[Finding]:
    """Compare what running chunks get after TERM with what Slurm gives before KILL."""
    if slurm is None or slurm.kill_wait_s is None:
        return
    if slurm.kill_wait_s < grace_s + _PUBLISHING_S:
        text = f"Slurm kills {slurm.kill_wait_s} s after TERM (KillWait), but chunks get {grace_s:g} s to end (--grace)"
        shorter = max(0, slurm.kill_wait_s - _PUBLISHING_S)
        yield warning("grace", text, f"badcjobs run … --grace {shorter}")
    else:
        yield fine("grace", f"Slurm waits {slurm.kill_wait_s} s between TERM and KILL; chunks get {grace_s:g} s of it")
