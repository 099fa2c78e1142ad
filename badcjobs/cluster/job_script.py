"""Read a job script: its ``#SBATCH`` lines, its plain assignments and the lines that call badcjobs; nothing is run.

This is not a shell. It reads our templates, the script in the README and others that are as plain. A line with several
commands is not read, nor is anything after a here-document.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster import sbatch_options as sbatch
from badcjobs.devices.allocation import sbatch_options
from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.seams import Environ
from badcjobs.settings import JOB_SCRIPTS, refuse

ARGUMENTS = "BADCJOBS_ARGS"
CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter"}
_LAUNCHERS = {*CONTAINERS, "srun", "python", "nohup"}

_SBATCH = re.compile(r"\s*#\s*SBATCH\s+(-.*)")
_HERE_DOCUMENT = re.compile(r"(?<!<)<<(?!<)")
_LOGICAL_LINE = re.compile(r"^\w+=\([^()]*\)|(?:[^\\\n]|\\.)+", re.M | re.S)  # an array, or a line with continuations
_ASSIGNMENT = re.compile(r"(\s*)(?:export\s+)?(\w+)=([^(].*|)", re.S)
_DEFAULT = re.compile(r': "\$\{(\w+):=([^\\]*)\}"')
_ARRAY = re.compile(r"(\w+)=\(([^()]*)\)")
_READ_ARRAY = re.compile(r'read -r -a (\w+) <<<"\$\{(\w+):-\}"')
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_ALL_OF_ARRAY = re.compile(r'"\$\{(\w+)\[@\]\}"')
_ALONE = re.compile(r"\$\{?[\w@*]+(?:\[[@*]\])?\}?")  # a word that is only a variable
_PATTERN = re.compile(r"[*?[{]")
_OPERATOR = re.compile(r"[();<>|&]+")
_MODULES = re.compile(r"(?:^|[;&|])[ \t]*(?:module|ml)[ \t]+(?:load|add)[ \t]+([^\n;&|>#]+)", re.M)
_SETTING_UP = re.compile(r"^[ \t]*((?:source|\.|conda|mamba|micromamba|spack|eval)[ \t].*)", re.M)
_MOVING = re.compile(r"\b(?:cd|pushd)\b(?![ \t]+\"?\$\{?SLURM_SUBMIT_DIR)")
_TRAP = re.compile(r"^[^#\n]*\btrap\b", re.M)
_TMPDIR = re.compile(r"^[^#\n]*(?:\bTMPDIR=|\bunset\b.*\bTMPDIR\b)", re.M)
_TEMPLATE_VARIABLES = ("SOURCE", "OUT", "IMAGE")  # our templates stop without them
_OF_THE_JOB = ("SLURM", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "TMPDIR")
_PATHS = ("out", "root", "hawkears_root")
Words = Sequence[str]


@dataclass(frozen=True)
class Mistake:
    """A mistake in a script."""

    text: str
    fix: str  # a line to paste


@dataclass(frozen=True)
class ParsedWords:
    """The parsed words after ``badcjobs``; values may have unknown variables."""

    command: str | None = None
    values: dict[str, Any] = field(default_factory=dict)  # "engine_arg" → its value; True for a flag
    operands: tuple[str, ...] = ()
    wrong: Mistake | None = None


Parser = Callable[[Words], ParsedWords]


@dataclass(frozen=True)
class Call:
    """A line of a script that calls badcjobs."""

    line: int
    text: str
    command: str = "run"
    before: tuple[str, ...] = ()  # the words before badcjobs, programs by their names
    values: dict[str, Any] = field(default_factory=dict)  # "out" → the value of --out; None: not known
    hidden: bool = False  # a variable may have more options
    sources: tuple[str, ...] | None = None  # None: one of them has an unknown variable

    @property
    def needs_gpu(self) -> bool:
        """Whether a ``badcjobs run`` needs a GPU for certain."""
        return not self.hidden and self.values.keys().isdisjoint({"cpu_workers", "config"})

    @property
    def by_exec(self) -> bool:
        """Whether it replaces the shell of the job."""
        return self.before[:1] == ("exec",)

    @property
    def by_srun(self) -> bool:
        """Whether it runs as a step of the job, on each of its nodes."""
        return "srun" in self.before

    @property
    def contained(self) -> bool:
        """Whether it runs in a container, with the engine of its image."""
        return not CONTAINERS.isdisjoint(self.before)


@dataclass(frozen=True)
class BatchScript:
    """A job script, as far as it can be read."""

    name: str
    options: sbatch.Options  # under their long names
    asked: sbatch.Asked = field(default_factory=sbatch.Asked)
    signal: sbatch.EarlySignal | None = None
    call: Call | None = None  # the last one of badcjobs run, else the last one
    mistakes: tuple[Mistake, ...] = ()  # options that sbatch would refuse
    ignored: tuple[Mistake, ...] = ()  # lines that look like options, but are comments for sbatch
    wrong_calls: tuple[Mistake, ...] = ()  # calls that badcjobs would refuse
    unread: tuple[int, ...] = ()  # lines that name badcjobs, if no call can be read
    modules: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()  # the variables of our templates that have no value yet
    set_up_by: str | None = None  # a line that may add programs to PATH which cannot be found here
    traps_signals: bool = False
    sets_tmpdir: bool = False
    sets_cache: bool = False

    @property
    def start(self) -> Call | None:
        """The call of ``badcjobs run``."""
        return self.call if self.call is not None and self.call.command == "run" else None


def is_job_script(source: str) -> bool:
    """Say whether a SOURCE is a job script, by its ending."""
    return source.endswith(JOB_SCRIPTS)


def script_variables(source: str | None, out: str | Path | None, arguments: Words) -> dict[str, str]:
    """Return the variables through which SOURCE, --out and options of run reach a script, as our templates read them.

    The options are split at spaces.
    """
    variables = {"SOURCE": source, "OUT": out, ARGUMENTS: " ".join(arguments)}
    return {name: str(value) for name, value in variables.items() if value}


def read_text(script: Path, cwd: Path) -> str:
    """Return the text of a job script, with its own line ends."""
    try:
        return (cwd / script).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        look = shell_line("ls", "-l", script.parent)
        raise BadInput(f"the job script {script} cannot be read", why=str(error), fix=look) from error


def read_script(text: str, name: str, environ: Environ, cwd: str, parse: Parser, options: Words = ()) -> BatchScript:
    """Read a script; ``parse`` parses the words after badcjobs.

    ``options`` are those on the command line of sbatch, which override the environment, which overrides the script.
    """
    wrong: list[str] = []
    readable = _HERE_DOCUMENT.split(text, maxsplit=1)[0]
    ignored: list[Mistake] = []
    own_options = _read_options(readable, wrong, ignored)
    request = sbatch.read_request(own_options | sbatch_options(environ) | sbatch.read_options(options), wrong)
    test = f"sbatch --test-only {shell_line(Path(name))}   (shows the message of sbatch)"

    variables = {name: value for name, value in environ.items() if not name.startswith(_OF_THE_JOB)}
    variables |= {"SLURM_SUBMIT_DIR": cwd, "PWD": cwd}
    moves = "chdir" in request.options or _MOVING.search(readable) is not None
    reader = _Reader(readable, variables, parse, moves)
    reader.read()
    starts = [call for call in reader.calls if call.command == "run"]
    unread: list[int] = []
    if not reader.calls and not reader.wrong_calls:
        numbered = enumerate(text.splitlines(), 1)
        unread = [number for number, line in numbered if "badcjobs" in line.partition("#")[0].lower()]
    asked = request.asked
    if asked.gpus_per_task == 0 and not (starts and starts[-1].needs_gpu):
        asked = replace(asked, gpus_per_task=None)  # it may do without
    return BatchScript(
        name=name,
        options=request.options,
        asked=asked,
        signal=request.signal,
        call=next(reversed(starts or reader.calls), None),
        mistakes=tuple(Mistake(message, test) for message in wrong),
        ignored=tuple(ignored),
        wrong_calls=tuple(reader.wrong_calls),
        unread=tuple(unread),
        modules=tuple(module for module in " ".join(_MODULES.findall(text)).split() if module[0].isalpha()),
        unset=tuple(variable for variable in _TEMPLATE_VARIABLES if reader.variables.get(variable) == ""),
        set_up_by=next(iter(_SETTING_UP.findall(text)), None),
        traps_signals=_TRAP.search(text) is not None,
        sets_tmpdir=_TMPDIR.search(text) is not None,
        sets_cache="XDG_CACHE_HOME=" in text,
    )


# --- the options of sbatch ------------------------------------------------------------------------------------------


def _read_options(text: str, wrong: list[str], ignored: list[Mistake]) -> dict[str, str]:
    """Return the options of the ``#SBATCH`` lines by their long names, as sbatch reads them.

    ``ignored`` gets those not at the beginning of a line, or not before the first command.
    """
    words: list[str] = []
    if not text.startswith("#!"):
        wrong.append("its first line is not #!/bin/bash, so sbatch refuses it")
    if "\r\n" in text:
        wrong.append(r"it has Windows line ends (CRLF), so sbatch refuses it: sed -i 's/\r$//' removes them")
    in_head = True  # no command yet
    for number, line in enumerate(text.splitlines(), 1):
        option = _SBATCH.fullmatch(line)
        if option is None:
            in_head = in_head and line.lstrip()[:1] in ("", "#")
        elif in_head and line.startswith("#SBATCH"):
            own_words = _split(option[1])
            words += own_words
            if not own_words:
                wrong.append(f"line {number}: a quotation mark is not closed")
        else:
            why = "sbatch reads this as a comment: an option starts with #SBATCH at the beginning of a line"
            fix = f"#SBATCH {option[1]}   (above the first command; or ##SBATCH for a comment)"
            ignored.append(Mistake(f"line {number}: {why}, before the first command", fix))
    return sbatch.read_options(words)


def _split(line: str) -> list[str]:
    """Split a line into words, as a shell does; none if a quotation mark is not closed."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return []


# --- the lines that call badcjobs -----------------------------------------------------------------------------------


@dataclass
class _Reader:
    """Reads the lines of a script in their order: assignments as our templates have them, and calls of badcjobs."""

    text: str
    variables: dict[str, str]
    parse: Parser
    moves: bool  # to another folder: then relative paths are not known

    def __post_init__(self) -> None:
        self.calls: list[Call] = []
        self.wrong_calls: list[Mistake] = []
        self._arrays: dict[str, str] = {}

    def read(self) -> None:
        """Read all lines, continued ones as one."""
        for line in _LOGICAL_LINE.finditer(self.text):
            number = self.text.count("\n", 0, line.start()) + 1
            self._read_line(number, re.sub(r"\s*\\\r?\n\s*", " ", line[0]).rstrip())

    def _read_line(self, number: int, line: str) -> None:
        """Read a line; one that is neither an assignment nor a call changes nothing."""
        if default := _DEFAULT.fullmatch(line):
            name, value = default.groups()
            self.variables[name] = self.variables.get(name) or value
        elif assignment := _ASSIGNMENT.fullmatch(line):
            self._assign(*assignment.groups())
        elif array := _ARRAY.fullmatch(line):
            self._arrays[array[1]] = shlex.join(_split(array[2]))
        elif array := _READ_ARRAY.fullmatch(line):
            self._arrays[array[1]] = self.variables.get(array[2], "")
        elif not line.startswith("#"):
            self._read_call(number, line.strip())

    def _assign(self, indent: str, name: str, text: str) -> None:
        """Set a variable to one plain word; its value is not known in a branch or a loop."""
        value = self._expand("".join(_split(text)[:1]))
        self.variables[name] = f"${name}" if indent or _is_unknown(value) else value

    def _read_call(self, number: int, line: str) -> None:
        """Keep the call of badcjobs in a line, or its mistake; a line with several commands is not read."""
        words = self._words_of(line)
        programs = [_program(word) for word in words]
        if "badcjobs" not in programs:
            return
        at = programs.index("badcjobs")
        before = tuple(programs[:at])
        launcher = next((name for name in before if name != "exec"), None)
        if launcher is not None and launcher not in _LAUNCHERS:
            return
        parsed = self.parse(words[at + 1 :])
        if parsed.wrong is not None:
            # A variable may have the rest of an option, and a launcher an option of its own with the value badcjobs.
            if not any(map(_is_unknown, words)) and (parsed.command or launcher is None):
                self.wrong_calls.append(Mistake(f"line {number}: {parsed.wrong.text}", parsed.wrong.fix))
        elif parsed.command is not None:
            sources = [self._source_of(operand) for operand in parsed.operands]
            call = Call(
                line=number,
                text=line,
                command=parsed.command,
                before=before,
                values={name: self._value_of(name, value) for name, value in parsed.values.items()},
                hidden=any(map(_ALONE.fullmatch, parsed.operands)),
                sources=None if None in sources else tuple(filter(None, sources)),
            )
            self.calls.append(call)

    def _words_of(self, line: str) -> list[str]:
        """Return the words of a command, known variables replaced; none for several commands."""
        line = _ALL_OF_ARRAY.sub(lambda match: self._arrays.get(match[1], match[0]), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation mark is not closed
            return []
        if "`" in line or any(map(_OPERATOR.fullmatch, words)):
            return []
        return [self._expand(word) for word in words]

    def _expand(self, word: str) -> str:
        """Replace the variables that are known."""
        return _VARIABLE.sub(lambda match: self.variables.get(match[1] or match[2]) or match[0], word)

    def _value_of(self, name: str, value: Any) -> Any:
        """Return the value of an option; None: not known."""
        if name in _PATHS:
            return self._path_of(value)
        if _is_unknown(str(value)) or (name == "config" and self.moves):
            return None
        return value

    def _path_of(self, path: str) -> str | None:
        """Return a path as it is in the folder of submission; None: not known."""
        if _is_unknown(path) or (self.moves and not posixpath.isabs(path)):
            return None
        return path

    def _source_of(self, operand: str) -> str | None:
        """Return the path of a source; None: it is a pattern, or the script itself writes it."""
        if _PATTERN.search(operand) or re.search(rf">\s*[\"']?{re.escape(operand)}", self.text):
            return None
        return self._path_of(operand)


def _is_unknown(word: str) -> bool:
    return "$" in word or "`" in word


def _program(word: str) -> str:
    """Return a program's name without its folder and version."""
    name = word.rpartition("/")[2].strip("${}").lower()
    return "python" if name.startswith("python") else name


# --- the request for the emulation ----------------------------------------------------------------------------------

# The script would behave differently without these options, so they are refused, not ignored.
_REFUSED = ("chdir", "exclusive", "export-file", "gpus-per-socket", "input", "tres-per-task", "wrap")


def read_script_request(script: str, options: Words = ()) -> sbatch.Request:
    """Return what a script requests; ``options`` override it. All mistakes are in one message."""
    mistakes: list[str] = []
    own_options = _read_options(script, mistakes, [])
    request = sbatch.read_request(own_options | sbatch.read_options(options), mistakes)
    given = request.options
    if given.get("export", "ALL") != "ALL":
        mistakes.append(f"--export={given['export']}: the emulation passes all variables on, and sets none")
    mistakes += [f"--{name}: not supported by the emulation" for name in given if name in _REFUSED]
    if request.asked.nodes not in (None, 1):
        mistakes.append(f"--nodes={given['nodes']}: the emulation is one machine")
    refuse(mistakes, "badcjobs guide local   (lists the options that have an effect)", "options of this job are wrong")
    return request
