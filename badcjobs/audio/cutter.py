"""Cuts a stretch out of an audio file: WAV by copying frames, every other format by whoever here can decode it."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import BinaryIO

from badcjobs.audio.ffmpeg import Ffmpeg
from badcjobs.audio.libsndfile import cut_with_libsndfile, length_with_libsndfile
from badcjobs.audio.wav import NotWav, WavHeader, copy_frames, make_head, read_header
from badcjobs.model import FlacInfo, read_flac_info
from badcjobs.seams import CannotCut, NoDecoder, NotThere

_SLACK_S = 1.0  # recorders, and those who round, are not exact
_GUESS_BYTES_PER_S = 48_000 * 2 * 4  # stereo, decoded to 32 bits a sample


class AudioCutter:
    """Knows how long audio is, and makes shorter audio of it (seams.Cutter).

    Parameters
    ----------
    search_path: where ffmpeg and ffprobe are looked for, as PATH has it; None: nowhere.
    """

    def __init__(self, search_path: str | None) -> None:
        self._ffmpeg = Ffmpeg(search_path or "")

    def length_s(self, path: Path) -> float | None:
        """Return the seconds of audio that are really in the file; None: nobody here can tell."""
        try:
            found = _look(path)
        except OSError:
            return None
        if isinstance(found, WavHeader):
            return found.length_s
        if isinstance(found, FlacInfo) and found.frames:
            return found.frames / found.rate_hz
        return length_with_libsndfile(path) or self._ffmpeg.length_s(path)

    def promised_s(self, path: Path) -> float | None:
        """Return the seconds of audio that a WAV header promises, of which a file that breaks off has less.

        None: it is no WAV; of other formats nobody knows where in the file something is missing.
        """
        try:
            found = _look(path)
        except OSError:
            return None
        return found.promised_s if isinstance(found, WavHeader) else None

    def size_bytes(self, source: Path, start_s: float, end_s: float) -> int:
        """Return about how large a stretch is as a WAV file; raise OSError where the file cannot be read."""
        found = _look(source)
        if isinstance(found, WavHeader):
            first, last = _frames(found, start_s, end_s)
            return len(make_head(found, 0)) + max(0, last - first) * found.frame_bytes
        bytes_per_s = _GUESS_BYTES_PER_S
        if isinstance(found, FlacInfo):
            bytes_per_s = found.rate_hz * found.channels * -(-found.bits // 8)
        length_s = (end_s if end_s < float("inf") else self.length_s(source) or 0.0) - start_s
        return int(max(0.0, length_s) * bytes_per_s)

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        """Write the audio between two moments as the WAV file ``target``.

        An end beyond the audio's own is its end, also where that breaks off. Raise CannotCut, or OSError where a disk
        will not have it.
        """
        try:
            self._cut(source, start_s, end_s, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        try:
            with open_audio(source) as file:
                header = read_header(file)
                first, last = _frames(header, start_s, end_s)
                if first >= last:
                    raise _nothing_there(source, header, start_s)
                copy_frames(file, header, first, last, target)
        except NotWav as problem:
            self._decode(source, start_s, end_s, target, problem)
        except EOFError as problem:
            raise CannotCut(f"{source}: {problem}") from problem

    def _decode(self, source: Path, start_s: float, end_s: float, target: Path, problem: NotWav) -> None:
        """Ask one after the other; the word of one that can decode counts more than that of one that is not here."""
        refusals: list[CannotCut] = []
        try:
            return cut_with_libsndfile(source, start_s, end_s, target)
        except CannotCut as refusal:
            refusals.append(refusal)
        found = _look(source)
        try:
            flac = found if isinstance(found, FlacInfo) else None
            return self._ffmpeg.cut(source, start_s, end_s, target, flac)
        except CannotCut as refusal:
            refusals.append(refusal)
        if spoken := [refusal for refusal in refusals if not isinstance(refusal, NoDecoder)]:
            raise spoken[-1]
        why = " and ".join(map(str, refusals))
        # The line to paste comes last: of an error that is told in one line, it is that one.
        what = f"{source} is no WAV that can be cut ({problem}), {why}"
        raise NoDecoder(f"{what}\npip install 'badcjobs[audio]'   (where badcjobs is: no soundfile, no ffmpeg)")


def open_audio(path: Path) -> BinaryIO:
    """Open a file; raise OSError also where it is a pipe: to open that takes until somebody writes to it."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder the system says it
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not an audio file", str(path))
    return path.open("rb")


def _look(path: Path) -> WavHeader | FlacInfo | None:
    """Read the header of a file; None: it is of another kind, or broken."""
    with open_audio(path) as file:
        try:
            return read_header(file)
        except NotWav:
            return read_flac_info(file)


def _nothing_there(source: Path, header: WavHeader, start_s: float) -> CannotCut:
    """Return why nothing can be cut out of a file behind a moment: it breaks off before, or has no more audio."""
    there, promised_s = f"{header.length_s:g} s are there, and none after {start_s:g} s", header.promised_s
    if promised_s - header.length_s > _SLACK_S and start_s < promised_s:
        return NotThere(f"{source} breaks off: its header says {promised_s:g} s, {there}")
    if not header.frames:
        return CannotCut(f"{source} has no audio in it")
    return CannotCut(f"{source} has {header.length_s:.3f} s of audio, and none after {start_s:.3f} s")


def _frames(header: WavHeader, start_s: float, end_s: float) -> tuple[int, int]:
    last = header.frames if end_s == float("inf") else min(header.frames, round(end_s * header.rate_hz))
    return max(0, round(start_s * header.rate_hz)), last
