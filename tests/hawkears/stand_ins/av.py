"""As much of PyAV as HawkEars needs to decode audio, with soundfile: the real one has 30 MB."""

from types import SimpleNamespace

import soundfile


class InvalidDataError(ValueError, OSError):
    """This is no audio."""


error = SimpleNamespace(InvalidDataError=InvalidDataError)


class File:
    """A file with one stream of audio."""

    def __init__(self, path, metadata_errors=None):
        try:
            self._file = soundfile.SoundFile(path)
        except Exception as error:
            raise InvalidDataError(1094995529, f"Invalid data found when processing input: {path!r}") from error
        self.streams = SimpleNamespace(audio=[self])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def demux(self, _stream):
        for samples in self._file.blocks(2**20, dtype="float32", always_2d=True):
            yield Frame(samples.T.copy(), self._file.samplerate)


class Frame:
    """A stretch of audio, and the packet that it comes in."""

    def __init__(self, samples, rate):
        self.to_ndarray, self.sample_rate, self.samples = lambda: samples, rate, samples.shape[1]
        self.layout = SimpleNamespace(name=len(samples))

    def decode(self):
        return [self]


class AudioResampler:
    """Gives every frame back: its numbers are of the right kind."""

    def __init__(self, **_):
        pass

    def resample(self, frame):
        return [] if frame is None else [frame]


open = File
