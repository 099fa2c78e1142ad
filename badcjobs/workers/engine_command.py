"""The command engine: any program, once per chunk or once per batch. Success is exit 0 and the output file.

With ``{input} {output}`` the program runs once per chunk. With ``{inputs} {outputs}`` it runs once per batch:
``{inputs}`` is a text file with one audio path per line, ``{outputs}`` a folder for one table per path, with the same
name: ``/data/a.wav`` → ``{outputs}/a.csv``. ``--engine-arg=--batch=N`` sets the largest batch. No two paths of a batch
have the same name.

A program may also make a folder of ``{output}``, or add to its name: the table is then the file that is named after
the audio, ``a.BirdNET.results.csv``, or else the only one that can be understood.
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import string
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadInput
from badcjobs.masking import find_secrets, mask
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.processes import Process, fingerprint_of, last_lines, require_program, worker_environment
from badcjobs.seams import EngineTraits, More, SessionBroken, nothing_more
from badcjobs.settings import RunSettings
from badcjobs.store.atomic_write import fresh_file, make_folder
from badcjobs.store.export_badc import chunk_file
from badcjobs.workers import policy
from badcjobs.workers.detection_tables import UnknownTable, parse_detections
from badcjobs.workers.error_patterns import classify, describe_exit, fault_of_node, stated_class
from badcjobs.workers.hawkears1 import PLACES_FILE, RARITIES
from badcjobs.workers.program_start import EngineStart, HangTimeout
from badcjobs.workers.stream_session import log_size, place_facts

log = logging.getLogger(__name__)

_OF_RECORDING = ("chunk_id", "recording_id", "latitude", "longitude", "date", "region")
PLACEHOLDERS = ("input", "output", "inputs", "outputs", "device", "device_index", *_OF_RECORDING)
_EMPTY = dict.fromkeys(PLACEHOLDERS, "")  # what is not known
_PER_CHUNK = ("input", "output", *_OF_RECORDING)
_PER_BATCH = ("inputs", "outputs")
_DEFAULT_BATCH = 64
_ENDINGS = (".csv", ".tsv", ".txt")  # of tables
_EXAMPLE = "badcjobs run … --engine command --command 'program {input} {output}'"
TRAITS = EngineTraits(writes_tables=True, one_program_per_chunk=True)


def make_engine(settings: RunSettings, start: EngineStart) -> CommandEngine:
    """Return the engine that runs the program of --command."""
    return CommandEngine(start, settings.command or "")


def parse_command(template: str) -> tuple[list[str], bool]:
    """Split a command into words and check its placeholders; return also whether it runs once per batch."""
    try:
        words = shlex.split(template)
        fields = set().union(*map(_fields, words))
    except ValueError as error:
        raise BadInput(f"--command {template!r} cannot be read", why=str(error), fix=_EXAMPLE) from error
    is_per_batch = not fields.isdisjoint(_PER_BATCH)
    needed = _PER_BATCH if is_per_batch else ("input", "output")
    faults = [f"{{{name}}} is not a placeholder" for name in sorted(fields - set(PLACEHOLDERS))]
    faults += [f"{{{name}}} is missing" for name in needed if name not in fields]
    if is_per_batch:
        faults += [f"{{{name}}} cannot be used together with {{inputs}}" for name in _PER_CHUNK if name in fields]
    if faults or not words:
        placeholders = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
        raise BadInput(
            f"--command {template!r}: {', '.join(faults)}",
            why=f"placeholders are {placeholders}; write {{{{ for a brace",
            fix=_EXAMPLE,
        )
    return words, is_per_batch


def _fields(word: str) -> set[str]:
    """Return the texts between braces, with their formats: ``{input:>9}`` is not a placeholder."""
    fields = set()
    for _, name, form, conversion in string.Formatter().parse(word):
        if name is None:
            continue
        if conversion:
            name += f"!{conversion}"
        if form:
            name += f":{form}"
        fields.add(name)
    return fields


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
    traits = TRAITS
    receives_term = True  # an unknown program may end its own child processes with TERM: if ignored, they would hang

    def __init__(self, start: EngineStart, template: str) -> None:
        self.start = start
        self._template, self.per_batch = parse_command(template)
        # The speed of the program is unknown: only a very long silence is a hang.
        self.hang_timeout = HangTimeout(least_s=900.0, slowest=20.0)
        self._cannot_keep = False
        self.understood = False  # a table has been read

    @property
    def wants(self) -> int:
        """One chunk, or a batch."""
        return parse_batch_size(self.start.args) if self.per_batch else 1

    @property
    def version(self) -> str | None:
        """A fingerprint of the files in the command: a changed program is another version."""
        program = shutil.which(self._template[0], path=self.start.environ.get("PATH"))
        words = [program or "", *self._template[1:]]
        files = [path for path in map(Path, words) if path.is_file()]
        names = " ".join(path.name for path in files)
        return f"{names} {fingerprint_of(files)}" if files else None

    def check(self) -> None:
        """Check that the program exists before any chunk starts."""
        parse_batch_size(self.start.args)
        program = self._template[0]
        may_be_elsewhere = "{" in program or self.start.launcher.prefix_for("")  # in a container
        if not may_be_elsewhere:
            require_program(program, "--command", self.start.environ.get("PATH"))

    def chunks_at_once(self, plan: WorkerPlan) -> int:
        """Return 1: a program runs for one chunk or batch at a time."""
        return 1

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

    def keep_raw(self, chunk: Chunk, content: bytes, ending: str) -> None:
        """Write a copy of an output file to the run folder, with run.keep_raw; warn once if that is not possible."""
        if self.start.raw is None:
            return
        target = self.start.raw / chunk_file(chunk.recording_id, chunk.chunk_id, ending)
        try:
            make_folder(target.parent)
            with fresh_file(target) as file:
                file.write(content)
        except BadInput as error:
            if not self._cannot_keep:
                log.warning("run.keep_raw: %s (%s); the work continues", error.what, error.why)
            self._cannot_keep = True


@dataclass(eq=False)
class CommandSession:
    """Runs the program of one worker again and again, for one chunk or one batch each time."""

    engine: CommandEngine
    plan: WorkerPlan
    scratch: Path
    pid: int | None = None
    _oom_kills: int | None = None  # before the current run
    _running: Process | None = None
    _killed: bool = False  # set by another thread
    _interrupted: bool = False

    def __post_init__(self) -> None:
        self._words = self.engine.argv_template(self.plan)
        self._env = self.engine.environment(self.plan, self.scratch)
        self._clock = self.engine.start.clock
        self._folder = self.scratch / "command"  # emptied before each run
        self._outputs = self._folder / "outputs"
        self._log = self._folder / "command.log"
        self._lock = threading.Lock()

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Run the program; chunks with the same file name go into separate runs."""
        for part in split_batch(batch, 1 if self.plan.lean else self.engine.wants):
            if self._interrupted or self._killed:
                return
            started_at_ms = self._clock.now_ms()
            for chunk in part:
                yield ChunkStarted(chunk, started_at_ms)
            code = self._run(part)
            if code is None or self._killed:
                return  # its output may be incomplete
            if code == 0:
                stems = [Path(chunk.audio_path).stem for chunk in part]
                for chunk in part:
                    yield self._read(chunk, started_at_ms, stems)
            else:
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
        """Remove the last outputs; the exit code of a failure is in the error of its try."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return None

    def _run(self, chunks: Sequence[Chunk]) -> int | None:
        """Run the program on these chunks; return its exit code, None if it was killed before its start."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._outputs.mkdir(parents=True)
        env = dict(self._env)
        if self.engine.per_batch:
            values = self._batch_values(chunks)
        else:
            [chunk] = chunks
            values = self._chunk_values(chunk)
            env["BADCJOBS_CHUNK_ID"] = chunk.piece_of or chunk.chunk_id
            env["BADCJOBS_RECORDING_ID"] = chunk.recording_id
        device = self.plan.device
        if device is not None:
            values |= {"device": device.pin, "device_index": device.index}
        texts = _EMPTY | {name: str(value) for name, value in values.items() if value is not None}
        argv = [word.format_map(texts) for word in self._words]

        lengths_s = [chunk.audio_s for chunk in chunks]
        audio_s = None if None in lengths_s else sum(length_s or 0.0 for length_s in lengths_s)
        began_s = self._clock.monotonic_s()
        self._oom_kills = self.engine.start.oom_kills()
        code = self._wait(argv, env, self.engine.hang_timeout.limit_s(audio_s))
        if code == 0:
            self.engine.hang_timeout.learn(self._clock.monotonic_s() - began_s, audio_s)
        return code

    def _chunk_values(self, chunk: Chunk) -> dict[str, object]:
        """Return the values of the placeholders for one chunk."""
        place = chunk.place
        return {
            "input": chunk.audio_path,
            "output": self._output(chunk),
            "chunk_id": chunk.piece_of or chunk.chunk_id,
            "recording_id": chunk.recording_id,
            "latitude": place.latitude,
            "longitude": place.longitude,
            "date": place.recorded_on and place.recorded_on[:10],
            "region": place.region,
        }

    def _batch_values(self, chunks: Sequence[Chunk]) -> dict[str, object]:
        """Write the files about a batch, and return the values of its placeholders."""
        paths = self._folder / "inputs.txt"
        paths.write_text("".join(f"{chunk.audio_path}\n" for chunk in chunks), errors="surrogateescape")
        if self.engine.start.places:
            (self._folder / PLACES_FILE).write_text(json.dumps([place_facts(chunk.place) for chunk in chunks]))
        return {"inputs": paths, "outputs": self._outputs}

    def _wait(self, argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> int | None:
        """Run a program to its end; no output in its log for ``limit_s`` is a hang."""
        with self._lock:
            if self._killed:
                return None
            try:
                process = self.engine.start.launcher.start(
                    argv,
                    env=env,
                    cwd=None,
                    stderr=self._log,
                    receives_term=self.engine.receives_term,
                )
            except OSError as error:
                error_class = fault_of_node(error, self._folder) or policy.NO_PROGRAM
                raise SessionBroken(error_class, f"{argv[0]}: {error}", at_start=True) from error
            self._running = process
        try:
            return self._watch(process, limit_s)
        finally:
            self._end()  # including processes that it left in its group

    def _watch(self, process: Process, limit_s: float) -> int:
        """Return the exit code of a program; kill it if it writes nothing for too long."""
        size = log_size(self._log)
        silent_since_s = self._clock.monotonic_s()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=min(5.0, limit_s / 4))
            size_before = size
            size = log_size(self._log)
            if size != size_before:
                silent_since_s = self._clock.monotonic_s()
            elif self._clock.monotonic_s() - silent_since_s >= limit_s:
                self._end()
                process.wait()
                raise SessionBroken(policy.HANG, f"no output from the program for {limit_s:.0f} s")

    def _end(self) -> None:
        if self._running is not None:
            self.engine.start.launcher.kill(self._running)

    def _output(self, chunk: Chunk) -> Path:
        if not self.engine.per_batch:
            return self._outputs / "detections.csv"
        return self._outputs / f"{Path(chunk.audio_path).stem}.csv"

    def _find_output(self, chunk: Chunk, stems: Sequence[str]) -> Path:
        """Return the table of a chunk; ``stems``: the names of all audio files of this run, without their endings."""
        named_output = self._output(chunk)
        if named_output.is_file():
            return named_output
        stem = Path(chunk.audio_path).stem
        tables = [path for path in self._outputs.rglob("*") if path.suffix in _ENDINGS and path.is_file()]
        tables.sort(key=lambda table: (table.suffix, table))
        for table in tables:
            # A file of rec.001 also starts like one of rec: the longest name counts.
            named_after = [stem for stem in stems if table.name.startswith(f"{stem}.")]
            if max(named_after, key=len, default=None) == stem:
                return table
        if len(stems) > 1 or not tables:
            raise FileNotFoundError(f"{{output}} ({named_output.name}) was not written")
        for table in tables:
            with suppress(ValueError, OSError):  # such as BirdNET's list of its own settings
                parse_detections(table.read_text(encoding="utf-8"), table.name)
                return table
        names = ", ".join(table.name for table in tables)
        raise FileNotFoundError(f"{{output}} ({named_output.name}) was not written, only {names}")

    def _read(self, chunk: Chunk, started_at_ms: int, stems: Sequence[str]) -> ChunkResult:
        try:
            table = self._find_output(chunk, stems)
            content = table.read_bytes()
            self.engine.keep_raw(chunk, content, table.suffix)
            detections = parse_detections(content.decode(), table.name)
            rare = table.with_suffix(RARITIES)
            rarities = parse_detections(rare.read_text(), rare.name) if rare.is_file() else []
        except FileNotFoundError as missing:
            return self._failure(chunk, started_at_ms, policy.NO_OUTPUT, f"exit code 0, but {missing}")
        except (ValueError, OSError) as problem:
            error = f"{{output}} cannot be read: {problem}"
            if isinstance(problem, UnknownTable) and not self.engine.understood:  # all chunks would fail
                raise SessionBroken(policy.CONFIGURATION, error) from problem
            return self._failure(chunk, started_at_ms, policy.BAD_OUTPUT, error)
        self.engine.understood = True
        return ChunkResult(
            chunk,
            started_at_ms,
            self._clock.now_ms(),
            detections=tuple(detections),
            audio_s=chunk.audio_s,
            rarities=tuple(rarities),
        )

    def _explain(self, chunks: Sequence[Chunk], code: int, started_at_ms: int) -> Iterator[ChunkResult]:
        """Charge a chunk that ran alone; in a batch the cause is unknown, and output files may be incomplete."""
        output = self._last_output()
        error_class = stated_class(output) or classify(output, code, self.engine.traits.error_patterns)
        if error_class == policy.TERMINATED:
            raise SessionBroken(policy.TERMINATED, "another process ended the program (SIGTERM)")
        if error_class in (*policy.OF_DEVICE, policy.CONFIGURATION):
            raise SessionBroken(error_class, output)
        error = f"the program ended {describe_exit(code)}"
        for chunk in chunks:
            yield replace(self._failure(chunk, started_at_ms, error_class, error), charged=len(chunks) == 1)

    def _last_output(self) -> str:
        """Return the last lines that the program has written, without its secrets."""
        return mask(last_lines(self._log), find_secrets(self._words))

    def _failure(
        self,
        chunk: Chunk,
        started_at_ms: int,
        error_class: str,
        why: str,
    ) -> ChunkResult:
        return ChunkResult(
            chunk,
            started_at_ms,
            self._clock.now_ms(),
            error_class=self.engine.start.blame_memory(error_class, self._oom_kills),
            error=f"{chunk.audio_path}: {why}\n{self._last_output()}".strip(),
        )


def split_batch(batch: Sequence[Chunk], most: int) -> list[list[Chunk]]:
    """Split a batch so that no part is too long or has two files with the same name; usually there is one part."""
    parts: list[dict[str, Chunk]] = []  # by name
    for chunk in batch:
        name = Path(chunk.audio_path).stem.casefold()
        for part in parts:
            if name not in part and len(part) < most:
                part[name] = chunk
                break
        else:
            parts.append({name: chunk})
    return [list(part.values()) for part in parts]
