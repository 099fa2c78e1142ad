"""Sets the clock of a badcjobs that a test starts: where BADCJOBS_TEST_NOW_MS is given, time.time() stands still."""

import os
import time

_true_time = time.time


def _time() -> float:
    now_ms = os.environ.get("BADCJOBS_TEST_NOW_MS")
    return _true_time() if now_ms is None else int(now_ms) / 1000


time.time = _time
