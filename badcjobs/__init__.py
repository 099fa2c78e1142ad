"""badcjobs: run bird-sound detectors inside Slurm, keep every GPU busy, record what happened.

The Python interface: ``Recorder``, ``list_devices``, ``pick_devices``, ``open_job`` (`badcjobs guide export`).
"""

from __future__ import annotations

from badcjobs.version import __version__

TYPE_CHECKING = False  # type checkers treat it as true; importing it takes longer than the rest of this module
if TYPE_CHECKING:
    from badcjobs.api.python import Recorder, list_devices, open_job, pick_devices
    from badcjobs.model import AlertLimits
    from badcjobs.telemetry.alerts import Alert

__all__ = ["Alert", "AlertLimits", "Recorder", "__version__", "list_devices", "open_job", "pick_devices"]

_HOMES = {"Alert": "badcjobs.telemetry.alerts", "AlertLimits": "badcjobs.model"}  # all others: badcjobs.api.python


def __getattr__(name: str) -> object:
    """Import a name when it is first used: every command imports this module, and few need these names."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "badcjobs.api.python")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
