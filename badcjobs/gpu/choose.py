"""Pick the reader: simulated devices where someone asked for them, NVML everywhere else.

Opening never fails for want of a GPU; that answer comes from ``inventory``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.gpu.nvml import NvmlReader
from badcjobs.gpu.script import SimulationScript, parse_script
from badcjobs.gpu.simulated import SimulatedReader
from badcjobs.model import StandIn
from badcjobs.seams import Clock, GpuReader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def open_reader(stand_in: StandIn, clock: Clock, started_at_ms: int, search_path: str | None) -> GpuReader:
    """Return the reader for this run; ``search_path`` is where programs such as nvidia-smi are looked for."""
    script = None if stand_in.script is None else load_script(Path(stand_in.script))
    if stand_in.simulate is not None:
        return SimulatedReader(stand_in.simulate, script, clock=clock, started_at_ms=started_at_ms)
    if script is not None:
        raise BadInput(
            "a simulation script was given, but no number of simulated devices",
            why="the script describes devices; how many there are is said by --simulate",
            fix=f"--simulate {max((device.index for device in script.devices), default=0) + 1}",
        )
    return NvmlReader(clock)


def load_script(path: Path) -> SimulationScript:
    """Read a simulation script from a TOML file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"the simulation script {path} cannot be read", why=error.strerror) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise BadInput(f"the simulation script {path} is not TOML", why=str(error)) from error
    return parse_script(document, str(path))
