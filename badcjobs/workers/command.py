"""The command engine: any program, once per chunk or once per batch. Success is exit 0 and the output file.

``{input} {output}`` is a program per chunk. ``{inputs} {outputs}`` is a program per batch: a text file with one audio
path per line, and a folder for one CSV per path, named after it: ``/data/a.wav`` → ``{outputs}/a.csv``. ``--batch=N``
(``--engine-arg``) says how many at most. No two paths of a batch have the same name.
"""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from badcjobs.seams import Clock, Launcher, More, Session, SessionBroken, nothing_more
from badcjobs.workers.detections import parse_detections_csv
from badcjobs.workers.failures import (
    BAD_AUDIO,
    BAD_OUTPUT,
    CONFIGURATION,
    EXIT_CODE,
    GPU_LOST,
    NO_OUTPUT,
    TERMINATED,
    classify,
    signal_name,
    signal_of,
)
from badcjobs.workers.fingerprints import fingerprint_of
from badcjobs.workers.launch import last_lines, worker_environment
from badcjobs.workers.patience import Patience
from badcjobs.workers.program_run import ProgramRunner

PLACEHOLDERS = ("input", "output", "inputs", "outputs", "device", "device_index", "chunk_id", "recording_id")
_PER_CHUNK = ("input", "output", "chunk_id", "recording_id")
_PER_BATCH = ("inputs", "outputs")
_DEFAULT_BATCH = 64


def parse_command(template: str) -> list[str]:
    """Split a command into words and check its placeholders."""
    try:
        words = shlex.split(template)
        fields = {field for word in words for field in _fields(word)}
    except ValueError as error:
        raise BadInput(f"--command {template!r} cannot be read", why=str(error)) from error
    needed = _PER_BATCH if fields & set(_PER_BATCH) else ("input", "output")
    faults = [f"{{{name}}} is not a placeholder" for name in sorted(fields - set(PLACEHOLDERS))]
    faults += [f"{{{name}}} is missing" for name in needed if name not in fields]
    if needed is _PER_BATCH:
        faults += [f"{{{name}}} means nothing beside {{inputs}}" for name in _PER_CHUNK if name in fields]
    if faults or not words:
        raise BadInput(
            f"--command {template!r}: " + ", ".join(faults),
            why="placeholders are " + " ".join(f"{{{name}}}" for name in PLACEHOLDERS) + "; write {{ for a brace",
            fix="badcjobs run … --engine command --command 'program {input} {output}'",
        )
    return words


def is_per_batch(words: Sequence[str]) -> bool:
    """Say whether a checked command takes many chunks at once."""
    return any(field in _PER_BATCH for word in words for field in _fields(word))


def _fields(word: str) -> Iterator[str]:
    """Yield what stands between braces; a format (``{input:>9}``) belongs to it, and makes it no placeholder."""
    for _, name, form, conversion in string.Formatter().parse(word):
        if name is not None:
            yield name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")


def parse_batch_size(args: Sequence[str]) -> int:
    """Return what --engine-arg says about batches."""
    size = _DEFAULT_BATCH
    for arg in args:
        name, _, value = arg.partition("=")
        if name != "--batch" or not value.isdecimal() or int(value) < 1:
            raise BadInput(
                f"the command engine does not understand --engine-arg={arg}",
                why="it knows --batch=N alone: how many chunks at most {inputs} may hold",
                fix=f"badcjobs run … --engine-arg=--batch={_DEFAULT_BATCH}",
            )
        size = int(value)
    return size


def read_table(path: Path) -> tuple[tuple[Detection, ...], str, str]:
    """Return the detections in a program's output, or the class and the story of what is wrong with it."""
    try:
        return tuple(parse_detections_csv(path.read_text(encoding="utf-8"))), "", ""
    except FileNotFoundError:
        return (), NO_OUTPUT, f"the program ended with 0 but wrote no {{output}} ({path.name})"
    except (ValueError, OSError) as error:
        return (), BAD_OUTPUT, f"{{output}} cannot be read: {error}"


class CommandEngine:
    """Runs the user's program, for each chunk or for each batch."""

    name = "command"

    def __init__(
        self, template: str, *, environ: Mapping[str, str], launcher: Launcher, clock: Clock, args: Sequence[str] = ()
    ) -> None:
        self._words = parse_command(template)
        self._args = list(args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock
        # Nobody knows this program: only a silence that is absurd is a hang.
        self._patience = Patience(least_s=900.0, slowest=20.0)

    @property
    def wants(self) -> int:
        """One chunk, or a batch."""
        return parse_batch_size(self._args) if is_per_batch(self._words) else 1

    @property
    def version(self) -> str | None:
        """The files that the command names: a program that was changed is another one."""
        found = [shutil.which(self._words[0], path=self._environ.get("PATH")), *self._words[1:]]
        files = [Path(word) for word in found if word and Path(word).is_file()]
        return " ".join([*(path.name for path in files), fingerprint_of(files) or ""]) if files else None

    def check(self) -> None:
        """Look for the program now, not once per chunk."""
        parse_batch_size(self._args)
        program = self._words[0]
        if "{" not in program and shutil.which(program, path=self._environ.get("PATH")) is None:
            raise NotHere(
                f"the program {program!r} of --command was not found",
                why="it is neither a file that can be run nor on PATH",
                fix=f"command -v {shlex.quote(program)}   (on the compute node: load its module first)",
            )

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Prepare a place; programs start with the chunks."""
        place = CommandPlace(self._words, plan, self._environ, scratch, self._launcher, self._clock, self._patience)
        if not is_per_batch(self._words):
            return CommandSession(place)
        from badcjobs.workers.command_batch import CommandBatchSession

        return CommandBatchSession(place, most=1 if plan.lean else self.wants)


class CommandPlace:
    """Where the programs of one worker run, one after the other."""

    def __init__(
        self,
        words: Sequence[str],
        plan: WorkerPlan,
        environ: Mapping[str, str],
        scratch: Path,
        launcher: Launcher,
        clock: Clock,
        patience: Patience,
    ) -> None:
        self.clock = clock
        self.patience = patience
        self.folder = scratch / "command"  # emptied before each run, whatever a program has left there
        self.log = self.folder / "command.log"
        self.runner = ProgramRunner(launcher, clock)
        self.interrupted = False
        self._words = words
        self._device = plan.device
        self._env = worker_environment(environ, plan)
        if plan.lean:  # what the program makes of it is its own business
            self._env.update(BADCJOBS_LEAN="1", OMP_NUM_THREADS="1")

    def clear(self) -> None:
        """Make the folder anew."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self, values: Mapping[str, str], env: Mapping[str, str], *, audio_s: float | None) -> int | None:
        """Run the program with these values; return its exit code, None when it was killed before it began."""
        device = self._device
        index = "" if device is None or device.index is None else str(device.index)
        known = {"device": device.pin if device else "", "device_index": index, **values}
        argv = [word.format(**known) for word in self._words]
        limit_s = self.patience.limit_s(audio_s)
        began_s = self.clock.monotonic_s()
        code = self.runner.run(argv, env={**self._env, **env}, cwd=None, log=self.log, limit_s=limit_s, hears_term=True)
        if code == 0:
            self.patience.learn(self.clock.monotonic_s() - began_s, audio_s)
        return code

    def explain(self, code: int) -> tuple[str, str]:
        """Return the class and the story of a program that did not end with 0."""
        said = last_lines(self.log)
        error_class = classify(said, code)
        if error_class == TERMINATED:
            raise SessionBroken(TERMINATED, "the program was ended from outside (SIGTERM)")
        if error_class == GPU_LOST:
            raise SessionBroken(GPU_LOST, said)
        if error_class in (BAD_AUDIO, CONFIGURATION):
            error_class = EXIT_CODE  # those words are HawkEars'; from anybody else they may mean anything
        signum = signal_of(code)
        how = f"was ended by {signal_name(signum)}" if signum else f"ended with exit code {code}"
        return error_class, f"the program {how}\n{said}".strip()


class CommandSession:
    """One worker's place for the programs of its chunks, one after the other."""

    pid: int | None = None

    def __init__(self, place: CommandPlace) -> None:
        self._place = place
        self._output = place.folder / "detections.csv"

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Run the program on one chunk after the other."""
        for chunk in batch:
            if self._place.interrupted or self._place.runner.killed:
                return
            started_at_ms = self._place.clock.now_ms()
            yield ChunkStarted(chunk, started_at_ms)
            code = self._run(chunk)
            if code is not None:
                yield self._judge(chunk, code, started_at_ms)

    def _run(self, chunk: Chunk) -> int | None:
        self._place.clear()
        values = {
            "input": chunk.audio_path,
            "output": str(self._output),
            "chunk_id": chunk.piece_of or chunk.chunk_id,
            "recording_id": chunk.recording_id,
        }
        env = {"BADCJOBS_CHUNK_ID": chunk.piece_of or chunk.chunk_id, "BADCJOBS_RECORDING_ID": chunk.recording_id}
        return self._place.run(values, env, audio_s=chunk.audio_s)

    def _judge(self, chunk: Chunk, code: int, started_at_ms: int) -> ChunkResult:
        ended_at_ms = self._place.clock.now_ms()
        if code:
            error_class, error = self._place.explain(code)
        else:
            detections, error_class, error = read_table(self._output)
            if not error_class:
                return ChunkResult(chunk, started_at_ms, ended_at_ms, detections, audio_s=chunk.audio_s)
            error = f"{error}\n{last_lines(self._place.log)}".strip()
        return ChunkResult(chunk, started_at_ms, ended_at_ms, error_class=error_class, error=error)

    def interrupt(self) -> None:
        """Finish the chunk at hand, then stop."""
        self._place.interrupted = True

    def kill(self) -> None:
        """End the program now."""
        self._place.runner.kill()

    def close(self) -> int | None:
        """Forget the last output; the exit codes are with the attempts."""
        shutil.rmtree(self._place.folder, ignore_errors=True)
        return None
