"""List, fill in and write the batch scripts that come with badcjobs (``badcjobs template``).

A template has no special markers, so that it can be edited and submitted unchanged. Its keys are the names of
``#SBATCH`` options (also of those commented out with a second ``#``) and, in lower case, of variables in lines such as
``: "${SOURCE:=}"``; the keys ``args`` and ``setup`` add lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from badcjobs import paths as resources
from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.project import Project
from badcjobs.settings import SubmitSettings, refuse
from badcjobs.store.atomic_write import cannot_write

_ENDING = ".sbatch"
_OPTION = re.compile(r"(?P<off>#?)#SBATCH --(?P<key>[a-z-]+)=(?P<value>\S*)")
_VARIABLE = re.compile(r': "\$\{(?P<name>[A-Z]+):=(?P<value>.*)\}"')
_PLACEHOLDER = re.compile(r"<[a-z]+>")
_SETUP_BEFORE = ': "${BADCJOBS:='
_NEEDED = ("SOURCE", "OUT", "IMAGE")  # the script stops without them
_ARGS_BEGIN = "ARGS=("
_ARGS_END = ")"
Values = Mapping[str, Sequence[str]]  # of the keys of a template


class Template(NamedTuple):
    """A batch script, original or filled in."""

    name: str
    text: str

    @property
    def about(self) -> str:
        """Its first sentence."""
        comment = self.text.partition("\n\n")[0].splitlines()[1:]
        sentence = " ".join(line.lstrip("# ") for line in comment)
        return re.split(r"[.:;] ", f"{sentence} ", maxsplit=1)[0].strip()

    @property
    def open(self) -> tuple[str, ...]:
        """The keys that need a value before or at submission."""
        return tuple(key.name for key in keys_of(self.text) if key.required or (key.open and not key.value))

    def to_dict(self) -> dict[str, object]:
        """Return the template for ``--json``."""
        keys = {key.name: key.value for key in keys_of(self.text)}
        return {"name": self.name, "about": self.about, "keys": keys, "open": list(self.open)}


def list_templates() -> list[Template]:
    """Return all templates, sorted by name."""
    paths = sorted(resources.folder("templates").glob(f"*{_ENDING}"))
    return [Template(path.stem, path.read_text(encoding="utf-8")) for path in paths]


def find_template(name: str) -> Template:
    """Return the template with this name; raise BadInput if there is none."""
    templates = {template.name: template for template in list_templates()}
    template = templates.get(name.removesuffix(_ENDING))
    if template is None:
        why = f"templates are {', '.join(templates)}"
        raise BadInput(f"there is no template {name!r}", why=why, fix="badcjobs template")
    return template


# Adds cores and memory to options of submit; True: lowers their GPUs to those of a node.
AddRequest = Callable[[SubmitSettings, bool], SubmitSettings]


def fill_template(
    name: str,
    settings: Sequence[str],
    project: Project,
    *,
    complete: bool,
    request: AddRequest | None = None,
) -> Template:
    """Return a template filled in with ``KEY=VALUE`` texts and, for other keys, from the project file.

    ``complete``: refuse missing required values.
    """
    name, text = find_template(name)
    keys = {key.name: key for key in keys_of(text)}
    named = {_key_of(setting) for setting in settings}
    usual = [f"{key}={value}" for key, value in _from_project(project) if key in keys and key not in named]
    values = parse_settings(text, [*usual, *settings], name, complete=complete)
    if request is not None and {"gpus-per-node", "cpus-per-task", "mem"} <= keys.keys():
        values = _usual_request(values, keys["gpus-per-node"].value, request) | values
    return Template(name, fill(text, values))


def _usual_request(values: Values, usual_gpus: str, request: AddRequest) -> dict[str, list[str]]:
    """Return GPUs, cores and memory for the workers of these values."""
    gpus_text = values.get("gpus-per-node", [usual_gpus])[0]
    gpus = sum(number for _, number in sbatch.parse_gpus(gpus_text, "gpus-per-node"))
    cpus = int(values["cpus-per-task"][0]) if "cpus-per-task" in values else None
    options = request(SubmitSettings(gpus_per_task=gpus, cpus=cpus), "gpus-per-node" not in values)
    request_of_task = {"gpus-per-node": options.gpus_per_task, "cpus-per-task": options.cpus, "mem": options.mem}
    return {key: [str(value)] for key, value in request_of_task.items() if value is not None}


def _from_project(project: Project) -> Iterator[tuple[str, str]]:
    """Yield the keys of templates that the project file sets, each with its value."""
    for key, setting in sbatch.OF_SUBMIT.items():
        value = project.get("submit", setting)
        if value is not None:
            yield key, value
    tasks = project.get("submit", "tasks")
    if tasks is not None:
        yield "array", sbatch.range_of(tasks, project.get("submit", "parallel"))
    for line in project.get("submit", "setup") or ():
        yield "setup", line
    sources: Sequence[str] = project.get("run", "source") or ()
    if len(sources) == 1:
        yield "source", sources[0]
    out = project.get("run", "out")
    if out is not None:
        yield "out", out


def write_new(path: Path, text: str, fix: str = "") -> None:
    """Write a file that does not exist yet; never replace one. ``fix``: what to try if it exists."""
    try:
        write_new_text(path, text)
    except OSError as error:
        if not isinstance(error, FileExistsError) or path.is_dir():
            raise cannot_write(path, error) from error
        fix = fix or f"--out {path.with_stem(f'{path.stem}-2')}"
        raise BadInput(f"{path} exists already", why="it may have been edited", fix=fix) from error


class Key(NamedTuple):
    """A value that can be set in a template."""

    name: str
    value: str  # the current value
    required: bool = False  # the script cannot be used without it
    open: bool = False  # to be filled in, or given at submission, if it is empty
    several: bool = False  # may be given more than once


def keys_of(text: str) -> tuple[Key, ...]:
    """Return the keys of a template, in its order."""
    keys = []
    for line in text.splitlines():
        if line.startswith(_SETUP_BEFORE):
            keys.append(Key("setup", "", several=True))
        if line == _ARGS_BEGIN:
            keys.append(Key("args", "", several=True))
        key = _key_in(line)
        if key is not None:
            keys.append(key)
    return tuple(keys)


def _key_in(line: str) -> Key | None:
    """Return the key whose value is in a line."""
    if option := _OPTION.fullmatch(line):
        value = option["value"]
        return Key(option["key"], value, required=not option["off"] and bool(_PLACEHOLDER.search(value)))
    if variable := _VARIABLE.fullmatch(line):
        return Key(variable["name"].lower(), variable["value"], open=variable["name"] in _NEEDED)
    return None


def parse_settings(text: str, settings: Sequence[str], name: str, *, complete: bool) -> dict[str, list[str]]:
    """Parse ``KEY=VALUE`` texts for a template; unknown, repeated and wrong ones are refused in one message.

    ``complete``: missing required values are refused as well.
    """
    keys = {key.name: key for key in keys_of(text)}
    values: dict[str, list[str]] = {}
    mistakes = []
    for setting in settings:
        word, _, value = setting.partition("=")
        key = keys.get(_key_of(setting))
        if key is None:
            mistakes.append(f"--set {setting}: {name} has no key {word!r}")
            continue
        reason = _why_wrong(key, value)
        if key.name in values and not key.several:
            reason = "it is given twice"
        if reason is not None:
            mistakes.append(f"--set {key.name}={value}: {reason}")
        values.setdefault(key.name, []).append(value)
    if complete:
        missing = [key.name for key in keys.values() if key.required and key.name not in values]
        mistakes += [f"--set {name_of_key}=… is missing" for name_of_key in missing]
    fix = f"badcjobs template {name}   (shows the script with all its keys)"
    refuse(mistakes, fix, f"the template {name} cannot be filled in with these values")
    return values


def _key_of(setting: str) -> str:
    """Return the key of a ``KEY=VALUE`` text; it may be written with underscores, as settings are."""
    return setting.partition("=")[0].strip().replace("_", "-")


_NAMES = ("account", "partition", "qos", "constraint")
_PATHS = ("source", "out", "image", "badcjobs", "apptainer")


def _why_wrong(key: Key, value: str) -> str | None:
    """Return why sbatch or the template would not accept a value; None: it is right."""
    if not value or not value.isprintable():
        return "it has no value, or one that cannot be written in a line of a script"
    if key.name in _PATHS and value.startswith("~"):
        return "must be a path without ~, because the shell does not expand it there"
    if key.name in _NAMES and re.search(r"[\s<>]", value):
        return "must be a name without spaces, < and >"
    mistakes: list[str] = []
    if key.name == "args":
        sbatch.try_parse(mistakes, shlex.split, value)
    asked = sbatch.read_request({key.name: value}, mistakes).asked
    if mistakes:
        return mistakes[0]
    if asked.array_range is not None:
        return f"must be a range, because Slurm does not pass a list to its tasks, such as {asked.array_range}"
    form = r"[^<>\s]+".join(map(re.escape, _PLACEHOLDER.split(key.value)))
    if key.required and not re.fullmatch(form, value):
        return f"must have the form {key.value}"
    return None


def fill(text: str, values: Values) -> str:
    """Return the script with these values; everything else stays unchanged."""
    lines: list[str] = []
    in_args = False
    for line in text.splitlines():
        if line == _ARGS_BEGIN:
            in_args = True
        elif in_args and line == _ARGS_END:
            in_args = False
            lines += [f"    {shlex.quote(word)}" for value in values.get("args", ()) for word in shlex.split(value)]
        if line.startswith(_SETUP_BEFORE):
            lines += [own for own in values.get("setup", ()) if own not in lines]  # a site's template may have it
        lines.append(_fill_line(line, values))
    return "\n".join(lines) + "\n"


def _fill_line(line: str, values: Values) -> str:
    """Return a line with the value of its key, if there is one."""
    key = _key_in(line)
    if key is None or key.name not in values:
        return line
    value = values[key.name][0]
    if line.startswith("#"):
        return f"#SBATCH --{key.name}={shlex.quote(value)}"
    # These characters are special to the shell inside double quotes and braces.
    escaped = re.sub(r'[\\"$`}]', lambda letter: "\\" + letter[0], value).replace("'", '"\'"')
    return f': "${{{key.name.upper()}:={escaped}}}"'
