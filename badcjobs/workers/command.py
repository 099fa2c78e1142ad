"""The command engine: any program, started once per chunk. Success is exit 0 and the output file."""

from __future__ import annotations

import shlex
import shutil
import signal
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Launcher, Process, SessionBroken
from badcjobs.workers.detections import parse_detections_csv
from badcjobs.workers.failures import BAD_OUTPUT, EXIT_CODE, NO_OUTPUT, NO_PROGRAM, TERMINATED, WORKER_DIED
from badcjobs.workers.launch import last_lines, worker_environment

PLACEHOLDERS = ("input", "output", "device", "device_index", "chunk_id", "recording_id")


def parse_command(template: str) -> list[str]:
    """Split a command into words and check its placeholders."""
    try:
        words = shlex.split(template)
        fields = {field for word in words for field in _fields(word)}
    except ValueError as error:
        raise BadInput(f"--command {template!r} cannot be read", why=str(error)) from error
    unknown = sorted(fields - set(PLACEHOLDERS))
    missing = [name for name in ("input", "output") if name not in fields]
    if unknown or missing or not words:
        faults = [f"{{{name}}} is not a placeholder" for name in unknown]
        faults += [f"{{{name}}} is missing" for name in missing]
        raise BadInput(
            f"--command {template!r}: " + ", ".join(faults),
            why="placeholders are " + " ".join(f"{{{name}}}" for name in PLACEHOLDERS) + "; write {{ for a brace",
            fix="badcjobs run … --engine command --command 'program {input} {output}'",
        )
    return words


def _fields(word: str) -> Iterator[str]:
    """Yield what stands between braces; a format (``{input:>9}``) belongs to it, and makes it no placeholder."""
    for _, name, form, conversion in string.Formatter().parse(word):
        if name is not None:
            yield name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")


class CommandEngine:
    """Runs the user's program for each chunk."""

    name = "command"
    takes_whole_share = False

    def __init__(self, template: str, *, environ: Mapping[str, str], launcher: Launcher, clock: Clock) -> None:
        self._words = parse_command(template)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock

    def check(self) -> None:
        """Look for the program now, not once per chunk."""
        program = self._words[0]
        if "{" not in program and shutil.which(program, path=self._environ.get("PATH")) is None:
            raise NotHere(
                f"the program {program!r} of --command was not found",
                why="it is neither a file that can be run nor on PATH",
                fix=f"command -v {shlex.quote(program)}   (on the compute node: load its module first)",
            )

    def open(self, plan: WorkerPlan, scratch: Path) -> CommandSession:
        """Prepare a place; programs start with the chunks."""
        return CommandSession(self._words, plan, self._environ, scratch, self._launcher, self._clock)


class CommandSession:
    """One worker's place for the programs of its chunks, one after the other."""

    pid: int | None = None

    def __init__(
        self,
        words: Sequence[str],
        plan: WorkerPlan,
        environ: Mapping[str, str],
        scratch: Path,
        launcher: Launcher,
        clock: Clock,
    ) -> None:
        self._words = words
        self._plan = plan
        self._env = worker_environment(environ, plan)
        self._folder = scratch / "command"  # emptied before each chunk, whatever a program has left there
        self._output = self._folder / "detections.csv"
        self._log = self._folder / "command.log"
        self._launcher = launcher
        self._clock = clock
        self._running: Process | None = None
        self._interrupted = False
        self._killed = False

    def process(self, batch: Sequence[Chunk]) -> Iterator[ChunkStarted | ChunkResult]:
        """Run the program on one chunk after the other."""
        for chunk in batch:
            if self._interrupted or self._killed:
                return
            started_at_ms = self._clock.now_ms()
            yield ChunkStarted(chunk, started_at_ms)
            code = self._run(chunk)
            yield self._judge(chunk, code, started_at_ms)

    def _run(self, chunk: Chunk) -> int:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        device = self._plan.device
        values = {
            "input": chunk.audio_path,
            "output": str(self._output),
            "device": device.pin if device else "",
            "device_index": "" if device is None or device.index is None else str(device.index),
            "chunk_id": chunk.chunk_id,
            "recording_id": chunk.recording_id,
        }
        argv = [word.format(**values) for word in self._words]
        env = {**self._env, "BADCJOBS_CHUNK_ID": chunk.chunk_id, "BADCJOBS_RECORDING_ID": chunk.recording_id}
        try:
            self._running = self._launcher.start(argv, env=env, cwd=None, stderr=self._log, hears_term=True)
        except OSError as error:
            raise SessionBroken(NO_PROGRAM, f"{argv[0]}: {error}") from error
        if self._killed:
            self.kill()
        code = self._running.wait()
        self._launcher.signal(self._running, signal.SIGKILL)  # whatever it left running in its group
        return code

    def _judge(self, chunk: Chunk, code: int, started_at_ms: int) -> ChunkResult:
        ended_at_ms = self._clock.now_ms()

        def failed(error_class: str, what: str) -> ChunkResult:
            said = f"{what}\n{last_lines(self._log)}".strip()
            return ChunkResult(chunk, started_at_ms, ended_at_ms, error_class=error_class, error=said)

        if code == -signal.SIGTERM:
            raise SessionBroken(TERMINATED, "the program was ended from outside (SIGTERM)")
        if code < 0:
            return failed(WORKER_DIED, f"the program was ended by {_signal_name(-code)}")
        if code > 0:
            return failed(EXIT_CODE, f"the program ended with exit code {code}")
        try:
            detections = parse_detections_csv(self._output.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return failed(NO_OUTPUT, "the program ended with 0 but wrote no {output}")
        except (ValueError, OSError) as error:
            return failed(BAD_OUTPUT, f"{{output}} cannot be read: {error}")
        return ChunkResult(chunk, started_at_ms, ended_at_ms, detections=tuple(detections))

    def interrupt(self) -> None:
        """Finish the chunk at hand, then stop."""
        self._interrupted = True

    def kill(self) -> None:
        """End the program now."""
        self._killed = True
        if self._running is not None:
            self._launcher.signal(self._running, signal.SIGKILL)

    def close(self) -> int | None:
        """Forget the last output; the exit codes are with the attempts."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a real-time one
