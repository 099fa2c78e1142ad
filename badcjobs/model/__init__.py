"""The value types that all rooms share: frozen, typed, with the unit in each name.

They import nothing from the rest of the package, and do nothing beyond describing themselves. Decisions are imported
from their own module: the recorder makes none, and stays smaller.
"""

from badcjobs.model.arrays import *  # noqa: F403
from badcjobs.model.devices import *  # noqa: F403
from badcjobs.model.places import *  # noqa: F403
from badcjobs.model.work import *  # noqa: F403
