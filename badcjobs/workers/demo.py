"""The demo engine: our own small detector of loud stretches, one long-lived process per worker.

It speaks the protocol that any streaming engine of ours speaks: a JSON line per chunk in, a JSON line per chunk out.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from badcjobs.seams import Clock, Launcher, SessionBroken
from badcjobs.workers.failures import TERMINATED, WORKER_DIED
from badcjobs.workers.launch import last_lines, worker_environment


class DemoEngine:
    """Finds loud stretches in WAV files with the standard library alone."""

    name = "demo"
    takes_whole_share = False

    def __init__(self, args: Sequence[str], *, environ: Mapping[str, str], launcher: Launcher, clock: Clock) -> None:
        self._args = list(args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock

    def check(self) -> None:
        """Refuse wrong arguments now, not once per worker."""
        from badcjobs.workers.demo_worker import parse_arguments

        parse_arguments(self._args)

    def open(self, plan: WorkerPlan, scratch: Path) -> DemoSession:
        """Start the worker process."""
        return DemoSession(self._args, worker_environment(self._environ, plan), scratch, self._launcher, self._clock)


class DemoSession:
    """One demo worker: a line in, a line out."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], scratch: Path, launcher: Launcher, clock: Clock
    ) -> None:
        self._clock = clock
        self._launcher = launcher
        self._log = scratch / "demo.log"
        argv = [sys.executable, "-m", "badcjobs.workers.demo_worker", *args]
        self._process = launcher.start(argv, env=env, cwd=None, stderr=self._log, pipes=True)
        self.pid: int | None = self._process.pid
        self._interrupted = False

    def process(self, batch: Sequence[Chunk]) -> Iterator[ChunkStarted | ChunkResult]:
        """Analyse one chunk after the other."""
        for chunk in batch:
            if self._interrupted:
                return
            started = ChunkStarted(chunk, self._clock.now_ms())
            yield started
            answer = self._ask({"audio": chunk.audio_path})
            yield _result(chunk, started.at_ms, self._clock.now_ms(), answer)

    def _ask(self, question: Mapping[str, str]) -> dict[str, object]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            return dict(json.loads(answer))
        except (OSError, ValueError) as error:
            raise self._obituary() from error

    def _obituary(self) -> SessionBroken:
        self._launcher.signal(self._process, signal.SIGKILL)
        code = self._process.wait()
        if code == -signal.SIGTERM:
            return SessionBroken(TERMINATED, "the worker was ended from outside (SIGTERM)")
        return SessionBroken(WORKER_DIED, f"the worker ended with {code}\n{last_lines(self._log)}".strip())

    def interrupt(self) -> None:
        """Finish the chunk at hand, then stop."""
        self._interrupted = True

    def kill(self) -> None:
        """End it now."""
        self._launcher.signal(self._process, signal.SIGKILL)

    def close(self) -> int | None:
        """End the worker by closing its input; insist if it does not listen."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # the worker died with a line half written
        try:
            return self._process.wait(timeout=5)
        except Exception:
            self.kill()
            return self._process.wait()


def _result(chunk: Chunk, started_at_ms: int, ended_at_ms: int, answer: Mapping[str, object]) -> ChunkResult:
    if "error" in answer:
        return ChunkResult(
            chunk, started_at_ms, ended_at_ms, error_class=str(answer["error_class"]), error=str(answer["error"])
        )
    rows = answer["detections"]
    assert isinstance(rows, list)
    detections = tuple(Detection(start, end, "LOUD", score, "Loud sound") for start, end, score in rows)
    audio_s = answer["audio_s"]
    assert isinstance(audio_s, float)
    return ChunkResult(chunk, started_at_ms, ended_at_ms, detections=detections, audio_s=audio_s)
