"""Rules of ``check`` about a job script: its options and calls, Slurm's signals, its log, its modules."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.cluster.job_script import BatchScript, Call
from badcjobs.planning.findings import Remark, fine, problem, warning
from badcjobs.planning.preflight_facts import Job, ModuleFacts, PreflightFacts, SlurmFacts
from badcjobs.report.rules import PROBLEM, WARNING

_WARNING_SIGNALS = ("USR1", "USR2")  # before the time limit
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_GOOD_LEAD_S = 180
_PUBLISHING_S = 5  # after the grace: the last publication


def check_script(facts: PreflightFacts) -> Iterator[Remark]:
    """Check the script itself, the time that Slurm leaves, and the modules."""
    job = facts.job
    script = job.script
    if script is not None:
        for mistake in script.mistakes:
            yield problem("script", f"{script.name}: {mistake.text}", mistake.fix)
        for mistake in script.ignored:
            yield warning("script", f"{script.name} {mistake.text}", mistake.fix)
        for mistake in script.wrong_calls:
            yield problem("call", f"{script.name} {mistake.text}", mistake.fix)
        if script.start is None:
            yield from _check_without_start(script, merges=job.merges)
        else:
            yield _check_start(script, script.start)
            yield _check_signal(job, script, script.start)
            yield from _check_log_and_modules(job, script, script.start)
    yield from _check_grace(job, facts.slurm)
    yield from _check_modules(script, facts.modules)


# --- a script that starts badcjobs run --------------------------------------------------------------------------------


def _check_start(script: BatchScript, start: Call) -> Remark:
    """Check that Slurm's signals reach badcjobs."""
    place = f"{script.name} line {start.line}"
    to_script = script.signal is not None and script.signal.to_script
    if script.traps_signals:
        return fine("start", f"{place}: the script answers signals itself (trap)")
    if start.by_exec or (start.by_srun and not to_script):
        return fine("start", f"{place} starts badcjobs with {'exec' if start.by_exec else 'srun'}")
    text = f"{place} does not start badcjobs with exec: the shell"
    fix = f"exec {start.text}   (as the only start: one run may have several sources)"
    if to_script:
        return problem("start", f"{text} would be killed by the warning before the time limit", fix)
    return warning("start", f"{text} does not pass on Slurm's signals", fix)


def _check_signal(job: Job, script: BatchScript, start: Call) -> Remark:
    """Check the signal before the time limit."""
    good = f"USR1@{_GOOD_LEAD_S}" if start.by_srun and not start.by_exec else f"B:USR1@{_GOOD_LEAD_S}"
    fix = job.ask("signal", good)
    signal = script.signal
    if signal is None:
        text = f"{script.name} asks for no early warning: at the time limit tasks have only KillWait to stop"
        return warning("signal", text, fix)

    name = signal.signum.name.removeprefix("SIG")
    receiver = "B:" if signal.to_script else ""
    option = f"--signal={receiver}{name}@{signal.lead_s}"
    text = f"{script.name}: {option}"
    time_s = job.request.time_s
    if time_s is not None and signal.lead_s >= time_s:
        text = f"{option} warns at once: the time limit is {time_s:,} s, so every task stops before it has begun"
        is_short = time_s <= 2 * _GOOD_LEAD_S
        return problem("signal", text, job.ask("time", "1:00:00") if is_short else fix)
    if name not in _WARNING_SIGNALS:
        handled = " and ".join(_WARNING_SIGNALS)
        return warning("signal", f"{text} is not a warning to badcjobs, which handles {handled}", fix)
    if not signal.to_script and not start.by_srun:
        text += " without B: reaches srun steps alone, and this script starts badcjobs without srun"
        return warning("signal", text, fix)
    if signal.lead_s < _LEAST_LEAD_S:
        text += f" is short: Slurm may be 30 s late; ask for {_LEAST_LEAD_S} s or more"
        return warning("signal", text, fix)
    return fine("signal", f"{option} warns the task {signal.lead_s} s before its end")


def _check_log_and_modules(job: Job, script: BatchScript, start: Call) -> Iterator[Remark]:
    """Find a log that is overwritten, and what the site wants and the script does not load; an image has its own."""
    if not script.options.get("open-mode", "").startswith("a"):
        text = f"{script.name} has no --open-mode=append: a task that is requeued overwrites its first log"
        yield warning("log", text, job.ask("open-mode", "append"))
    named = [word.partition("/")[0] for word in script.modules]
    unloaded = [word for word in job.site.modules if word not in named]
    if unloaded and not start.contained:
        fix = f"module load {' '.join(job.site.modules)}   (in the script, before badcjobs)"
        yield warning("modules", f"{script.name} does not load {', '.join(unloaded)}", fix)


# --- a script that does not -------------------------------------------------------------------------------------------


def _check_without_start(script: BatchScript, *, merges: bool) -> Iterator[Remark]:
    dependency = script.options.get("dependency", "")
    if merges and "afterok:" in dependency:
        text = f"{script.name}: --dependency={dependency} is never met once a task of the array has failed"
        right = dependency.replace("afterok:", "afterany:")
        fix = f"#SBATCH --dependency={right}   (merge reports what is missing)"
        yield warning("dependency", f"{text}, and the merge never starts", fix)
    if script.wrong_calls:
        return
    if script.unread:
        lines = ", ".join(str(line) for line in script.unread)
        text = f"not checked: line {lines} of {script.name} names badcjobs in a way that cannot be read here"
        yield fine("start", text, checked=False)
    elif script.call is None:
        text = f"{script.name} does not start badcjobs run itself"
        yield warning("start", text, "exec badcjobs run SOURCE --out DIR   (as its last line)")


# --- the grace, and modules -------------------------------------------------------------------------------------------


def _check_grace(job: Job, slurm: SlurmFacts | None) -> Iterator[Remark]:
    """Compare what running chunks get after TERM with what Slurm gives before KILL; a merge has no chunk to end."""
    if slurm is None or slurm.kill_wait_s is None or job.merges:
        return
    kill_wait_s = slurm.kill_wait_s
    grace_s = job.settings.grace_s
    if kill_wait_s >= grace_s + _PUBLISHING_S:
        text = f"Slurm waits {kill_wait_s} s between TERM and KILL; chunks get {grace_s:g} s of it"
        yield fine("grace", text)
        return
    text = f"Slurm kills {kill_wait_s} s after TERM (KillWait), but chunks get {grace_s:g} s to end ([run] grace_s)"
    shorter_s = max(0, kill_wait_s - _PUBLISHING_S)
    yield warning("grace", text, f"badcjobs run … --config run.grace_s={shorter_s}")


def _check_modules(script: BatchScript | None, modules: ModuleFacts | None) -> Iterator[Remark]:
    """Report which modules could not be loaded in a shell of its own."""
    if modules is None:
        return
    line = f"module load {' '.join(modules.names)}"
    if not modules.command:
        text = f"this machine has no module command, so {', '.join(modules.names)} cannot be checked"
        yield warning("modules", text, f"bash -lc '{line}'   (on a login node of the cluster)")
        return
    loaded = tuple(f"{module}/" for module in modules.loaded)
    missing = [module for module in modules.names if not any(name.startswith(f"{module}/") for name in loaded)]
    if not missing:
        yield fine("modules", f"{line} works here")
        return
    text = f"{', '.join(missing)} cannot be loaded"
    if modules.message:
        text += f": {modules.message}"
    severity = PROBLEM
    if script is not None and script.set_up_by:
        text += f" (tested here without the script's {script.set_up_by})"
        severity = WARNING
    yield Remark(severity, "modules", text, f"module avail {missing[0].partition('/')[0]}")
