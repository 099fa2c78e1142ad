"""A load of known size on one NVIDIA GPU: kernels that spin for a share of every period, through the driver alone.

    python tests/bench/gpu_load.py --duty 30 --seconds 20

Prints one JSON line: when it ran, and the share of that time in which a kernel really was running, by the GPU's own
events. Needs libcuda.so.1 and nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from typing import Any

# Every thread looks at the GPU's clock until its time is over.
_SPIN = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry spin(.param .u64 duration_ns)
{
    .reg .u64 %now, %end, %duration;
    .reg .pred %early;
    ld.param.u64 %duration, [duration_ns];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %duration;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}
\0"""
_MULTIPROCESSOR_COUNT = 16
_THREADS = 256
_PERIOD_S = 0.1  # from the start of one kernel to that of the next


class Cuda:
    """As much of the driver as is needed to start a kernel and to time it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, count = ctypes.c_int(), ctypes.c_int()
        context, module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSOR_COUNT, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_SPIN))
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        self._blocks = count.value
        self._events = [ctypes.c_void_p() for _ in range(2)]
        for event in self._events:
            self._call("cuEventCreate", ctypes.byref(event), 0)

    def spin(self, duration_ns: int) -> float:
        """Keep every multiprocessor busy; return how many seconds it really took."""
        before, after = self._events
        duration = ctypes.c_uint64(duration_ns)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        self._call("cuEventRecord", before, None)
        self._call("cuLaunchKernel", self._kernel, self._blocks, 1, 1, _THREADS, 1, 1, 0, None, arguments, None)
        self._call("cuEventRecord", after, None)
        self._call("cuEventSynchronize", after)
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), before, after)
        return milliseconds.value / 1000

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")


def run_load(duty_percent: float, seconds: float) -> dict[str, float]:
    """Spin for a share of every period; return what was true."""
    cuda = Cuda()
    cuda.spin(1_000_000)  # the first launch also loads the kernel
    started_ms, start_s = time.time() * 1000, time.monotonic()
    busy_s, periods = 0.0, 0
    while time.monotonic() - start_s < seconds:
        busy_s += cuda.spin(int(duty_percent / 100 * _PERIOD_S * 1e9))
        periods += 1
        time.sleep(max(0.0, start_s + periods * _PERIOD_S - time.monotonic()) if duty_percent < 100 else 0)
    took_s = time.monotonic() - start_s
    return {"started_ms": started_ms, "ended_ms": started_ms + took_s * 1000, "busy_percent": 100 * busy_s / took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--duty", type=float, required=True, help="percent of the time")
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    print(json.dumps(run_load(args.duty, args.seconds)))


if __name__ == "__main__":
    main()
