"""As much of PyTorch as anybody asks here: is there a GPU, and which one."""

import os
from types import SimpleNamespace

__version__ = "2.9.0+stand.in"


class OutOfMemoryError(RuntimeError):
    """CUDA has no room."""


def _is_available() -> bool:
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES")) and os.environ.get("FAKE_HAWKEARS_CUDA") != "0"


def _properties(index: int) -> SimpleNamespace:
    return SimpleNamespace(name="Tesla V100", uuid=os.environ["CUDA_VISIBLE_DEVICES"].removeprefix("GPU-"))


cuda = SimpleNamespace(
    is_available=_is_available,
    get_device_properties=_properties,
    empty_cache=lambda: None,
    OutOfMemoryError=OutOfMemoryError,
)
