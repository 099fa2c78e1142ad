"""What cutting costs: stretches of a long recording, cut as a task does it, beside copies of files of the same bytes.

python tests/bench/cutting.py                     (an hour of audio in chunks of five minutes; the figures of the guide)
python tests/bench/cutting.py --minutes 5 --json  (a quick look)
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rooms.model import Chunk
from rooms.sources import AudioCutter
from rooms.workers import Copy, cut_chunk, make_copy

RATE = 48_000


def make_recording(path: Path, minutes: float) -> None:
    """Write noise as a recorder would: 16 bits, one channel."""
    second = bytes(range(256)) * (2 * RATE // 256)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        for _ in range(round(minutes * 60)):
            file.writeframesraw(second)


def make_flac(source: Path, target: Path) -> bool:
    """Write the same as FLAC; False where soundfile is not installed."""
    try:
        import soundfile
    except ImportError:
        return False
    with soundfile.SoundFile(source) as audio, soundfile.SoundFile(target, "w", RATE, 1, "PCM_16") as out:
        while block := bytes(audio.buffer_read(RATE, dtype="int16")):
            out.buffer_write(block, dtype="int16")
    return True


def took_s(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def measure(folder: Path, minutes: float, chunk_s: float, rounds: int) -> dict[str, Any]:
    """Return medians over all chunks and rounds; cut and copy take turns, so that both see the same machine."""
    make_recording(folder / "night.wav", minutes)
    has_flac = make_flac(folder / "night.wav", folder / "night.flac")
    cutter = AudioCutter(None)
    spans = [(round(n * chunk_s * 1000), round((n + 1) * chunk_s * 1000)) for n in range(int(minutes * 60 // chunk_s))]
    found: dict[str, list[float]] = {"cut": [], "copy": [], "flac": []}
    for turn in range(rounds):
        for start_ms, end_ms in spans:
            chunk = Chunk("night", str(start_ms), "", str(folder / "night.wav"), start_ms, end_ms, is_cut=True)
            cut, copied = folder / "cut.wav", folder / f"copy{turn}-{start_ms}" / "cut.wav"
            found["cut"].append(took_s(lambda c=chunk, to=cut: cut_chunk(c, to, cutter)))  # type: ignore[misc]
            copy = Copy(Chunk("night", str(start_ms), "", str(cut)), copied)
            found["copy"].append(took_s(lambda c=copy: make_copy(c, cutter)))  # type: ignore[misc]
            size_bytes = cut.stat().st_size
            cut.unlink()
            shutil.rmtree(copied.parent)
            if has_flac and turn == 0:
                decoded = Chunk("night", str(start_ms), "", str(folder / "night.flac"), start_ms, end_ms, is_cut=True)
                found["flac"].append(took_s(lambda c=decoded, to=cut: cut_chunk(c, to, cutter)))  # type: ignore[misc]
                cut.unlink()
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    return {
        "chunk_s": chunk_s,
        "chunk_bytes": size_bytes,
        "cuts": len(found["cut"]),
        **{f"{name}_ms": round(value * 1000, 3) for name, value in medians.items()},
        "cut_mb_per_s": round(size_bytes / medians["cut"] / 1e6),
        "ratio": round(medians["cut"] / medians["copy"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--chunk-length", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to work: on the filesystem that is to be measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(Path(folder), args.minutes, args.chunk_length, args.rounds)
    if args.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:14} {value}")


if __name__ == "__main__":
    main()
