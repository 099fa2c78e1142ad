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


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code):
        super().__init__(err_code)
        self.err_code = err_code
        self.err_info = _INFO[err_code]

    def __str__(self):
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class _Sensor(IntEnum):
    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2


class _OldSensor(IntEnum):
    EDGE = 0
    JUNCTION = 1


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0
    CRITICAL = 5


class AmdSmiClkType(IntEnum):
    GFX = 0
    MEM = 4


def _setting(name, default=""):
    return os.environ.get(f"FAKE_AMDSMI_{name}", default)


def _rocm():
    return int(_setting("ROCM", "7"))


def _asked(call, handle):
    assert _started, "amdsmi_init was not called"
    calls.append((call, handle))
    if str(handle) in _setting("LOST").split(",") or f"{call}:{handle}" in _setting("FAILING").split(","):
        raise AmdSmiLibraryException(_NOT_FOUND)
    if f"{call}:{handle}" in _setting("UNSUPPORTED").split(","):
        raise AmdSmiLibraryException(_NOT_SUPPORTED)
    says = dict(pair.split(":", 1) for pair in _setting("SAYS").split(",") if pair)
    return (lambda number: _said(says[call])) if call in says else (lambda number: number)


def _said(text):
    return int(text) if text.isdecimal() else text


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
    serial = {} if _rocm() == 5 else {"asic_serial": _setting("SERIAL", f"0xA3D000000000000{handle}")}
    return {"market_name": "AMD Stand-in", "vendor_id": 0x1002, **serial}


def amdsmi_get_gpu_board_info(handle):
    return {"product_name": "Board"}


def amdsmi_get_gpu_device_uuid(handle):
    return f"a3ff74a1-0000-1000-80d0-00000000000{handle}"


def amdsmi_get_gpu_device_bdf(handle):
    return f"0000:0{handle + 1}:00.0"


def amdsmi_get_gpu_driver_info(handle):
    if _setting("NAMELESS"):
        return {"driver_version": ""}
    return {"driver_name": "amdgpu", "driver_version": "6.8.5"}


def amdsmi_get_power_cap_info(handle):
    number = _asked("cap", handle)
    return {"power_cap": number(300 if _rocm() == 5 else 300_000_000)}


def amdsmi_get_gpu_activity(handle):
    number = _asked("activity", handle)
    return {"gfx_activity": number(50 + handle), "umc_activity": 20 + handle, "mm_activity": "N/A"}


def amdsmi_get_gpu_vram_usage(handle):
    number = _asked("vram", handle)
    return {"vram_total": 16384, "vram_used": number(1024 * (1 + handle))}


def amdsmi_get_temp_metric(handle, sensor, metric):
    number = _asked("temp", handle)
    celsius = 100 if metric == AmdSmiTemperatureMetric.CRITICAL else 40 + handle
    if sensor not in (_Sensor.EDGE, _Sensor.HOTSPOT) or (sensor != _Sensor.EDGE and _setting("NO_HOTSPOT")):
        raise AmdSmiLibraryException(_NOT_SUPPORTED)
    celsius -= 5 if sensor == _Sensor.EDGE else 0
    return number(celsius * 1000 if _rocm() == 5 else celsius)


def amdsmi_get_power_info(handle):
    watts = _asked("power", handle)(100 + 10 * handle)
    if _rocm() == 7:
        return {"socket_power": watts, "current_socket_power": watts, "average_socket_power": "N/A"}
    if _rocm() == 6:
        return {"current_socket_power": watts, "average_socket_power": "N/A", "power_limit": 300}
    return {"average_socket_power": watts, "current_socket_power": 0xFFFF}


def amdsmi_get_energy_count(handle):
    number = _asked("energy", handle)
    ticks = number(int(_setting("TICKS", time.monotonic() * 1e6 * (100 + 10 * handle) / 15.259)))
    return {"energy_accumulator" if _rocm() > 5 else "power": ticks, "counter_resolution": 15.259, "timestamp": 1}


def amdsmi_get_clock_info(handle, kind):
    number = _asked("clock", handle)
    return {"clk" if _rocm() > 5 else "cur_clk": number(1700 if kind == AmdSmiClkType.GFX else 1600), "max_clk": 2100}


def amdsmi_get_gpu_fan_speed(handle, sensor):
    assert sensor == 0, "there is one fan"
    return _asked("fan", handle)(51)


def amdsmi_get_gpu_fan_speed_max(handle, sensor):
    assert sensor == 0, "there is one fan"
    return _asked("fan_max", handle)(255)


def amdsmi_get_gpu_total_ecc_count(handle):
    number = _asked("ecc", handle)
    return {"correctable_count": 7, "uncorrectable_count": number(0)}


def amdsmi_get_gpu_process_list(handle):
    _asked("processes", handle)
    return [_process(handle)] if _rocm() > 5 else [900 + handle]


def amdsmi_get_gpu_process_info(handle, process):
    assert process == 900 + handle
    return _process(handle)


def _process(handle):
    return {"name": "N/A", "pid": 4000 + handle, "mem": 0, "memory_usage": {"vram_mem": (1 + handle) * 2**30}}


def _enumeration(handle):
    number = int(_setting("DEVICES")) - 1 - handle if _setting("REVERSED") else handle
    number = _said(_setting("HIP_ID", str(number)))
    return {"hip_id": number, "hip_uuid": f"GPU-a3d000000000000{handle}", "drm_card": handle}


def __getattr__(name):
    if name == "amdsmi_get_gpu_enumeration_info" and _rocm() == 7:  # known only since ROCm 6.4
        return _enumeration
    if name == "AmdSmiTemperatureType":
        return _OldSensor if _rocm() == 5 else _Sensor
    raise AttributeError(f"module 'amdsmi' has no attribute {name!r}")
