"""As much of librosa as HawkEars needs: it resamples with soxr, as the real one does, which brings 50 MB of numba."""

import math

import numpy
import soxr


def resample(signal, *, orig_sr, target_sr, res_type, axis):
    frames = math.ceil(signal.shape[axis] * (float(target_sr) / orig_sr))
    found = numpy.apply_along_axis(soxr.resample, axis, signal, orig_sr, target_sr, quality=res_type)
    missing = [
        (0, max(0, frames - found.shape[axis])) if n == axis % signal.ndim else (0, 0) for n in range(signal.ndim)
    ]
    return numpy.pad(found, missing).take(range(frames), axis=axis).astype(signal.dtype)
