"""Reads what ``scontrol show config`` prints, as far as a preflight wants to know it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# With this in its environment scontrol says the controller's time in seconds since 1970.
TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
QUESTION = ("scontrol", "show", "config")


@dataclass(frozen=True, slots=True)
class SlurmConfig:
    """Settings of a Slurm; None: it does not say."""

    cluster: str | None
    max_array_size: int | None
    kill_wait_s: int | None
    as_of_s: int | None  # the controller's clock


def parse_config(text: str) -> SlurmConfig:
    """Read the lines ``KillWait                = 30 sec``."""
    said = dict(re.findall(r"^(\w+)\s*= (.*)$", text, re.MULTILINE))
    as_of = re.search(r"^Configuration data as of (\d{9,})$", text, re.MULTILINE)
    return SlurmConfig(
        cluster=said.get("ClusterName"),
        max_array_size=_number(said.get("MaxArraySize")),
        kill_wait_s=_number(said.get("KillWait")),
        as_of_s=int(as_of[1]) if as_of else None,
    )


def _number(text: str | None) -> int | None:
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None
