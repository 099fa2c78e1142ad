"""Judges what a job costs: GPUs, memory and cores, by the weights of the site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from badcjobs.preflight.facts import Asked
from badcjobs.preflight.finding import Finding, fine, warning
from badcjobs.preflight.site import Site

# Engine processes have to live in it: less would be cheaper, but Slurm would kill them. The same as submit asks for.
NEEDED_GB_PER_GPU = 4.0


@dataclass(frozen=True, slots=True)
class _Bill:
    """What one array task costs an hour, on all its nodes together."""

    gpus: float
    memory: float
    cores: float
    highest_counts: bool
    parts: tuple[str, ...]

    @property
    def text(self) -> str:
        rule = "the largest counts" if self.highest_counts else "they add up"
        costs = (self.gpus, self.memory, self.cores)
        total = max(costs) if self.highest_counts else sum(costs)
        return f"{', '.join(self.parts)}; {rule}: {total:g} an hour for each task"

    def times(self, cost: float) -> str:
        return f"{cost / self.gpus:.1f} times what the GPUs cost"


def judge_billing(asked: Asked, site: Site | None) -> Iterator[Finding]:
    """Show what a task is billed, and warn where memory or cores cost more than its GPUs for no good reason."""
    if site is None or site.bill_gpu is None or not asked.gpus_per_task or asked.exclusive:
        return
    memory_gb = site.node_memory_gb if asked.memory_gb_per_node == 0 else asked.memory_gb_per_node
    bill = _make_bill(asked, memory_gb, site)
    enough_mib = _enough_mib(asked, bill, site)
    paid = max(bill.gpus, bill.memory if bill.highest_counts else 0.0)
    if bill.memory > bill.gpus and memory_gb is not None and memory_gb * 1024 > enough_mib:
        size = f"{enough_mib}M" if enough_mib % 1024 else f"{enough_mib // 1024}G"
        fix = f"#SBATCH --mem={size}   (ask for more only if a first task needed it)"
        yield warning("billing", f"memory costs {bill.times(bill.memory)}: {bill.text}", fix)
    elif bill.cores > paid and site.bill_cpu is not None:
        fix = f"#SBATCH --cpus-per-task={max(1, int(paid / site.bill_cpu / (asked.nodes or 1)))}"
        yield warning("billing", f"cores cost {bill.times(bill.cores)}: {bill.text}", fix)
    elif bill.memory > bill.gpus:
        yield fine("billing", f"memory costs {bill.times(bill.memory)}, but an engine may need it: {bill.text}")
    else:
        yield fine("billing", bill.text)


def _enough_mib(asked: Asked, bill: _Bill, site: Site) -> int:
    """Return the memory of a node that is needed, or that costs nothing beside the rest."""
    nodes, gpus = asked.nodes or 1, asked.gpus_per_task or 0
    paid = max(bill.gpus, bill.cores if bill.highest_counts else 0.0)
    free_gb = paid / site.bill_memory_gb / nodes if site.bill_memory_gb else 0.0
    return int(max(NEEDED_GB_PER_GPU * -(-gpus // nodes), free_gb) * 1024)


def _make_bill(asked: Asked, memory_gb_per_node: float | None, site: Site) -> _Bill:
    gpus, cpus = asked.gpus_per_task or 0, asked.cpus
    memory_gb = None if memory_gb_per_node is None else memory_gb_per_node * (asked.nodes or 1)
    cost, memory, cores = gpus * (site.bill_gpu or 0.0), 0.0, 0.0
    parts = [f"{gpus} GPU{'' if gpus == 1 else 's'} × {site.bill_gpu:g} = {cost:g}"]
    if memory_gb is not None and site.bill_memory_gb is not None:
        memory = memory_gb * site.bill_memory_gb
        parts.append(f"{memory_gb:g} GB × {site.bill_memory_gb:g} = {memory:g}")
    if cpus is not None and site.bill_cpu is not None:
        cores = cpus * site.bill_cpu
        parts.append(f"{cpus} cores × {site.bill_cpu:g} = {cores:g}")
    return _Bill(cost, memory, cores, site.bill_rule == "max", tuple(parts))
