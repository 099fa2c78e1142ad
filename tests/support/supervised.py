"""A supervisor over a scripted engine and a real task database, run to its end in the test's own thread."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rooms.model import Chunk, ChunkStarted, Device, TaskKey, WorkerPlan
from rooms.root import Engine, SessionBroken
from rooms.store import TaskWriter
from rooms.workers import RetryPolicy, Supervisor
from support.scripted_engine import CLOCK, News, Script, ScriptedEngine, ScriptedSession, done, failed

MODEL = "Test GPU"
OK = (None, "done")


def make_chunks(count: int) -> list[Chunk]:
    return [Chunk("r", f"c{number}", "a.wav", "/a.wav") for number in range(count)]


def plan_on(slot: int, device_id: int | None = None) -> WorkerPlan:
    return WorkerPlan(slot, Device(str(slot), "test", name=MODEL), 100 + slot if device_id is None else device_id, 1)


class Bench:
    """Runs chunks through a supervisor; ``tries`` and ``statuses`` are what the task database says afterwards."""

    def __init__(
        self,
        folder: Path,
        script: Script | Engine,
        *,
        chunks: int | Sequence[Chunk] = 4,
        workers: int | Sequence[WorkerPlan] = 1,
        wants: int = 1,
        retries: int = 2,
        give_up_after: int = 25,
        on_open: Callable[[WorkerPlan], None] = lambda plan: None,
        **others: Any,
    ) -> None:
        self.engine: Any = ScriptedEngine(script, wants=wants, on_open=on_open) if callable(script) else script
        self.chunks = make_chunks(chunks) if isinstance(chunks, int) else list(chunks)
        scratch = Path(tempfile.mkdtemp(dir=folder))
        self.writer = TaskWriter(scratch / "wrapper.sqlite", TaskKey("4821", 0, 0, "gpu1"))
        self.writer.fill(self.chunks, lambda rows: None)
        plans = [plan_on(slot) for slot in range(workers)] if isinstance(workers, int) else workers
        settings = {"clock": CLOCK, "policy": RetryPolicy(retries, 0.0, give_up_after=give_up_after)}
        self.supervisor = Supervisor(
            self.engine, plans, self.writer, **{**settings, "scratch": scratch / "workers", **others}
        )
        self.tally = self.supervisor.tally
        self._is_started = False

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self.supervisor.start()

    def run(self, until: Callable[[], bool] = lambda: False) -> Bench:
        """Handle events until all is over, or ``until`` says so."""
        self.start()
        end_s = time.monotonic() + 30
        while self.supervisor.busy and not until():
            assert time.monotonic() < end_s, f"it never ends: {self.statuses}"
            self.supervisor.handle_events(timeout_s=0.02)
        return self

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        uri = self.writer.half(self.writer.path.parent)
        db = sqlite3.connect(uri, uri=True)
        try:
            return db.execute(sql).fetchall()
        finally:
            db.close()

    @property
    def statuses(self) -> dict[str, int]:
        return self.writer.count_by_status()

    def with_status(self, status: str) -> list[str]:
        return [name for (name,) in self.rows(f"SELECT chunk_id FROM chunk WHERE status = '{status}' ORDER BY rowid")]

    @property
    def tries(self) -> dict[str, list[tuple[str | None, str | None]]]:
        """The tries of each chunk: error class and outcome (None: without an end)."""
        found: dict[str, list[tuple[str | None, str | None]]] = {chunk.chunk_id: [] for chunk in self.chunks}
        for chunk_id, *end in self.rows("SELECT chunk_id, error_class, outcome FROM attempt ORDER BY attempt_id"):
            found[chunk_id].append((end[0], end[1]))
        return found

    def sessions_of(self, slot: int) -> list[ScriptedSession]:
        return [session for session in self.engine.sessions if session.plan.slot == slot]


def acting(acts: Mapping[str, Sequence[str]], usual: str = "ok", *, in_turn: bool = False) -> Script:
    """Make a script of what happens at each try of a chunk; when its acts are over, ``usual``.

    ok, an error class, "silent", "uncharged", "together" (the error of a batch does not say whose it is), or "!class":
    the session breaks when every chunk of the batch has begun (``in_turn``: when those before it are done); "?class":
    before any has begun.
    """
    tried: Counter[str] = Counter()

    def act_of(chunk: Chunk) -> str:
        tried[chunk.chunk_id] += 1
        mine = acts.get(chunk.chunk_id, ())
        return mine[tried[chunk.chunk_id] - 1] if tried[chunk.chunk_id] <= len(mine) else usual

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for group in [[chunk] for chunk in batch] if in_turn else [batch]:
            for act in [act for one in group for act in acts.get(one.chunk_id, ())[:1] if not tried[one.chunk_id]]:
                if act.startswith("?"):
                    tried.update(chunk.chunk_id for chunk in group)
                    raise SessionBroken(act[1:], "broken before any news")
            for chunk in group:
                yield ChunkStarted(chunk, CLOCK.now_ms())
            deeds = [(chunk, act_of(chunk)) for chunk in group]
            for chunk, act in deeds:
                if act.startswith("!"):
                    raise SessionBroken(act[1:], f"broken by {chunk.name}")
            if "together" in [act for _, act in deeds]:
                yield from (failed(chunk, "exit_code", charged=len(batch) == 1) for chunk in batch)
                continue
            for chunk, act in deeds:
                if act == "ok":
                    yield done(chunk)
                elif act != "silent":
                    yield failed(chunk, "batch_lost", charged=False) if act == "uncharged" else failed(chunk, act)

    return script
