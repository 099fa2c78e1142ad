"""Keeps the devices of a probe busy with trials: the next one for whichever is free, until nothing is left to try."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from badcjobs.allocation.memory import requested_memory_bytes
from badcjobs.audio.wav import NotWav
from badcjobs.errors import BadInput
from badcjobs.model import Device, Trial, WorkerPlan
from badcjobs.probe.search import Step
from badcjobs.probe_model import ModelSearch
from badcjobs.probe_subjects import Subject
from badcjobs.probe_trial import Bench, TrialRun
from badcjobs.telemetry.host import HostReader
from badcjobs.telemetry.usage import UsageReader
from badcjobs.workers.watched_engine import Trouble
from badcjobs.world import World

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_HOST_EVERY_S = 0.5


class Round:
    """All searches of a probe, as long as there is time."""

    def __init__(self, bench: Bench, world: World, searches: Sequence[ModelSearch]) -> None:
        self._bench = bench
        self._world = world
        self._searches = searches
        self._running: list[tuple[ModelSearch, TrialRun]] = []
        self._began = 0
        self._slots = 0
        self._usage = UsageReader(world.pid)
        self._next_usage_s = 0.0
        self._host_bytes = _room_on_the_node(world)

    def go_on(self, *, until_s: float) -> None:
        """Try and try again, until nothing is left to try or the time is over."""
        clock, stop = self._world.clock, self._world.stop
        while True:
            if stop.requested or clock.monotonic_s() >= until_s:
                self._break_off()
                return
            self._begin_what_can_be(until_s - clock.monotonic_s())
            if not self._running:
                return
            for _, run in self._running:
                run.look(_LOOK_S / len(self._running))
            self._look_at_the_host()
            self._bench.records.look_after_recorder()
            self._settle()

    def _begin_what_can_be(self, left_s: float) -> None:
        for search in self._searches:
            while search.free and (step := search.next_step(self._host_bytes)) is not None:
                if search.expected_s(step) > left_s:
                    break
                self._begin(search, step)

    def _begin(self, search: ModelSearch, step: Step) -> None:
        key, device = search.subject.key, search.free.pop(0)
        self._began += 1
        plans = [self._plan(search.subject, device) for _ in range(key.workers)]
        run = TrialRun(self._bench, step, plans, search.chunks(step), search.measure(step).lanes, self._began)
        log.info("%s: trying %g s%s", key.gpu, step.length_s, " with one thread" if step.lean else "")
        search.begin(step)
        try:
            run.begin()
        except (NotWav, OSError) as problem:
            raise BadInput(
                f"no audio of {step.length_s:g} s can be made: {problem}",
                why=f"it is written to {self._bench.records.local.path}",
                fix=f"export TMPDIR=/a/local/folder/with/space, or --max-length {step.length_s / 2:g}",
            ) from problem
        self._running.append((search, run))

    def _plan(self, subject: Subject, device: Device | None) -> WorkerPlan:
        slot, self._slots = self._slots, self._slots + 1
        device_id = None if device is None else self._bench.records.writer.device_id(device)
        return WorkerPlan(slot, device, device_id, subject.threads)

    def _settle(self) -> None:
        for search, run in [pair for pair in self._running if not pair[1].busy]:
            self._running.remove((search, run))
            told = run.end()
            again = "; too short to count, so once more with more chunks" if search.end(run, told) else ""
            log.info("%s: %s%s", search.subject.key.gpu, _words(run.step, told), again)

    def _break_off(self) -> None:
        for _, run in self._running:
            run.break_off()
        while self._running:
            for _, run in self._running:
                run.look(_LOOK_S)
            for search, run in [pair for pair in self._running if not pair[1].busy]:
                self._running.remove((search, run))
                run.end()
                search.end(run, None)

    def _look_at_the_host(self) -> None:
        """Read how much memory our processes hold together; each trial that runs meanwhile is told."""
        now_s = self._world.clock.monotonic_s()
        if now_s < self._next_usage_s:
            return
        self._next_usage_s = now_s + _HOST_EVERY_S
        try:
            reading = self._usage.read(now_s)
        except OSError:
            return
        if reading is not None and reading.memory_bytes is not None:
            for _, run in self._running:
                run.host_peak_bytes = max(run.host_peak_bytes or 0, reading.memory_bytes)


def _room_on_the_node(world: World) -> int | None:
    """Return how much memory of the node is ours: what was asked for, else what nobody uses now."""
    asked_bytes = requested_memory_bytes(world.environ)
    if asked_bytes is not None:
        return asked_bytes
    host = HostReader().read()
    if host is None or host.memory_total_bytes is None or host.memory_used_bytes is None:
        return None
    return host.memory_total_bytes - host.memory_used_bytes


def _words(step: Step, told: Trial | Trouble) -> str:
    if isinstance(told, Trouble):
        return f"{step.length_s:g} s failed: {told.error_class}"
    rate = "" if told.times_real_time is None else f", {told.times_real_time:,.0f} × real time"
    peak = "" if told.peak_bytes is None else f", {told.peak_bytes / 2**30:.2f} GiB at most"
    return f"{step.length_s:g} s: {told.outcome}{peak}{rate}"
