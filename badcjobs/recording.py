"""The life of the recorder's process, from the first sample to, if need be, the last publication.

Started by the wrapper as ``python -m badcjobs.recording [--again] ORDER``. It obeys words on its input, not signals:
Slurm sends TERM to every process of a job, and the last seconds are worth recording.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.gpu.choose import load_script, open_reader
from badcjobs.seams import Clock
from badcjobs.store.publish import publish, remove_unfinished
from badcjobs.store.telemetry_writer import TelemetryWriter
from badcjobs.telemetry.gaps import Gaps
from badcjobs.telemetry.host import HostReader
from badcjobs.telemetry.recorder import Recorder
from badcjobs.telemetry.sampler import Sampler
from badcjobs.telemetry.sidecar import AGAIN, PUBLISHED, READY, STOPPED, SidecarOrder
from badcjobs.workers.leftovers import end_leftovers

log = logging.getLogger(__name__)

_WRAPPER_GONE = ""
_LAST_PUBLICATION_TRIES = 3


class Words:
    """The talk with the wrapper, a word per line; an empty word means that the wrapper is gone."""

    def __init__(self, descriptor: int, answers: int) -> None:
        self._descriptor = descriptor
        self._answers = answers
        self._heard = b""
        self.ready_said = False

    def say(self, word: str) -> None:
        """Answer the wrapper; one that is gone is noticed when we listen."""
        try:
            os.write(self._answers, word.encode() + b"\n")
        except OSError:
            pass

    def next(self, timeout_s: float | None) -> str | None:
        """Return the next word; None when none came in time."""
        if b"\n" not in self._heard:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return None
            part = os.read(self._descriptor, 4096)
            if not part:
                return _WRAPPER_GONE
            self._heard += part
        word, _, self._heard = self._heard.partition(b"\n")
        return word.decode()


def run_recorder(order: SidecarOrder, words: Words, clock: Clock, *, again: bool) -> None:
    """Record until the wrapper says stop or is gone; in the second case publish for it."""
    word: str | None = record_until_told(order, words, clock, again=again)
    if word != _WRAPPER_GONE:
        words.say(STOPPED)
        word = words.next(None)
    if word != PUBLISHED:
        finish_for_the_wrapper(order, clock)


def record_until_told(order: SidecarOrder, words: Words, clock: Clock, *, again: bool) -> str:
    """Sample on the grid until a word comes; return the word. ``again``: a recorder before us has died."""
    script = load_script(Path(order.simulate_script)) if order.simulate_script else None
    reader = open_reader(order.simulate, script, clock, order.started_at_ms)
    writer = TelemetryWriter(Path(order.recorder_file), order.task_id)
    heard: list[str] = []

    def wait(seconds: float) -> bool:
        if not words.ready_said:  # we are asked for the first time after the first tick
            words.say(READY)
            words.ready_said = True
        word = words.next(max(0.0, seconds))
        if word is not None:
            heard.append(word)
        return word is not None

    sampler = Sampler(reader, order.devices, Gaps(writer, clock.now_ms()))
    recorder = Recorder(
        sampler,
        HostReader().read,
        writer,
        clock=clock,
        interval_s=order.interval_s,
        since_ms=order.asked_at_ms,
        again=again,
    )
    recorder.run(wait)
    reader.close()
    writer.close()
    return heard[0]


def finish_for_the_wrapper(order: SidecarOrder, clock: Clock) -> None:
    """Do what a killed wrapper cannot: end its workers, publish both files a last time, tidy up."""
    log.warning("the wrapper is gone: ending its workers and publishing what there is")
    end_leftovers(order.mark)
    closing = {"ended_at_ms": clock.now_ms(), "verdict": "killed"}
    files = [Path(order.wrapper_file), Path(order.recorder_file)]
    for number in range(_LAST_PUBLICATION_TRIES):
        try:
            publish(files, Path(order.publish_to), closing=closing)
            remove_unfinished(Path(order.publish_to))
        except (OSError, sqlite3.Error) as error:
            log.warning("publication %d failed: %s", number + 1, error)
            time.sleep(1)
        else:
            shutil.rmtree(order.local_folder, ignore_errors=True)
            return
    log.error("the last publication failed; the files stay in %s", order.local_folder)


def main(args: Sequence[str]) -> None:
    """Run as the wrapper's sidecar."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s recorder %(levelname)s %(message)s")
    words = Words(sys.stdin.fileno(), sys.stdout.fileno())
    run_recorder(SidecarOrder.read(Path(args[-1])), words, SystemClock(), again=AGAIN in args)


if __name__ == "__main__":
    main(sys.argv[1:])
