"""A clock that stands still until a test moves it, and devices that answer by it."""

from collections.abc import Callable

from rooms.model import Reading
from rooms.root import DeviceUnreadable, GpuReader


class HandClock:
    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self._now_ms / 1000

    def sleep(self, seconds: float) -> None:
        self._now_ms += max(0, round(seconds * 1000))


class ScriptedReader(GpuReader):
    """Answers what the script says of a UUID at this second; a text is a reason for not answering."""

    backend, why, is_last = "scripted", "a test wrote it", False

    def __init__(self, clock: HandClock, script: Callable[[str, float], Reading | str]) -> None:
        self._clock, self._start_s, self._script = clock, clock.monotonic_s(), script

    def read(self, uuid: str) -> Reading:
        answer = self._script(uuid, self._clock.monotonic_s() - self._start_s)
        if isinstance(answer, str):
            raise DeviceUnreadable(answer)
        return answer

    def force_full_read(self) -> None:
        self.is_last = True
