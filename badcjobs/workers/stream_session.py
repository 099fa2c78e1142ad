"""A session with one of our worker programs: it reads a JSON line per chunk and writes a JSON line per event.

``hawkears_worker`` describes the lines. The process gets the next chunks before it has finished the current ones.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from badcjobs.masking import find_secrets, mask
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection
from badcjobs.processes import ForkParent, Launcher, last_lines
from badcjobs.seams import Clock, More, SessionBroken, nothing_more
from badcjobs.workers import retry

log = logging.getLogger(__name__)

_SHORTEST_ANALYSED_S = 0.5
START_S = 1800.0  # of an engine: a cold import from a busy filesystem is slow
_COMPILE_S = 900.0  # with the first chunk
_CLOSE_S = 10.0
_FACTOR = 20  # a worker that is silent for this many times the slowest chunk hangs
_UNKNOWN_AUDIO_S = 3600.0  # assumed for audio of unknown length
_LONGEST_ERROR = 2000
_NO_USE_ANY_MORE = frozenset({retry.GPU_LOST, retry.GPU_ERROR, retry.CONFIGURATION, retry.HOST_MEMORY})
# Also of a program whose child was killed.
_MAY_BE_MEMORY = (retry.WORKER_DIED, retry.ENGINE_CRASH, retry.EXIT_CODE, retry.NO_OUTPUT)


@dataclass(kw_only=True)
class HangTimeout:
    """Decides when a silent engine hangs, from the slowest chunk so far; shared by all workers of a task."""

    start_s: float = START_S  # until the first chunk starts (imports, models, a cold filesystem)
    least_s: float = 120.0  # a shorter silence is never a hang
    slowest: float = 2.0  # assumed seconds of work per second of audio, until a chunk is done
    _slowest_rate: float | None = None  # seconds of work per second of audio
    _slowest_s: float | None = None  # used for audio of unknown length

    def learn(self, took_s: float, audio_s: float | None) -> None:
        """Record the time that a finished chunk took."""
        self._slowest_s = max(took_s, self._slowest_s or 0.0)
        if audio_s:
            self._slowest_rate = max(took_s / audio_s, self._slowest_rate or 0.0)

    def limit_s(self, audio_s: float | None) -> float:
        """Return how long a worker may be silent with this much audio in progress."""
        if self._slowest_s is None:
            return min(self.start_s, _COMPILE_S) + self.slowest * (audio_s or _UNKNOWN_AUDIO_S)
        if audio_s is None or self._slowest_rate is None:
            return max(self.least_s, _FACTOR * self._slowest_s)
        return max(self.least_s, _FACTOR * self._slowest_rate * audio_s)


def read_oom_kills(proc: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None: not known.

    A line of /proc/self/cgroup is ``0::/path``, or ``9:memory:/path`` with version 1.
    """
    counts: list[int] = []
    with suppress(OSError, ValueError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            place = groups / path.lstrip("/") / "memory.events"
            if controllers:
                place = groups / "memory" / path.lstrip("/") / "memory.oom_control"
            if (not controllers or "memory" in controllers.split(",")) and place.exists():
                counts += map(int, re.findall(r"^oom_kill (\d+)$", place.read_text(), re.MULTILINE))
    return max(counts, default=None)


@dataclass(frozen=True)
class EngineStart:
    """What every engine needs to start its programs."""

    args: Sequence[str]  # the values of --engine-arg
    environ: Mapping[str, str]
    launcher: Launcher
    clock: Clock
    raw: Path | None = None  # with --keep-raw: the folder for copies of output files
    oom_kills: Callable[[], int | None] = read_oom_kills

    def blame_memory(self, error_class: str, kills_before: int | None) -> str:
        """Return the class of a program's end: full memory, if the kernel has killed a process for that meanwhile."""
        was_killed = (self.oom_kills() or 0) > (kills_before or 0)
        return retry.HOST_MEMORY if was_killed and error_class in _MAY_BE_MEMORY else error_class


@dataclass(eq=False)
class StreamSession:
    """One worker process, fed through a pipe."""

    start: EngineStart
    argv: Sequence[str]
    _: KW_ONLY
    env: Mapping[str, str]
    cwd: Path | None
    log_file: Path
    hang_timeout: HangTimeout
    must_use_cuda: bool = False  # refuse a process that does not run on CUDA
    pin: str | None = None  # the only device that the process can see
    parent: ForkParent | None = None  # forks the process; None: it is started
    _unread: bytes = b""
    _interrupted: bool = False
    _is_ended: bool = False  # we killed it before it reported a started chunk; such a report may still come
    _sent: int = 0
    _ready: bool = False
    _got_bye: bool = False
    _threads: int = 1
    _holds: int = 1

    def __post_init__(self) -> None:
        self._clock, self._launcher = self.start.clock, self.start.launcher
        self._log_mark = log_size(self.log_file)  # only output after the last result can explain an error
        self._oom_kills = self.start.oom_kills()
        self._secrets = find_secrets(self.argv)
        self._lock = threading.Lock()
        self._in_hand: dict[int, tuple[Chunk, int | None]] = {}  # by number, with its start (None: it waits)
        starter = self.parent or self._launcher
        self._process = starter.start(self.argv, env=self.env, cwd=self.cwd, stderr=self.log_file, pipes=True)
        self.pid: int | None = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)

    # --- called from another thread -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Finish the chunks in progress, then stop; kill a process that has not started a chunk."""
        with self._lock:
            if self._interrupted:
                return
            self._interrupted = True
            if not self._has_started:
                self._is_ended = True
                self._launcher.kill(self._process)
        self._write({"stop": True})

    def kill(self) -> None:
        """Kill the process."""
        self._launcher.kill(self._process)

    # --- the life of a batch --------------------------------------------------------------------------------------

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Analyse the batch and the chunks that follow it, several at the same time if the process can."""
        self._in_hand = {}
        self._give(batch)
        while self._in_hand and not (self._interrupted and (self._got_bye or not self._has_started)):
            event = self._handle_event(self._next_event())
            if self._ready and not self._interrupted:
                held = len(self._in_hand)
                self._give(more(max(0, self._holds - held), idle=max(0, self._threads - held)))
            if event is not None:
                yield event

    def close(self) -> int | None:
        """End the worker by closing its input; kill it if it does not end."""
        with suppress(OSError):  # the worker died while we wrote a line
            self._stdin.close()
        if self._process.returncode is None:
            end_s = self._clock.monotonic_s() + _CLOSE_S
            # Read what it still writes, so that a full pipe does not block it.
            while (left_s := end_s - self._clock.monotonic_s()) > 0:
                if self._poll.poll(left_s * 1000) and not os.read(self._stdout.fileno(), 65536):
                    break
            try:
                self._process.wait(timeout=max(1.0, left_s))
            except Exception:
                self.kill()
        self._stdout.close()
        return self._process.wait()

    @property
    def _has_started(self) -> bool:
        return any(started_at_ms is not None for _, started_at_ms in list(self._in_hand.values()))

    def _give(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            with self._lock:
                if self._interrupted:
                    return
                self._sent += 1
                self._in_hand[self._sent] = chunk, None
            self._write({"id": self._sent, "audio": chunk.audio_path})

    def _write(self, order: Mapping[str, object]) -> None:
        with self._lock, suppress(OSError, ValueError):  # it may have died: the reader will notice
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._stdin.flush()

    # --- events of the process ------------------------------------------------------------------------------------

    def _next_event(self) -> dict[str, Any]:
        """Wait for the next event; if none comes in time, the process hangs."""
        while b"\n" not in self._unread:
            lengths = [chunk.audio_s for chunk, begun_ms in self._in_hand.values() if begun_ms is not None]
            longest_s = None if None in lengths else max((length or 0.0 for length in lengths), default=0.0)
            limit_s = self.hang_timeout.limit_s(longest_s) if lengths else self.hang_timeout.start_s
            if not self._poll.poll(limit_s * 1000):
                self.kill()
                slow = "" if self._ready else "slow to start: "
                why = f"{slow}no output from the worker for {limit_s:.0f} s"
                raise SessionBroken(retry.HANG, why, at_start=not self._has_started)
            data = os.read(self._stdout.fileno(), 65536)
            if not data:
                if self._is_ended or (self._interrupted and not self._has_started):
                    return {"event": "bye"}
                raise self._explain_end()
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return dict(json.loads(line))
        except ValueError as error:
            self.kill()
            raise SessionBroken(retry.ENGINE_CRASH, f"unexpected line from the worker: {line[:200]!r}") from error

    def _handle_event(self, event: Mapping[str, Any]) -> ChunkStarted | ChunkResult | None:
        kind = event["event"]
        if kind == "started":
            chunk, now_ms = self._in_hand[event["id"]][0], self._clock.now_ms()
            self._in_hand[event["id"]] = chunk, now_ms
            return ChunkStarted(chunk, now_ms)
        if kind in ("done", "failed"):
            chunk, started_at_ms = self._in_hand[event["id"]]
            result = self._result(chunk, started_at_ms, event)
            del self._in_hand[event["id"]]
            self._log_mark = log_size(self.log_file)
            return result
        if kind == "ready":
            self._on_ready(event)
        elif kind == "fewer":
            self._threads = int(event["threads"])
            log.warning("a worker continues with fewer threads (%d): %s", self._threads, event["error"])
        elif kind == "bye":
            self._got_bye = True  # it closes its pipe next
        elif kind == "broken":
            error_class = retry.classify(event["error"])
            if error_class == retry.ENGINE_ERROR:
                error_class = retry.ENGINE_CRASH
            raise SessionBroken(error_class, event["error"], at_start=not self._has_started)
        return None

    def _on_ready(self, event: Mapping[str, Any]) -> None:
        """Check the device of the process, and log its versions."""
        device = str(event.get("device") or "cpu").upper()
        if self.must_use_cuda and device != "CUDA":
            self.kill()
            raise SessionBroken(
                retry.RAN_ON_CPU,
                f"HawkEars uses the {device} although this worker has a GPU:"
                " CUDA does not work here for its PyTorch, and on the CPU it uses fewer models",
                at_start=True,
            )
        self._threads = int(event.get("threads") or 1)
        self._holds = int(event.get("holds") or 1)
        self._ready = True
        if "versions" not in event:
            return
        # PyTorch before 2.5 does not report the UUID of the device, but the process sees only one.
        uuid = event.get("uuid") or (self.pin if device == "CUDA" else None)
        versions = ", ".join(f"{name} {version}" for name, version in event["versions"].items())
        where = " ".join(filter(None, (device, uuid, event.get("name"))))
        how = f"threads: {self._threads}, models: {event.get('models') or 'all'}"
        log.info("worker %s: %s on %s, %s", self.pid, versions, where, how)
        if self.pin and self.pin.startswith("GPU-") and uuid and uuid != self.pin:
            log.warning("worker %s should use %s but uses %s", self.pid, self.pin, uuid)

    def _result(self, chunk: Chunk, started_at_ms: int | None, event: Mapping[str, Any]) -> ChunkResult:
        now_ms = self._clock.now_ms()
        started_at_ms = now_ms if started_at_ms is None else started_at_ms
        if event["event"] == "failed":
            error = mask(event["error"], self._secrets)
            error_class = event.get("error_class") or retry.classify(error)
            if error_class in _NO_USE_ANY_MORE:
                self.kill()
                raise SessionBroken(error_class, error)
            return ChunkResult(chunk, started_at_ms, now_ms, error_class=error_class, error=error)
        if "took_s" in event:  # measured by the worker: our thread may have read the start late
            started_at_ms = now_ms - round(event["took_s"] * 1000)
        length_s = event.get("audio_s")
        if event.get("analysed") is False and (chunk.audio_s or 0.0) > _SHORTEST_ANALYSED_S:
            why = f"{chunk.audio_path} has {length_s:.2f} s of audio instead of {chunk.audio_s:.2f} s"
            return ChunkResult(chunk, started_at_ms, now_ms, error_class=retry.BAD_AUDIO, error=why)
        audio_s = length_s if chunk.audio_s is None else chunk.audio_s
        self.hang_timeout.learn((now_ms - started_at_ms) / 1000, audio_s)
        return ChunkResult(chunk, started_at_ms, now_ms, tuple(Detection(*row) for row in event["detections"]), audio_s)

    def _explain_end(self) -> SessionBroken:
        """Return the error for a process that ended before its work was done."""
        self._launcher.kill(self._process)  # also the rest of its process group
        code = self._process.wait()
        limit = min(_LONGEST_ERROR, log_size(self.log_file) - self._log_mark)
        output = mask(last_lines(self.log_file, limit), self._secrets)
        error_class = retry.classify(output, code)
        if error_class in (retry.BAD_AUDIO, retry.EXIT_CODE, retry.NO_OUTPUT):
            error_class = retry.ENGINE_CRASH
        error_class = self.start.blame_memory(error_class, self._oom_kills)
        why = f"{output}\nthe worker ended {retry.describe_exit(code)}".strip()
        return SessionBroken(error_class, why, at_start=not self._has_started)


def log_size(path: Path) -> int:
    """Return the size of a log in bytes, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
