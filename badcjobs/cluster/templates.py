"""List, fill in and write the batch scripts that come with badcjobs (``badcjobs template``).

A template has no special markers, so that it can be edited and submitted unchanged. Its keys are the names of
``#SBATCH`` options (also of those commented out with a second ``#``) and, in lower case, of variables in lines such as
``: "${SOURCE:=}"``; the keys ``args`` and ``setup`` add lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
_ARGS_BEGIN, _ARGS_END = "ARGS=(", ")"


@dataclass(frozen=True, slots=True)
class Template:
    """A batch script, original or filled in."""

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
        """The keys that need a value before or at submission."""
        return tuple(key.name for key in keys_of(self.text) if key.required or (key.open and not key.value))

    def to_dict(self) -> dict[str, object]:
        """Return the template for ``--json``."""
        keys = {key.name: key.value for key in keys_of(self.text)}
        return {"name": self.name, "about": self.about, "keys": keys, "open": list(self.open)}


def list_templates() -> list[Template]:
    """Return all templates, sorted by name."""
    found = sorted(resources.folder("templates").glob(f"*{_ENDING}"))
    return [Template(path.stem, path.read_text(encoding="utf-8")) for path in found]


def fill_template(
    name: str, settings: Sequence[str], project: Project, *, complete: bool,
    request: Callable[..., SubmitSettings] = lambda options, fit: options,
) -> Template:  # fmt: skip
    """Return a template filled in with ``KEY=VALUE`` texts and, for other keys, from the project file.

    ``complete``: refuse missing required values. ``request``: adds cores and memory to these options, and with ``fit``
    lowers their GPUs to those of a node.
    """
    texts = {one.name: one.text for one in list_templates()}
    name = name.removesuffix(_ENDING)
    if name not in texts:
        why = f"templates are {', '.join(texts)}"
        raise BadInput(f"there is no template {name!r}", why=why, fix="badcjobs template")
    known, said = {key.name for key in keys_of(texts[name])}, {one.partition("=")[0].strip() for one in settings}
    words = [word for key, word in _from_project(project) if key in known and key not in said]
    given = parse_settings(texts[name], [*words, *settings], name, complete=complete)
    if {"gpus-per-node", "cpus-per-task", "mem"} <= known:
        (usual,) = [key.value for key in keys_of(texts[name]) if key.name == "gpus-per-node"]
        gpus = sbatch.count_gpus({"gpus-per-node": given.get("gpus-per-node", [usual])[0]})
        cpus = int(given.get("cpus-per-task", ["0"])[0]) or None
        options = request(SubmitSettings(gpus_per_task=gpus, cpus=cpus), fit="gpus-per-node" not in given)
        more = [("gpus-per-node", options.gpus_per_task), ("cpus-per-task", options.cpus), ("mem", options.mem)]
        given = {key: [str(value)] for key, value in more if value is not None} | given
    return Template(name, fill(texts[name], given))


def _from_project(project: Project) -> Iterator[tuple[str, str]]:
    """Yield the keys of templates that the project file sets, each with its ``KEY=VALUE``."""
    for key, ours in sbatch.OF_SUBMIT.items():
        if (value := project.get("submit", ours)) is not None:
            yield key, f"{key}={value}"
    if (tasks := project.get("submit", "tasks")) is not None:
        parallel = project.get("submit", "parallel")
        yield "array", f"array=0-{tasks - 1}" + (f"%{parallel}" if parallel else "")
    yield from (("setup", f"setup={line}") for line in project.get("submit", "setup") or ())
    sources: Sequence[str] = project.get("run", "source") or ()
    if len(sources) == 1:
        yield "source", f"source={sources[0]}"
    if (out := project.get("run", "out")) is not None:
        yield "out", f"out={out}"


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


@dataclass(frozen=True, slots=True)
class Key:
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


def parse_settings(text: str, given: Sequence[str], name: str, *, complete: bool) -> dict[str, list[str]]:
    """Parse ``KEY=VALUE`` texts for a template; unknown, repeated and wrong ones are refused in one message.

    ``complete``: missing required values are refused as well.
    """
    keys = {key.name: key for key in keys_of(text)}
    values: dict[str, list[str]] = {}
    mistakes = []
    for one in given:
        word, equals, value = one.partition("=")
        key = word.strip().replace("_", "-")
        if not equals:
            mistakes.append(f"--set {one} has no value; write --set {word}=…")
        elif key not in keys:
            mistakes.append(f"--set {one}: {name} has no key {word!r}")
        elif key in values and not keys[key].several:
            mistakes.append(f"--set {one}: {key} is given twice")
        elif not value or not value.isprintable():
            mistakes.append(f"--set {word}: {value!r} cannot be written in a line of a script")
        else:
            try:
                shlex.split(value if key == "args" else "")
                values.setdefault(key, []).append(value)
            except ValueError as error:  # a quotation mark that is not closed
                mistakes.append(f"--set args={value}: {error}")
    missing = [key.name for key in keys.values() if key.required and key.name not in values]
    if complete and missing:
        mistakes.append(f"missing: {', '.join(missing)}")
    keys_line = [f"keys of {name}: {', '.join(keys)}"] if mistakes else []
    wrong = wrong_values(keys, values)
    mistakes = [*(sentence for _, _, sentence in wrong), *mistakes]
    if mistakes:  # the line to try has the right values (the first for a repeated key) and the missing keys
        right = values | {key: [_first_of(example)] for key, example, _ in wrong}
        words = [f"--set {shlex.quote(f'{key}={value}')}" for key, several in right.items() for value in several]
        words += [f"--set {key}=…" for key in missing]
        raise BadInput(
            mistakes[0] if len(mistakes) == 1 else f"the template {name} cannot be filled in with these values",
            why="\n".join([*(mistakes if len(mistakes) > 1 else []), *keys_line]) or None,
            fix=" ".join(["badcjobs template", name, *words])
            + ("" if words else "   (shows the script with all its keys)"),
        )
    return values


def fill(text: str, values: Mapping[str, Sequence[str]]) -> str:
    """Return the script with these values; everything else stays unchanged."""
    lines: list[str] = []
    in_args = False
    for line in text.splitlines():
        if in_args and line == _ARGS_END:
            lines += [f"    {shlex.quote(word)}" for value in values.get("args", ()) for word in shlex.split(value)]
        in_args = line == _ARGS_BEGIN or (in_args and line != _ARGS_END)
        if line.startswith(_SETUP_BEFORE):
            lines += [one for one in values.get("setup", ()) if one not in lines]  # a site's template may have it
        if (option := _OPTION.fullmatch(line)) and option["key"] in values:
            line = f"#SBATCH --{option['key']}={shlex.quote(values[option['key']][0])}"
        elif (variable := _VARIABLE.fullmatch(line)) and (key := variable["name"].lower()) in values:
            # These characters are special to the shell inside double quotes and braces.
            value = re.sub(r'[\\"$`}]', lambda letter: "\\" + letter[0], values[key][0]).replace("'", '"\'"')
            line = f': "${{{variable["name"]}:={value}}}"'
        lines.append(line)
    return "\n".join(lines) + "\n"


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


def wrong_values(keys: Mapping[str, Key], values: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """Return key, example and message for every value that sbatch or the template would not accept."""
    checked = [(name, value, _check_value(keys[name], value)) for name, given in values.items() for value in given]
    together = {name: values[name][0] if name in values else key.value for name, key in keys.items()}
    which = next((name for name in ("time", "signal") if name in values), None)
    if which and together.keys() >= {"time", "signal"} and not any(wrong for _, _, wrong in checked):
        time, warning = together["time"], together["signal"]  # the warning must come before the end
        time_s, lead_s = sbatch.parse_limit(time) or 0, sbatch.parse_signal(warning).lead_s
        less = f"fewer seconds than the {time_s:,} of its time limit, {time}", f"{warning.partition('@')[0]}@180"
        longer = f"{max(2, lead_s // 3600 + 2)}:00:00"  # the warning comes after more than an hour
        more = f"more than the {lead_s} s of its early warning (this is {time_s // 60} min)", longer
        if time_s <= lead_s:
            checked.append((which, together[which], less if which == "signal" else more))
    return [
        (name, wrong[1], f"--set {name}={value}: must be {wrong[0]}, such as {wrong[1]}")
        for name, value, wrong in checked
        if wrong
    ]


def example_of(option: str) -> str | None:
    """Return an example value of an sbatch option; None: its values are not checked here."""
    return _first_of(_KINDS[option][1]) if option in _KINDS else None


def _first_of(examples: str) -> str:
    return examples.partition(" or ")[0].partition(",")[0]


def _check_value(key: Key, value: str) -> tuple[str, str] | None:
    """Return the expected value and an example of it; None: the value is right."""
    if key.name in _PATHS and value.startswith("~"):
        return "a path without ~, because the shell does not expand it there", "/path/to" + value[1:]
    if key.name not in _KINDS:
        return None
    wanted, example, read = _KINDS[key.name]
    with suppress(ValueError):
        if read(value):
            wanted = ""
    if wanted:
        return wanted, example
    if key.name == "array" and (instead := sbatch.suggest_range(sbatch.parse_array(value))):
        return "a range, because Slurm does not pass a list to its tasks", instead
    form = r"[^<>\s]+".join(re.escape(part) for part in _PLACEHOLDER.split(key.value))
    if key.required and not re.fullmatch(form, value):
        return f"the form {key.value}", _PLACEHOLDER.sub(value, key.value, count=1)
    return None
