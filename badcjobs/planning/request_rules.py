"""Rules of ``check`` about what a job asks of Slurm: array, GPU-hours, time, nodes, account, cost, names."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from badcjobs.cluster.nodes import UNTYPED, Node, largest_size
from badcjobs.cluster.sbatch_options import parse_gpus, try_parse
from badcjobs.planning.findings import Advice, Cases, Remark, apply_rules, fine_if, problem_if, rules, warning_if
from badcjobs.planning.preflight_facts import PreflightFacts
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.report.words import clock, count, number
from badcjobs.settings import nearest

_MUCH_LESS = 0.8  # of the bill: a request that saves less is no better
_ENOUGH = "what the workers may need"
_AGAIN = "   (what is left is done when you submit it again)"
# Problems with these subjects have a line to paste; the message of sbatch would only repeat them.
_EXPLAINED = {"array", "time", "GPUs", "cores", "memory", "account", "partition", "constraint", "nodes"}
# Messages of sbatch for what never fits, and also for nodes that are drained now, for which a job can wait.
_PERHAPS_LATER = ("node configuration is not available", "nodes are busy", "not available (down")


def check_request(facts: PreflightFacts) -> Iterator[Remark]:
    """Check the request; ``sbatch --test-only`` decides about names, because sinfo may hide some."""
    found = list(apply_rules(REQUEST if facts.trial == () else (*REQUEST, NAMES), facts))
    yield from found
    if facts.trial == () or not any(one.severity == PROBLEM and one.subject in _EXPLAINED for one in found):
        yield from _SBATCH(facts)


# --- the array and its time -------------------------------------------------------------------------------------------


def _array(facts: PreflightFacts) -> Cases:
    """Compare the array with what the site and this Slurm allow."""
    asked, site, slurm = facts.asked, facts.site, facts.slurm
    if asked.tasks is None:
        return
    last = asked.tasks - 1 if asked.last_index is None else asked.last_index
    if site.array_tasks:
        yield {"limit": site.array_tasks, "who": f"{site.name} allows", "last": 0}
    if slurm and slurm.max_array_size:
        yield {"limit": slurm.max_array_size, "who": "this Slurm (MaxArraySize) allows", "last": last}


def _spacing(facts: PreflightFacts) -> Cases:
    """Check that tasks can know their place in the array; a run that has begun already knows it."""
    script, start = facts.script, facts.start
    if facts.has_begun or facts.asked.array_range is None:
        return
    if (script is not None and start is None) or (start and "shard" in start.named):
        return
    if facts.out is not None and not (start and start.hidden):
        yield {"severity": PROBLEM, "outcome": "all of them would end at once, without knowing their shares"}
    else:
        yield {"severity": WARNING, "outcome": "they know their shares only in a run that has begun already"}


def _gpu_hours(facts: PreflightFacts) -> Cases:
    """Multiply tasks, GPUs and time: a cap counts what runs and waits together."""
    asked, site, tasks = facts.asked, facts.site, facts.asked.tasks or 1
    if not asked.gpus_per_task or (asked.time_s is None and not (asked.no_time_limit and site.gpu_hours)):
        return
    hours = (asked.time_s or 0) / 3600
    total = tasks * asked.gpus_per_task * hours
    cap = f"{site.name} allows {site.gpu_hours:,.0f} running and queued together" if site.gpu_hours else ""
    yield {
        "total": total,
        "said": f"{count(tasks, 'task')} × {count(asked.gpus_per_task, 'GPU')}",
        "product": f" × {hours:,.4g} h = {total:{',.0f' if total >= 10 else '.2g'}} GPU-hours",
        "cap": cap or "no cap is known",
        "within_cap": _within_cap(facts, hours or None, site.gpu_hours) if site.gpu_hours else "",
    }


def _within_cap(facts: PreflightFacts, hours: float | None, cap: float) -> str:
    """Return a shorter time where it is still worth a start, else fewer tasks: either way the rest is done later."""
    asked, gpus = facts.asked, facts.asked.gpus_per_task or 1
    minutes = int(min(cap / ((asked.tasks or 1) * gpus), facts.site.time_h or cap) * 60)
    if minutes >= 60 or (asked.tasks is None and minutes):
        return f"#SBATCH --time={clock(60 * minutes)}{_AGAIN}"
    tasks = max(1, int(cap / (gpus * (hours or 1))))
    return f"#SBATCH --array=0-{tasks - 1}{'' if hours else ' --time=1:00:00'}{_AGAIN}"


def _time(facts: PreflightFacts) -> Cases:
    time_s = facts.asked.time_s
    yield {"wanted": "no time limit" if time_s is None else f"{time_s / 3600:,.4g} h"}


def _shares(facts: PreflightFacts) -> Cases:
    tasks, source = facts.asked.tasks, facts.source
    if tasks is not None and source is not None:
        yield {"idle": tasks - source.chunks, "busy": max(1, source.chunks), "listed": source.manifests_listed}


SPACING = rules("array", _spacing)(
    Advice(
        "{severity}",
        "--array={asked.array} is a list, and Slurm hides the spacing of a list from its tasks: {outcome}",
        "#SBATCH --array={asked.array_range}",
    )
)
SHARES = rules("array", _shares)(
    problem_if(
        "the list names {listed:,} manifests, but the array has {asked.tasks:,} tasks: the run is refused",
        "#SBATCH --array=0-{listed:before}",
        lambda f: f.listed is not None and f.listed > f.asked.tasks,
    ),
    warning_if(
        "{asked.tasks:count task} for {source.chunks:count chunk}: {idle:,} {idle:has|have} nothing to do",
        "#SBATCH --array=0-{busy:before}",
        lambda f: f.idle > 0,
    ),
)
_ARRAY_AND_TIME = (
    rules("array", _array)(
        problem_if(
            "the array has {asked.tasks:,} tasks, but {who} {limit:,}",
            "#SBATCH --array=0-{limit:before}",
            lambda f: f.asked.tasks > f.limit,
        ),
        problem_if(
            "the array's last index is {last:,}, but this Slurm (MaxArraySize) takes at most {limit:before}",
            "#SBATCH --array=0-{asked.tasks:before}",
            lambda f: f.last >= f.limit,
        ),
        fine_if("{asked.tasks:count task}; {who} {limit:,}"),
    ),
    rules("queue", lambda f: [{"room": f.site.queued_jobs - 1}] if f.site.queued_jobs and f.asked.tasks else [])(
        problem_if(
            "{asked.tasks:,} tasks and the merge job are more than the {site.queued_jobs:,} jobs {site.name} queues",
            "#SBATCH --array=0-{room:before}",
            lambda f: f.room < f.asked.tasks <= f.site.queued_jobs,
        )
    ),
    rules("time", _time)(
        problem_if(
            "--time asks for {wanted}, but {site.name} allows {site.time_h:,.4g} h",
            "#SBATCH --time={site.time_h:.0f}:00:00",
            lambda f: f.site.time_h and (f.asked.no_time_limit or (f.asked.time_s or 0) > f.site.time_h * 3600),
        ),
        warning_if(
            "--time asks for no time limit: nothing warns a task before its end, and no plan can be kept",
            "#SBATCH --time=12:00:00" + _AGAIN,
            when="asked.no_time_limit",
        ),
    ),
    rules("GPU-hours", _gpu_hours)(
        problem_if(
            "{said} without a time limit have no end, but {cap}", "{within_cap}", lambda f: f.asked.time_s is None
        ),
        fine_if("{said}{product}; {cap}", when=lambda f: f.total <= (f.site.gpu_hours or f.total)),
        problem_if("{said}{product}, but {cap}", "{within_cap}"),
    ),
)


# --- nodes and cost ---------------------------------------------------------------------------------------------------


def _node(facts: PreflightFacts) -> Cases:
    """Compare what a task wants of one node with a node of the site; Slurm is asked for what its file does not have."""
    asked, site = facts.asked, facts.site
    of_site, of_slurm = _node_sizes(facts)
    wanted = (asked.gpus_per_node, asked.cpus_per_node, asked.memory_gb_per_node)
    units = ("GPUs", "cores", "GB of memory")
    for many, unit, in_file, there in zip(wanted, units, of_site, of_slurm, strict=True):
        most = there if in_file is None else in_file
        if many is None or most is None or many <= most:
            continue
        fixes = {
            "GPUs": f"#SBATCH --gpus-per-node={most}   (more: badcjobs template multinode)",
            "cores": f"#SBATCH --cpus-per-task={most}",
            "memory": f"#SBATCH --mem={most:.0f}G" if most == int(most) else f"#SBATCH --mem={int(most * 1024)}M",
        }
        if site.billing and 0 < facts.needed_gb <= most:  # not what would cost too much then
            fixes["memory"] = f"#SBATCH --mem={facts.needed_gb}G   ({_ENOUGH})"
        subject = unit.split()[-1]
        fix = fixes[subject] if most else "sinfo -N -O NodeList,Partition,Gres   (where are GPUs?)"
        whose = _reached(facts)[0] if in_file is None else site.name
        yield {"subject": subject, "wanted": many, "unit": unit, "whose": whose, "most": most, "fix": fix}


def _node_sizes(facts: PreflightFacts) -> tuple[tuple[float | None, ...], tuple[float | None, ...]]:
    """Return GPUs, cores and memory in GB of a node: by the file of the site, and by Slurm."""
    size = None if facts.cluster is None else largest_size(facts.cluster, facts.asked.partition)
    gpus, cores, memory_mib = size or (None, None, None)
    site = facts.site
    return (site.node_gpus, site.node_cpus, site.node_memory_gb), (gpus, cores, memory_mib and memory_mib / 1024)


def _spread(facts: PreflightFacts) -> Cases:
    """Check that a task of several nodes is started on all of them: the script itself runs on the first."""
    asked, script = facts.asked, facts.script
    nodes = asked.nodes
    if nodes is None and asked.gpus_per_task:
        on_one = asked.gpus_per_node or facts.site.node_gpus
        nodes = -(-asked.gpus_per_task // on_one) if on_one else 1
    if script and script.start and (nodes or 1) > 1 and not any(one.spread for one in script.starts):
        yield {"needed": nodes}


def _billing(facts: PreflightFacts) -> Cases:
    """Show what a task is billed, and whether memory or cores cost more than its GPUs for no good reason."""
    asked, site = facts.asked, facts.site
    if site.billing is None or not asked.gpus_per_task or asked.exclusive:
        return
    nodes, billing = asked.nodes or 1, site.billing
    _, most_cpus, most_gb = [one or other or math.inf for one, other in zip(*_node_sizes(facts), strict=True)]
    all_of_it = asked.memory_gb_per_node == 0
    on_a_node_gb = most_gb if all_of_it and most_gb < math.inf else asked.memory_gb_per_node
    names = ("GPU" if asked.gpus_per_task == 1 else "GPUs", "GB", "core" if asked.cpus == 1 else "cores")
    weights = (billing.gpu, billing.memory_gb, billing.cpu)
    amounts = (asked.gpus_per_task, nodes * (on_a_node_gb or 0.0), asked.cpus or 0)
    units = billing.per_hour(*amounts)
    gpus, memory, cores = costs = [amount * weight for amount, weight in zip(amounts, weights, strict=True)]
    parts = [
        f"{round(amount, 2):g} {name} × {weight:g} = {round(cost, 2):g}"
        for amount, name, weight, cost in zip(amounts, names, weights, costs, strict=True)
        if cost
    ]
    total = f"{'the largest counts' if billing.rule == 'max' else 'they add up'}: {units:g} an hour for each task"
    per = "" if facts.rate is None else "; per 1,000 audio-hours: not known, no speed is measured"
    if facts.rate:
        start_up = "with" if facts.source and facts.source.audio_s else "without"
        per = f"; per 1,000 audio-hours: about {number(1000 * units * facts.task_hours)}, {start_up} start-up, at"
        per += f" {number(facts.rate)} audio-hours per GPU-hour"
    enough_gb, cpus = int(min(facts.needed_gb, most_gb)), min(asked.cpus or 0, nodes * most_cpus)  # more are refused
    now, then = (billing.per_hour(asked.gpus_per_task, nodes * (gb or 0), cpus) for gb in (on_a_node_gb, enough_gb))
    paid = max(gpus, memory if billing.rule == "max" else 0.0)
    cores_paid = int(min(max(paid / (billing.cpu or math.inf) / nodes, facts.workers or 1), most_cpus))
    yield {
        "memory_times": memory / gpus if gpus else 0.0,
        "cores_times": cores / gpus if gpus else 0.0,
        "too_much": facts.needed_gb and memory > gpus > 0 and (then < now if all_of_it else then <= _MUCH_LESS * now),
        "too_many": cores > paid and gpus and (asked.cpus or 0) > nodes * cores_paid,
        "cores_paid": cores_paid,
        "enough": enough_gb,
        "bill": f"{', '.join(parts)}; {total}{per}",
    }


BILLING = rules("billing", _billing)(
    warning_if(
        "memory costs {memory_times:.1f} times what the GPUs cost: {bill}",
        f"#SBATCH --mem={{enough}}G   ({_ENOUGH})",
        when="too_much",
    ),
    warning_if(
        "cores cost {cores_times:.1f} times what the GPUs cost: {bill}",
        "#SBATCH --cpus-per-task={cores_paid}",
        when="too_many",
    ),
    fine_if(
        "memory costs {memory_times:.1f} times what the GPUs cost, but an engine may need so much: {bill}",
        when=lambda f: f.memory_times > 1,
    ),
    fine_if("{bill}"),
)
_NODES_AND_COST = (
    rules("GPUs")(
        warning_if("the job asks Slurm for no GPU", "#SBATCH --gpus-per-node=1", lambda f: f.asked.gpus_per_task == 0)
    ),
    rules("{subject}", _node)(
        problem_if("a task asks for {wanted:,.4g} {unit} on a node, but a node of {whose} has {most:,.4g}", "{fix}")
    ),
    rules("nodes", _spread)(
        warning_if(
            "{script.name} asks for {needed} nodes, but line {start.line} starts badcjobs on the first alone: the GPUs"
            " of the others are idle",
            "#SBATCH --nodes=1   (and more array tasks; or srun: badcjobs template multinode)",
        )
    ),
    rules("memory")(
        warning_if(
            "{asked.memory_gb_per_node:,.3g} GB may not hold {workers:count worker}, which may need {workers_gb}",
            "#SBATCH --mem={workers_gb}G   (or fewer workers, or shorter chunks)",
            lambda f: f.workers and 0 < (f.asked.memory_gb_per_node or 0) < f.workers_gb,
        )
    ),
    rules("cores")(
        warning_if(
            "{asked.cpus_per_node:count core} for {workers:count worker}: each keeps one busy",
            "#SBATCH --cpus-per-task={workers}   (or fewer workers)",
            lambda f: f.workers and (f.asked.cpus_per_node or f.workers) < f.workers,
        )
    ),
    BILLING,
)


# --- account --------------------------------------------------------------------------------------------------------


def _account(facts: PreflightFacts) -> Cases:
    """Compare the account with the site's rule for GPU jobs; others, such as a merge, are often paid by another."""
    asked, ending = facts.asked, facts.site.account_ends_with
    if ending and (asked.gpus_per_task is not None or (facts.script is None and asked.account is not None)):
        yield {"account": asked.account, "ending": ending}


def _merge_account(facts: PreflightFacts) -> Cases:
    """Find a merge, which has no GPU, that the account of GPU jobs would pay: in a script, or of ``submit``."""
    asked, script, ending = facts.asked, facts.script, facts.site.account_ends_with
    account, option = asked.merge_account or asked.account, "--config submit.merge_account="
    if script is not None:
        if script.start or asked.gpus_per_task or "merge" not in {call.command for call in script.calls}:
            return
        account, option = asked.account, "#SBATCH --account="
    if ending and account and account.endswith(ending) and account != ending:
        yield {"account": account, "option": option, "other": account.removesuffix(ending)}


_PAYING = (
    rules("account", _account)(
        problem_if(
            "no account is named; GPU jobs on {site.name} need one that ends in {ending}",
            "#SBATCH --account=<your allocation>{ending}",
            lambda f: f.account is None or "<" in f.account,
        ),
        problem_if(
            "account {account} does not end in {ending}, as GPU jobs on {site.name} need",
            "#SBATCH --account={account}{ending}",
            lambda f: not f.account.endswith(f.ending),
        ),
        fine_if("{account} ends in {ending}"),
    ),
    rules("merge account", _merge_account)(
        warning_if(
            "the merge job has no GPU, but would be paid by {account}, an account of GPU jobs on {site.name}: it may"
            " never start",
            "{option}{other}",
        )
    ),
)
REQUEST = (*_ARRAY_AND_TIME, *_NODES_AND_COST, *_PAYING)


# --- names, and the answer of sbatch ----------------------------------------------------------------------------------

_MANY = 8  # names in one sentence
_NO_NAME = "()[]&|,"


def _reached(facts: PreflightFacts) -> tuple[str, list[Node]]:
    """Return the nodes that the request can reach, and whose they are; a partition that sinfo hides is no help."""
    if facts.cluster is None:
        return "this Slurm", []
    partition = facts.asked.partition if largest_size(facts.cluster, facts.asked.partition) else None
    return f"partition {partition}" if partition else "this Slurm", facts.cluster.reached(partition)


def _names(facts: PreflightFacts) -> Cases:
    """Compare the names in a request with those that sinfo shows."""
    asked, cluster = facts.asked, facts.cluster
    if cluster is None:
        return
    whose, reached = _reached(facts)
    partitions, nodes = ([one.name for one in names] for names in (cluster.partitions, cluster.nodes))
    kinds = sorted({one.kind for node in reached for one in node.gpus} - {UNTYPED})
    features = sorted({word for node in reached for word in node.features})
    of_all = features if whose == "this Slurm" else []  # else it may be that of another partition
    wanted = re.sub(r"\*\d+", "", asked.constraint or "").translate(dict.fromkeys(map(ord, _NO_NAME), " ")).split()
    for name in _missing((asked.partition or "").split(","), partitions):
        fix = _other("partition", asked.partition, name, partitions, "sinfo -s")
        yield _absent("partition", f"this Slurm has no partition {name}", partitions, fix)
    for name in _missing(wanted, features):
        fix = _other("constraint", asked.constraint, name, of_all, "sinfo -N -O NodeList,Partition,Features")
        yield _absent("constraint", f"no node of {whose} has the feature {name}", features, fix)
    for option in asked.gpu_options:
        name, _, text = option.partition("=")
        parts = try_parse([], partial(parse_gpus, text, gres=name == "--gres")) or []
        for kind in [kind for kind, _ in parts if kind and kind.lower() not in kinds]:
            right = re.sub(rf"\b{re.escape(kind)}:(?=\d)|:{re.escape(kind)}$", "", option)
            fix = f"#SBATCH {right}   (of any kind)"
            yield _absent("GPUs", f"no node of {whose} has a GPU of kind {kind}", kinds, fix)
    for name in _missing(asked.node_names, nodes):
        fix = "sinfo -N   (which nodes are there? or leave --nodelist and --exclude out)"
        yield _absent("nodes", f"this Slurm has no node {name}", nodes, fix)


def _missing(wanted: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    return (name for name in dict.fromkeys(wanted) if name and name not in there)


def _absent(subject: str, what: str, names: Sequence[str], fix: str) -> dict[str, str]:
    more = f" and {len(names) - _MANY:,} more" if len(names) > _MANY else ""
    return {"subject": subject, "what": what, "there": ", ".join(names[:_MANY]) + more or "none", "fix": fix}


def _other(option: str, value: str | None, wrong: str, known: Sequence[str], ask: str) -> str:
    """Return the line with the name that was probably meant, or with the only one; else how to find it."""
    right = {one.lower(): one for one in known}.get(nearest(wrong.lower(), [one.lower() for one in known]) or "")
    right = known[0] if len(known) == 1 else right
    if right is None:
        return f"{ask}   (which are there?)"
    line = re.sub(rf"(?<![\w.-]){re.escape(wrong)}(?![\w.-])", right, value or wrong)
    return f"#SBATCH --{option}={shlex.quote(line)}"


def _tried(facts: PreflightFacts) -> Cases:
    """Report the answer of sbatch; that no node fits may be true only while some nodes are down."""
    if facts.trial is None:
        return
    refusal, *details = facts.trial or ("",)
    later = any(words in refusal for words in _PERHAPS_LATER)
    all_work = facts.cluster is not None and all(node.works for node in _reached(facts)[1])
    why = "; no node has all this together" + ("" if all_work else ", or such nodes are down now")
    yield {
        "refusal": refusal + why if later else refusal,
        "severity": WARNING if later and not all_work else PROBLEM,
        "hint": "and: sinfo -R, badcjobs cluster" if later else "until it names a time",
        "details": () if later else details,
    }


NAMES = rules("{subject}", _names)(problem_if("{what} (there: {there})", "{fix}"))
_SBATCH = rules("sbatch", _tried)(
    fine_if("it would take {script.name} (--test-only)", when=lambda f: not f.refusal),
    Advice("{severity}", "it refuses {script.name}: {refusal}", "sbatch --test-only {script.name:quoted}   ({hint})"),
)
