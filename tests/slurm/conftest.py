"""One real Slurm for all tests in this folder; where it is not installed they are skipped, and say so."""

from collections.abc import Iterator

import pytest
from support.needs import missing
from support.slurm_cluster import SlurmCluster
from support.slurm_stories import SPANK_HEADER, Hooks, Stories, build_spank

GPUS = (4, 4, 4, 4, 4, 4, 2, 1)  # by node
PARTITIONS = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=fragile Nodes=gpu[3-4]
PartitionName=odd Nodes=gpu[5-6]
PartitionName=low Nodes=gpu7 PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=gpu7 PriorityTier=10 PreemptMode=OFF"""


@pytest.fixture(scope="session")
def stories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Begin all stories on a cluster that has our scripts for administrators, and our plugin where it can be built."""
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    folder = tmp_path_factory.mktemp("slurm")
    hooks = Hooks(folder / "hooks")
    plugin = build_spank(folder / "spank") if SPANK_HEADER.exists() else []
    with SlurmCluster(GPUS, [PARTITIONS, *hooks.conf, *plugin], usual="gpu[0-3]") as cluster:
        bodies = [item.function.body for item in request.session.items if hasattr(item.function, "body")]  # type: ignore[attr-defined]
        stories = Stories(cluster, hooks, folder, bodies)
        yield stories
        stories.pool.shutdown(cancel_futures=True)
