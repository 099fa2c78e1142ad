"""What a task says of itself when it ends: to Slurm, to its database, to people and to scripts."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Verdict:
    """What a task says of itself."""

    exit_code: int
    verdict: str
    note: str | None = None


@dataclass(frozen=True)
class TaskEnd:
    """How a task ended, for people and for scripts."""

    exit_code: int
    verdict: str
    task: str
    out: str
    database: str
    chunks: dict[str, int]
    audio_s: float
    wall_s: float
    devices: int
    workers: int
    telemetry: str
    failed: list[dict[str, str]]
    note: str | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs run --json``."""
        return asdict(self)
