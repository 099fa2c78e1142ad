"""Rules of ``check`` about what a job asks of Slurm, and about its script: its calls, signals, log and modules."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from badcjobs.cluster.job_script import BatchScript, Call
from badcjobs.model import Billing
from badcjobs.planning.bill import FASTEST, usual_request
from badcjobs.planning.findings import Remark, fine, problem, warning
from badcjobs.planning.plan_tasks import USUAL_TIME_H
from badcjobs.planning.preflight_facts import Job
from badcjobs.planning.site import Site
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.seams import Environ
from badcjobs.settings import SubmitSettings
from badcjobs.words import clock, count
from badcjobs.workers.engines import traits_of

_WARNING_SIGNALS = ("USR1", "USR2")  # before the time limit
_LEAST_LEAD_S = 120  # Slurm looks at its limits every 30 s, so a warning may come that much late
_GOOD_LEAD_S = 180
_PUBLISHING_S = 5  # after the grace: the last publication
_MUCH_LESS = 0.8  # of the bill: a request that saves less is no better
_AGAIN = "what is left is done when you submit it again"
_CAN_WAIT = ("nodes are busy", "not available (down")  # messages of sbatch about nodes for which a job can wait


# --- the array and its time -------------------------------------------------------------------------------------------


def _check_spacing(job: Job) -> Iterator[Remark]:
    """Check that tasks can know their place in the array; a run that has begun already knows it."""
    start = job.start
    if job.request.array_range is None or job.has_begun:
        return
    may_have_begun = job.out is None
    if job.script is not None:
        if start is None or "shard" in start.values:
            return
        may_have_begun = may_have_begun or start.hidden
    text = f"--array={job.request.array} is a list, and Slurm hides the spacing of a list from its tasks: they know"
    text += " their shares only in a run that has begun already"
    severity = WARNING if may_have_begun else PROBLEM
    yield Remark(severity, "array", text, job.ask("array", job.request.array_range))


def _check_array(job: Job) -> Iterator[Remark]:
    """Compare the array with what the site and this Slurm allow."""
    tasks = job.request.tasks
    if tasks is None:
        return
    limits = job.site.task_limits()
    if limits:
        most, why = min(limits)
        text = f"{count(tasks, 'task')}; {why}"
        if tasks > most:
            yield problem("array", text, job.ask_tasks(most))
        else:
            yield fine("array", text)
    if job.slurm is not None and job.slurm.max_array_size:
        most = job.slurm.max_array_size
        last = max(tasks - 1, job.request.last_index or 0)
        if last >= most:
            text = f"the array's last index is {last:,}, but this Slurm allows less than {most:,} (MaxArraySize)"
            yield problem("array", text, job.ask_tasks(min(tasks, most)))


def _check_shares(job: Job) -> Iterator[Remark]:
    """Compare the number of tasks with what there is to share."""
    tasks = job.request.tasks
    if tasks is None or job.source is None:
        return
    chunks = job.source.chunks
    listed = job.source.manifests_listed or 0
    if tasks < listed:
        text = f"the list names {listed:,} manifests, but the array has {tasks:,} tasks: the run is refused"
        yield problem("array", text, job.ask_tasks(listed))
    elif tasks > chunks:
        text = f"{count(tasks, 'task')} for {count(chunks, 'chunk')}: {tasks - chunks:,} with nothing to do"
        yield warning("array", text, job.ask_tasks(max(1, chunks)))


def _check_time(job: Job) -> Iterator[Remark]:
    most_h = job.site.time_h
    hours = (job.request.time_s or 0) / 3600
    if job.request.no_time_limit:
        text = "--time asks for no time limit: nothing warns a task before its end, and no plan can be kept"
        severity = PROBLEM if most_h else WARNING
        yield Remark(severity, "time", text, job.ask("time", clock(job.site.time_limit_s(USUAL_TIME_H)), _AGAIN))
    elif most_h and hours > most_h:
        text = f"--time asks for {hours:,.4g} h, but {job.site.name} allows {most_h:,.4g} h"
        yield problem("time", text, job.ask("time", clock(job.site.time_limit_s(hours))))


def _check_gpu_hours(job: Job) -> Iterator[Remark]:
    """Multiply tasks, GPUs and time: a cap counts what runs and waits together."""
    gpus = job.request.gpus_per_task
    if not gpus or job.request.time_s is None:
        return
    tasks = job.request.tasks or 1
    gpu_s = gpus * job.request.time_s  # of a task
    total = tasks * gpu_s / 3600
    hours = f"{job.request.time_s / 3600:,.4g} h"
    text = f"{count(tasks, 'task')} × {count(gpus, 'GPU')} × {hours} = {round(total, 2):,.12g} GPU-hours"
    cap = job.site.gpu_hours
    if not cap:
        yield fine("GPU-hours", f"{text}; no cap is known")
        return
    text += f"; {job.site.name} allows {cap:,.12g} running and queued together"
    fitting_tasks = int(3600 * cap // gpu_s)
    if total <= cap:
        yield fine("GPU-hours", text)
    elif fitting_tasks:
        yield problem("GPU-hours", text, job.ask_tasks(fitting_tasks, _AGAIN))
    else:
        yield problem("GPU-hours", text, job.ask("time", clock(job.site.time_limit_s(cap / gpus)), _AGAIN))


# --- nodes, workers and cost -----------------------------------------------------------------------------------------


def _check_node(job: Job) -> Iterator[Remark]:
    """Compare what a task wants of one node with a node of the site."""
    request = job.request
    site = job.site
    if request.gpus_per_task == 0:
        yield warning("GPUs", "the job asks Slurm for no GPU", job.ask("gpus-per-node", 1))
    sizes = (
        ("GPUs", "GPUs", request.gpus_per_node, site.node_gpus, "gpus-per-node", ""),
        ("cores", "cores", request.cpus_per_node, site.node_cpus, "cpus-per-task", ""),
        ("memory", "GB of memory", request.memory_gb_per_node, site.node_memory_gb, "mem", "G"),
    )
    for subject, unit, amount, most, option, ending in sizes:
        if amount and most and amount > most:
            text = f"a task asks for {amount:,.4g} {unit} on a node, but a node of {site.name} has {most:,.4g}"
            yield problem(subject, text, job.ask(option, f"{int(most)}{ending}"))
    if job.start is not None and (request.nodes or 1) > 1 and not job.start.by_srun:
        text = f"the script asks for {request.nodes} nodes, but line {job.start.line} starts badcjobs on the first"
        fix = job.ask("nodes", 1, "and more array tasks; or srun: badcjobs template multinode")
        yield warning("nodes", f"{text} alone: the GPUs of the others are idle", fix)


def with_needs(
    job: Job,
    prefer: str,
    environ: Environ,
    cwd: Path,
) -> Job:
    """Estimate memory and workers of a task: as many as its cores and memory hold, but at least one on each GPU."""
    request = job.request
    settings = job.settings
    gpus = request.gpus_per_node or request.gpus_per_task

    # As submit and templates request it, which do not look at the source.
    usual = SubmitSettings(gpus_per_task=gpus, cpus=request.cpus_per_node)
    if request.cpus_per_node:
        prefer = FASTEST
    job = replace(job, needed_gb=usual_request(usual, prefer, settings, job.site, environ, cwd).mem_gb)
    declares_memory = traits_of(settings.engine).memory_per_worker is not None
    lengths = None if job.source is None else job.source.lengths
    workers_known = settings.workers_wanted or (declares_memory and lengths)
    if not workers_known or not request.gpus_per_task:
        return job

    settings = replace(settings, workers_per_gpu=str(settings.workers_wanted or 1))
    least = usual_request(SubmitSettings(gpus_per_task=gpus), FASTEST, settings, Site(""), environ, cwd, lengths)
    job = replace(job, workers=least.gpus * least.workers)
    if not declares_memory:
        return job
    return replace(job, needed_gb=max(job.needed_gb, least.mem_gb), workers_gb=least.mem_gb)


def _check_workers(job: Job) -> Iterator[Remark]:
    """Compare memory and cores with the workers that a task starts in any case."""
    memory_gb = job.request.memory_gb_per_node
    cpus = job.request.cpus_per_node
    workers = job.workers
    least_gb = job.workers_gb
    if memory_gb and memory_gb < least_gb:
        text = f"{memory_gb:,.3g} GB may not hold {count(workers, 'worker')}, which may need {least_gb}"
        yield warning(
            "memory",
            text,
            job.ask("mem", f"{least_gb}G", "or fewer workers, or shorter chunks"),
        )
    if cpus and cpus < workers:
        text = f"{count(cpus, 'core')} for {count(workers, 'worker')}: each keeps one busy"
        yield warning("cores", text, job.ask("cpus-per-task", workers, "or fewer workers"))


def check_billing(job: Job) -> Iterator[Remark]:
    """Show what a task is billed, and whether memory or cores cost more than its GPUs for no good reason."""
    request = job.request
    site = job.site
    billing = site.billing
    gpus = request.gpus_per_task
    if billing is None or not gpus or request.exclusive:
        return
    nodes = request.nodes or 1
    cpus = request.cpus or 0
    node_gb = request.memory_gb_per_node or 0.0
    if request.memory_gb_per_node == 0:  # all of it
        node_gb = site.node_memory_gb or 0.0
    gpus_cost = gpus * billing.gpu
    memory_cost = nodes * node_gb * billing.memory_gb
    paid = max(gpus_cost, memory_cost)
    bill = _bill_text(billing, gpus, nodes * node_gb, cpus)

    enough_gb = int(min(job.needed_gb, site.node_memory_gb or job.needed_gb))
    bill_with_enough = billing.per_hour(gpus, nodes * enough_gb, cpus)
    saves = bill_with_enough <= _MUCH_LESS * billing.per_hour(gpus, nodes * node_gb, cpus)
    if enough_gb and memory_cost > gpus_cost > 0 and saves:
        text = f"memory costs {memory_cost / gpus_cost:.1f} times what the GPUs cost: {bill}"
        yield warning("billing", text, job.ask("mem", f"{enough_gb}G", "what the workers may need"))
        return
    if cpus * billing.cpu > paid and gpus_cost:
        useful_cores = max(int(paid / billing.cpu / nodes), job.workers or 1)
        useful_cores = min(useful_cores, site.node_cpus or useful_cores)
        if cpus > nodes * useful_cores:
            text = f"cores cost {cpus * billing.cpu / gpus_cost:.1f} times what the GPUs cost: {bill}"
            yield warning("billing", text, job.ask("cpus-per-task", useful_cores))
            return
    yield fine("billing", bill)


def _bill_text(
    billing: Billing,
    gpus: int,
    memory_gb: float,
    cpus: int,
) -> str:
    """Return the parts of a task's bill, and their sum."""
    amounts = (
        (gpus, count(gpus, "GPU"), billing.gpu),
        (memory_gb, f"{memory_gb:g} GB", billing.memory_gb),
        (cpus, count(cpus, "core"), billing.cpu),
    )
    parts = [f"{name} × {weight:g} = {amount * weight:g}" for amount, name, weight in amounts if amount * weight]
    rule = "the largest counts" if billing.rule == "max" else "they add up"
    units = billing.per_hour(gpus, memory_gb, cpus)
    return f"{', '.join(parts)}; {rule}: {units:g} an hour for each task"


# --- account, and the answer of sbatch --------------------------------------------------------------------------------


def _check_account(job: Job) -> Iterator[Remark]:
    """Compare the account with the site's rule for GPU jobs; others, such as a merge, are often paid by another."""
    account = job.request.account
    ending = job.site.account_ends_with
    if not ending:
        return
    if job.merges and job.start is None and not job.request.gpus_per_task:
        if account and account.endswith(ending) and account != ending:
            text = (
                f"the merge job has no GPU, but would be paid by {account}, an account of GPU jobs: it may never start"
            )
            yield warning("merge account", text, job.ask("account", account.removesuffix(ending)))
        return
    if job.request.gpus_per_task is None and (job.script is not None or account is None):
        return
    if account is None or "<" in account:
        text = f"no account is named; GPU jobs on {job.site.name} need one that ends in {ending}"
        yield problem("account", text, job.ask("account", f"<your allocation>{ending}"))
    elif not account.endswith(ending):
        text = f"account {account} does not end in {ending}, as GPU jobs on {job.site.name} need"
        yield problem("account", text, job.ask("account", account + ending))
    else:
        yield fine("account", f"{account} ends in {ending}")


def _check_answer(job: Job) -> Iterator[Remark]:
    """Report what ``sbatch --test-only`` says."""
    if job.script is None or job.trial is None:
        return
    name = job.script.name
    if not job.trial:
        yield fine("sbatch", f"it would take {name} (--test-only)")
        return
    refusal, *details = job.trial
    can_wait = any(message in refusal for message in _CAN_WAIT)
    severity = WARNING if can_wait else PROBLEM
    fix = f"sbatch --test-only {shlex.quote(name)}   (until it names a time; badcjobs cluster: which nodes are there)"
    yield Remark(severity, "sbatch", f"it refuses {name}: {refusal}", fix, details)


# --- the script -------------------------------------------------------------------------------------------------------


def check_script(job: Job) -> Iterator[Remark]:
    """Name the lines that sbatch or badcjobs would refuse, or not read, and check the others."""
    script = job.script
    if script is None:
        return
    for mistake in script.mistakes:
        yield problem("script", f"{script.name}: {mistake.text}", mistake.fix)
    for mistake in script.ignored:
        yield warning("script", f"{script.name} {mistake.text}", mistake.fix)
    for mistake in script.wrong_calls:
        yield problem("call", f"{script.name} {mistake.text}", mistake.fix)
    if script.start is None:
        yield from _check_without_start(script, merges=job.merges)
        return
    for rule in (_check_start, _check_signal, _check_log_mode, _check_unloaded):
        yield from rule(job, script, script.start)


# --- a script that starts badcjobs run --------------------------------------------------------------------------------


def _check_start(_job: Job, script: BatchScript, start: Call) -> Iterator[Remark]:
    """Check that Slurm's signals reach badcjobs."""
    place = f"{script.name} line {start.line}"
    to_script = script.signal is not None and script.signal.to_script
    text = f"{place} does not start badcjobs with exec: the shell"
    fix = f"exec {start.text}   (as the only start: one run may have several sources)"
    if script.traps_signals:
        yield fine("start", f"{place}: the script answers signals itself (trap)")
    elif start.by_exec or (start.by_srun and not to_script):
        yield fine("start", f"{place} starts badcjobs with {'exec' if start.by_exec else 'srun'}")
    elif to_script:
        yield problem("start", f"{text} would be killed by the warning before the time limit", fix)
    else:
        yield warning("start", f"{text} does not pass on Slurm's signals", fix)


def _check_signal(job: Job, script: BatchScript, start: Call) -> Iterator[Remark]:
    """Check the signal before the time limit."""
    name = script.name
    signal = script.signal
    receiver = "" if start.by_srun and not start.by_exec else "B:"
    fix = job.ask("signal", f"{receiver}USR1@{_GOOD_LEAD_S}")
    if signal is None:
        text = f"{name} asks for no early warning: at the time limit tasks have only KillWait to stop"
        yield warning("signal", text, fix)
        return

    signal_name = signal.signum.name.removeprefix("SIG")
    option = f"--signal={'B:' * signal.to_script}{signal_name}@{signal.lead_s}"
    time_s = job.request.time_s
    if time_s is not None and signal.lead_s >= time_s:
        text = f"{option} warns at once: the time limit is {time_s:,} s, so every task stops before it has begun"
        if time_s <= 2 * _GOOD_LEAD_S:
            fix = job.ask("time", "1:00:00")
        yield problem("signal", text, fix)
    elif signal_name not in _WARNING_SIGNALS:
        text = f"{name}: {option} is not a warning to badcjobs, which handles {' and '.join(_WARNING_SIGNALS)}"
        yield warning("signal", text, fix)
    elif not signal.to_script and not start.by_srun:
        text = f"{name}: {option} without B: reaches srun steps alone, and this script starts badcjobs without srun"
        yield warning("signal", text, fix)
    elif signal.lead_s < _LEAST_LEAD_S:
        text = f"{name}: {option} is short: Slurm may be 30 s late; ask for {_LEAST_LEAD_S} s or more"
        yield warning("signal", text, fix)
    else:
        yield fine("signal", f"{option} warns the task {signal.lead_s} s before its end")


def _check_log_mode(job: Job, script: BatchScript, _start: Call) -> Iterator[Remark]:
    if not script.options.get("open-mode", "").startswith("a"):
        text = f"{script.name} has no --open-mode=append: a task that is requeued overwrites its first log"
        yield warning("log", text, job.ask("open-mode", "append"))


def _check_unloaded(job: Job, script: BatchScript, start: Call) -> Iterator[Remark]:
    """Find what the site wants and the script does not load; an image brings its own."""
    loaded = [module.partition("/")[0] for module in script.modules]
    unloaded = [module for module in job.site.modules if module not in loaded]
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
    if script.call is not None or script.wrong_calls:
        return
    if script.unread:
        lines = ", ".join(map(str, script.unread))
        text = f"not checked: line {lines} of {script.name} names badcjobs in a way that cannot be read here, so its"
        yield fine("start", f"{text} source, settings and run folder are not looked at", checked=False)
    else:
        text = f"{script.name} does not start badcjobs run itself"
        yield warning("start", text, "exec badcjobs run SOURCE --out DIR   (as its last line)")


# --- the grace, and modules -------------------------------------------------------------------------------------------


def _check_grace(job: Job) -> Iterator[Remark]:
    """Compare what running chunks get after TERM with what Slurm gives before KILL; a merge has no chunk to end."""
    if job.slurm is None or job.slurm.kill_wait_s is None or job.merges:
        return
    kill_wait_s = job.slurm.kill_wait_s
    grace_s = job.settings.grace_s
    text = f"Slurm waits {kill_wait_s} s between TERM and KILL (KillWait); chunks get {grace_s:g} s of it"
    if kill_wait_s >= grace_s + _PUBLISHING_S:
        yield fine("grace", text)
    else:
        shorter_s = max(0, kill_wait_s - _PUBLISHING_S)
        yield warning("grace", f"{text}: too many", f"badcjobs run … --config run.grace_s={shorter_s}")


def _check_modules(job: Job) -> Iterator[Remark]:
    """Report that modules could not be loaded in a shell of its own."""
    script = job.script
    modules = job.modules
    if modules is None:
        return
    line = f"module load {' '.join(modules.names)}"
    if not modules.command:
        text = f"this machine has no module command, so {', '.join(modules.names)} cannot be checked"
        yield warning("modules", text, f"bash -lc '{line}'   (on a login node of the cluster)")
        return
    if not modules.message:
        yield fine("modules", f"{line} works here")
        return
    text = f"{line} fails: {modules.message}"
    severity = PROBLEM
    if script is not None and script.set_up_by:
        text += f" (tested here without the script's {script.set_up_by})"
        severity = WARNING
    yield Remark(severity, "modules", text, f"module avail {' '.join(modules.names)}")


RULES = (
    _check_spacing,
    _check_array,
    _check_shares,
    _check_time,
    _check_gpu_hours,
    _check_node,
    _check_workers,
    check_billing,
    _check_account,
    _check_answer,
    check_script,
    _check_grace,
    _check_modules,
)
