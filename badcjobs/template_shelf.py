"""The templates that come with badcjobs, as ``badcjobs template`` shows, fills and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from badcjobs import resources
from badcjobs.errors import BadInput
from badcjobs.scheduler.script import fill, keys_of, parse_settings, still_open
from badcjobs.scheduler.template_values import WrongValue, wrong_values
from badcjobs.store.exports.fresh_file import cannot_write

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
    wrong = wrong_values(keys_of(template.text), settings)
    try:
        values = parse_settings(template.text, settings, template.name, complete=complete)
    except BadInput as error:
        raise _together(error, wrong, template.name) if wrong else error from None
    if wrong:
        raise _together(None, wrong, template.name)
    return Template(template.name, fill(template.text, values))


def _together(error: BadInput | None, wrong: list[WrongValue], name: str) -> BadInput:
    """Put wrong values and whatever else is wrong into one answer."""
    lines = [str(one) for one in wrong]
    if error is None and len(lines) == 1:
        what, why = lines[0], None
    else:
        what = f"the template {name} cannot be filled in like this"
        others = [] if error is None else [text for text in (error.what, error.why) if text and text != what]
        why = "\n".join([*lines, *others])
    examples = {one.key: one.example.partition(" or ")[0].partition(",")[0] for one in wrong}
    fix = f"badcjobs template {name} " + " ".join(f"--set {key}={example}" for key, example in examples.items())
    return BadInput(what, why=why, fix=fix)


def write_script(path: Path, text: str, *, force: bool) -> None:
    """Write a script; never over a file that is there, unless that is wanted."""
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise BadInput(f"{path} exists already", why="it may have been edited", fix="add --force") from error
    except OSError as error:
        raise cannot_write(path, error) from error


def _read(path: Path) -> Template:
    return Template(path.stem, path.read_text(encoding="utf-8"))
