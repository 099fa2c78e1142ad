"""A stand-in for the Python package ``hawkears`` (2.3), for PYTHONPATH: the API that our worker feeds, and its lies.

Written from the outside of the real one: the same names, the same shapes, the same loop over a fixed list, no models.
What misbehaves and how fast is said as for ``fake_hawkears``, whose ears it has; besides, FAKE_HAWKEARS_LOADS names
a file that gets a line for each time that models are loaded, and FAKE_HAWKEARS_SHAPE=other|none is another 2.x:
with an inner shape that we do not know, or without an API at all.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def fake_package_environ() -> dict[str, str]:
    """Return the variables with which any Python has this HawkEars (and the stand-in's ears, which are in tests/)."""
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])])}
