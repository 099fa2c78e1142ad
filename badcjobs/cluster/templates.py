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
from typing import NamedTuple, Protocol

from badcjobs import paths as resources
from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.project import Project
from badcjobs.settings import SubmitSettings
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


class WrongValues(BadInput):
    """Values of a template that are missing or cannot be used."""

    def __init__(self, keys: Sequence[str], what: str, *, why: str | None, fix: str) -> None:
        super().__init__(what, why=why, fix=fix)
        self.keys = keys


def list_templates() -> list[Template]:
    """Return all templates, sorted by name."""
    paths = sorted(resources.folder("templates").glob(f"*{_ENDING}"))
    return [Template(path.stem, path.read_text(encoding="utf-8")) for path in paths]


class AddRequest(Protocol):
    """Adds cores and memory to options of submit; with ``fit`` lowers their GPUs to those of a node."""

    def __call__(self, options: SubmitSettings, *, fit: bool) -> SubmitSettings: ...


def _add_nothing(options: SubmitSettings, *, fit: bool) -> SubmitSettings:
    return options


def fill_template(
    name: str,
    settings: Sequence[str],
    project: Project,
    *,
    complete: bool,
    request: AddRequest = _add_nothing,
) -> Template:
    """Return a template filled in with ``KEY=VALUE`` texts and, for other keys, from the project file.

    ``complete``: refuse missing required values.
    """
    texts = {template.name: template.text for template in list_templates()}
    name = name.removesuffix(_ENDING)
    if name not in texts:
        why = f"templates are {', '.join(texts)}"
        raise BadInput(f"there is no template {name!r}", why=why, fix="badcjobs template")
    text = texts[name]
    keys = {key.name: key for key in keys_of(text)}
    named = {setting.partition("=")[0].strip() for setting in settings}
    usual = [f"{key}={value}" for key, value in _from_project(project) if key in keys and key not in named]
    values = parse_settings(text, [*usual, *settings], name, complete=complete)
    if {"gpus-per-node", "cpus-per-task", "mem"} <= keys.keys():
        values = _usual_request(values, keys["gpus-per-node"].value, request) | values
    return Template(name, fill(text, values))


def _usual_request(values: Values, usual_gpus: str, request: AddRequest) -> dict[str, list[str]]:
    """Return GPUs, cores and memory for the workers of these values."""
    gpus = sbatch.count_gpus({"gpus-per-node": values.get("gpus-per-node", [usual_gpus])[0]})
    cpus = int(values["cpus-per-task"][0]) if "cpus-per-task" in values else None
    options = request(SubmitSettings(gpus_per_task=gpus, cpus=cpus), fit="gpus-per-node" not in values)
    wanted = {"gpus-per-node": options.gpus_per_task, "cpus-per-task": options.cpus, "mem": options.mem}
    return {key: [str(value)] for key, value in wanted.items() if value is not None}


def _from_project(project: Project) -> Iterator[tuple[str, str]]:
    """Yield the keys of templates that the project file sets, each with its value."""
    for key, setting in sbatch.OF_SUBMIT.items():
        value = project.get("submit", setting)
        if value is not None:
            yield key, value
    tasks = project.get("submit", "tasks")
    parallel = project.get("submit", "parallel")
    if tasks is not None:
        yield "array", f"0-{tasks - 1}%{parallel}" if parallel else f"0-{tasks - 1}"
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
    except FileExistsError as error:
        if path.is_dir():
            raise cannot_write(path, IsADirectoryError(f"{path} is a folder")) from error
        fix = fix or f"--out {path.with_stem(f'{path.stem}-2')}"
        raise BadInput(f"{path} exists already", why="it may have been edited", fix=fix) from error
    except OSError as error:
        raise cannot_write(path, error) from error


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
        if option := _OPTION.fullmatch(line):
            value = option["value"]
            keys.append(Key(option["key"], value, required=not option["off"] and bool(_PLACEHOLDER.search(value))))
        elif variable := _VARIABLE.fullmatch(line):
            if line.startswith(_SETUP_BEFORE):
                keys.append(Key("setup", "", several=True))
            keys.append(Key(variable["name"].lower(), variable["value"], open=variable["name"] in _NEEDED))
        elif line == _ARGS_BEGIN:
            keys.append(Key("args", "", several=True))
    return tuple(keys)


def parse_settings(text: str, settings: Sequence[str], name: str, *, complete: bool) -> dict[str, list[str]]:
    """Parse ``KEY=VALUE`` texts for a template; unknown, repeated and wrong ones are refused in one message.

    ``complete``: missing required values are refused as well.
    """
    keys = {key.name: key for key in keys_of(text)}
    values: dict[str, list[str]] = {}
    mistakes = []
    for setting in settings:
        word, equals, value = setting.partition("=")
        key = word.strip().replace("_", "-")
        if not equals:
            mistakes.append(f"--set {setting} has no value; write --set {word}=…")
        elif key not in keys:
            mistakes.append(f"--set {setting}: {name} has no key {word!r}")
        elif key in values and not keys[key].several:
            mistakes.append(f"--set {setting}: {key} is given twice")
        elif not value or not value.isprintable():
            mistakes.append(f"--set {word}: {value!r} cannot be written in a line of a script")
        elif key == "args" and not _can_be_split(value):
            mistakes.append(f"--set args={value}: No closing quotation")
        else:
            values.setdefault(key, []).append(value)
    missing = [key.name for key in keys.values() if key.required and key.name not in values]
    if complete and missing:
        mistakes.append(f"missing: {', '.join(missing)}")
    wrong = wrong_values(keys, values)
    if wrong or mistakes:
        raise _refusal(name, keys, values, wrong, mistakes, missing)
    return values


def _can_be_split(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:  # a quotation mark that is not closed
        return False
    return True


def _refusal(
    name: str,
    keys: Mapping[str, Key],
    values: Values,
    wrong: Sequence[WrongValue],
    mistakes: Sequence[str],
    missing: Sequence[str],
) -> WrongValues:
    """Return the error; its line to try has the right values (the first of a repeated key) and the missing keys."""
    reasons = [*(value.message for value in wrong), *mistakes]
    what = reasons[0]
    why = [f"keys of {name}: {', '.join(keys)}"] if mistakes else []
    if len(reasons) > 1:
        what = f"the template {name} cannot be filled in with these values"
        why = [*reasons, *why]
    right = {**values, **{value.key: [_first_of(value.example)] for value in wrong}}
    words = [f"--set {shlex.quote(f'{key}={value}')}" for key, several in right.items() for value in several]
    words += [f"--set {key}=…" for key in missing]
    line = " ".join(["badcjobs template", name, *words])
    fix = line if words else f"{line}   (shows the script with all its keys)"
    keys_wrong = [*missing, *(value.key for value in wrong)]
    return WrongValues(keys_wrong, what, why="\n".join(why) or None, fix=fix)


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
    option = _OPTION.fullmatch(line)
    if option and option["key"] in values:
        return f"#SBATCH --{option['key']}={shlex.quote(values[option['key']][0])}"
    variable = _VARIABLE.fullmatch(line)
    if variable and variable["name"].lower() in values:
        value = values[variable["name"].lower()][0]
        # These characters are special to the shell inside double quotes and braces.
        escaped = re.sub(r'[\\"$`}]', lambda letter: "\\" + letter[0], value).replace("'", '"\'"')
        return f': "${{{variable["name"]}:={escaped}}}"'
    return line


def _is_range_of_nodes(text: str) -> bool:
    least, _, most = text.partition("-")
    return 0 < int(least) <= int(most or least)


_NAME = ("a name without spaces", re.compile(r"[\w.@-]+").fullmatch)
_COUNT = ("a whole number above 0", "4", re.compile(r"0*[1-9][0-9]*").fullmatch)
_DEPENDENCY = re.compile(r"singleton|after[a-z]*:\d+(?:[_+:,?]?[a-z:]*\d+)*")

# key → the expected value, an example, a parser: a false result or a ValueError means a wrong value
_KINDS: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "account": (_NAME[0], "st-pi-1", _NAME[1]),
    "partition": ("names of partitions, separated by commas", "gpu", re.compile(r"[\w.,-]+").fullmatch),
    "qos": (_NAME[0], "normal", _NAME[1]),
    "constraint": ("features of a node, without spaces", "gpu_mem_32", re.compile(r"[^\s<>]+").fullmatch),
    "array": ("indices of an array", "0-9, 1-20:2 or 0-99%10", sbatch.parse_array),
    "time": ("a time limit", "12:00:00 or 1-00:00:00", sbatch.parse_limit),
    "mem": ("an amount of memory", "16G", lambda text: sbatch.parse_memory(text) >= 0),
    "gpus-per-node": ("a number of GPUs", "4 or v100:4", lambda text: sbatch.count_gpus({"gpus-per-node": text})),
    "nodes": ("a number of nodes", "2", _is_range_of_nodes),
    "ntasks": _COUNT,
    "ntasks-per-node": _COUNT,
    "cpus-per-task": _COUNT,
    "signal": ("a signal and its seconds before the end", "B:USR1@180", sbatch.parse_signal),
    "open-mode": ("append or truncate", "append", re.compile("append|truncate").fullmatch),
    "dependency": ("a condition to wait for", "afterany:4821", _DEPENDENCY.fullmatch),
}
_PATHS = ("source", "out", "image", "badcjobs", "apptainer")


class WrongValue(NamedTuple):
    """A value that sbatch or the template would not accept."""

    key: str
    example: str
    message: str


def wrong_values(keys: Mapping[str, Key], values: Values) -> list[WrongValue]:
    """Return the values that sbatch or the template would not accept."""
    wrong = []
    for name, several in values.items():
        for value in several:
            reason = _check_value(keys[name], value)
            if reason is not None:
                wrong.append(_wrong_value(name, value, *reason))
    return wrong or _check_warning(keys, values)


def _wrong_value(key: str, value: str, expected: str, example: str) -> WrongValue:
    return WrongValue(key, example, f"--set {key}={value}: must be {expected}, such as {example}")


def _check_warning(keys: Mapping[str, Key], values: Values) -> list[WrongValue]:
    """Check that the early warning comes before the end."""
    if not {"time", "signal"} <= keys.keys() or values.keys().isdisjoint({"time", "signal"}):
        return []
    time = values["time"][0] if "time" in values else keys["time"].value
    warning = values["signal"][0] if "signal" in values else keys["signal"].value
    time_s = sbatch.parse_limit(time) or 0
    lead_s = sbatch.parse_signal(warning).lead_s
    if time_s > lead_s:
        return []
    if "time" in values:
        expected = f"more than the {lead_s} s of its early warning (this is {time_s // 60} min)"
        longer = f"{max(2, lead_s // 3600 + 2)}:00:00"  # the warning comes after more than an hour
        return [_wrong_value("time", time, expected, longer)]
    expected = f"fewer seconds than the {time_s:,} of its time limit, {time}"
    return [_wrong_value("signal", warning, expected, f"{warning.partition('@')[0]}@180")]


def _first_of(examples: str) -> str:
    return examples.partition(" or ")[0].partition(",")[0]


def _check_value(key: Key, value: str) -> tuple[str, str] | None:
    """Return the expected value and an example of it; None: the value is right."""
    if key.name in _PATHS and value.startswith("~"):
        return "a path without ~, because the shell does not expand it there", "/path/to" + value[1:]
    if key.name not in _KINDS:
        return None
    expected, example, is_right = _KINDS[key.name]
    try:
        if not is_right(value):
            return expected, example
    except ValueError:
        return expected, example
    instead = sbatch.suggest_range(sbatch.parse_array(value)) if key.name == "array" else None
    if instead:
        return "a range, because Slurm does not pass a list to its tasks", instead
    form = r"[^<>\s]+".join(re.escape(part) for part in _PLACEHOLDER.split(key.value))
    if key.required and not re.fullmatch(form, value):
        return f"the form {key.value}", _PLACEHOLDER.sub(value, key.value, count=1)
    return None
