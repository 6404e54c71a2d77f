"""Fixtures of several tests of the launcher."""

from collections.abc import Iterator

import pytest

from tests.launch.slurm.slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Four nodes of eight (fake) GPUs. A test that kills a node mends it."""
    with slurm_cluster() as cluster:
        yield cluster
