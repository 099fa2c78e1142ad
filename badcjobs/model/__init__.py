"""The nouns that travel between stages: frozen, typed, with the unit in each name.

No behaviour beyond what a noun knows about itself; no imports from the rest of the package.
"""

from badcjobs.model.arrays import *  # noqa: F403
from badcjobs.model.devices import *  # noqa: F403
from badcjobs.model.work import *  # noqa: F403
