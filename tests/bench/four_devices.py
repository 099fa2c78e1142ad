"""The recorder's own process with four devices on a machine that has one: it is read four times over.

Started by telemetry.py as ``python four_devices.py FOLDER``; hears the wrapper's words. All is as in a job but the
reader: four NVML readers instead of one, so reports of errors are fetched four times as often.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rooms.devices import open_reader
from rooms.model import AlertLimits, InventoryDevice, Reading, StandIn
from rooms.root import GpuReader, SystemClock
from rooms.telemetry import Followed, LinePipe, SidecarOrder, run_recorder

DEVICES = 4


class FourTimes(GpuReader):
    """Gives the first device of a machine four times; each has a reader of its own, with its own windows."""

    def __init__(self, readers: Sequence[GpuReader]) -> None:
        self._readers = readers
        self.backend, self.real, self.why = readers[0].backend, readers[0].inventory()[0], readers[0].why

    def inventory(self) -> Sequence[InventoryDevice]:
        return [self.real] * len(self._readers)

    def read(self, uuid: str) -> Reading:
        return self._readers[int(uuid)].read(self.real.uuid)

    def force_full_read(self) -> None:
        for reader in self._readers:
            reader.force_full_read()


def main() -> None:
    folder, clock = sys.argv[1], SystemClock()
    now_ms = clock.now_ms()
    reader = FourTimes([open_reader(StandIn(), clock, now_ms, os.environ.get("PATH")) for _ in range(DEVICES)])
    real = reader.real
    facts = (real.memory_total_bytes, real.power_limit_w, real.slowdown_c)
    devices = [Followed(number + 1, str(number), number, *facts) for number in range(DEVICES)]
    order = SidecarOrder(
        mark="bench", task_id=1, wrapper_pid=os.getppid(), devices=devices, interval_s=1.0, stand_in=StandIn(),
        search_path=None, sysfs=None, started_at_ms=now_ms, asked_at_ms=now_ms,
        publish_to=folder, local_folder=folder, shared=False, limits=AlertLimits(), own_marks=[], claim_file=None,
    )  # fmt: skip
    run_recorder(order, reader, LinePipe(sys.stdin.fileno(), sys.stdout.fileno()), clock, again=False)


if __name__ == "__main__":
    main()
