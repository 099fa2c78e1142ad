"""What a task says on its way, what signals ask of it (drain, drain before a deadline, stop now), and its exit code."""

import os
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from rooms import task as room
from rooms.devices import EndTime, Grant
from rooms.model import Allocation, Chunk, ChunkResult, Device, TaskKey
from rooms.root import RunSettings
from rooms.store import TaskWriter
from rooms.task import DeviceWorkNow, StopRequest, TaskProgress
from rooms.workers import Tally
from support.fake_hawkears import fake_package_environ, make_fake_root
from support.hand_clock import HandClock
from support.stand_ins import install
from support.task_files import TaskFile

SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")
GRACE_S = 20
# What arrives, and after how many seconds the next. Slurm repeats itself in the same breath; Ctrl-C means it.
STORIES = """
nothing, USR1, USR2, USR1 30 USR1 30 USR2, TERM, INT, HUP, USR1 100 TERM, USR2 INT, TERM 10 USR1, TERM 5 TERM,
TERM 5.001 TERM, TERM 5.001 HUP, TERM INT, INT INT, HUP INT
"""


def received(clock, story):
    stop = StopRequest(clock.monotonic_s)
    for word in story.split():
        if word in SIGNALS:
            stop.receive(signal.Signals[f"SIG{word}"])
        elif word != "nothing":
            clock.sleep(float(word))
    return stop


def test_a_warning_drains_an_ending_sets_a_deadline_and_another_one_means_now(pages):
    lines = []
    for story in map(str.strip, STORIES.split(",")):
        clock = HandClock()
        stop = received(clock, story)
        before = f"{story}: {stop.name}; {'starts nothing new' if stop.requested else 'goes on'}"
        ends = "never"
        for waited_ms in range(1000 * GRACE_S + 2):
            if stop.overdue(GRACE_S):
                ends = f"after {waited_ms / 1000:g} s"
                break
            clock.sleep(0.001)
        clock.sleep(1e6)
        assert stop.overdue(GRACE_S) == (ends != "never")
        lines.append(f"{before}; ends what is running {ends}")
    pages({"stops.txt": "\n".join(lines)})


@pytest.mark.parametrize("nohup", [False, True])
def test_once_installed_real_signals_arrive_but_under_nohup_a_closed_terminal_is_no_reason_to_stop(nohup):
    numbers = [signal.Signals[f"SIG{name}"] for name in SIGNALS]
    before, heard = {number: signal.getsignal(number) for number in numbers}, []
    try:
        for number in numbers:
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
            stop = StopRequest(HandClock().monotonic_s)
            stop.install()
            os.kill(os.getpid(), number)
            heard.append(stop.name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == ["SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "no signal" if nohup else "SIGHUP"]


LEAVING = """
import os, sys
from rooms.task import StopRequest
class Last:
    def __del__(self, write=os.write, read=os.read):
        write(1, b"leaving")
        read(0, 1)
last = Last()
StopRequest(lambda: 0.0).install()
sys.exit(75)
"""


def test_signals_to_a_process_that_is_leaving_do_not_change_its_exit_code():
    """Python gives up its handlers before its last objects are gone."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LEAVING], **pipes, env=env) as process:  # type: ignore[call-overload]
        assert process.stdout.read(7) == b"leaving"
        for name in SIGNALS:
            process.send_signal(signal.Signals[f"SIG{name}"])
        process.communicate(b"go")
    assert process.returncode == 75


# The chunks by state, the signals, what the supervisor says, and whether the time is over.
VERDICTS = [
    ("done done", "", Tally(), False),
    ("skipped", "TERM", Tally(), True),
    ("done failed", "", Tally(), False),
    ("done poison", "TERM", Tally(), True),
    ("done failed-before", "", Tally(), False),
    ("done", "", Tally(retired=["lost", "gone"]), False),
    ("done pending", "USR1", Tally(), False),
    ("failed pending", "TERM", Tally(gave_up="no model"), True),
    *(("pending", arrives, Tally(), False) for arrives in ("HUP", "INT", "TERM INT", "TERM 9 TERM")),
    ("pending", "", Tally(), True),
    ("pending", "", Tally(gave_up="no model"), True),
    ("done pending", "", Tally(retired=["lost", "gone"]), False),
    ("pending", "", Tally(), False),
]


def test_the_exit_code_follows_from_what_is_left_and_who_stopped_it(tmp_path, pages):
    before, lines = TaskFile(tmp_path, states={"c1": "failed"}, job_id="4000").write(), []
    for number, (states, signals, tally, is_late) in enumerate(VERDICTS):
        clock, chunks = HandClock(), [Chunk("rec", f"c{n}", "a", "/a") for n, _ in enumerate(states.split())]
        writer = TaskWriter(tmp_path / f"{number}.sqlite", TaskKey("4821", 0, 0, "gpu1"))
        writer.fill(chunks, lambda rows: None)
        for chunk, state in zip(chunks, states.split(), strict=True):
            if state == "failed-before":
                writer.skip_done_in(before, retry_failed=False)
            elif state != "pending":
                writer.attempt_ended(ChunkResult(chunk, 1, 2), status=state, try_number=1, worker_id=1, device_id=None)
        time = room.TimeBudget(EndTime(0, "run.stop_after") if is_late else None, clock)
        assert time.over == is_late
        task = SimpleNamespace(
            world=SimpleNamespace(stop=received(clock, signals)),
            writer=writer,
            time=time,
            claim=SimpleNamespace(lost=False),
        )
        exit_code, verdict, note = room.decide_verdict(task, tally)
        writer.close()
        ended = f"{len(tally.retired)} workers ended" * bool(tally.retired)
        reported = [states, signals, tally.gave_up, ended, "late" * is_late]
        lines.append(f"{'; '.join(filter(None, reported))}\n  {verdict}, exit code {int(exit_code)}: {note}")
    pages({"verdicts.txt": "\n".join(lines)})


def test_that_a_task_starts_nothing_more_is_published_soon_and_once():
    soon, state, clock = [], SimpleNamespace(draining=False, killed=False), HandClock()
    supervisor = SimpleNamespace(drain=lambda: setattr(state, "draining", True), killed=True)
    for signals, ends in (("USR1", None), ("", EndTime(0, "run.stop_after"))):
        state.draining = False
        task = SimpleNamespace(
            world=SimpleNamespace(stop=received(clock, signals)), settings=SimpleNamespace(grace_s=1.0),
            records=SimpleNamespace(publish_soon=lambda: soon.append(state.draining)),
            time=room.TimeBudget(ends, clock), writer=SimpleNamespace(recent_work=lambda many: []),
        )  # fmt: skip
        for _ in range(2):
            supervisor.draining = state.draining
            room.handle_signals(task, supervisor)
            room.check_deadline(task, supervisor)
    assert soon == [True, True]


progress_of = partial(TaskProgress, start_up_s=0.0, failed=0, retrying=0, devices=())
LOAD = (12.4, 38.6, 85.0)
NOW = 850 / 7  # seconds since the start; 840 of 960 chunks are left, so this takes seven times as long again
# Chunks settled, of how many, seconds of audio, seconds since the start; and what else is known.
PROGRESS = [
    progress_of(120, 960, 412 * NOW, NOW), progress_of(10, 10, 1.0, 100.0), progress_of(1, 2, 59.6, 59.6),
    progress_of(1, 2, 3599.6, 3599.6), progress_of(1, 101, 3600.0, 3600.0), progress_of(5, 10, 0.0, 0.0),
    progress_of(5, 10, 1.0, 0.0), progress_of(5, 10, 0.0, 60.0), progress_of(1, 3, 60.0, 60.0, start_up_s=50),
    progress_of(1, 3, 60.0, 60.0, start_up_s=70), progress_of(9, 10, 90.0, 60.0, retrying=1),
    progress_of(8, 10, 90.0, 60.0, retrying=1), progress_of(10, 10, 90.0, 60.0, retrying=1),
    *(progress_of(1, 2, 60 * rate, 60.0) for rate in (1.0, 0.999, 0.45, 0.1234, 0.0042, 1e-9)),
]  # fmt: skip


def test_the_heartbeat_line_is_as_the_contract_shows_it_and_what_nobody_knows_is_no_zero(pages):
    lines = [room.heartbeat_line(progress, LOAD, 4, 0) for progress in PROGRESS]
    lines.append(room.heartbeat_line(progress_of(0, 960, 0.0, 30.0), (None, None, None), 0, 0))
    lines.append(room.heartbeat_line(progress_of(1, 2, 1.0, 1.0), (0.0, 38.6, 0.0), 1, 0))
    lines.append(room.heartbeat_line(progress_of(1, 2, 1.0, 1.0), (0.0, 38.6, 0.0), 3, 1))
    pages({"heartbeats.txt": "\n".join(lines)})


def test_progress_counts_what_is_settled_and_what_each_device_is_at(tmp_path):
    writer = TaskWriter(tmp_path / "wrapper.sqlite", TaskKey("4821", 0, 0, "gpu1", started_at_ms=1000))
    writer.begin_task(Allocation(True, "4821", "gpu1"), started_at_ms=1000, telemetry=True, pid=1, version="1")
    chunks = [Chunk("r", f"c{n}", "a.wav", "/a.wav", 0, 30_000) for n in range(7)]
    writer.fill(chunks, lambda rows: None)
    assert room.count_progress(writer, 5.0) == progress_of(0, 7, 0.0, 5.0, devices=(DeviceWorkNow("CPU", 0, 0.0, ()),))
    devices = (Device("0", "test", 0, "GPU-0", "Tesla V100"), Device("MIG-1", "test", uuid="MIG-1"))
    writer.add_devices(devices)
    places = [writer.device_id(device) for device in devices]
    ends = [("done", 0), ("done", 0), ("failed", 0), ("poison", 1), ("pending", 1), ("done", 1)]
    for number, (chunk, (status, place)) in enumerate(zip(chunks, ends, strict=False)):
        tried = {"try_number": 1, "worker_id": 1, "device_id": places[place]}
        writer.attempt_started(chunk, **tried, at_ms=3000)  # type: ignore[arg-type]
        if number < 5:
            error_class = None if status == "done" else "bad_audio"
            result = ChunkResult(chunk, 3000, 4000, audio_s=30.0, error_class=error_class)
            writer.attempt_ended(result, status=status, **tried)  # type: ignore[arg-type]
    progress = room.count_progress(writer, 60.0, devices)
    assert progress == progress_of(
        4, 7, 60.0, 60.0, start_up_s=2.0, failed=2, retrying=1,
        devices=(DeviceWorkNow("GPU 0  Tesla V100", 2, 60.0, ()), DeviceWorkNow("GPU MIG-1", 0, 0.0, ("r/c5",))),
    )  # fmt: skip
    assert (progress.rate, progress.eta_s) == (1.0, 58 * 3 / 4)


class FastClock(HandClock):
    """A minute passes whenever someone looks."""

    def monotonic_s(self):
        self.sleep(60)
        return super().monotonic_s()


def test_an_engine_that_starts_slowly_is_waited_for_and_the_log_says_so(tmp_path, caplog):
    caplog.set_level("INFO", logger="badcjobs")
    slow = install(tmp_path / "python", f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    world = room.World(
        {"PATH": "/usr/bin:/bin", **fake_package_environ()}, FastClock(), StopRequest(lambda: 0.0), "vm", 1, tmp_path, 1
    )
    settings = RunSettings(
        source=(), out=None, hawkears_python=str(slow), hawkears_root=str(make_fake_root(tmp_path / "root"))
    )
    engine = room.make_engine(settings, world, "test", Grant((), "no GPU"))
    assert (engine.version or "").startswith("2.3.0")
    assert caplog.text.count("waiting for the start of hawkears") >= 2
