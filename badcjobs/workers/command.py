"""The command engine: any program, once per chunk or once per batch. Success is exit 0 and the output file.

With ``{input} {output}`` the program runs once per chunk. With ``{inputs} {outputs}`` it runs once per batch:
``{inputs}`` is a text file with one audio path per line, ``{outputs}`` a folder for one table per path, with the same
name: ``/data/a.wav`` → ``{outputs}/a.csv``. ``--engine-arg=--batch=N`` sets the largest batch. No two paths of a batch
have the same name.

A program may also make a folder of ``{output}``, or add to its name: the table is then the file that is named after
the audio, ``a.BirdNET.results.csv``, or else the only one that can be understood.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import string
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.masking import find_secrets, mask
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.processes import Process, fingerprint_of, last_lines, worker_environment
from badcjobs.seams import More, SessionBroken, nothing_more
from badcjobs.store.atomic_write import fresh_file, make_folder
from badcjobs.store.export_badc import chunk_file
from badcjobs.workers import retry
from badcjobs.workers.detection_tables import UnknownTable, parse_detections
from badcjobs.workers.stream_session import EngineStart, HangTimeout, log_size

log = logging.getLogger(__name__)

PLACEHOLDERS = ("input", "output", "inputs", "outputs", "device", "device_index", "chunk_id", "recording_id")
_PER_CHUNK = ("input", "output", "chunk_id", "recording_id")
_PER_BATCH = ("inputs", "outputs")
_DEFAULT_BATCH = 64
_ENDINGS = (".csv", ".tsv", ".txt")  # of tables
_EXAMPLE = "badcjobs run … --engine command --command 'program {input} {output}'"


def parse_command(template: str) -> tuple[list[str], bool]:
    """Split a command into words and check its placeholders; return also whether it runs once per batch."""
    try:
        words = shlex.split(template)
        fields = {field for word in words for field in _fields(word)}
    except ValueError as error:
        raise BadInput(f"--command {template!r} cannot be read", why=str(error), fix=_EXAMPLE) from error
    needed = _PER_BATCH if fields & set(_PER_BATCH) else ("input", "output")
    faults = [f"{{{name}}} is not a placeholder" for name in sorted(fields - set(PLACEHOLDERS))]
    faults += [f"{{{name}}} is missing" for name in needed if name not in fields]
    if needed is _PER_BATCH:
        faults += [f"{{{name}}} cannot be used together with {{inputs}}" for name in _PER_CHUNK if name in fields]
    if faults or not words:
        raise BadInput(
            f"--command {template!r}: " + ", ".join(faults),
            why="placeholders are " + " ".join(f"{{{name}}}" for name in PLACEHOLDERS) + "; write {{ for a brace",
            fix=_EXAMPLE,
        )
    return words, needed is _PER_BATCH


def _fields(word: str) -> Iterator[str]:
    """Yield the text between braces, with its format: ``{input:>9}`` is not a placeholder."""
    for _, name, form, conversion in string.Formatter().parse(word):
        if name is not None:
            yield name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")


def parse_batch_size(args: Sequence[str]) -> int:
    """Return the batch size from --engine-arg."""
    size = _DEFAULT_BATCH
    for arg in args:
        name, _, value = arg.partition("=")
        if name != "--batch" or not value.isdecimal() or int(value) < 1:
            raise BadInput(
                f"the command engine does not understand --engine-arg={arg}",
                why="it accepts only --batch=N, the largest number of chunks in {inputs}",
                fix=f"badcjobs run … --engine-arg=--batch={_DEFAULT_BATCH}",
            )
        size = int(value)
    return size


class CommandEngine:
    """Runs the user's program, for each chunk or for each batch."""

    name = "command"
    is_hawkears = False  # HawkEars' messages are only recognised in the output of HawkEars

    def __init__(
        self, start: EngineStart, template: str, hang_timeout: HangTimeout | None = None, batch: int | None = None
    ) -> None:
        self.start = start
        self._template, self.per_batch = parse_command(template)
        # The speed of the program is unknown: only a very long silence is a hang.
        self.hang_timeout = hang_timeout or HangTimeout(least_s=900.0, slowest=20.0)
        self._batch = batch  # None: from --engine-arg
        self._cannot_keep = False
        self.understood = False  # a table has been read

    @property
    def wants(self) -> int:
        """One chunk, or a batch."""
        return (self._batch or parse_batch_size(self.start.args)) if self.per_batch else 1

    @property
    def version(self) -> str | None:
        """A fingerprint of the files in the command: a changed program is another version."""
        found = [shutil.which(self._template[0], path=self.start.environ.get("PATH")), *self._template[1:]]
        files = [Path(word) for word in found if word and Path(word).is_file()]
        return " ".join([*(path.name for path in files), fingerprint_of(files) or ""]) if files else None

    def check(self) -> None:
        """Check that the program exists before any chunk starts."""
        parse_batch_size(self.start.args)
        program = self._template[0]
        may_be_elsewhere = "{" in program or self.start.launcher.prefix_for("")  # in a container
        if not may_be_elsewhere and shutil.which(program, path=self.start.environ.get("PATH")) is None:
            raise NotHere(
                f"the program {program!r} of --command was not found",
                why="it is neither an executable file nor on PATH",
                fix=f"command -v {shlex.quote(program)}   (on the compute node: load its module first)",
            )

    def argv_template(self, plan: WorkerPlan) -> list[str]:
        """Return the command line for one worker, with placeholders."""
        return self._template

    def environment(self, plan: WorkerPlan, scratch: Path) -> dict[str, str]:
        """Return the environment of one worker's programs."""
        env = worker_environment(self.start.environ, plan)
        if plan.lean:  # the program may use less memory then
            env.update(BADCJOBS_LEAN="1", OMP_NUM_THREADS="1")
        return env

    def open(self, plan: WorkerPlan, scratch: Path) -> CommandSession:
        """Prepare a session; programs start with the chunks."""
        return CommandSession(self, plan, scratch)

    def keep_raw(self, chunk: Chunk, content: bytes, ending: str = ".csv") -> None:
        """Write a copy of an output file to the run folder, with --keep-raw; warn once if that is not possible."""
        if self.start.raw is None:
            return
        target = self.start.raw / chunk_file(chunk.recording_id, chunk.chunk_id, ending)
        try:
            make_folder(target.parent)
            with fresh_file(target) as file:
                file.write(content)
        except BadInput as error:
            if not self._cannot_keep:
                log.warning("--keep-raw: %s (%s); the work continues", error.what, error.why)
            self._cannot_keep = True


class CommandSession:
    """Runs the program of one worker again and again, for one chunk or one batch each time."""

    pid: int | None = None

    def __init__(self, engine: CommandEngine, plan: WorkerPlan, scratch: Path) -> None:
        self._engine, self._plan = engine, plan
        self._words = engine.argv_template(plan)
        self._env = engine.environment(plan, scratch)
        self._launcher, self._clock = engine.start.launcher, engine.start.clock
        self._per_batch = engine.per_batch
        self._folder = scratch / "command"  # emptied before each run
        self._outputs = self._folder / "outputs"
        self._log = self._folder / "command.log"
        self._lock = threading.Lock()
        self._running: Process | None = None
        self._killed = False  # set by another thread
        self._interrupted = False

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Run the program; chunks with the same file name go into separate runs."""
        for part in split_batch(batch, 1 if self._plan.lean else self._engine.wants):
            if self._interrupted or self._killed:
                return
            started_at_ms = self._clock.now_ms()
            yield from (ChunkStarted(chunk, started_at_ms) for chunk in part)
            code = self._run(part)
            if code == 0:
                stems = [Path(chunk.audio_path).stem for chunk in part]
                yield from (self._read(chunk, started_at_ms, stems) for chunk in part)
            elif code is not None and not (self._per_batch and self._killed):
                yield from self._explain(part, code, started_at_ms)

    def interrupt(self) -> None:
        """Finish the current run, then stop."""
        self._interrupted = True

    def kill(self) -> None:
        """Kill the program, and start no other."""
        with self._lock:
            self._killed = True
        self._end()

    def close(self) -> int | None:
        """Remove the last outputs; exit codes are in the table attempt."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return None

    def _run(self, chunks: Sequence[Chunk]) -> int | None:
        """Run the program on these chunks; return its exit code, None if it was killed before its start."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._outputs.mkdir(parents=True)
        device = self._plan.device
        index = "" if device is None or device.index is None else str(device.index)
        values = {"device": device.pin if device else "", "device_index": index}
        env = dict(self._env)
        if self._per_batch:
            paths = self._folder / "inputs.txt"
            paths.write_text("".join(f"{chunk.audio_path}\n" for chunk in chunks), errors="surrogateescape")
            values.update(inputs=str(paths), outputs=str(self._outputs))
        else:
            [chunk] = chunks
            chunk_id = chunk.piece_of or chunk.chunk_id
            values.update(input=chunk.audio_path, output=str(self._output(chunk)))
            values.update(chunk_id=chunk_id, recording_id=chunk.recording_id)
            env.update(BADCJOBS_CHUNK_ID=chunk_id, BADCJOBS_RECORDING_ID=chunk.recording_id)
        lengths = [chunk.audio_s for chunk in chunks]
        audio_s = None if None in lengths else sum(length or 0.0 for length in lengths)
        began_s = self._clock.monotonic_s()
        self._oom_kills = self._engine.start.oom_kills()
        argv = [word.format(**values) for word in self._words]
        code = self._wait(argv, env, self._engine.hang_timeout.limit_s(audio_s))
        if code == 0:
            self._engine.hang_timeout.learn(self._clock.monotonic_s() - began_s, audio_s)
        return code

    def _wait(self, argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> int | None:
        """Wait for the end of a program; no output in its log for ``limit_s`` is a hang."""
        # An unknown program may end its own child processes with TERM: if they ignored it, they would hang.
        receives_term = not self._engine.is_hawkears
        with self._lock:
            if self._killed:
                return None
            try:
                process = self._launcher.start(argv, env=env, cwd=None, stderr=self._log, receives_term=receives_term)
            except OSError as error:
                error_class = retry.fault_of_node(error, self._folder) or retry.NO_PROGRAM
                raise SessionBroken(error_class, f"{argv[0]}: {error}", at_start=True) from error
            self._running = process
        size, since_s = log_size(self._log), self._clock.monotonic_s()
        try:
            while True:
                try:
                    return process.wait(timeout=min(5.0, limit_s / 4))
                except subprocess.TimeoutExpired:
                    if (now := log_size(self._log)) != size:
                        size, since_s = now, self._clock.monotonic_s()
                    elif self._clock.monotonic_s() - since_s >= limit_s:
                        self._end()
                        process.wait()
                        raise SessionBroken(retry.HANG, f"no output from the program for {limit_s:.0f} s") from None
        finally:
            self._end()  # including processes that it left in its group

    def _end(self) -> None:
        if self._running is not None:
            self._launcher.kill(self._running)

    def _output(self, chunk: Chunk) -> Path:
        return self._outputs / (f"{Path(chunk.audio_path).stem}.csv" if self._per_batch else "detections.csv")

    def _find_output(self, chunk: Chunk, stems: Sequence[str]) -> Path:
        """Return the table of a chunk; ``stems``: the names of all audio files of this run, without their endings."""
        given = self._output(chunk)
        if given.is_file():
            return given
        stem = Path(chunk.audio_path).stem
        written = sorted(p for p in self._outputs.rglob("*") if p.suffix in _ENDINGS and p.is_file())
        for path in sorted(written, key=lambda path: path.suffix):
            # A file of rec.001 also starts like one of rec: the longest name counts.
            if max((one for one in stems if path.name.startswith(f"{one}.")), key=len, default=None) == stem:
                return path
        for path in written if len(stems) == 1 else ():
            with suppress(ValueError, OSError):  # such as BirdNET's list of its own settings
                parse_detections(path.read_text(encoding="utf-8"), path.name)
                return path
        others = f", only {', '.join(path.name for path in written)}" if written and len(stems) == 1 else ""
        raise FileNotFoundError(f"{{output}} ({given.name}) was not written{others}")

    def _read(self, chunk: Chunk, started_at_ms: int, stems: Sequence[str]) -> ChunkResult:
        try:
            path = self._find_output(chunk, stems)
            content = path.read_bytes()
            self._engine.keep_raw(chunk, content, path.suffix)
            detections = tuple(parse_detections(content.decode(), path.name))
        except FileNotFoundError as missing:
            error_class, error = retry.NO_OUTPUT, f"exit code 0, but {missing}"
        except (ValueError, OSError) as problem:
            error_class, error = retry.BAD_OUTPUT, f"{{output}} cannot be read: {problem}"
            if isinstance(problem, UnknownTable) and not self._engine.understood:  # all chunks would fail
                raise SessionBroken(retry.CONFIGURATION, error) from problem
        else:
            self._engine.understood = True
            return ChunkResult(chunk, started_at_ms, self._clock.now_ms(), detections, audio_s=chunk.audio_s)
        error = f"{chunk.audio_path}: {error}\n{self._said()}".strip()
        return self._failure(chunk, started_at_ms, error_class, error)

    def _explain(self, chunks: Sequence[Chunk], code: int, started_at_ms: int) -> Iterator[ChunkResult]:
        """Charge a chunk that ran alone; in a batch the cause is unknown, and output files may be incomplete."""
        output = self._said()
        error_class = retry.classify(output, code)
        if error_class in (retry.BAD_AUDIO, retry.CONFIGURATION) and not self._engine.is_hawkears:
            error_class = retry.EXIT_CODE
        if error_class == retry.TERMINATED:
            raise SessionBroken(retry.TERMINATED, "another process ended the program (SIGTERM)")
        if error_class in retry.RETIRING or error_class == retry.CONFIGURATION:
            raise SessionBroken(error_class, output)
        error = f"the program ended {retry.describe_exit(code)}\n{output}".strip()
        if len(chunks) == 1:
            yield self._failure(chunks[0], started_at_ms, error_class, f"{chunks[0].audio_path}: {error}")
            return
        why = f"lost with its batch of {len(chunks)} chunks ({error_class}): {error}"
        for chunk in chunks:
            yield replace(self._failure(chunk, started_at_ms, retry.BATCH_LOST, why), charged=False)

    def _said(self) -> str:
        """Return the last lines that the program has written, without its secrets."""
        return mask(last_lines(self._log), find_secrets(self._words))

    def _failure(self, chunk: Chunk, started_at_ms: int, error_class: str, error: str) -> ChunkResult:
        error_class = self._engine.start.blame_memory(error_class, self._oom_kills)
        return ChunkResult(chunk, started_at_ms, self._clock.now_ms(), error_class=error_class, error=error)


def split_batch(batch: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Split a batch so that no part is too long or has two files with the same name; usually there is one part."""
    parts: list[dict[str, Chunk]] = []  # by name
    for chunk in batch:
        name = Path(chunk.audio_path).stem.casefold()
        part = next((part for part in parts if name not in part and len(part) < most), {})
        if not part:
            parts.append(part)
        part[name] = chunk
    return [list(part.values()) for part in parts]
