"""Judges a job script: will badcjobs hear Slurm's signals, and does a second start keep the log of the first?"""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import ModuleFacts, ScriptFacts, SlurmFacts, Start, WarningSignal
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.preflight.site import Site

HEARD = ("USR1", "USR2")  # as warnings; see badcjobs/stop.py
SIGNAL_LINE = "#SBATCH --signal=B:USR1@180"
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_PUBLISHING_S = 5  # after the grace: the last publication


def judge_script(script: ScriptFacts) -> Iterator[Finding]:
    """Judge everything that stands in the script itself."""
    for mistake in script.mistakes:
        yield problem("script", f"{script.name}: {mistake}", "sbatch --test-only " + script.name)
    if script.late_options:
        lines = ", ".join(map(str, script.late_options))
        text = f"{script.name} line {lines}: #SBATCH behind the first command is a comment to sbatch"
        yield problem("script", text, "move it above the first command")
    if script.afterok:
        text = f"{script.name}: afterok on an array with one failed task waits for ever"
        yield warning("dependency", text, "--dependency=afterany:JOB   (merge says itself what is missing)")
    if script.start is None:
        if not script.other_commands:
            text = f"{script.name} never starts badcjobs run"
            yield warning("start", text, "exec badcjobs run SOURCE --out DIR   (as its last line)")
        return
    yield from _judge_start(script, script.start)
    yield from _judge_signal(script, script.start)
    if not script.append:
        text = f"{script.name} has no --open-mode=append: a task that is requeued overwrites its first log"
        yield warning("log", text, "#SBATCH --open-mode=append")


def _judge_start(script: ScriptFacts, start: Start) -> Iterator[Finding]:
    where = f"{script.name} line {start.line}"
    if start.by_exec:
        yield fine("start", f"{where} starts badcjobs with exec")
        return
    fix = f"exec {start.text}"
    if start.by_srun and (script.signal is None or not script.signal.to_script):
        yield fine("start", f"{where} starts badcjobs with srun")
    elif script.signal is not None and script.signal.to_script:
        text = f"{where} does not start badcjobs with exec: the shell gets {script.signal.name} and dies of it"
        yield problem("start", text, fix)
    else:
        yield warning("start", f"{where} does not start badcjobs with exec: the shell keeps Slurm's signals", fix)


def _judge_signal(script: ScriptFacts, start: Start) -> Iterator[Finding]:
    signal = script.signal
    if signal is None:
        text = f"{script.name} asks for no early warning: at the time limit tasks have only KillWait to end in order"
        yield warning("signal", text, SIGNAL_LINE)
        return
    said = f"--signal={'B:' if signal.to_script else ''}{signal.name}@{signal.lead_s}"
    mistake = _signal_mistake(signal, start)
    if mistake:
        yield warning("signal", f"{script.name}: {said} {mistake}", SIGNAL_LINE)
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


def judge_modules(script: ScriptFacts | None, site: Site | None, found: ModuleFacts | None) -> Iterator[Finding]:
    """Judge the modules: in the script as the site wants them, and there to be loaded."""
    wanted = site.modules if site else ()
    if script is not None and script.start is not None and wanted:
        named = [word.partition("/")[0] for word in script.modules]
        there = [word for word in wanted if word in named]
        fix = f"module load {' '.join(wanted)}   (in the script, before badcjobs)"
        if len(there) < len(wanted):
            missing = ", ".join(word for word in wanted if word not in named)
            yield warning("modules", f"{script.name} does not load {missing}", fix)
        elif sorted(there, key=named.index) != there:
            yield warning("modules", f"{script.name} loads {' '.join(named)}; the order is {' '.join(wanted)}", fix)
    if found is None or not found.wanted:
        return
    line = f"module load {' '.join(found.wanted)}"
    missing_ones = [word for word in found.wanted if not any(_is(one, word) for one in found.loaded)]
    if not found.command:
        text = f"this machine has no module command, so nobody knows about {', '.join(found.wanted)}"
        yield warning("modules", text, f"bash -lc '{line}'   (on a login node of the cluster)")
    elif missing_ones:
        said = f": {found.said}" if found.said else ""
        text = f"{', '.join(missing_ones)} cannot be loaded{said}"
        yield problem("modules", text, f"module avail {missing_ones[0].partition('/')[0]}")
    else:
        yield fine("modules", f"{line} works here")


def _is(loaded: str, wanted: str) -> bool:
    return loaded == wanted or loaded.startswith(f"{wanted}/")
