"""Judges what a job asks of Slurm: array, GPU-hours, time, nodes, account; what it costs is in ``billing.py``."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.preflight.facts import Asked, NodeFacts, ScriptFacts, SlurmFacts, SourceFacts
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


def judge_spacing(asked: Asked, script: ScriptFacts | None, *, sure: bool) -> Iterator[Finding]:
    """See that tasks can know their place in the array; ``sure``: no run has begun that would tell it to them."""
    start = script.start if script else None
    if asked.array_range is None or (script is not None and start is None) or (start and "--shard" in start.named):
        return
    text = f"--array={asked.array} is a list, and Slurm hides the spacing of a list from its tasks"
    fix = f"#SBATCH --array={asked.array_range}"
    if sure and not (start and start.hidden):
        yield problem("array", f"{text}: all of them would end at once, for none knows its share", fix)
    else:
        yield warning("array", f"{text}: they know their shares only in a run that has begun already", fix)


def judge_gpu_hours(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Compare tasks × GPUs × time with the cap on what may run and wait together."""
    if not asked.gpus_per_task or (asked.time_s is None and not asked.no_time_limit):
        return
    gpus = (asked.tasks or 1) * asked.gpus_per_task
    said = f"{_counted(asked.tasks or 1, 'task')} × {_counted(asked.gpus_per_task, 'GPU')}"
    cap = site.gpu_hours if site else None
    if asked.time_s is None:
        if site and cap:
            text = f"{said} without a time limit have no end, but {site.name} allows {cap:,.0f} GPU-hours"
            yield problem("GPU-hours", text, _within_cap(asked, None, site))
        return
    hours = asked.time_s / 3600
    product = gpus * hours
    said += f" × {hours:,.4g} h = {product:{',.0f' if product >= 10 else '.2g'}} GPU-hours"
    if not site or not cap:
        yield fine("GPU-hours", f"{said}; no cap is known")
    elif gpus * hours <= cap:
        yield fine("GPU-hours", f"{said}; {site.name} allows {cap:,.0f} running and queued together")
    else:
        text = f"{said}, but {site.name} allows {cap:,.0f} running and queued together"
        yield problem("GPU-hours", text, _within_cap(asked, hours, site))


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _within_cap(asked: Asked, hours: float | None, site: Site) -> str:
    """Return a shorter time where it is still worth a start, else fewer tasks: either way the rest is done later."""
    assert asked.gpus_per_task is not None
    assert site.gpu_hours is not None
    cap, again = site.gpu_hours, "   (what is left is done when you submit it again)"
    minutes = int(min(cap / ((asked.tasks or 1) * asked.gpus_per_task), site.time_h or cap) * 60)
    if minutes >= 60 or (asked.tasks is None and minutes):
        return f"#SBATCH --time={minutes // 60}:{minutes % 60:02d}:00{again}"
    tasks = int(cap / (asked.gpus_per_task * (hours or 1)))
    if tasks and asked.tasks is not None:
        return f"#SBATCH --array=0-{tasks - 1}{'' if hours else ' --time=1:00:00'}{again}"
    return f"#SBATCH --nodes=1 --gpus-per-node=1 --time={max(1, int(cap))}:00:00{again}"


def judge_time(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Compare the time limit with the site's longest, and say what is lost without one."""
    longest = site.time_h if site else None
    if site and longest and (asked.no_time_limit or (asked.time_s or 0) > longest * 3600):
        wanted = "no time limit" if asked.time_s is None else f"{asked.time_s / 3600:,.4g} h"
        text = f"--time asks for {wanted}, but {site.name} allows {longest:,.4g} h"
        yield problem("time", text, f"#SBATCH --time={int(longest)}:00:00")
    elif asked.no_time_limit:
        text = "--time asks for no time limit: nothing warns a task before its end, and no plan can be kept"
        yield warning("time", text, "#SBATCH --time=12:00:00   (what is left is done when you submit it again)")


def judge_node(asked: Asked, site: Site | None, there: NodeFacts | None = None) -> Iterator[Finding]:
    """Compare what a task wants of one node with a node of the site; what its file does not say, Slurm may."""
    if asked.gpus_per_task == 0:
        yield warning("GPUs", "the script asks Slurm for no GPU", "#SBATCH --gpus-per-node=1")
    said = NodeFacts(site.name, site.node_gpus, site.node_cpus, site.node_memory_gb) if site else NodeFacts("")
    for subject, wanted, part, unit in (
        ("GPUs", asked.gpus_per_node, "gpus", "GPUs"),
        ("cores", asked.cpus_per_node, "cpus", "cores"),
        ("memory", asked.memory_gb_per_node, "memory_gb", "GB of memory"),
    ):
        whose = there if there is not None and getattr(said, part) is None else said
        most = getattr(whose, part)
        if wanted is not None and most is not None and wanted > most:
            text = f"a task asks for {wanted:,.4g} {unit} on a node, but a node of {whose.whose} has {most:,.4g}"
            yield problem(subject, text, _less(subject, most))


def _less(subject: str, most: float) -> str:
    """Return the line that asks for as much as a node has."""
    if subject == "memory":
        return f"#SBATCH --mem={most:.0f}G" if most == int(most) else f"#SBATCH --mem={int(most * 1024)}M"
    if subject == "cores":
        return f"#SBATCH --cpus-per-task={most}"
    if most == 0:
        return "sinfo -N -O NodeList,Partition,Gres   (where are GPUs?)"
    return f"#SBATCH --gpus-per-node={most}   (more: badcjobs template multinode)"


def judge_spread(asked: Asked, site: Site | None, script: ScriptFacts | None) -> Iterator[Finding]:
    """See that a task of several nodes is started on all of them: the script itself runs on the first."""
    start = script.start if script else None
    nodes = _nodes_needed(asked, site)
    if script is None or start is None or nodes < 2 or any(one.spread for one in script.starts or (start,)):
        return
    text = (
        f"{script.name} asks for {nodes} nodes, but line {start.line} starts badcjobs on the first alone:"
        " the GPUs of the others have nothing to do"
    )
    yield warning("nodes", text, "#SBATCH --nodes=1   (and more array tasks; or srun: badcjobs template multinode)")


def _nodes_needed(asked: Asked, site: Site | None) -> int:
    if asked.nodes is not None or not asked.gpus_per_task:
        return asked.nodes or 1
    on_one = asked.gpus_per_node or (site.node_gpus if site else None)
    return -(-asked.gpus_per_task // on_one) if on_one else 1


def judge_account(asked: Asked, site: Site | None, *, has_script: bool) -> Iterator[Finding]:
    """Compare the account with the site's rule for GPU jobs."""
    if site is None or not site.account_ends_with:
        return
    ending = site.account_ends_with
    if has_script and asked.gpus_per_task is None:
        return  # a job without GPUs, such as a merge, is often paid by another account
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


def judge_merge_account(asked: Asked, site: Site | None, script: ScriptFacts | None) -> Iterator[Finding]:
    """Warn where the account of GPU jobs would pay for a merge, which has no GPU: of a script, or of ``submit``."""
    ending = site.account_ends_with if site else None
    if site is None or not ending:
        return
    if script is not None and (script.start is not None or "merge" not in script.other_commands or asked.gpus_per_task):
        return
    account = asked.account if script is not None else asked.merge_account or asked.account
    if account is None or not account.endswith(ending) or account == ending:
        return
    text = (
        f"the merge job has no GPU, but would be paid by {account}, an account of GPU jobs on {site.name}: it may wait"
    )
    other = account.removesuffix(ending)
    line = f"#SBATCH --account={other}" if script is not None else f"badcjobs submit … --merge-account {other}"
    yield warning("merge account", f"{text} for ever", line)


def judge_shares(asked: Asked, source: SourceFacts) -> Iterator[Finding]:
    """Compare the array with what there is to do."""
    listed = source.manifests_listed
    if asked.tasks is None:
        return
    if listed is not None and listed > asked.tasks:
        text = f"the list names {listed:,} manifests, but the array has {asked.tasks:,} tasks: the run is refused"
        yield problem("array", text, f"#SBATCH --array=0-{listed - 1}")
    elif asked.tasks > source.chunks:
        idle = asked.tasks - source.chunks
        have = f"{idle:,} {'has' if idle == 1 else 'have'} nothing to do"
        text = f"{asked.tasks:,} tasks for {_counted(source.chunks, 'chunk')}: {have}"
        yield warning("array", text, f"#SBATCH --array=0-{max(1, source.chunks) - 1}")
