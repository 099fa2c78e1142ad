"""Rules of ``check`` about what a job asks of Slurm: array, GPU-hours, time, nodes, account, cost, names."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import partial

from badcjobs.cluster.nodes import UNTYPED, Node, largest_size
from badcjobs.cluster.sbatch_options import parse_gpus, try_parse
from badcjobs.model import Billing
from badcjobs.planning.findings import Advice, Cases, Remark, apply_rules, fine_if, problem_if, rules, warning_if
from badcjobs.planning.preflight_facts import PreflightFacts
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.settings import nearest
from badcjobs.words import clock, count, first_names, number

_UNITS = (("GPUs", "GPUs"), ("cores", "cores"), ("memory", "GB of memory"))  # subject → its unit
_MUCH_LESS = 0.8  # of the bill: a request that saves less is no better
_ENOUGH = "what the workers may need"
_AGAIN = "   (what is left is done when you submit it again)"
# Problems with these subjects have a line to paste; the message of sbatch would only repeat them.
_EXPLAINED = {"array", "time", "GPUs", "cores", "memory", "account", "partition", "constraint", "nodes"}
# Messages of sbatch for what never fits, and also for nodes that are drained now, for which a job can wait.
_PERHAPS_LATER = ("node configuration is not available", "nodes are busy", "not available (down")


def check_request(facts: PreflightFacts) -> Iterator[Remark]:
    """Check the request; ``sbatch --test-only`` decides about names, because sinfo may hide some."""
    rules_of_names = () if facts.trial == () else (NAMES,)
    remarks = list(apply_rules((*REQUEST, *rules_of_names), facts))
    yield from remarks
    explained = any(remark.severity == PROBLEM and remark.subject in _EXPLAINED for remark in remarks)
    if facts.trial == () or not explained:
        yield from _SBATCH(facts)


# --- the array and its time -------------------------------------------------------------------------------------------


def _array(facts: PreflightFacts) -> Cases:
    """Compare the array with what the site and this Slurm allow."""
    tasks = facts.asked.tasks
    if tasks is None:
        return
    site = facts.site
    slurm = facts.slurm
    last = tasks - 1 if facts.asked.last_index is None else facts.asked.last_index
    if site.array_tasks:
        yield {"limit": site.array_tasks, "who": f"{site.name} allows", "last": 0}
    if slurm and slurm.max_array_size:
        yield {"limit": slurm.max_array_size, "who": "this Slurm (MaxArraySize) allows", "last": last}


def _spacing(facts: PreflightFacts) -> Cases:
    """Check that tasks can know their place in the array; a run that has begun already knows it."""
    start = facts.start
    if facts.has_begun or facts.asked.array_range is None:
        return
    if facts.script is not None and start is None:
        return
    if start is not None and "shard" in start.named:
        return
    may_have_begun = facts.out is None or (start is not None and start.hidden)
    if may_have_begun:
        yield {"severity": WARNING, "outcome": "they know their shares only in a run that has begun already"}
    else:
        yield {"severity": PROBLEM, "outcome": "all of them would end at once, without knowing their shares"}


def _gpu_hours(facts: PreflightFacts) -> Cases:
    """Multiply tasks, GPUs and time: a cap counts what runs and waits together."""
    asked = facts.asked
    site = facts.site
    tasks = asked.tasks or 1
    is_limited = asked.time_s is not None or bool(asked.no_time_limit and site.gpu_hours)
    if not asked.gpus_per_task or not is_limited:
        return
    hours = (asked.time_s or 0) / 3600
    total = tasks * asked.gpus_per_task * hours
    shown = f"{total:,.0f}" if total >= 10 else f"{total:.2g}"
    cap = "no cap is known"
    within_cap = ""
    if site.gpu_hours:
        cap = f"{site.name} allows {site.gpu_hours:,.0f} running and queued together"
        within_cap = _within_cap(facts, hours or None, site.gpu_hours)
    yield {
        "total": total,
        "said": f"{count(tasks, 'task')} × {count(asked.gpus_per_task, 'GPU')}",
        "product": f" × {hours:,.4g} h = {shown} GPU-hours",
        "cap": cap,
        "within_cap": within_cap,
    }


def _within_cap(facts: PreflightFacts, hours: float | None, cap: float) -> str:
    """Return a shorter time where it is still worth a start, else fewer tasks: either way the rest is done later."""
    asked = facts.asked
    gpus = asked.gpus_per_task or 1
    fitting_h = cap / ((asked.tasks or 1) * gpus)
    minutes = int(60 * min(fitting_h, facts.site.time_h or cap))
    if minutes >= 60 or (asked.tasks is None and minutes):
        return f"#SBATCH --time={clock(60 * minutes)}{_AGAIN}"
    tasks = max(1, int(cap / (gpus * (hours or 1))))
    time = "" if hours else " --time=1:00:00"
    return f"#SBATCH --array=0-{tasks - 1}{time}{_AGAIN}"


def _time(facts: PreflightFacts) -> Cases:
    time_s = facts.asked.time_s
    yield {"wanted": "no time limit" if time_s is None else f"{time_s / 3600:,.4g} h"}


def _shares(facts: PreflightFacts) -> Cases:
    tasks = facts.asked.tasks
    source = facts.source
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
    asked = facts.asked
    of_site, of_slurm = _node_sizes(facts)
    sizes = zip(_UNITS, (asked.gpus_per_node, asked.cpus_per_node, asked.memory_gb_per_node), strict=True)
    for (subject, unit), wanted in sizes:
        most = of_site[subject]
        whose = facts.site.name
        if most is None:
            most = of_slurm[subject]
            whose = _reached(facts)[0]
        if wanted is None or most is None or wanted <= most:
            continue
        fix = _most_line(facts, subject, most)
        yield {"subject": subject, "wanted": wanted, "unit": unit, "whose": whose, "most": most, "fix": fix}


def _most_line(facts: PreflightFacts, subject: str, most: float) -> str:
    """Return the line that asks for the most that a node has."""
    if not most:
        return "sinfo -N -O NodeList,Partition,Gres   (where are GPUs?)"
    if subject == "GPUs":
        return f"#SBATCH --gpus-per-node={most}   (more: badcjobs template multinode)"
    if subject == "cores":
        return f"#SBATCH --cpus-per-task={most}"
    if facts.site.billing and 0 < facts.needed_gb <= most:  # not what would cost too much then
        return f"#SBATCH --mem={facts.needed_gb}G   ({_ENOUGH})"
    if most == int(most):
        return f"#SBATCH --mem={most:.0f}G"
    return f"#SBATCH --mem={int(most * 1024)}M"


def _node_sizes(facts: PreflightFacts) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return GPUs, cores and memory in GB of a node: by the file of the site, and by Slurm."""
    site = facts.site
    of_site = {"GPUs": site.node_gpus, "cores": site.node_cpus, "memory": site.node_memory_gb}
    size = facts.cluster and largest_size(facts.cluster, facts.asked.partition)
    gpus, cores, memory_mib = size or (None, None, None)
    return of_site, {"GPUs": gpus, "cores": cores, "memory": memory_mib and memory_mib / 1024}


def _spread(facts: PreflightFacts) -> Cases:
    """Check that a task of several nodes is started on all of them: the script itself runs on the first."""
    asked = facts.asked
    script = facts.script
    nodes = asked.nodes
    if nodes is None and asked.gpus_per_task:
        on_one = asked.gpus_per_node or facts.site.node_gpus
        nodes = math.ceil(asked.gpus_per_task / on_one) if on_one else 1
    if script and script.start and (nodes or 1) > 1 and not any(call.spread for call in script.starts):
        yield {"needed": nodes}


def _billing(facts: PreflightFacts) -> Cases:
    """Show what a task is billed, and whether memory or cores cost more than its GPUs for no good reason."""
    asked = facts.asked
    billing = facts.site.billing
    if billing is None or not asked.gpus_per_task or asked.exclusive:
        return
    nodes = asked.nodes or 1
    most_cpus = _most_of_node(facts, "cores")
    most_gb = _most_of_node(facts, "memory")
    all_of_it = asked.memory_gb_per_node == 0
    node_gb = asked.memory_gb_per_node or 0.0
    if all_of_it and most_gb < math.inf:
        node_gb = most_gb

    def cost(memory_gb: float, cores: float) -> float:
        return billing.per_hour(asked.gpus_per_task or 0, nodes * memory_gb, cores)

    gpus_cost = asked.gpus_per_task * billing.gpu
    memory_cost = nodes * node_gb * billing.memory_gb
    cores_cost = (asked.cpus or 0) * billing.cpu
    enough_gb = int(min(facts.needed_gb, most_gb))  # more is refused
    cpus = min(asked.cpus or 0, nodes * most_cpus)
    now = cost(node_gb, cpus)
    then = cost(enough_gb, cpus)
    saves = then < now if all_of_it else then <= _MUCH_LESS * now
    paid = max(gpus_cost, memory_cost if billing.rule == "max" else 0.0)
    cores_for_paid = paid / billing.cpu / nodes if billing.cpu else 0.0
    cores_paid = int(min(max(cores_for_paid, facts.workers or 1), most_cpus))
    yield {
        "memory_times": memory_cost / gpus_cost if gpus_cost else 0.0,
        "cores_times": cores_cost / gpus_cost if gpus_cost else 0.0,
        "too_much": facts.needed_gb and memory_cost > gpus_cost > 0 and saves,
        "too_many": cores_cost > paid and gpus_cost and (asked.cpus or 0) > nodes * cores_paid,
        "cores_paid": cores_paid,
        "enough": enough_gb,
        "bill": _bill_text(facts, billing, nodes * node_gb),
    }


def _most_of_node(facts: PreflightFacts, subject: str) -> float:
    of_site, of_slurm = _node_sizes(facts)
    return of_site[subject] or of_slurm[subject] or math.inf


def _bill_text(facts: PreflightFacts, billing: Billing, memory_gb: float) -> str:
    """Return the parts of a task's bill, their sum, and the cost of 1,000 audio-hours."""
    asked = facts.asked
    gpus = asked.gpus_per_task or 0
    amounts = (
        (gpus, "GPU" if gpus == 1 else "GPUs", billing.gpu),
        (memory_gb, "GB", billing.memory_gb),
        (asked.cpus or 0, "core" if asked.cpus == 1 else "cores", billing.cpu),
    )
    parts = []
    for amount, name, weight in amounts:
        if amount * weight:
            parts.append(f"{round(amount, 2):g} {name} × {weight:g} = {round(amount * weight, 2):g}")
    units = billing.per_hour(gpus, memory_gb, asked.cpus or 0)
    rule = "the largest counts" if billing.rule == "max" else "they add up"
    text = f"{', '.join(parts)}; {rule}: {units:g} an hour for each task"
    if facts.rate is None:
        return text
    if not facts.rate:
        return f"{text}; per 1,000 audio-hours: not known, no speed is measured"
    start_up = "with" if facts.source and facts.source.audio_s else "without"
    about = f"about {number(1000 * units * facts.task_hours)}, {start_up} start-up"
    return f"{text}; per 1,000 audio-hours: {about}, at {number(facts.rate)} audio-hours per GPU-hour"


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


def _reached(facts: PreflightFacts) -> tuple[str, list[Node]]:
    """Return the nodes that the request can reach, and whose they are; a partition that sinfo hides is no help."""
    if facts.cluster is None:
        return "this Slurm", []
    partition = facts.asked.partition if largest_size(facts.cluster, facts.asked.partition) else None
    return f"partition {partition}" if partition else "this Slurm", facts.cluster.reached(partition)


def _names(facts: PreflightFacts) -> Cases:
    """Compare the names in a request with those that sinfo shows."""
    asked = facts.asked
    cluster = facts.cluster
    if cluster is None:
        return
    whose, reached = _reached(facts)
    partitions = [partition.name for partition in cluster.partitions]
    for name in _missing((asked.partition or "").split(","), partitions):
        fix = _other("partition", asked.partition, name, partitions, "sinfo -s")
        yield _absent("partition", f"this Slurm has no partition {name}", partitions, fix)

    features = sorted({feature for node in reached for feature in node.features})
    of_all = features if whose == "this Slurm" else []  # else it may be that of another partition
    constraint = re.sub(r"\*\d+", "", asked.constraint or "")
    for name in _missing(re.split(r"[()\[\]&|,\s]+", constraint), features):
        fix = _other("constraint", asked.constraint, name, of_all, "sinfo -N -O NodeList,Partition,Features")
        yield _absent("constraint", f"no node of {whose} has the feature {name}", features, fix)

    kinds = sorted({count.kind for node in reached for count in node.gpus} - {UNTYPED})
    for option in asked.gpu_options:
        for kind in _missing_kinds(option, kinds):
            right = re.sub(rf"\b{re.escape(kind)}:(?=\d)|:{re.escape(kind)}$", "", option)
            fix = f"#SBATCH {right}   (of any kind)"
            yield _absent("GPUs", f"no node of {whose} has a GPU of kind {kind}", kinds, fix)

    nodes = [node.name for node in cluster.nodes]
    for name in _missing(asked.node_names, nodes):
        fix = "sinfo -N   (which nodes are there? or leave --nodelist and --exclude out)"
        yield _absent("nodes", f"this Slurm has no node {name}", nodes, fix)


def _missing_kinds(option: str, kinds: Sequence[str]) -> list[str]:
    """Return the kinds of GPUs in an option that no node has."""
    name, _, text = option.partition("=")
    parts = try_parse([], partial(parse_gpus, text, gres=name == "--gres")) or []
    return [kind for kind, _ in parts if kind and kind.lower() not in kinds]


def _missing(wanted: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    return (name for name in dict.fromkeys(wanted) if name and name not in there)


def _absent(subject: str, what: str, names: Sequence[str], fix: str) -> dict[str, str]:
    return {"subject": subject, "what": what, "there": first_names(names, _MANY) or "none", "fix": fix}


def _other(option: str, value: str | None, wrong: str, known: Sequence[str], ask: str) -> str:
    """Return the line with the name that was probably meant, or with the only one; else how to find it."""
    by_lower = {name.lower(): name for name in known}
    right = by_lower.get(nearest(wrong.lower(), by_lower) or "")
    if len(known) == 1:
        right = known[0]
    if right is None:
        return f"{ask}   (which are there?)"
    line = re.sub(rf"(?<![\w.-]){re.escape(wrong)}(?![\w.-])", right, value or wrong)
    return f"#SBATCH --{option}={shlex.quote(line)}"


def _tried(facts: PreflightFacts) -> Cases:
    """Report the answer of sbatch; that no node fits may be true only while some nodes are down."""
    if facts.trial is None:
        return
    refusal, *details = facts.trial or ("",)
    may_fit_later = any(words in refusal for words in _PERHAPS_LATER)
    if not may_fit_later:
        yield {"refusal": refusal, "severity": PROBLEM, "hint": "until it names a time", "details": details}
        return
    all_work = facts.cluster is not None and all(node.works for node in _reached(facts)[1])
    why = "no node has all this together"
    if not all_work:
        why += ", or such nodes are down now"
    yield {
        "refusal": f"{refusal}; {why}",
        "severity": PROBLEM if all_work else WARNING,
        "hint": "and: sinfo -R, badcjobs cluster",
        "details": (),
    }


NAMES = rules("{subject}", _names)(problem_if("{what} (there: {there})", "{fix}"))
_SBATCH = rules("sbatch", _tried)(
    fine_if("it would take {script.name} (--test-only)", when=lambda f: not f.refusal),
    Advice("{severity}", "it refuses {script.name}: {refusal}", "sbatch --test-only {script.name:quoted}   ({hint})"),
)
