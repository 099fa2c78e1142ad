"""Stand-ins for NVIDIA's profilers: programs called nsys and ncu that behave as the real ones were seen to.

nsys (2025.3) talks on stdout, gives its program a session of its own and passes its exit code on; ncu (2025.3) stays in
the group. Both write their report when the program has ended. The report here holds the words they were started with.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """\
#!{python}
import json, os, subprocess, sys, time
name, fault = {name!r}, {fault!r}
words = sys.argv[1:]
if fault == "refuses":
    sys.exit("ERR_NVGPUCTRPERM: no permission")
shell = words.index("/bin/sh")
options, program = words[:shell], words[shell:]
print("Collecting data...", flush=True)
print("==PROF== Connected", file=sys.stderr, flush=True)
if fault == "runs nothing":
    sys.exit(0)
child = subprocess.Popen(program, start_new_session=name == "nsys")
if fault == "dies":
    time.sleep(0.5)
    child.kill()
    sys.exit(139)
code = child.wait()
time.sleep({report_s})
report = options[options.index("-o" if name == "nsys" else "--export") + 1]
if fault != "leaves nothing":
    with open(report + (".nsys-rep" if name == "nsys" else ".ncu-rep"), "w") as file:
        json.dump({{"options": options, "program": program}}, file)
print("Generated:", report, flush=True)
sys.exit(3 if fault == "ends badly" else code % 256)
"""


def install_fake_profiler(folder: Path, name: str = "nsys", *, fault: str = "", report_s: float = 0.0) -> Path:
    """Write the program, which takes ``report_s`` for its report, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(_PROGRAM.format(python=sys.executable, name=name, fault=fault, report_s=report_s))
    path.chmod(0o755)
    return path
