"""Tests on the one Slurm cluster as stories: all begin at once, because most of their time is Slurm's own patience.

A story is written as one function that acts and asserts. The test of its name waits for its end; a second try of that
test tells the story again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from support.slurm_cluster import SlurmCluster
from support.slurm_hooks import Hooks
from support.slurm_job import SlurmJob

AT_A_TIME = 12


class Desk(NamedTuple):
    """The place of one story at the login node."""

    cluster: SlurmCluster
    hooks: Hooks
    folder: Path

    def job(self, name: str = "job", **more: Any) -> SlurmJob:
        return SlurmJob(self.cluster, self.folder / name, **more)


Body = Callable[[Desk], None]


def story(body: Body) -> Callable[[Stories], None]:
    """Make a test of a story."""

    def test(stories: Stories) -> None:
        stories.end_of(body)

    test.__name__, test.__doc__, test.body = body.__name__, body.__doc__, body  # type: ignore[attr-defined]
    return test


class Stories:
    """The stories of one session."""

    def __init__(self, cluster: SlurmCluster, hooks: Hooks, folder: Path, bodies: Iterable[Body]) -> None:
        self._cluster, self._hooks, self._folder, self._told = cluster, hooks, folder, 0
        self._pool = ThreadPoolExecutor(max_workers=AT_A_TIME)
        self._ends: dict[Body, Future[None]] = {body: self._begin(body) for body in bodies}

    def _begin(self, body: Body) -> Future[None]:
        self._told += 1
        folder = self._folder / f"{self._told}-{body.__name__[5:45]}"
        folder.mkdir()
        return self._pool.submit(body, Desk(self._cluster, self._hooks, folder))

    def end_of(self, body: Body) -> None:
        (self._ends.pop(body, None) or self._begin(body)).result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
