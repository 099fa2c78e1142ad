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
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from badcjobs.clock import SystemClock
from badcjobs.gpu.choose import open_reader
from badcjobs.seams import Clock
from badcjobs.store.into_place import remove_unfinished
from badcjobs.store.live.halves import left_behind, work_left_behind
from badcjobs.store.live.publish import publish
from badcjobs.store.live.telemetry_writer import TelemetryWriter
from badcjobs.telemetry.gaps import Gaps
from badcjobs.telemetry.host import HostReader
from badcjobs.telemetry.recorder import Recorder
from badcjobs.telemetry.sampler import Sampler
from badcjobs.telemetry.sidecar import AGAIN, PUBLISHED, READY, REFUSED, SNAPSHOT, STOP, STOPPED, SidecarOrder
from badcjobs.telemetry.unwritten import Unwritten
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


class Snapshots:
    """Copies of the recorder's file for the wrapper, taken one at a time in a thread of their own: no tick waits."""

    def __init__(self, writer: TelemetryWriter) -> None:
        self._writer = writer
        self._thread: threading.Thread | None = None

    def take(self, target: Path) -> None:
        """Begin a snapshot; while one is under way, another one is not begun."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, args=(target,))
            self._thread.start()

    def finish(self) -> None:
        """Wait for the one that is under way."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, target: Path) -> None:
        try:
            self._writer.snapshot(target)
        except (OSError, sqlite3.Error) as error:
            log.warning("no snapshot for the wrapper: %s", error)


def run_recorder(order: SidecarOrder, words: Words, clock: Clock, *, again: bool) -> None:
    """Record until the wrapper says stop or is gone; in the second case publish for it."""
    word, unwritten = record_until_told(order, words, clock, again=again)
    if word != _WRAPPER_GONE:
        words.say(f"{STOPPED} {unwritten.to_json()}")
        word = words.next(None) or _WRAPPER_GONE
    if word != PUBLISHED:
        finish_for_the_wrapper(order, clock, unwritten)


def record_until_told(order: SidecarOrder, words: Words, clock: Clock, *, again: bool) -> tuple[str, Unwritten]:
    """Sample on the grid until a word comes; return it, and what could not be written.

    ``again``: a recorder before us has died.
    """
    reader = open_reader(order.stand_in, clock, order.started_at_ms, order.search_path)
    writer = TelemetryWriter(Path(order.recorder_file), order.task_id, shared=order.shared)
    snapshots = Snapshots(writer)
    heard: list[str] = []

    def wait(seconds: float) -> bool:
        if not words.ready_said:  # we are asked for the first time after the first tick
            words.say(READY)
            words.ready_said = True
        end_s = clock.monotonic_s() + seconds
        word = words.next(max(0.0, seconds))
        while word is not None and word.startswith(SNAPSHOT):
            snapshots.take(Path(word.partition(" ")[2]))
            word = words.next(max(0.0, end_s - clock.monotonic_s()))
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
        refused=lambda reason: words.say(f"{REFUSED} {reason}"),
    )
    recorder.run(wait)
    reader.close()
    last_copy = heard[0].removeprefix(STOP).strip()
    if last_copy:
        snapshots.finish()
        snapshots.take(Path(last_copy))
    snapshots.finish()
    writer.close()
    return heard[0], recorder.unwritten


def finish_for_the_wrapper(order: SidecarOrder, clock: Clock, unwritten: Unwritten) -> None:
    """Do what a killed wrapper cannot: end its workers, publish both files a last time, tidy up."""
    log.warning("the wrapper is gone: ending its workers and publishing what there is")
    end_leftovers(order.mark)
    ended_at_ms = clock.now_ms()
    target = Path(order.publish_to)
    for number in range(_LAST_PUBLICATION_TRIES):
        try:
            publish(
                [
                    work_left_behind(Path(order.wrapper_file), target, shared=order.shared),
                    left_behind(Path(order.recorder_file), shared=order.shared),
                ],
                target,
                workplace=Path(order.local_folder),
                closing={"ended_at_ms": ended_at_ms, "verdict": "killed"},
                gaps=unwritten.gaps(ended_at_ms),
            )
            remove_unfinished(target)
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
