"""As much of PyTorch as anybody asks here: is there a GPU, and which one."""

import os
import sys
import threading
from types import SimpleNamespace

__version__ = "2.9.0+stand.in"


def device():
    """Return the device as CUDA finds it, when it is first used."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "")


cuda = SimpleNamespace(
    is_available=lambda: bool(device()) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0",
    is_initialized=lambda: os.environ.get("FAKE_HAWKEARS_UNFIT") == "cuda",
    get_device_properties=lambda index: SimpleNamespace(name="Tesla V100", uuid=device().removeprefix("GPU-")),
    empty_cache=lambda: print("memory freed", file=sys.stderr, flush=True),
)
if os.environ.get("FAKE_HAWKEARS_UNFIT") == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
