"""Finds the rules of a site: in a file that comes with badcjobs, or in somebody's own."""

from __future__ import annotations

from pathlib import Path

from badcjobs import resources
from badcjobs.config import read_toml
from badcjobs.errors import BadInput
from badcjobs.preflight.site import Site, parse_site


def find_site(name: str, cwd: Path) -> Site:
    """Read a site file that comes with badcjobs, by its name, or somebody's own, by its path."""
    if name.endswith(".toml"):
        path = cwd / name
    else:
        path = resources.folder("sites") / f"{name}.toml"
        known = sorted(one.stem for one in path.parent.glob("*.toml"))
        if name not in known:
            raise BadInput(
                f"there is no site {name!r}",
                why=f"sites are {', '.join(known)}, or a file whose name ends in .toml",
                fix=f"badcjobs check --site {known[0]}   (or --site ./{name}.toml; see badcjobs guide check)",
            )
    if not path.exists():
        raise BadInput(f"{path} does not exist", fix="badcjobs guide check   (how to write a site file)")
    return parse_site(read_toml(path), str(path))
