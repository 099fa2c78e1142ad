"""One real Slurm for all tests in this folder; where it is not installed they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.needs import missing
from support.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A running cluster of 2 nodes with 4 GPUs each; with ``--require slurm`` its absence is a failure."""
    if programs := SlurmCluster.missing():
        missing("slurm", f"no Slurm here, {', '.join(programs)} not found")
    with SlurmCluster(nodes=2, gpus=4) as cluster:
        yield cluster
