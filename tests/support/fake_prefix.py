"""A stand-in for programs that are put before an engine: it talks, gives its program a session of its own, reports.

So does nsys (2025.3): it prints on stdout and stderr, passes the exit code on, and writes its report in the end.
"""

import sys
from pathlib import Path

from support.stand_ins import install

_PROGRAM = """#!{python}
import subprocess, sys, time
report, program = sys.argv[1], sys.argv[2:]
print("Collecting data...", flush=True)
print("==PROF== Connected", file=sys.stderr, flush=True)
code = subprocess.Popen(program, start_new_session=True).wait()
time.sleep({report_s})
open(report + ".report", "w").write(" ".join(program))
print("Generated:", report, flush=True)
sys.exit(code % 256)
"""


def install_fake_prefix(folder: Path, *, report_s: float = 0.0) -> Path:
    """Write the program ``watchful REPORT PROGRAM …``, which takes ``report_s`` for its report; return its path."""
    return install(folder / "watchful", _PROGRAM.format(python=sys.executable, report_s=report_s))
