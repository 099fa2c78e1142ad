"""Judges what a job asks of Slurm: array, GPU-hours, time, memory and what it costs, account."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import Asked, SlurmFacts, SourceFacts
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.preflight.site import Site


def judge_array(asked: Asked, site: Site | None, slurm: SlurmFacts | None) -> Iterator[Finding]:
    """Compare the array with what the site and this Slurm allow."""
    if asked.tasks is None:
        return
    limits = [(site.array_tasks, f"{site.name} allows")] if site and site.array_tasks else []
    if slurm and slurm.max_array_size:
        limits.append((slurm.max_array_size, "this Slurm (MaxArraySize) allows"))
    last = asked.tasks - 1 if asked.last_index is None else asked.last_index
    for limit, who in limits:
        if asked.tasks > limit:
            text = f"the array has {asked.tasks:,} tasks, but {who} {limit:,}"
            yield problem("array", text, f"#SBATCH --array=0-{limit - 1}")
        elif who.startswith("this Slurm") and last >= limit:
            text = f"the array's last index is {last:,}, but this Slurm (MaxArraySize) takes at most {limit - 1:,}"
            yield problem("array", text, f"#SBATCH --array=0-{asked.tasks - 1}")
        else:
            yield fine("array", f"{asked.tasks:,} tasks; {who} {limit:,}")
    if site and site.queued_jobs and asked.tasks + 1 > site.queued_jobs >= asked.tasks:
        text = f"{asked.tasks:,} tasks and the merge job are more than the {site.queued_jobs:,} jobs {site.name} queues"
        yield problem("queue", text, f"#SBATCH --array=0-{site.queued_jobs - 2}")


def judge_gpu_hours(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Compare tasks × GPUs × time with the cap on what may run and wait together."""
    if asked.tasks is None or asked.gpus_per_task is None or asked.time_s is None:
        return
    gpus, hours = asked.tasks * asked.gpus_per_task, asked.time_s / 3600
    said = f"{asked.tasks:,} tasks × {asked.gpus_per_task} GPUs × {hours:,.4g} h = {gpus * hours:,.0f} GPU-hours"
    if not site or not site.gpu_hours:
        yield fine("GPU-hours", f"{said}; no cap is known")
    elif gpus * hours <= site.gpu_hours:
        yield fine("GPU-hours", f"{said}; {site.name} allows {site.gpu_hours:,.0f} running and queued together")
    else:
        text = f"{said}, but {site.name} allows {site.gpu_hours:,.0f} running and queued together"
        yield problem("GPU-hours", text, _within_cap(asked, asked.gpus_per_task, hours, site.gpu_hours))


def _within_cap(asked: Asked, gpus_per_task: int, hours: float, cap: float) -> str:
    """Return a shorter time where it is still worth a start, else fewer tasks: either way the rest is done later."""
    assert asked.tasks is not None
    minutes = int(cap / (asked.tasks * gpus_per_task) * 60)
    again = "   (what is left is done when you submit it again)"
    if minutes >= 60:
        return f"#SBATCH --time={minutes // 60}:{minutes % 60:02d}:00{again}"
    tasks = int(cap / (gpus_per_task * hours))
    if tasks:
        return f"#SBATCH --array=0-{tasks - 1}{again}"
    return f"#SBATCH --gpus-per-node=1 --array=0-0 --time={int(cap)}:00:00{again}"


def judge_node(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Compare one task with one node of the site, and its time with the longest one."""
    if asked.gpus_per_task == 0:
        yield warning("GPUs", "the script asks Slurm for no GPU", "#SBATCH --gpus-per-node=1")
    if site is None:
        return
    if asked.time_s is not None and site.time_h and asked.time_s > site.time_h * 3600:
        text = f"--time asks for {asked.time_s / 3600:,.4g} h, but {site.name} allows {site.time_h:,.4g} h"
        yield problem("time", text, f"#SBATCH --time={int(site.time_h)}:00:00")
    for subject, wanted, most, unit, flag in (
        ("GPUs", asked.gpus_per_task, site.node_gpus, "GPUs", "--gpus-per-node={:.0f}"),
        ("cores", asked.cpus, site.node_cpus, "cores", "--cpus-per-task={:.0f}"),
        ("memory", asked.memory_gb, site.node_memory_gb, "GB of memory", "--mem={:.0f}G"),
    ):
        if wanted is not None and most is not None and wanted > most:
            text = f"a task asks for {wanted:,.4g} {unit}, but a node of {site.name} has {most:,.4g}"
            yield problem(subject, text, f"#SBATCH {flag.format(most)}")


def judge_billing(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Show what a task is billed, and warn where memory or cores cost more than its GPUs."""
    if site is None or site.bill_gpu is None or not asked.gpus_per_task:
        return
    memory_gb = site.node_memory_gb if asked.memory_gb == 0 else asked.memory_gb
    gpus = asked.gpus_per_task * site.bill_gpu
    parts = [f"{asked.gpus_per_task} GPUs × {site.bill_gpu:g} = {gpus:g}"]
    memory = cores = 0.0
    if memory_gb is not None and site.bill_memory_gb is not None:
        memory = memory_gb * site.bill_memory_gb
        parts.append(f"{memory_gb:g} GB × {site.bill_memory_gb:g} = {memory:g}")
    if asked.cpus is not None and site.bill_cpu is not None:
        cores = asked.cpus * site.bill_cpu
        parts.append(f"{asked.cpus} cores × {site.bill_cpu:g} = {cores:g}")
    bill = max(gpus, memory, cores) if site.bill_rule == "max" else gpus + memory + cores
    rule = "the largest counts" if site.bill_rule == "max" else "they add up"
    said = f"{', '.join(parts)}; {rule}: {bill:g} an hour for each task"
    if memory > gpus and site.bill_memory_gb is not None:
        mib = int(max(gpus, cores if site.bill_rule == "max" else 0.0) / site.bill_memory_gb * 1024)
        fix = f"#SBATCH --mem={mib}M   (costs no more than the rest; ask for more only if a first task needed it)"
        yield warning("billing", f"memory costs {memory / gpus:.1f} times what the GPUs cost: {said}", fix)
    elif cores > gpus and site.bill_cpu is not None:
        fix = f"#SBATCH --cpus-per-task={max(1, int(gpus / site.bill_cpu))}"
        yield warning("billing", f"cores cost {cores / gpus:.1f} times what the GPUs cost: {said}", fix)
    else:
        yield fine("billing", said)


def judge_account(asked: Asked, site: Site | None, *, has_script: bool) -> Iterator[Finding]:
    """Compare the account with the site's rule for GPU jobs."""
    if site is None or not site.account_ends_with:
        return
    ending = site.account_ends_with
    if asked.account is None:
        if has_script:
            text = f"the script names no account; on {site.name} GPU jobs need one that ends in {ending}"
            yield problem("account", text, f"#SBATCH --account=<your allocation>{ending}")
    elif "<" in asked.account:
        text = f"account {asked.account} is a placeholder still"
        yield problem("account", text, f"#SBATCH --account=<your allocation>{ending}")
    elif not asked.account.endswith(ending):
        text = f"account {asked.account} does not end in {ending}, as GPU jobs on {site.name} need"
        yield problem("account", text, f"#SBATCH --account={asked.account}{ending}")
    else:
        yield fine("account", f"{asked.account} ends in {ending}")


def judge_shares(asked: Asked, source: SourceFacts) -> Iterator[Finding]:
    """Compare the array with what there is to do."""
    listed = source.manifests_listed
    if asked.tasks is None:
        return
    if listed is not None and listed > asked.tasks:
        text = f"the list names {listed:,} manifests, but the array has {asked.tasks:,} tasks: the run is refused"
        yield problem("array", text, f"#SBATCH --array=0-{listed - 1}")
    elif asked.tasks > source.chunks:
        text = f"{asked.tasks:,} tasks for {source.chunks:,} chunks: {asked.tasks - source.chunks:,} have nothing to do"
        yield warning("array", text, f"#SBATCH --array=0-{max(1, source.chunks) - 1}")
