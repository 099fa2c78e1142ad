"""Files that take for ever to open, as on a filesystem that does not answer; no signal gets through meanwhile."""

import os

from support.badcjobs_program import Site

_ASKED = "someone-waits"
# What Python loads by itself. A thread that waits has its signals blocked: the system does so with one that is in a
# call which cannot be interrupted.
_CUSTOMIZE = """
import builtins, signal, time

builtin_open = open


def slow_open(path, *args, **options):
    if str(path).endswith("slow.wav"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        builtin_open({asked!r}, "w").close()
        while True:
            time.sleep(0.1)
    return builtin_open(path, *args, **options)


builtins.open = slow_open
"""


def slow_files(site: Site) -> dict[str, str]:
    """Return the environment of a program for which to open any ``…slow.wav`` never ends."""
    folder = site.folder / "slow-files"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE.format(asked=str(folder / _ASKED)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), site.environ()["PYTHONPATH"]])}


def somebody_waits(site: Site) -> bool:
    """Say whether such a file was opened."""
    return (site.folder / "slow-files" / _ASKED).exists()
