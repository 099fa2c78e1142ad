"""As much of PyTorch as anybody asks here: is there a GPU, and which one."""

import os
import sys
from types import SimpleNamespace

__version__ = "2.9.0+stand.in"
_DEVICE = os.environ.get("CUDA_VISIBLE_DEVICES", "")

cuda = SimpleNamespace(
    is_available=lambda: bool(_DEVICE) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0",
    get_device_properties=lambda index: SimpleNamespace(name="Tesla V100", uuid=_DEVICE.removeprefix("GPU-")),
    empty_cache=lambda: print("memory freed", file=sys.stderr, flush=True),
)
