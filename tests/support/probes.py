"""Trials and probes for tests, with only what matters said."""

from rooms.model import FITS, Chunk, ChunkResult, ProbeKey, Trial

GIB = 2**30


class Key:
    """A probe of one model, and what belongs to it."""

    key = ProbeKey("Tesla V100", 16 * GIB, "demo", "1.0", "demo --x", 2)

    def result(self, audio_s: int, began_ms: int, ended_ms: int) -> ChunkResult:
        chunk = Chunk("r", f"c{began_ms}-{ended_ms}", "a.wav", "/a.wav", 0, audio_s * 1000)
        return ChunkResult(chunk, began_ms, ended_ms)


KEY = Key()


def trial(length_s: float, rate: float | None, *, lean: bool = False, peak_bytes: int | None = None) -> Trial:
    rate = None if rate is None else float(rate)
    return Trial(float(length_s), lean, FITS, chunks=4, work_s=3.0, times_real_time=rate, peak_bytes=peak_bytes)
