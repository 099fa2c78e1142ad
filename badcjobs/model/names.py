"""What a task is called, and numbers that are the same in every process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TASK_NAME = re.compile(r"(?P<job>.+?)_(?P<index>\d+)\.r(?P<restart>\d+)\.(?P<node>.+?)(\.p(?P<procid>\d+))?")
_BITS_OF_BIRTH = 17


def stable_id(*parts: object) -> int:
    """Return a 47-bit number for these names: the same in every process, six bytes in SQLite.

    Task databases are written apart and joined later, so a row number would collide; these do not
    (10,000 tasks of 4 devices: one chance in 100,000).
    """
    import hashlib  # late: it carries a cryptographic library of 4 MB, and the recorder needs none of it

    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") >> 1


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The name of one attempt of one array task; its file names carry it."""

    job_id: str
    array_index: int
    restart: int
    node: str
    procid: int | None = None
    # When it started. Names repeat across run folders, so the id needs it; no name says it, so keys are equal without.
    born_ms: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        step = "" if self.procid is None else f".p{self.procid}"
        return f"{self.job_id}_{self.array_index}.r{self.restart}.{self.node}{step}"

    @property
    def task_id(self) -> int:
        """The number of this attempt; its first bits are those of the name, so that names tell the order of ids."""
        by_name = stable_id(self.name)
        if self.born_ms is None:
            return by_name
        mask = (1 << _BITS_OF_BIRTH) - 1
        return (by_name & ~mask) | (stable_id(self.name, self.born_ms) & mask)

    @classmethod
    def parse(cls, name: str) -> TaskKey | None:
        """Return the task of this name; None when no task has such a name."""
        parts = _TASK_NAME.fullmatch(name)
        if parts is None:
            return None
        procid = None if parts["procid"] is None else int(parts["procid"])
        key = cls(parts["job"], int(parts["index"]), int(parts["restart"]), parts["node"], procid)
        return key if key.name == name else None
