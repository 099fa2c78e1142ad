"""What ``check`` says about what a job asks of Slurm: array, GPU-hours, time, nodes, account, cost, names."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence

from badcjobs.planning.findings import (
    Cases,
    Remark,
    RuleSet,
    always,
    fine_if,
    judge_all,
    one_case,
    problem_if,
    warning_if,
)
from badcjobs.planning.preflight_facts import NodeFacts, PreflightFacts
from badcjobs.report.rules import PROBLEM
from badcjobs.report.words import count

_AGAIN = "   (what is left is done when you submit it again)"
# Engine processes have to live in it: less would be cheaper, but Slurm would kill them. The same as submit asks for.
_NEEDED_GB_PER_GPU = 4.0
# Problems about these are said with a line to paste already; sbatch would say the same, in fewer words.
_SAID_BETTER = {"array", "time", "GPUs", "cores", "memory", "account", "partition", "constraint", "nodes"}
# What sbatch says both of what never fits and of nodes that are drained today, for which a job would rightly wait.
_PERHAPS_LATER = ("node configuration is not available", "nodes are busy", "not available (down")


def judge_request(facts: PreflightFacts) -> list[Remark]:
    """Judge what is asked for; ``sbatch --test-only`` has the last word: sinfo does not show everybody everything."""
    found, trial = list(judge_all(REQUEST, facts)), facts.trial
    if trial is not None and trial.refusal is None:
        return [*found, *_SBATCH.judge(facts)]
    found += NAMES.judge(facts)
    said_better = any(one.severity == PROBLEM and one.subject in _SAID_BETTER for one in found)
    return found if said_better else [*found, *_SBATCH.judge(facts)]


# --- the array and its time -------------------------------------------------------------------------------------------


def _array(facts: PreflightFacts) -> Cases:
    """Compare the array with what the site and this Slurm allow."""
    asked, site, slurm = facts.asked, facts.site, facts.slurm
    if asked.tasks is None:
        return
    last = asked.tasks - 1 if asked.last_index is None else asked.last_index
    of_slurm = slurm.max_array_size if slurm else None
    if site.array_tasks:
        yield {"limit": site.array_tasks, "who": f"{site.name} allows", "last": 0, "highest": site.array_tasks - 1}
    if of_slurm:
        yield {"limit": of_slurm, "who": "this Slurm (MaxArraySize) allows", "last": last, "highest": of_slurm - 1}


def _spacing(facts: PreflightFacts) -> Cases:
    """See that tasks can know their place in the array, unless a run has begun that says it."""
    script, start = facts.script, facts.start
    if facts.asked.array_range is None or (script is not None and start is None) or (start and "shard" in start.named):
        return
    yield {"sure": facts.out is not None and not (start and start.hidden)}


def _gpu_hours(facts: PreflightFacts) -> Cases:
    """Multiply tasks, GPUs and time: a cap counts what runs and waits together."""
    asked = facts.asked
    if not asked.gpus_per_task or (asked.time_s is None and not asked.no_time_limit):
        return
    hours = (asked.time_s or 0) / 3600
    gpu_hours = (asked.tasks or 1) * asked.gpus_per_task * hours
    yield {
        "gpu_hours": gpu_hours,
        "said": f"{count(asked.tasks or 1, 'task')} × {count(asked.gpus_per_task, 'GPU')}",
        "product": f" × {hours:,.4g} h = {gpu_hours:{',.0f' if gpu_hours >= 10 else '.2g'}} GPU-hours",
        "within_cap": _within_cap(facts, hours or None, facts.site.gpu_hours) if facts.site.gpu_hours else "",
    }


def _within_cap(facts: PreflightFacts, hours: float | None, cap: float) -> str:
    """Return a shorter time where it is still worth a start, else fewer tasks: either way the rest is done later."""
    asked, gpus = facts.asked, facts.asked.gpus_per_task or 1
    minutes = int(min(cap / ((asked.tasks or 1) * gpus), facts.site.time_h or cap) * 60)
    if minutes >= 60 or (asked.tasks is None and minutes):
        return f"#SBATCH --time={minutes // 60}:{minutes % 60:02d}:00{_AGAIN}"
    tasks = int(cap / (gpus * (hours or 1)))
    if tasks and asked.tasks is not None:
        return f"#SBATCH --array=0-{tasks - 1}{'' if hours else ' --time=1:00:00'}{_AGAIN}"
    return f"#SBATCH --nodes=1 --gpus-per-node=1 --time={max(1, int(cap))}:00:00{_AGAIN}"


def _time(facts: PreflightFacts) -> Cases:
    time_s = facts.asked.time_s
    yield {"wanted": "no time limit" if time_s is None else f"{time_s / 3600:,.4g} h"}


def _shares(facts: PreflightFacts) -> Cases:
    tasks, source = facts.asked.tasks, facts.source
    if tasks is not None and source is not None:
        yield {"idle": tasks - source.chunks, "busy": max(1, source.chunks), "listed": source.manifests_listed}


SPACING = RuleSet(
    "array",
    _spacing,
    problem_if(
        lambda f: f.sure,
        "--array={asked.array} is a list, and Slurm hides the spacing of a list from its tasks: all of them would end"
        " at once, for none knows its share",
        "#SBATCH --array={asked.array_range}",
    ),
    warning_if(
        always,
        "--array={asked.array} is a list, and Slurm hides the spacing of a list from its tasks: they know their shares"
        " only in a run that has begun already",
        "#SBATCH --array={asked.array_range}",
    ),
)
SHARES = RuleSet(
    "array",
    _shares,
    problem_if(
        lambda f: f.listed is not None and f.listed > f.asked.tasks,
        "the list names {listed:,} manifests, but the array has {asked.tasks:,} tasks: the run is refused",
        "#SBATCH --array=0-{listed:before}",
    ),
    warning_if(
        lambda f: f.idle > 0,
        "{asked.tasks:,} tasks for {source.chunks:count chunk}: {idle:,} {idle:has|have} nothing to do",
        "#SBATCH --array=0-{busy:before}",
    ),
)
_ARRAY_AND_TIME = (
    RuleSet(
        "array",
        _array,
        problem_if(
            lambda f: f.asked.tasks > f.limit,
            "the array has {asked.tasks:,} tasks, but {who} {limit:,}",
            "#SBATCH --array=0-{limit:before}",
        ),
        problem_if(
            lambda f: f.last >= f.limit,
            "the array's last index is {last:,}, but this Slurm (MaxArraySize) takes at most {highest:,}",
            "#SBATCH --array=0-{asked.tasks:before}",
        ),
        fine_if(always, "{asked.tasks:,} tasks; {who} {limit:,}"),
    ),
    RuleSet(
        "queue",
        lambda f: [{"room": f.site.queued_jobs - 1}] if f.site.queued_jobs and f.asked.tasks else [],
        problem_if(
            lambda f: f.room < f.asked.tasks <= f.site.queued_jobs,
            "{asked.tasks:,} tasks and the merge job are more than the {site.queued_jobs:,} jobs {site.name} queues",
            "#SBATCH --array=0-{room:before}",
        ),
    ),
    RuleSet(
        "time",
        _time,
        problem_if(
            lambda f: f.site.time_h and (f.asked.no_time_limit or (f.asked.time_s or 0) > f.site.time_h * 3600),
            "--time asks for {wanted}, but {site.name} allows {site.time_h:,.4g} h",
            "#SBATCH --time={site.time_h:.0f}:00:00",
        ),
        warning_if(
            lambda f: f.asked.no_time_limit,
            "--time asks for no time limit: nothing warns a task before its end, and no plan can be kept",
            "#SBATCH --time=12:00:00" + _AGAIN,
        ),
    ),
    RuleSet(
        "GPU-hours",
        _gpu_hours,
        problem_if(
            lambda f: f.asked.time_s is None and f.site.gpu_hours,
            "{said} without a time limit have no end, but {site.name} allows {site.gpu_hours:,.0f} GPU-hours",
            "{within_cap}",
        ),
        fine_if(lambda f: f.asked.time_s is not None and not f.site.gpu_hours, "{said}{product}; no cap is known"),
        fine_if(
            lambda f: f.asked.time_s is not None and f.gpu_hours <= f.site.gpu_hours,
            "{said}{product}; {site.name} allows {site.gpu_hours:,.0f} running and queued together",
        ),
        problem_if(
            lambda f: f.asked.time_s is not None,
            "{said}{product}, but {site.name} allows {site.gpu_hours:,.0f} running and queued together",
            "{within_cap}",
        ),
    ),
)


# --- nodes and cost ---------------------------------------------------------------------------------------------------


def _node(facts: PreflightFacts) -> Cases:
    """Compare what a task wants of one node with a node of the site; what its file does not say, Slurm may."""
    asked, site = facts.asked, facts.site
    said = NodeFacts(site.name, site.node_gpus, site.node_cpus, site.node_memory_gb)
    for part, subject, wanted, unit in (
        ("gpus", "GPUs", asked.gpus_per_node, "GPUs"),
        ("cpus", "cores", asked.cpus_per_node, "cores"),
        ("memory_gb", "memory", asked.memory_gb_per_node, "GB of memory"),
    ):
        whose = facts.nodes if facts.nodes is not None and getattr(said, part) is None else said
        most = getattr(whose, part)
        if wanted is not None and most is not None and wanted > most:
            mem = f"{most:.0f}G" if most == int(most) else f"{int(most * 1024)}M"
            yield {"subject": subject, "wanted": wanted, "unit": unit, "whose": whose.whose, "most": most, "mem": mem}


def _spread(facts: PreflightFacts) -> Cases:
    """See that a task of several nodes is started on all of them: the script itself runs on the first."""
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
    if site.bill_gpu is None or not asked.gpus_per_task or asked.exclusive:
        return
    nodes, highest_counts = asked.nodes or 1, site.bill_rule == "max"
    on_a_node_gb = site.node_memory_gb if asked.memory_gb_per_node == 0 else asked.memory_gb_per_node
    amounts = (
        (asked.gpus_per_task, site.bill_gpu, " GPU" if asked.gpus_per_task == 1 else " GPUs"),
        (None if on_a_node_gb is None else on_a_node_gb * nodes, site.bill_memory_gb, " GB"),
        (asked.cpus, site.bill_cpu, " cores"),
    )
    gpus, memory, cores = ((amount or 0) * (weight or 0.0) for amount, weight, _ in amounts)
    parts = [
        f"{amount:g}{unit} × {weight:g} = {amount * weight:g}"
        for amount, weight, unit in amounts
        if amount is not None and weight is not None
    ]
    total, rule = max(gpus, memory, cores), "the largest counts"
    if not highest_counts:
        total, rule = gpus + memory + cores, "they add up"
    free_gb = max(gpus, cores if highest_counts else 0.0) / site.bill_memory_gb / nodes if site.bill_memory_gb else 0.0
    enough_mib = int(max(_NEEDED_GB_PER_GPU * -(-asked.gpus_per_task // nodes), free_gb) * 1024)
    paid = max(gpus, memory if highest_counts else 0.0)
    yield {
        "memory_times": memory / gpus,
        "cores_times": cores / gpus,
        "too_much": memory > gpus and (on_a_node_gb or 0) * 1024 > enough_mib,
        "too_many": cores > paid,
        "cores_paid": max(1, int(paid / site.bill_cpu / nodes)) if site.bill_cpu else 1,
        "enough": f"{enough_mib}M" if enough_mib % 1024 else f"{enough_mib // 1024}G",
        "bill": f"{', '.join(parts)}; {rule}: {total:g} an hour for each task",
    }


_TOO_MUCH = "a task asks for {wanted:,.4g} {unit} on a node, but a node of {whose} has {most:,.4g}"
_NODES_AND_COST = (
    RuleSet(
        "GPUs",
        one_case,
        warning_if(
            lambda f: f.asked.gpus_per_task == 0, "the script asks Slurm for no GPU", "#SBATCH --gpus-per-node=1"
        ),
    ),
    RuleSet(
        "{subject}",
        _node,
        problem_if(lambda f: f.subject == "memory", _TOO_MUCH, "#SBATCH --mem={mem}"),
        problem_if(lambda f: f.subject == "cores", _TOO_MUCH, "#SBATCH --cpus-per-task={most}"),
        problem_if(lambda f: f.most == 0, _TOO_MUCH, "sinfo -N -O NodeList,Partition,Gres   (where are GPUs?)"),
        problem_if(always, _TOO_MUCH, "#SBATCH --gpus-per-node={most}   (more: badcjobs template multinode)"),
    ),
    RuleSet(
        "nodes",
        _spread,
        warning_if(
            always,
            "{script.name} asks for {needed} nodes, but line {start.line} starts badcjobs on the first alone: the GPUs"
            " of the others have nothing to do",
            "#SBATCH --nodes=1   (and more array tasks; or srun: badcjobs template multinode)",
        ),
    ),
    RuleSet(
        "billing",
        _billing,
        warning_if(
            lambda f: f.too_much,
            "memory costs {memory_times:.1f} times what the GPUs cost: {bill}",
            "#SBATCH --mem={enough}   (ask for more only if a first task needed it)",
        ),
        warning_if(
            lambda f: f.too_many,
            "cores cost {cores_times:.1f} times what the GPUs cost: {bill}",
            "#SBATCH --cpus-per-task={cores_paid}",
        ),
        fine_if(
            lambda f: f.memory_times > 1,
            "memory costs {memory_times:.1f} times what the GPUs cost, but an engine may need it: {bill}",
        ),
        fine_if(always, "{bill}"),
    ),
)


# --- who pays ---------------------------------------------------------------------------------------------------------


def _account(facts: PreflightFacts) -> Cases:
    """Compare the account with the site's rule for GPU jobs; others, such as a merge, are often paid by another."""
    asked, ending = facts.asked, facts.site.account_ends_with
    if ending and (asked.account is not None if facts.script is None else asked.gpus_per_task is not None):
        yield {"account": asked.account, "ending": ending}


def _merge_account(facts: PreflightFacts) -> Cases:
    """Find a merge, which has no GPU, that the account of GPU jobs would pay: in a script, or of ``submit``."""
    asked, script, ending = facts.asked, facts.script, facts.site.account_ends_with
    merges = script is not None and {call.command for call in script.calls} >= {"merge"} and not script.start
    if not ending or (script is not None and (not merges or asked.gpus_per_task)):
        return
    account = asked.account if script is not None else asked.merge_account or asked.account
    if account is not None and account.endswith(ending) and account != ending:
        option = "#SBATCH --account=" if script is not None else "badcjobs submit … --merge-account "
        yield {"account": account, "option": option, "other": account.removesuffix(ending)}


_PAYING = (
    RuleSet(
        "account",
        _account,
        problem_if(
            lambda f: f.account is None,
            "the script names no account; on {site.name} GPU jobs need one that ends in {ending}",
            "#SBATCH --account=<your allocation>{ending}",
        ),
        problem_if(
            lambda f: "<" in f.account,
            "account {account} is a placeholder still",
            "#SBATCH --account=<your allocation>{ending}",
        ),
        problem_if(
            lambda f: not f.account.endswith(f.ending),
            "account {account} does not end in {ending}, as GPU jobs on {site.name} need",
            "#SBATCH --account={account}{ending}",
        ),
        fine_if(always, "{account} ends in {ending}"),
    ),
    RuleSet(
        "merge account",
        _merge_account,
        warning_if(
            always,
            "the merge job has no GPU, but would be paid by {account}, an account of GPU jobs on {site.name}: it may"
            " wait for ever",
            "{option}{other}",
        ),
    ),
)
REQUEST = (*_ARRAY_AND_TIME, *_NODES_AND_COST, *_PAYING)


# --- names, and what sbatch itself says -------------------------------------------------------------------------------

_MANY = 8  # names in one sentence
_NO_NAME = "()[]&|,"


def _names(facts: PreflightFacts) -> Cases:
    """Compare the names in a request with those that sinfo shows."""
    asked, names = facts.asked, facts.names
    if names is None:
        return
    of_all = names.features if names.whose == "this Slurm" else ()  # else it may be that of another partition
    features = re.sub(r"\*\d+", "", asked.constraint or "").translate(dict.fromkeys(map(ord, _NO_NAME), " ")).split()
    ask = "sinfo -N -O NodeList,Partition,Features"
    for name in _missing((asked.partition or "").split(","), names.partitions):
        fix = _other("partition", asked.partition, name, names.partitions, "sinfo -s")
        yield {"subject": "partition", "name": name, "there": _listed(names.partitions), "right": fix}
    for name in _missing(features, names.features):
        fix = _other("constraint", asked.constraint, name, of_all, ask)
        yield {"subject": "constraint", "name": name, "there": _listed(names.features), "right": fix}
    for option, kind in [(one, kind) for one in asked.gpu_options for kind in kinds_of(one)]:
        if kind.lower() not in names.kinds:
            any_kind = re.sub(rf"\b{re.escape(kind)}:(?=\d)", "", option)
            right = any_kind if any_kind != option else option.replace(f":{kind}", "")
            fix = f"#SBATCH {right}   (of any kind)"
            yield {"subject": "GPUs", "name": kind, "there": _listed(names.kinds), "right": fix}
    for name in _missing(asked.node_names, names.nodes):
        fix = "sinfo -N   (which nodes are there? or leave --nodelist and --exclude out)"
        yield {"subject": "nodes", "name": name, "there": _listed(names.nodes), "right": fix}


def _missing(wanted: Sequence[str], there: Sequence[str]) -> Iterator[str]:
    return (name for name in dict.fromkeys(wanted) if name and name not in there)


def kinds_of(option: str) -> list[str]:
    """Return the kinds of GPU that an option names: --gres=gpu:a100:2, --gpus-per-node=v100:1,a100:1."""
    kinds = []
    for one in option.partition("=")[2].split(","):
        words = re.sub(r"\(.*", "", one).removeprefix("gres").lstrip("/:").split(":")
        if option.startswith("--gres"):
            words = words[1:] if words[0] == "gpu" else []
        kinds += [word for word in words[:1] if word and not word.isdecimal()]
    return kinds


def _other(option: str, value: str | None, wrong: str, known: Sequence[str], ask: str) -> str:
    """Return the line with the name that was probably meant, or with the only one; else how to find it."""
    near = [one for one in known if one.lower() == wrong.lower()] or difflib.get_close_matches(wrong, known, n=1)
    near = near or list(known if len(known) == 1 else ())
    if not near:
        return f"{ask}   (which are there?)"
    right = re.sub(rf"(?<![\w.-]){re.escape(wrong)}(?![\w.-])", near[0], value or wrong)
    return f"#SBATCH --{option}={shlex.quote(right)}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MANY:,} more" if len(names) > _MANY else ""
    return ", ".join(names[:_MANY]) + more or "none"


def _tried(facts: PreflightFacts) -> Cases:
    if (trial := facts.trial) is not None:
        later = any(words in (trial.refusal or "") for words in _PERHAPS_LATER)
        all_work = facts.names is not None and facts.names.all_work  # none can be missed because it is out of work
        yield {"later": later, "all_work": all_work, "details": () if later else trial.details}


NAMES = RuleSet(
    "{subject}",
    _names,
    problem_if(
        lambda f: f.subject == "constraint",
        "no node of {names.whose} has the feature {name} (there: {there})",
        "{right}",
    ),
    problem_if(
        lambda f: f.subject == "GPUs", "no node of {names.whose} has a GPU of kind {name} (there: {there})", "{right}"
    ),
    problem_if(lambda f: f.subject == "nodes", "this Slurm has no node {name} (there: {there})", "{right}"),
    problem_if(always, "this Slurm has no partition {name} (there: {there})", "{right}"),
)
_SBATCH = RuleSet(
    "sbatch",
    _tried,
    fine_if(lambda f: f.trial.refusal is None, "it would take {script.name} (--test-only)"),
    problem_if(
        lambda f: not f.later,
        "it refuses {script.name}: {trial.refusal}",
        "sbatch --test-only {script.name:quoted}   (until it names a time)",
    ),
    problem_if(
        lambda f: f.all_work,
        "it refuses {script.name}: {trial.refusal}; no node has all this together",
        "sbatch --test-only {script.name:quoted}   (and: badcjobs cluster)",
    ),
    warning_if(
        always,
        "it refuses {script.name}: {trial.refusal}; no node has all this together, or those that have it are out of"
        " work now",
        "sbatch --test-only {script.name:quoted}   (and: sinfo -R, badcjobs cluster)",
    ),
)
