"""Goes through the commands of a job script in their order and notes what a preflight wants to know of them.

What the findings about it are is ``preflight/``'s business; the ``#SBATCH`` lines are read in ``script_facts.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from badcjobs.own_line import Grammar, OwnLine, read_own_line
from badcjobs.preflight.facts import Mistake, Start
from badcjobs.shell_commands import Command
from badcjobs.shell_files import may_make_files
from badcjobs.shell_variables import Variables, read_flags, unquoted

_BADCJOBS = re.compile(r"(?:.*[^A-Za-z0-9])?badcjobs", re.IGNORECASE | re.DOTALL)
_SPEAKING = {"echo", "printf", "alias", "man", "which", "type"}
_CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter"}
_SPREADING = {"srun", "mpirun", "mpiexec", "pdsh", "clush", "ssh", "parallel", "prun"}
# What comes before a program that it starts; _PLAINLY: with nothing else between.
_PLAINLY = {"exec", "command", "time", "nohup", "python", "-m"}
_LAUNCHING = _PLAINLY | _CONTAINERS | _SPREADING | {
    "env", "nice", "timeout", "stdbuf", "setsid", "uv", "conda", "mamba", "micromamba", "pixi",
}  # fmt: skip
# Tried: they wait for the program that they start, and die of USR1 without a word to it (conda: its issue 10351).
_KEEPING = {"timeout", "time", "setsid", "flock", "xargs", "strace", "conda", "mamba", "micromamba"}
_UNFOLLOWED = {"source", ".", "conda", "mamba", "micromamba", "spack", "eval"}
_BRINGING_PYTHON = re.compile(r"python|conda|mamba|forge|hawkears|badc", re.IGNORECASE)
_NOT_LOADING = {
    "purge", "unload", "rm", "del", "list", "avail", "av", "spider", "show", "use", "unuse", "swap", "save", "restore",
    "reset", "keyword", "help", "whatis",
}  # fmt: skip


class Story:
    """What has happened in a script so far."""

    def __init__(self, environ: Mapping[str, str], chdir: str, cwd: str, grammar: Grammar | None = None) -> None:
        self._variables = Variables(environ, cwd, chdir)
        self._grammar = grammar
        self._made_by: str | None = None  # the first command that may make the files which a later one needs
        self.functions: frozenset[str] = frozenset()  # of the script; what they do is among its commands
        self.wrong_calls: list[Mistake] = []
        self.starts: list[Start] = []
        self.other_commands: list[str] = []
        self.modules: list[str] = []
        self.traps: set[str] = set()
        self.venvs: list[str] = []
        self.unfollowed: list[str] = []
        self.pipefail = False
        self.temporary: str | None = None

    def take(self, command: Command) -> None:
        """Note one command, and what it changes for the next."""
        words = self._variables.words_of(command)
        if words:
            self._note_badcjobs(command, words)
            self._note_set_up(command, words)
            if self._made_by is None and may_make_files(command, self.functions):
                self._made_by = command.text
        self.pipefail = self.pipefail or "pipefail" in words
        self._variables.pass_by(command)
        if any(word == "TMPDIR" or word.startswith("TMPDIR=") for word in words):
            unset = "unset" in words
            self.temporary = "" if unset else self._variables.value_of("$TMPDIR") or "$TMPDIR"

    def _note_badcjobs(self, command: Command, words: Sequence[str]) -> None:
        at = self._find_call(words)
        if at is None or unquoted(words[0]) in _SPEAKING:
            return
        called = next((word for word in words[at + 1 :] if not word.startswith("-")), "")
        line = self._read_line(command, words, at)
        if line is not None and line.command is not None:
            called = line.command
        if called == "run":
            self.starts.append(self._start(command, words, at, line))
        elif re.fullmatch(r"[a-z]+", called):
            self.other_commands.append(called)

    def _find_call(self, words: Sequence[str]) -> int | None:
        """Return where badcjobs stands among the words: the name may also be that of a folder, or of a job."""
        named = [n for n, word in enumerate(words) if self._is_badcjobs(word)]
        known = self._grammar.commands if self._grammar else {}
        return next((n for n in named if {*words[n + 1 : n + 2]} & known.keys()), named[0] if named else None)

    def _read_line(self, command: Command, words: Sequence[str], at: int) -> OwnLine | None:
        """Let badcjobs read its own words; None where they may be another program's."""
        before = self._before(words[:at])
        if self._grammar is None or (before and before[0] not in _LAUNCHING):
            return None
        behind = [self._variables.own_word(word) for word in words[at + 1 :]]
        line = read_own_line(behind, self._grammar, f" line {command.line}", command.text)
        if not line.surely_named and not _PLAINLY.issuperset(before):
            return None  # behind srun or in an image the word may be the name of something else
        self.wrong_calls += line.mistakes
        return line

    def _before(self, words: Sequence[str]) -> list[str]:
        """Return the names of the programs, and their arguments, that stand before badcjobs."""
        plain = [word for word in words if not re.match(r"\w+=", word)]
        known = [self._variables.value_of(word) or unquoted(word) for word in plain]
        return [re.sub(r"^python[\d.]*$", "python", word.rpartition("/")[2].strip("${}").lower()) for word in known]

    def _is_badcjobs(self, word: str) -> bool:
        if "=" in word.partition("badcjobs")[0]:  # an assignment, or an option's value
            return False
        value = self._variables.value_of(word) or unquoted(word).rstrip("}")
        return " " not in value and _BADCJOBS.fullmatch(value) is not None

    def _start(self, command: Command, words: Sequence[str], at: int, line: OwnLine | None) -> Start:
        before = self._before(words[:at])
        names = set(before)
        flags, named, hidden = read_flags(words[at + 1 :], self._variables)
        return Start(
            line=command.line,
            text=command.text,
            by_exec=before[:1] == ["exec"],
            by_srun="srun" in names,
            flags=self._placed(flags),
            named=named,
            hidden=hidden,
            within=command.within,
            looped=command.looped,
            spread=bool(names & _SPREADING),
            contained=bool(names & _CONTAINERS),
            sources=self._sources(line),
            doubt=self._doubt(command, contained=bool(names & _CONTAINERS)),
            keeper=self._keeper(words, at),
        )

    def _keeper(self, words: Sequence[str], at: int) -> Mistake | None:
        """Find a program before badcjobs that keeps signals to itself, and the line without it."""
        named = [next(iter(self._before([word])), "") for word in words[:at]]
        first = next((n for n, name in enumerate(named) if name in _KEEPING), None)
        if first is None or (named[first] == "timeout" and any(w.startswith(("-s", "--s")) for w in words[first:at])):
            return None  # timeout hands on the signal that it is told to send
        behind = next((n for n in range(first + 1, at) if named[n] in _CONTAINERS | _SPREADING), at)
        line = " ".join([*words[:first], *words[behind:]])
        return Mistake(named[first], line if {"exec", "srun"} & {*named[:first]} else f"exec {line}")

    def _sources(self, line: OwnLine | None) -> tuple[str, ...] | None:
        if line is None or line.operands is None:
            return None
        places = [self._variables.path_of(one) for one in line.operands]
        return tuple(one for one in places if one is not None) if None not in places else None

    def _doubt(self, command: Command, *, contained: bool) -> str | None:
        """Say why a source that is not as it should be may be so in time; None: nothing could mend it."""
        if self._made_by is not None:
            return f"unless {self._made_by} changes that"
        if contained:
            return "unless it is another folder inside the image"
        return None if command.sure else f"if line {command.line} is reached"

    def _placed(self, flags: dict[str, str]) -> dict[str, str]:
        """Return the flags with folders as they are seen from where the job is submitted."""
        paths = {name: self._variables.path_of(flags[name]) for name in _PATHS if name in flags}
        return {name: path for name, text in flags.items() if (path := paths.get(name, text)) is not None}

    def _note_set_up(self, command: Command, words: Sequence[str]) -> None:
        """Note what programs there are from here on, as far as it can be followed."""
        first = unquoted(words[0])
        loaded = self._loaded(words)
        self.modules += loaded
        if first == "trap":
            self.traps |= {unquoted(word).upper().removeprefix("SIG") for word in words[2:]}
        elif (venv := self._venv(words)) is not None:
            self.venvs.append(venv)
        elif first in _UNFOLLOWED or words[1:2] == ["use"] or any(map(_BRINGING_PYTHON.search, loaded)):
            self.unfollowed.append(command.text)

    def _venv(self, words: Sequence[str]) -> str | None:
        """Return the folder of a virtual environment that a command activates."""
        script = self._variables.value_of(words[1]) if len(words) == 2 and words[0] in ("source", ".") else None
        if script is None or not script.endswith("/bin/activate"):
            return None
        return self._variables.path_of(script.removesuffix("/bin/activate"))

    def _loaded(self, words: Sequence[str]) -> list[str]:
        """Return what ``module load …`` or ``ml …`` loads; a name that nobody knows is left out."""
        first, *names = [value for word in words if (value := self._variables.value_of(word)) is not None] or [""]
        loads = names[:1] in (["load"], ["add"])
        if first == "ml" and not loads and not _NOT_LOADING.intersection(names[:1]):
            return [name for name in names if not name.startswith("-")]
        return [name for name in names[1:] if not name.startswith("-")] if first in ("module", "ml") and loads else []


_PATHS = ("--out", "--root", "--hawkears-root", "--config")
