"""What tests need from the machine: where it is missing a test is skipped, or fails if ``--require`` names it.

This is the only list. ``--require=all``, which ``.ci/run`` passes, means all of it but ``MAY_BE_MISSING``.
"""

import os
from pathlib import Path
from typing import NoReturn

import pytest

_APT = "apt-get install -y --no-install-recommends"
# Each with the way to get it.
KNOWN = {
    "slurm": f"{_APT} slurmctld slurmd slurm-client munge",
    "spank": f"{_APT} libslurm-dev",
    "cc": f"{_APT} gcc libc6-dev",
    "root": "run the tests as root",
    "mount": "root, in a container that may mount",
    "cgroup": "root, and device and memory cgroups of version 1 that count swap",
    "wheel": "pip install '.[test]'",
    "chromium": f"{_APT} chromium",
    "promtool": f"{_APT} prometheus",
    "hawkears": "tests/hawkears/install DIR; export BADCJOBS_TEST_HAWKEARS=DIR/venv/bin/hawkears "
    "BADCJOBS_TEST_HAWKEARS_ROOT=DIR/root",
}
MAY_BE_MISSING = {"cgroup"}  # Debian's Slurm needs version 1, and a new kernel has version 2: no package brings it
required: set[str] = set()


def require(names: list[str]) -> None:
    """Take the names of the command line."""
    if unknown := set(names) - {*KNOWN, "all"}:
        raise pytest.UsageError(f"--require {', '.join(sorted(unknown))}: known are all, {', '.join(KNOWN)}")
    required.update(KNOWN.keys() - MAY_BE_MISSING if "all" in names else (), set(names) - {"all"})


def missing(name: str, reason: str) -> NoReturn:
    """End the test that needs ``name``."""
    reason = f"{reason}; try: {KNOWN[name]}"
    if name in required:
        pytest.fail(f"--require {name}: {reason}")
    pytest.skip(reason)


def find_hawkears() -> tuple[Path, Path]:
    """Return the program of the real HawkEars and the folder with its models."""
    program, root = (os.environ.get(f"BADCJOBS_TEST_HAWKEARS{end}") for end in ("", "_ROOT"))
    if not (program and root):
        missing("hawkears", "no real HawkEars: BADCJOBS_TEST_HAWKEARS and BADCJOBS_TEST_HAWKEARS_ROOT are not set")
    return Path(program), Path(root)
