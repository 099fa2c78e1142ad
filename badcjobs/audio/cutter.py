"""Cuts a stretch out of an audio file: WAV by copying frames, every other format with ffmpeg where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from badcjobs.audio.wav import NotWav, copy_frames, read_header
from badcjobs.seams import CannotCut

_DECODING_S = 900.0  # a day of audio from a slow file system


class AudioCutter:
    """Knows how long audio is, and makes shorter audio of it (seams.Cutter).

    Parameters
    ----------
    search_path: where ffmpeg and ffprobe are looked for, as PATH has it; None: nowhere.
    """

    def __init__(self, search_path: str | None) -> None:
        self._search_path = search_path or ""

    def length_s(self, path: Path) -> float | None:
        """Return the seconds of audio that are really in the file; None: nobody here can tell."""
        try:
            with path.open("rb") as file:
                return read_header(file).length_s
        except NotWav:
            return self._probe_s(path)
        except OSError:
            return None

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        """Write the audio between two moments as the WAV file ``target``.

        An end beyond the audio's own is its end. Raise CannotCut, or OSError where a disk will not have it.
        """
        try:
            self._cut(source, start_s, end_s, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        try:
            with source.open("rb") as file:
                header = read_header(file)
                first = max(0, round(start_s * header.rate_hz))
                last = min(header.frames, round(end_s * header.rate_hz))
                if first >= last:
                    raise CannotCut(f"{source} has {header.length_s:.3f} s of audio, and none after {start_s:.3f} s")
                copy_frames(file, header, first, last, target)
        except NotWav as problem:
            self._decode(source, start_s, end_s, target, problem)
        except EOFError as problem:
            raise CannotCut(f"{source}: {problem}") from problem

    def _decode(self, source: Path, start_s: float, end_s: float, target: Path, problem: NotWav) -> None:
        ffmpeg = shutil.which("ffmpeg", path=self._search_path)
        if ffmpeg is None:
            raise CannotCut(f"{source} is no WAV that can be cut ({problem}), and there is no ffmpeg on PATH")
        # -ss after -i decodes from the beginning: slower, but to the sample, also where an MP3 has no index.
        argv = [ffmpeg, "-nostdin", "-v", "error", "-y", "-i", str(source.absolute()), "-map", "0:a:0"]
        argv += ["-ss", f"{start_s:.6f}", "-t", f"{end_s - start_s:.6f}", "-c:a", "pcm_f32le", "-f", "wav", str(target)]
        said = _run(argv)
        try:
            with target.open("rb") as file:
                has_audio = read_header(file).frames > 0
        except (OSError, NotWav):
            has_audio = False
        if not has_audio:
            raise CannotCut(f"{source} cannot be decoded by ffmpeg: {said or 'it wrote nothing'}")

    def _probe_s(self, path: Path) -> float | None:
        ffprobe = shutil.which("ffprobe", path=self._search_path)
        if ffprobe is None:
            return None
        argv = [ffprobe, "-v", "error", "-select_streams", "a:0", "-show_entries", "format=duration", "-of", "csv=p=0"]
        said = _run([*argv, str(path.absolute())])
        try:
            length_s = float(said.splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return length_s if length_s > 0 else None


def _run(argv: Sequence[str]) -> str:
    """Return what a program says; whether it worked, its output tells."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DECODING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]
