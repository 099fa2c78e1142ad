"""A stand-in for AMD's package ``amdsmi``, for a folder on the module search path; steered by the environment:

    FAKE_AMDSMI_DEVICES=4              how many devices there are; unset: the driver is not loaded
    FAKE_AMDSMI_ROCM=7                 whose answers: 5, 6 or 7
    FAKE_AMDSMI_LOST=3                 these devices answer nothing
    FAKE_AMDSMI_UNSUPPORTED=power:1    these calls answer "not supported" on that device
    FAKE_AMDSMI_FAILING=power:1        these answer "not found"
    FAKE_AMDSMI_REVERSED=1             HIP counts the devices from the last one
    FAKE_AMDSMI_HIP_ID=N/A             what stands in place of HIP's numbers
    FAKE_AMDSMI_NAMELESS=1             no name, no serial, no driver
    FAKE_AMDSMI_SERIAL=0x1F            the serial of every device
    FAKE_AMDSMI_NO_HOTSPOT=1           only the edge is measured; it is 5 °C cooler
    FAKE_AMDSMI_TICKS=1000             the energy counter; unset: by the time
    FAKE_AMDSMI_SAYS=power:N/A         these calls answer this in place of their numbers

CALLS: activity vram temp power cap energy clock fan fan_max ecc processes.
Device i has the serial 0xAMD0…i: 50+i % busy, 16 GiB with 1+i used, 40+i °C (slows down at 100), 100+10i W of 300.
"""

import os
import time
from enum import IntEnum

_NOT_SUPPORTED, _NOT_FOUND, _NOT_LOADED = 2, 31, 34
_INFO = {
    _NOT_SUPPORTED: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
    _NOT_FOUND: "AMDSMI_STATUS_NOT_FOUND - Device Not found",
    _NOT_LOADED: "AMDSMI_STATUS_DRIVER_NOT_LOADED - Processor driver not loaded",
}
_started = False
calls = []  # for tests: what was asked


class AmdSmiLibraryException(Exception):
    def __init__(self, err_code):
        super().__init__(f"Error code:\n\t{err_code} | {_INFO[err_code]}")
        self.err_code, self.err_info = err_code, _INFO[err_code]


_Sensor = IntEnum("_Sensor", {"EDGE": 0, "HOTSPOT": 1, "JUNCTION": 1, "VRAM": 2})
_OldSensor = IntEnum("_OldSensor", {"EDGE": 0, "JUNCTION": 1})
AmdSmiTemperatureMetric = IntEnum("AmdSmiTemperatureMetric", {"CURRENT": 0, "CRITICAL": 5})
AmdSmiClkType = IntEnum("AmdSmiClkType", {"GFX": 0, "MEM": 4})


def _setting(name, default=""):
    return os.environ.get(f"FAKE_AMDSMI_{name}", default)


def _rocm():
    return int(_setting("ROCM", "7"))


def _said(text):
    return int(text) if text.isdecimal() else text


def _asked(call, handle, number=None):
    """Count a call; return its number, or what stands in its place."""
    assert _started, "amdsmi_init was not called"
    calls.append((call, handle))
    if str(handle) in _setting("LOST").split(",") or f"{call}:{handle}" in _setting("FAILING").split(","):
        raise AmdSmiLibraryException(_NOT_FOUND)
    if f"{call}:{handle}" in _setting("UNSUPPORTED").split(","):
        raise AmdSmiLibraryException(_NOT_SUPPORTED)
    says = dict(pair.split(":", 1) for pair in _setting("SAYS").split(",") if pair)
    return _said(says[call]) if call in says else number


def amdsmi_init(flag=2):
    global _started
    if not _setting("DEVICES"):
        raise AmdSmiLibraryException(_NOT_LOADED)
    _started = True


def amdsmi_shut_down():
    global _started
    _started = False


def amdsmi_get_processor_handles():
    assert _started
    return list(range(int(_setting("DEVICES"))))


def amdsmi_get_gpu_asic_info(handle):
    if _setting("NAMELESS"):
        return {"market_name": "N/A", "asic_serial": "0x0"}
    serial = {"asic_serial": _setting("SERIAL", f"0xA3D000000000000{handle}")}
    return {"market_name": "AMD Stand-in", "vendor_id": 0x1002, **serial}


def amdsmi_get_temp_metric(handle, sensor, metric):
    celsius = 100 if metric == AmdSmiTemperatureMetric.CRITICAL else 40 + handle
    celsius -= 5 if sensor == _Sensor.EDGE else 0
    answer = _asked("temp", handle, celsius)
    if sensor not in (_Sensor.EDGE, _Sensor.HOTSPOT) or (sensor != _Sensor.EDGE and _setting("NO_HOTSPOT")):
        raise AmdSmiLibraryException(_NOT_SUPPORTED)
    return answer


def amdsmi_get_power_info(handle):
    watts = _asked("power", handle, 100 + 10 * handle)
    if _rocm() == 7:
        return {"socket_power": watts, "current_socket_power": watts, "average_socket_power": "N/A"}
    if _rocm() == 6:
        return {"current_socket_power": watts, "average_socket_power": "N/A", "power_limit": 300}
    return {"average_socket_power": watts, "current_socket_power": 0xFFFF}


def amdsmi_get_energy_count(handle):
    ticks = int(_setting("TICKS", time.monotonic() * 1e6 * (100 + 10 * handle) / 15.259))
    name = "energy_accumulator"
    return {name: _asked("energy", handle, ticks), "counter_resolution": 15.259, "timestamp": 1}


def amdsmi_get_clock_info(handle, kind):
    mhz = _asked("clock", handle, 1700 if kind == AmdSmiClkType.GFX else 1600)
    return {"clk": mhz, "max_clk": 2100}


def amdsmi_get_gpu_process_list(handle):
    _asked("processes", handle)
    return [_process(handle)]


def _process(handle):
    return {"name": "N/A", "pid": 4000 + handle, "mem": 0, "memory_usage": {"vram_mem": (1 + handle) * 2**30}}


def _enumeration(handle):
    number = int(_setting("DEVICES")) - 1 - handle if _setting("REVERSED") else handle
    return {"hip_id": _said(_setting("HIP_ID", str(number))), "hip_uuid": f"GPU-a3d000000000000{handle}"}


_SIMPLE = {  # of the handle, and what follows it
    "gpu_board_info": lambda i: {"product_name": "Board"},
    "gpu_device_uuid": lambda i: f"a3ff74a1-0000-1000-80d0-00000000000{i}",
    "gpu_device_bdf": lambda i: f"0000:0{i + 1}:00.0",
    "gpu_driver_info": lambda i: {"driver_version": "" if _setting("NAMELESS") else "6.8.5"},
    "power_cap_info": lambda i: {"power_cap": _asked("cap", i, 300_000_000)},
    "gpu_activity": lambda i: {"gfx_activity": _asked("activity", i, 50 + i), "umc_activity": 20 + i},
    "gpu_vram_usage": lambda i: {"vram_total": 16384, "vram_used": _asked("vram", i, 1024 * (1 + i))},
    "gpu_fan_speed": lambda i, fan: _asked("fan", i, {0: 51}[fan]),  # there is one fan
    "gpu_fan_speed_max": lambda i, fan: _asked("fan_max", i, {0: 255}[fan]),
    "gpu_total_ecc_count": lambda i: {"correctable_count": 7, "uncorrectable_count": _asked("ecc", i, 0)},
    "gpu_process_info": lambda i, process: {900 + i: _process(i)}[process],
}


def __getattr__(name):
    if name.removeprefix("amdsmi_get_") in _SIMPLE:
        return _SIMPLE[name.removeprefix("amdsmi_get_")]
    if name == "amdsmi_get_gpu_enumeration_info" and _rocm() == 7:  # known only since ROCm 6.4
        return _enumeration
    if name == "AmdSmiTemperatureType":
        return _Sensor
    raise AttributeError(f"module 'amdsmi' has no attribute {name!r}")
