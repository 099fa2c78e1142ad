"""Rules of ``check`` about what a job asks of Slurm: array, time, GPU-hours, nodes, cost, account."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from badcjobs.model import Billing
from badcjobs.planning.findings import FINE, Remark, fine, problem, warning
from badcjobs.planning.preflight_facts import Job, Needs, PreflightFacts, SlurmFacts
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.words import clock, count

_MUCH_LESS = 0.8  # of the bill: a request that saves less is no better
_ENOUGH = "what the workers may need"
_AGAIN = "what is left is done when you submit it again"
_CAN_WAIT = ("nodes are busy", "not available (down")  # messages of sbatch about nodes for which a job can wait


def check_request(facts: PreflightFacts) -> Iterator[Remark]:
    """Check what is asked of Slurm; names of partitions and features are left to ``sbatch --test-only``."""
    job = facts.job
    yield from _check_spacing(job, may_have_begun=facts.places.out is None)
    yield from _check_array(job, facts.slurm)
    yield from _check_shares(job)
    yield from _check_time(job)
    yield from _check_gpu_hours(job)
    yield from _check_node(job)
    yield from _check_workers(job, facts.needs)
    yield from check_billing(job, facts.needs)
    yield from _check_account(job)
    yield from _check_merge_account(job)
    yield from _check_answer(job, facts.trial)


# --- the array and its time -------------------------------------------------------------------------------------------


def _check_spacing(job: Job, *, may_have_begun: bool) -> Iterator[Remark]:
    """Check that tasks can know their place in the array; a run that has begun already knows it."""
    request = job.request
    start = job.start
    if job.has_begun or request.array_range is None or (job.script is not None and start is None):
        return
    if start is not None:
        if "shard" in start.values:
            return
        may_have_begun = may_have_begun or start.hidden
    yield Remark(
        WARNING if may_have_begun else PROBLEM,
        "array",
        f"--array={request.array} is a list, and Slurm hides the spacing of a list from its tasks: they know their"
        " shares only in a run that has begun already",
        job.ask("array", request.array_range),
    )


def _check_array(job: Job, slurm: SlurmFacts | None) -> Iterator[Remark]:
    """Compare the array with what the site and this Slurm allow."""
    request = job.request
    site = job.site
    tasks = request.tasks
    if tasks is None:
        return
    if site.array_tasks:
        text = f"{count(tasks, 'task')}; {site.name} allows {site.array_tasks:,}"
        if tasks > site.array_tasks:
            yield problem("array", text, job.ask_tasks(site.array_tasks))
        else:
            yield fine("array", text)
    if site.queued_jobs and tasks >= site.queued_jobs:
        text = f"{tasks:,} tasks and the merge job are more than the {site.queued_jobs:,} jobs {site.name} queues"
        yield problem("queue", text, job.ask_tasks(site.queued_jobs - 1))
    if slurm is not None and slurm.max_array_size:
        last = tasks - 1 if request.last_index is None else request.last_index
        if last >= slurm.max_array_size:
            text = f"the array's last index is {last:,}, but this Slurm allows less than {slurm.max_array_size:,}"
            yield problem("array", f"{text} (MaxArraySize)", job.ask_tasks(min(tasks, slurm.max_array_size)))


def _check_shares(job: Job) -> Iterator[Remark]:
    """Compare the number of tasks with what there is to share."""
    tasks = job.request.tasks
    source = job.source
    if tasks is None or source is None:
        return
    listed = source.manifests_listed
    idle = tasks - source.chunks
    if listed is not None and tasks < listed:
        text = f"the list names {listed:,} manifests, but the array has {tasks:,} tasks: the run is refused"
        yield problem("array", text, job.ask_tasks(listed))
    elif idle > 0:
        text = f"{count(tasks, 'task')} for {count(source.chunks, 'chunk')}: {idle:,} with nothing to do"
        yield warning("array", text, job.ask_tasks(max(1, source.chunks)))


def _check_time(job: Job) -> Iterator[Remark]:
    request = job.request
    most_h = job.site.time_h
    if most_h and (request.no_time_limit or (request.time_s or 0) > most_h * 3600):
        time = "no time limit"
        if request.time_s is not None:
            time = f"{request.time_s / 3600:,.4g} h"
        text = f"--time asks for {time}, but {job.site.name} allows {most_h:,.4g} h"
        yield problem("time", text, job.ask("time", f"{most_h:.0f}:00:00"))
    elif request.no_time_limit:
        text = "--time asks for no time limit: nothing warns a task before its end, and no plan can be kept"
        yield warning("time", text, job.ask("time", "12:00:00", _AGAIN))


def _check_gpu_hours(job: Job) -> Iterator[Remark]:
    """Multiply tasks, GPUs and time: a cap counts what runs and waits together."""
    gpus = job.request.gpus_per_task
    if not gpus or job.request.time_s is None:
        return
    tasks = job.request.tasks or 1
    hours = job.request.time_s / 3600
    total = tasks * gpus * hours
    shown = f"{total:,.0f}" if total >= 10 else f"{total:.2g}"
    text = f"{count(tasks, 'task')} × {count(gpus, 'GPU')} × {hours:,.4g} h = {shown} GPU-hours"
    cap = job.site.gpu_hours
    if not cap:
        yield fine("GPU-hours", f"{text}; no cap is known")
        return
    text += f"; {job.site.name} allows {cap:,.0f} running and queued together"
    fitting_tasks = int(cap / gpus / hours)
    if total <= cap:
        yield fine("GPU-hours", text)
    elif fitting_tasks:
        yield problem("GPU-hours", text, job.ask_tasks(fitting_tasks, _AGAIN))
    else:
        yield problem("GPU-hours", text, job.ask("time", clock(60 * int(60 * cap / gpus)), _AGAIN))


# --- nodes and cost ---------------------------------------------------------------------------------------------------


def _check_node(job: Job) -> Iterator[Remark]:
    """Compare what a task wants of one node with a node of the site."""
    request = job.request
    site = job.site
    script = job.script
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
    if script is None or script.start is None or (request.nodes or 1) == 1:
        return
    if not script.start.by_srun:
        text = f"{script.name} asks for {request.nodes} nodes, but line {script.start.line} starts badcjobs on the"
        fix = job.ask("nodes", 1, "and more array tasks; or srun: badcjobs template multinode")
        yield warning("nodes", f"{text} first alone: the GPUs of the others are idle", fix)


def _check_workers(job: Job, needs: Needs) -> Iterator[Remark]:
    """Compare memory and cores with the workers that a task starts in any case."""
    memory_gb = job.request.memory_gb_per_node
    cpus = job.request.cpus_per_node
    workers = needs.workers
    if not workers:
        return
    if memory_gb and memory_gb < needs.workers_gb:
        text = f"{memory_gb:,.3g} GB may not hold {count(workers, 'worker')}, which may need {needs.workers_gb}"
        yield warning("memory", text, job.ask("mem", f"{needs.workers_gb}G", "or fewer workers, or shorter chunks"))
    if cpus and cpus < workers:
        text = f"{count(cpus, 'core')} for {count(workers, 'worker')}: each keeps one busy"
        yield warning("cores", text, job.ask("cpus-per-task", workers, "or fewer workers"))


def check_billing(job: Job, needs: Needs) -> Iterator[Remark]:
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
    cores_cost = cpus * billing.cpu
    bill = _bill_text(billing, gpus, nodes * node_gb, cpus)

    enough_gb = int(min(needs.needed_gb, site.node_memory_gb or needs.needed_gb))
    bill_with_enough = billing.per_hour(gpus, nodes * enough_gb, cpus)
    saves = bill_with_enough <= _MUCH_LESS * billing.per_hour(gpus, nodes * node_gb, cpus)
    if enough_gb and memory_cost > gpus_cost > 0 and saves:
        text = f"memory costs {memory_cost / gpus_cost:.1f} times what the GPUs cost: {bill}"
        yield warning("billing", text, job.ask("mem", f"{enough_gb}G", _ENOUGH))
        return
    paid = max(gpus_cost, memory_cost)
    if cores_cost > paid and gpus_cost:
        useful_cores = max(int(paid / billing.cpu / nodes), needs.workers or 1)
        useful_cores = min(useful_cores, site.node_cpus or useful_cores)
        if cpus > nodes * useful_cores:
            text = f"cores cost {cores_cost / gpus_cost:.1f} times what the GPUs cost: {bill}"
            yield warning("billing", text, job.ask("cpus-per-task", useful_cores))
            return
    yield Remark(FINE, "billing", bill)


def _bill_text(billing: Billing, gpus: int, memory_gb: float, cpus: int) -> str:
    """Return the parts of a task's bill, and their sum."""
    amounts = (
        (gpus, count(gpus, "GPU"), billing.gpu),
        (memory_gb, f"{round(memory_gb, 2):g} GB", billing.memory_gb),
        (cpus, count(cpus, "core"), billing.cpu),
    )
    parts = []
    for amount, name, weight in amounts:
        if amount * weight:
            parts.append(f"{name} × {weight:g} = {round(amount * weight, 2):g}")
    rule = "the largest counts" if billing.rule == "max" else "they add up"
    units = billing.per_hour(gpus, memory_gb, cpus)
    return f"{', '.join(parts)}; {rule}: {units:g} an hour for each task"


# --- account, and the answer of sbatch --------------------------------------------------------------------------------


def _check_account(job: Job) -> Iterator[Remark]:
    """Compare the account with the site's rule for GPU jobs; others, such as a merge, are often paid by another."""
    account = job.request.account
    ending = job.site.account_ends_with
    has_gpus = job.request.gpus_per_task is not None or (job.script is None and account is not None)
    if not ending or not has_gpus:
        return
    if account is None or "<" in account:
        text = f"no account is named; GPU jobs on {job.site.name} need one that ends in {ending}"
        yield problem("account", text, job.ask("account", f"<your allocation>{ending}"))
    elif not account.endswith(ending):
        text = f"account {account} does not end in {ending}, as GPU jobs on {job.site.name} need"
        yield problem("account", text, job.ask("account", account + ending))
    else:
        yield fine("account", f"{account} ends in {ending}")


def _check_merge_account(job: Job) -> Iterator[Remark]:
    """Find a merge, which has no GPU, that the account of GPU jobs would pay: in a script, or of ``submit``."""
    request = job.request
    script = job.script
    account = request.account
    option = "#SBATCH --account="
    if script is None:
        account = request.merge_account or account
        option = "--config submit.merge_account="
    elif script.start or request.gpus_per_task or not job.merges:
        return
    ending = job.site.account_ends_with
    if ending and account and account.endswith(ending) and account != ending:
        text = f"the merge job has no GPU, but would be paid by {account}, an account of GPU jobs on {job.site.name}"
        yield warning("merge account", f"{text}: it may never start", option + account.removesuffix(ending))


def _check_answer(job: Job, trial: tuple[str, ...] | None) -> Iterator[Remark]:
    """Report what ``sbatch --test-only`` says."""
    if job.script is None or trial is None:
        return
    name = job.script.name
    if not trial:
        yield fine("sbatch", f"it would take {name} (--test-only)")
        return
    refusal, *details = trial
    can_wait = any(message in refusal for message in _CAN_WAIT)
    yield Remark(
        WARNING if can_wait else PROBLEM,
        "sbatch",
        f"it refuses {name}: {refusal}",
        f"sbatch --test-only {shlex.quote(name)}   (until it names a time; badcjobs cluster: which nodes are there)",
        tuple(details),
    )
