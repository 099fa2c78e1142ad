"""Slow to import, and imported late: here each import leaves a line with the number of its process."""

import os
from pathlib import Path

if imports := os.environ.get("FAKE_HAWKEARS_IMPORTS"):
    with Path(imports).open("a") as file:
        file.write(f"{os.getpid()}\n")
