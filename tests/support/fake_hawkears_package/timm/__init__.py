"""Slow to import, and imported late: here each import leaves a line with the number of its process."""

import os
import time
from pathlib import Path

time.sleep(float(os.environ.get("FAKE_HAWKEARS_IMPORT_S", "0")))
if imports := os.environ.get("FAKE_HAWKEARS_IMPORTS"):
    with Path(imports).open("a") as file:
        file.write(f"{os.getpid()}\n")
