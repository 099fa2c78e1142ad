"""The command engine's programs for many chunks at once: a list of paths in, a folder with a table for each out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted
from badcjobs.seams import More, nothing_more
from badcjobs.workers.command import CommandPlace, read_table
from badcjobs.workers.failures import BAD_AUDIO, BATCH_LOST
from badcjobs.workers.launch import last_lines


class CommandBatchSession:
    """One program after the other, each for as many chunks as were given."""

    pid: int | None = None

    def __init__(self, place: CommandPlace, most: int) -> None:
        self._place = place
        self._most = most
        self._list = place.folder / "inputs.txt"
        self._outputs = place.folder / "outputs"

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Run the program on the batch; chunks whose names would collide have a run of their own."""
        for part in split_batch(batch, self._most):
            if self._place.interrupted or self._place.runner.killed:
                return
            yield from self._process(part)

    def _process(self, part: Sequence[Chunk]) -> Iterator[ChunkStarted | ChunkResult]:
        started_at_ms = self._place.clock.now_ms()
        yield from (ChunkStarted(chunk, started_at_ms) for chunk in part)
        listed = [chunk for chunk in part if "\n" not in chunk.audio_path]
        for chunk in part:
            if "\n" in chunk.audio_path:
                why = f"{chunk.audio_path!r} has a line break in its path"
                yield self._failure(chunk, started_at_ms, BAD_AUDIO, why)
        code = self._run(listed) if listed else None
        if code == 0:
            yield from (self._read(chunk, started_at_ms) for chunk in listed)
        elif code is not None and not self._place.runner.killed:
            yield from self._judge(listed, code, started_at_ms)

    def _run(self, chunks: Sequence[Chunk]) -> int | None:
        self._place.clear()
        self._outputs.mkdir()
        self._list.write_text("".join(f"{chunk.audio_path}\n" for chunk in chunks), errors="surrogateescape")
        lengths = [chunk.audio_s for chunk in chunks]
        audio_s = None if None in lengths else sum(length or 0.0 for length in lengths)
        values = {"inputs": str(self._list), "outputs": str(self._outputs)}
        return self._place.run(values, {}, audio_s=audio_s)

    def _read(self, chunk: Chunk, started_at_ms: int) -> ChunkResult:
        detections, error_class, error = read_table(self._outputs / f"{Path(chunk.audio_path).stem}.csv")
        if error_class:
            error = f"{chunk.audio_path}: {error}\n{last_lines(self._place.log)}".strip()
            return self._failure(chunk, started_at_ms, error_class, error)
        return ChunkResult(chunk, started_at_ms, self._place.clock.now_ms(), detections, audio_s=chunk.audio_s)

    def _judge(self, chunks: Sequence[Chunk], code: int, started_at_ms: int) -> Iterator[ChunkResult]:
        """Charge a chunk that was alone; of many nobody knows which it was, and their tables may be half written."""
        error_class, error = self._place.explain(code)
        if len(chunks) == 1:
            yield self._failure(chunks[0], started_at_ms, error_class, f"{chunks[0].audio_path}: {error}")
            return
        why = f"lost with its batch of {len(chunks)} ({error_class}): {error}"
        for chunk in chunks:
            yield self._failure(chunk, started_at_ms, BATCH_LOST, why, charged=False)

    def _failure(
        self, chunk: Chunk, started_at_ms: int, error_class: str, error: str, *, charged: bool = True
    ) -> ChunkResult:
        now_ms = self._place.clock.now_ms()
        return ChunkResult(chunk, started_at_ms, now_ms, error_class=error_class, error=error, charged=charged)

    def interrupt(self) -> None:
        """Finish the batch at hand, then stop."""
        self._place.interrupted = True

    def kill(self) -> None:
        """End the program now."""
        self._place.runner.kill()

    def close(self) -> int | None:
        """Forget the last outputs."""
        shutil.rmtree(self._place.folder, ignore_errors=True)
        return None


def split_batch(batch: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Cut a batch so that no part is too long or has two files of one name; most often there is one part."""
    parts: list[tuple[set[str], list[Chunk]]] = []
    for chunk in batch:
        name = Path(chunk.audio_path).stem.casefold()
        names, part = next(((n, p) for n, p in parts if name not in n and len(p) < most), (set(), []))
        if not part:
            parts.append((names, part))
        names.add(name)
        part.append(chunk)
    return [part for _, part in parts]
