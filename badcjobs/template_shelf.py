"""The templates that come with badcjobs, as ``badcjobs template`` shows, fills and writes them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from badcjobs import resources
from badcjobs.errors import BadInput
from badcjobs.scheduler.script import fill, keys_of, parse_settings, still_open

_ENDING = ".sbatch"


@dataclass(frozen=True, slots=True)
class Template:
    """A batch script, as it comes or filled in."""

    name: str
    text: str

    @property
    def about(self) -> str:
        """Its first sentence."""
        words = " ".join(line.lstrip("# ") for line in self.text.partition("\n\n")[0].splitlines()[1:])
        end = min(at for mark in (". ", ": ", "; ") if (at := (words + mark).find(mark)) >= 0)
        return words[:end].strip()

    @property
    def open(self) -> tuple[str, ...]:
        """The keys that are still to be filled in."""
        return still_open(self.text)

    def to_dict(self) -> dict[str, object]:
        """Return it for ``--json``."""
        keys = {key.name: key.value for key in keys_of(self.text)}
        return {"name": self.name, "about": self.about, "keys": keys, "open": list(self.open)}


def list_templates() -> list[Template]:
    """Return all of them, by name."""
    return [_read(path) for path in sorted(resources.folder("templates").glob(f"*{_ENDING}"))]


def fill_template(name: str, settings: list[str], *, complete: bool) -> Template:
    """Return one of them with these ``KEY=VALUE`` in it; ``complete``: nothing that is required may be missing."""
    path = resources.folder("templates") / f"{name.removesuffix(_ENDING)}{_ENDING}"
    if "/" in name or not path.exists():
        names = ", ".join(one.name for one in list_templates())
        raise BadInput(f"there is no template {name!r}", why=f"templates are {names}", fix="badcjobs template")
    template = _read(path)
    values = parse_settings(template.text, settings, template.name, complete=complete)
    return Template(template.name, fill(template.text, values))


def write_script(path: Path, text: str, *, force: bool) -> None:
    """Write a script; never over a file that is there, unless that is wanted."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise BadInput(f"{path} exists already", why="it may have been edited", fix="add --force") from error
    except OSError as error:
        fix = f"mkdir -p {shlex.quote(str(path.parent))}" if isinstance(error, FileNotFoundError) else None
        raise BadInput(f"{path} cannot be written", why=error.strerror, fix=fix) from error


def _read(path: Path) -> Template:
    return Template(path.stem, path.read_text(encoding="utf-8"))
