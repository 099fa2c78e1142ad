"""A session with one of our worker programs: it reads a JSON line per chunk and writes a JSON line per event.

``hawkears_worker`` describes the lines. The process gets the next chunks before it has finished the current ones.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from badcjobs.masking import find_secrets, mask
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection, Place, known_values
from badcjobs.processes import ForkParent, last_lines
from badcjobs.seams import More, SessionBroken, nothing_more
from badcjobs.workers import policy
from badcjobs.workers.error_patterns import ErrorPattern, classify, describe_exit
from badcjobs.workers.program_start import EngineStart, HangTimeout

log = logging.getLogger(__name__)

_SHORTEST_ANALYSED_S = 0.5
_CLOSE_S = 10.0
_LONGEST_ERROR = 2000


@dataclass
class _InHand:
    """A chunk that the process has got."""

    chunk: Chunk
    started_at_ms: int | None = None  # None: it waits


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
    error_patterns: Sequence[ErrorPattern] = ()  # of the engine
    must_use_cuda: bool = False  # refuse a process that does not run on CUDA
    pin: str | None = None  # the only device that the process can see
    parent: ForkParent | None = None  # forks the process; None: it is started
    _unread: bytes = b""
    _interrupted: bool = False
    _is_ended: bool = False  # we killed it before it reported a started chunk; such a report may still come
    _sent: int = 0
    _ready: bool = False
    _is_first: bool = True  # no chunk is done yet
    _got_bye: bool = False
    _threads: int = 1
    _holds: int = 1

    def __post_init__(self) -> None:
        self._launcher = self.start.launcher
        self._log_mark = log_size(self.log_file)  # only output after the last result can explain an error
        self._oom_kills = self.start.oom_kills()
        self._secrets = find_secrets(self.argv)
        self._lock = threading.Lock()
        self._in_hand: dict[int, _InHand] = {}  # by number
        starter = self.parent or self._launcher
        self._process = starter.start(
            self.argv,
            env=self.env,
            cwd=self.cwd,
            stderr=self.log_file,
            pipes=True,
        )
        self.pid: int | None = self._process.pid
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
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
        try:
            self._process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._stdout.close()
        return self._process.wait()

    @property
    def _has_started(self) -> bool:
        return any(held.started_at_ms is not None for held in list(self._in_hand.values()))

    def _give(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            with self._lock:
                if self._interrupted:
                    return
                self._sent += 1
                self._in_hand[self._sent] = _InHand(chunk)
            order: dict[str, object] = {"id": self._sent, "audio": chunk.audio_path}
            if self.start.places:
                order["place"] = place_facts(chunk.place)
            self._write(order)

    def _write(self, order: Mapping[str, object]) -> None:
        with self._lock, suppress(OSError, ValueError):  # it may have died: the reader will notice
            self._stdin.write(json.dumps(order).encode() + b"\n")
            self._stdin.flush()

    # --- events of the process ------------------------------------------------------------------------------------

    def _next_event(self) -> dict[str, Any]:
        """Wait for the next event; if none comes in time, the process hangs."""
        while b"\n" not in self._unread:
            limit_s = self._silence_s()
            if not self._poll.poll(limit_s * 1000):
                self.kill()
                slow = "" if self._ready else "slow to start: "
                why = f"{slow}no output from the worker for {limit_s:.0f} s"
                raise SessionBroken(policy.HANG, why, at_start=not self._has_started)
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
            raise SessionBroken(policy.ENGINE_CRASH, f"unexpected line from the worker: {line[:200]!r}") from error

    def _silence_s(self) -> float:
        """Return how long the process may be silent now."""
        limits_s = [
            self.hang_timeout.limit_s(held.chunk.audio_s, is_first=self._is_first)
            for held in self._in_hand.values()
            if held.started_at_ms is not None
        ]
        return max(limits_s, default=self.hang_timeout.start_s)

    def _handle_event(self, event: Mapping[str, Any]) -> ChunkStarted | ChunkResult | None:
        kind = event["event"]
        if kind == "started":
            held = self._in_hand[event["id"]]
            held.started_at_ms = self.start.clock.now_ms()
            return ChunkStarted(held.chunk, held.started_at_ms)
        if kind in ("done", "failed"):
            result = self._result(self._in_hand.pop(event["id"]), event)
            self._log_mark = log_size(self.log_file)
            return result
        if kind == "ready":
            self._on_ready(event)
        elif kind == "fewer":
            self._threads = event["threads"]
            log.warning("a worker continues with fewer threads (%d): %s", self._threads, event["error"])
        elif kind == "bye":
            self._got_bye = True  # it closes its pipe next
        elif kind == "broken":
            error_class = classify(event["error"], patterns=self.error_patterns)
            if error_class == policy.ENGINE_ERROR:
                error_class = policy.ENGINE_CRASH
            raise SessionBroken(error_class, event["error"], at_start=not self._has_started)
        return None

    def _on_ready(self, event: Mapping[str, Any]) -> None:
        """Check the device of the process, and log its versions."""
        device = event.get("device", "cpu").upper()
        if self.must_use_cuda and device != "CUDA":
            self.kill()
            raise SessionBroken(
                policy.RAN_ON_CPU,
                f"HawkEars uses the {device} although this worker has a GPU:"
                " CUDA does not work here for its PyTorch, and on the CPU it uses fewer models",
                at_start=True,
            )
        self._threads = event["threads"]
        self._holds = event["holds"]
        self._ready = True
        if "versions" in event:
            versions = ", ".join(f"{name} {version}" for name, version in event["versions"].items())
            where = " ".join(filter(None, (device, self.pin, event.get("name"))))
            log.info("worker %s: %s on %s, threads: %d", self.pid, versions, where, self._threads)

    def _result(self, held: _InHand, event: Mapping[str, Any]) -> ChunkResult:
        now_ms = self.start.clock.now_ms()
        started_at_ms = held.started_at_ms or now_ms
        chunk = held.chunk
        error_class = error = None
        if event["event"] == "failed":
            error_class, error = self._failure(event)
        elif event.get("analysed") is False and (chunk.audio_s or 0.0) > _SHORTEST_ANALYSED_S:
            error_class = policy.BAD_AUDIO
            error = f"{chunk.audio_path} has {event['audio_s']:.2f} s of audio instead of {chunk.audio_s:.2f} s"
        if error_class is not None:
            return ChunkResult(
                chunk,
                started_at_ms,
                now_ms,
                error_class=error_class,
                error=error,
            )

        if "took_s" in event:  # measured by the worker: our thread may have read the start late
            started_at_ms = now_ms - round(event["took_s"] * 1000)
        audio_s = event.get("audio_s") if chunk.audio_s is None else chunk.audio_s
        self._is_first = False
        self.hang_timeout.learn((now_ms - started_at_ms) / 1000, audio_s)
        detections = tuple(Detection(*row) for row in event["detections"])
        rarities = tuple(Detection(*row) for row in event.get("rarities", ()))
        return ChunkResult(chunk, started_at_ms, now_ms, detections, audio_s, rarities=rarities)

    def _failure(self, event: Mapping[str, Any]) -> tuple[str, str]:
        """Return the class and the reason of a failure; raise SessionBroken if it ends the process."""
        error = mask(event["error"], self._secrets)
        error_class = event.get("error_class") or classify(error, patterns=self.error_patterns)
        if policy.ends_process(error_class):
            self.kill()
            raise SessionBroken(error_class, error)
        return error_class, error

    def _explain_end(self) -> SessionBroken:
        """Return the error for a process that ended before its work was done."""
        self._launcher.kill(self._process)  # also the rest of its process group
        code = self._process.wait()
        limit = min(_LONGEST_ERROR, log_size(self.log_file) - self._log_mark)
        output = mask(last_lines(self.log_file, limit), self._secrets)
        error_class = classify(output, code, self.error_patterns)
        if error_class in (policy.BAD_AUDIO, policy.EXIT_CODE, policy.NO_OUTPUT):
            error_class = policy.ENGINE_CRASH
        error_class = self.start.blame_memory(error_class, self._oom_kills)
        why = f"{output}\nthe worker ended {describe_exit(code)}".strip()
        return SessionBroken(error_class, why, at_start=not self._has_started)


def place_facts(place: Place) -> dict[str, object]:
    """Return a place under the names that HawkEars' occurrence_metadata has."""
    facts = {
        "region_code": place.region,
        "latitude": place.latitude,
        "longitude": place.longitude,
        "recorded_at": place.recorded_on,
        "location_name": place.location_name,
    }
    return known_values(facts)


def log_size(path: Path) -> int:
    """Return the size of a log in bytes, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
