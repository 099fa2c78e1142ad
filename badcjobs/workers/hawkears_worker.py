"""The worker process of the engine ``hawkears``: runs HawkEars 2 in its own Python and loads the models once.

It imports only the standard library and HawkEars. It is started by its path, ``PYTHON hawkears_worker.py OUT
[OPTION …]``, in HawkEars' working folder, or forked by ``PYTHON hawkears_worker.py --parent FD [OPTION …]``, which has
imported everything. It reads one JSON line per recording and writes one JSON line per event.

    in:   {"id": 7, "audio": "/path"}   {"stop": true}, or the end of the input: finish the recordings in progress
          with --places as the first option also "place": {…}, as in HawkEars' occurrence_metadata
    out:  ready, started, done, failed, fewer (fewer threads than requested), broken (no recording can work), bye

The detections of ``done`` are rows of [start_ms, end_ms, label, score, name]. The label is as HawkEars writes it (a
code, unless --label changes it); the name is the common name of the species, or null if HawkEars has none. So are the
rarities: species that do not occur at the place in that week.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import logging
import os
import platform
import queue
import re
import signal
import socket
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from types import ModuleType
from typing import Any

_LONGEST_ERROR = 2000
# More names than threads, with a date in them for --date file.
_PLACEHOLDERS = [f"badcjobs_20000101_{number:03d}.wav" for number in range(256)]
PLACES = "--places"
# HawkEars only logs this error, then continues without the filter of the region: it would find wrong species.
_MISCONFIGURED = re.compile(r"Error: location .* not found")
# HawkEars imports these for its first model and its first recording.
_LATE_IMPORTS = (
    "hawkears.core.analyzer",
    "britekit.models.timm_model",
    "timm",
    "britekit.core.audio",
    "torchaudio",
    "librosa.core.audio",
    "av",
    "omegaconf",
)
_POSTPONED = ("polars", "scipy.signal")  # the import of the first starts threads; the second is slow, and not used
_PR_SET_PDEATHSIG = 1


class OrderPipe:
    """Reads orders from stdin, and writes events to a private copy of stdout."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # an engine's output goes to stderr, not between the events
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.stopping = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, event: str, **facts: object) -> None:
        """Write an event for the wrapper."""
        line = json.dumps({"event": event, **facts})
        with self._lock:
            self._answers.write(line + "\n")
            self._answers.flush()

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yield one order after another until the stop; thread-safe."""
        while True:
            order = self._orders.get()
            if order is None or self.stopping.is_set():
                self.stop()  # for the next thread that waits
                return
            yield order

    def stop(self) -> None:
        """Yield no more orders."""
        self.stopping.set()
        self._orders.put(None)

    def _read(self) -> None:
        rest = b""
        while True:
            data = os.read(0, 65536)  # not sys.stdin: a thread that waits in it crashes Python at exit
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                if order.get("stop"):
                    self.stop()
                else:
                    self._orders.put(order)
        self.stop()


# --- HawkEars' API ----------------------------------------------------------------------------------------------------


def read_call(options: Sequence[str]) -> tuple[Callable[..., object], dict[str, Any]]:
    """Return HawkEars' ``analyze`` and the arguments that its own command line would pass.

    With --places its filter of species is on, and the places come with the recordings.
    """
    from hawkears.cli import cli  # type: ignore[import-not-found]

    command = cli.commands["analyze"]
    module = sys.modules[command.callback.__module__]
    analyze: Callable[..., object] = module.analyze
    signature = inspect.signature(analyze)
    places: dict[str, Any] = {}
    if options and options[0] == PLACES:
        options = options[1:]
        places["occurrence_metadata"] = {name: {} for name in _PLACEHOLDERS}
    missing = {"recording_paths", "recording_callback", "raise_errors", *places} - set(signature.parameters)
    if missing:
        raise other_api(f"analyze() has no {', '.join(sorted(missing))}")

    arguments: dict[str, Any] = {}

    def note_call(*args: Any, **named: Any) -> None:
        arguments.update(signature.bind(*args, **named).arguments)

    module.analyze = note_call  # type: ignore[attr-defined]
    try:
        command.main(args=list(options), prog_name="hawkears analyze", standalone_mode=False)
    finally:
        module.analyze = analyze  # type: ignore[attr-defined]
    return analyze, {**arguments, **places}


def other_api(difference: str) -> ImportError:
    """Return the error for a HawkEars with another API; ImportError means a wrong installation."""
    version = versions()["hawkears"]
    return ImportError(f"badcjobs needs HawkEars 2.3 or later; HawkEars {version} has another API: {difference}")


def describe(error: BaseException) -> str:
    """Return the message of an error with its class."""
    if hasattr(error, "format_message"):  # an error of click: wrong options
        return f"Error: {error.format_message()}"
    kind = type(error)
    name = kind.__name__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    before, mark, cuda_error = str(error).partition("CUDA error: ")
    first_line = cuda_error.partition("\n")[0]  # the others are the same for every error
    return f"{name}: {before}{mark}{first_line}"[-_LONGEST_ERROR:]


def is_out_of_memory(text: str) -> bool:
    """Return whether an error means that the device ran out of memory."""
    return "OutOfMemoryError" in text or "out of memory" in text or "_ALLOC_FAILED" in text


def device_facts(module: Any) -> dict[str, object]:
    """Return the device that HawkEars uses, and its name."""
    import torch  # type: ignore[import-not-found]

    device = str(module.util.get_device())
    if device != "cuda":
        return {"device": device, "name": platform.processor() or platform.machine()}
    return {"device": device, "name": torch.cuda.get_device_properties(0).name}


def versions() -> dict[str, str]:
    """Return the versions of HawkEars, PyTorch and Python."""
    import hawkears  # type: ignore[import-not-found]

    torch = sys.modules.get("torch")
    return {
        "hawkears": str(getattr(hawkears, "__version__", "unknown")),
        "torch": str(getattr(torch, "__version__", "unknown")),
        "python": platform.python_version(),
    }


# --- recordings -------------------------------------------------------------------------------------------------------


_AnyClass: Any = object


class Feed:
    """Gives each thread of HawkEars its next recording, and reports the result of the last."""

    def __init__(self, pipe: OrderPipe) -> None:
        self.pipe = pipe
        self.here = threading.local()  # per thread: its order, its place, its rarities, its models, its measurements
        self.places: Any = None  # with --places: HawkEars' OccurrenceManager
        self.names: dict[str, str] = {}  # label → the common name of the species
        self._config_error = ""  # a logged error after which all results of HawkEars would be wrong
        self.last_error = ""  # of all logged errors
        make = logging.getLogRecordFactory()

        def make_record(*args: Any, **named: Any) -> logging.LogRecord:
            record = make(*args, **named)
            if record.levelno >= logging.ERROR:
                self.last_error = record.getMessage()
                if _MISCONFIGURED.search(self.last_error):
                    self._config_error = self.last_error
            return record

        logging.setLogRecordFactory(make_record)

    def paths(self) -> Iterator[str]:
        """Yield the recordings for one thread."""
        for order in self.pipe.orders():
            self.here.order = order
            self.here.began_s = time.monotonic()
            self.here.measured = {}
            self.here.rarities = {}
            self.pipe.send("started", id=order["id"])
            if self.places is not None:
                self.places._process_recording_metadata({order["audio"]: order["place"]})
            yield order["audio"]
            self.fail("HawkEars gave no result for this recording and continued")

    def done(self, result: Any) -> None:
        """Report the detections of a recording (HawkEars' recording_callback)."""
        if self._config_error:
            self.give_up(self._config_error)
            return
        self.pipe.send(
            "done",
            id=self.here.order["id"],
            took_s=round(time.monotonic() - self.here.began_s, 4),
            detections=rows(result.detections, self.names),
            **self.here.measured,
            **self.here.rarities,
        )
        self.here.order = None

    def fail(self, error: str) -> bool:
        """Report that the recording in progress failed; return False if there is none."""
        order = getattr(self.here, "order", None)
        if order is None:
            return False
        self.here.order = None
        self.pipe.send("failed", id=order["id"], error=error)
        return True

    def give_up(self, error: str) -> None:
        """Report why no recording can work, and stop."""
        if not self.pipe.stopping.is_set():
            self.pipe.send("broken", error=error)
        self.here.order = None
        self.pipe.stop()


def rows(detections: Sequence[Any], names: Mapping[str, str]) -> list[tuple[int, int, str, float, str | None]]:
    """Return detections as HawkEars writes them to scores.csv (milliseconds, three decimals), and the species' name."""
    return [
        (round(d.start_time * 1000), round(d.end_time * 1000), d.species, round(d.score, 3), names.get(d.species))
        for d in detections
    ]


def reuse_predictors(module: Any, here: Any) -> None:
    """Let each thread load its models once, and measure the time of each recording.

    A bad recording ends HawkEars' loop, but must not cause a reload. The length of a recording is measured before the
    low-band model resamples it. Arrays that are not read again are dropped: the last recording, all spectrograms.
    """
    make = module.Predictor

    def reuse(*args: Any, **named: Any) -> Any:
        if getattr(here, "predictor", None) is not None:
            return here.predictor
        predictor = here.predictor = make(*args, **named)
        for name in ("normalized_specs", "unnormalized_specs"):
            setattr(type(predictor), name, property(lambda _: None, lambda _, value: None))
        scores = predictor.get_overlapping_scores

        def measured(*args: Any, **named: Any) -> Any:
            predictor.audio.signal = predictor.audio.cached = None
            began_s = time.monotonic()
            result = scores(*args, **named)
            here.measured = {
                "predict_s": round(time.monotonic() - began_s, 4),
                "audio_s": float(predictor.audio.seconds()),
                "analysed": result is not None,
            }
            return result

        predictor.get_overlapping_scores = measured
        return predictor

    module.Predictor = reuse


def read_wav(path: str) -> tuple[Any, int] | None:
    """Return the samples of a complete WAV file of 16 bit as HawkEars decodes them; None: it is another file."""
    import numpy as np

    with suppress(OSError, EOFError, wave.Error), wave.open(path) as file:
        channels = file.getnchannels()
        size_bytes = 2 * channels * file.getnframes()
        is_simple = file.getsampwidth() == 2 and 0 < size_bytes < os.stat(path).st_size  # noqa: PTH116 - as given
        data = file.readframes(file.getnframes()) if is_simple else b""
        if data and len(data) == size_bytes:
            samples = np.frombuffer(data, "<i2").reshape(-1, channels).T
            return np.ascontiguousarray(samples) * np.float32(2**-15), file.getframerate()
    return None


def read_wav_at_once() -> None:
    """Change how HawkEars reads simple WAV files: it decodes a few milliseconds at a time, with a call for each."""
    with suppress(ImportError, AttributeError):
        audio: Any = importlib.import_module("britekit.core.audio")
        decode = audio._decode_audio
        audio._decode_audio = lambda path: read_wav(path) or decode(path)


class FedAnalyzer(_AnyClass):  # type: ignore[misc]
    """Changes HawkEars' Analyzer to take its recordings from the feed; it comes before it among the base classes."""

    _feed: Feed
    _module: Any  # with HawkEars' Analyzer

    def __init__(self, cfg: Any, *args: Any, **named: Any) -> None:
        super().__init__(cfg, *args, **named)
        self._lock = threading.Lock()
        self._threads = cfg.infer.num_threads
        for field in ("code", "alt_code", "name", "alt_name"):  # the common name, for any value of --label
            for species in self.class_mgr.all_classes():
                label = getattr(species, field, None)
                if label and species.name:
                    self._feed.names.setdefault(str(label), str(species.name))
        self._feed.pipe.send(
            "ready",
            threads=self._threads,
            holds=self._threads + 2,
            **device_facts(self._module),
            versions=versions(),
        )

    def _process_recordings(self, recording_paths: Any, *args: Any, **named: Any) -> None:
        places = getattr(getattr(self, "occur_mgr", None), "file_info", None)
        if places:  # later recordings use the one location of this run
            (self.occur_mgr.region,) = {region for region, _ in places.values()}
        while not self._feed.pipe.stopping.is_set():
            try:
                super()._process_recordings(self._feed.paths(), *args, **named)
                return
            except Exception as problem:
                error = describe(problem)  # keep only the text: the traceback holds device memory
            if not self._goes_on_after(error):
                return

    def _goes_on_after(self, error: str) -> bool:
        """Report the error of this thread, and return whether it takes another recording."""
        here = self._feed.here
        if is_out_of_memory(error):
            import torch

            gc.collect()
            torch.cuda.empty_cache()  # no effect without CUDA
        try:  # reset the models of this thread; if that fails, they are loaded again
            if getattr(here, "predictor", None) is not None:  # a local name would keep the models
                here.predictor.audio.set_config(here.predictor.cfg, resample=False)
        except Exception:
            here.predictor = None
            here.heuristics = None
        if self._feed.fail(error):
            return True
        with self._lock:  # this thread could not load its models; other threads may work
            self._threads -= 1
        if self._threads and is_out_of_memory(error):
            self._feed.pipe.send("fewer", threads=self._threads, error=error)
        else:
            self._feed.give_up(error)
        return False

    def _update_frame_map(self, frame_map: Any, recording_path: Any) -> Any:
        rare = super()._update_frame_map(frame_map, recording_path)
        if rare is not None:  # as HawkEars writes them to rarities.csv
            here = self._feed.here
            table = here.predictor.get_dataframe(None, rare, None, "")
            table = self._split_long_dataframe_labels(self._filter_output_dataframe(table))
            rarities = self._dataframe_detections(recording_path, self._filter_short_dataframe_labels(table))
            here.rarities = {"rarities": rows(rarities, self._feed.names)}
        return rare

    def _load_heuristics_manager(self, *args: Any, **named: Any) -> Any:
        here = self._feed.here
        if getattr(here, "heuristics", None) is None:
            here.heuristics = super()._load_heuristics_manager(*args, **named)
        return here.heuristics


def placing_manager(module: Any, feed: Feed) -> type:
    """Return HawkEars' OccurrenceManager class, changed: a thread's table has only the recording that it analyses."""
    if not hasattr(getattr(module, "OccurrenceManager", None), "_process_recording_metadata"):
        raise other_api("it cannot take a place for each recording")

    class PlacingManager(module.OccurrenceManager):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self.date = self.week_num = None  # the date in a --cfg file is not for recordings without one
            feed.places = self

        @property
        def file_info(self) -> Any:
            return feed.here.file_info

        @file_info.setter
        def file_info(self, table: Any) -> None:
            feed.here.file_info = table

    return PlacingManager


# --- a parent that forks workers --------------------------------------------------------------------------------------


class Postponed(ModuleType):
    """Stands in for a module until a worker uses it: a process with threads cannot be forked."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # which the import of a submodule needs
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def why_unfit() -> str | None:
    """Return why workers cannot be forked from this process; None: they can."""
    if sys.modules["torch"].cuda.is_initialized():
        return "the import of HawkEars has initialised CUDA"
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - pathlib has no short way
    if threads > 1:
        return f"the import of HawkEars has started threads ({threads} run)"
    return None


def fork_workers(channel: socket.socket, options: Sequence[str]) -> list[str] | None:
    """Import HawkEars, then fork a worker on each request; in a worker return its arguments, at the end None.

    in:   {"reap": PID}, or {"args": […], "env": {…}, "unset": […]} with the worker's stdin, stdout and stderr
    out:  probe or broken once, then {"code": …} (null: it still runs) or {"pid": …} for each request
    """

    try:
        import_early(options)
        send_facts(
            channel,
            event="probe",
            versions=versions(),
            unfit=why_unfit(),
        )
    except BaseException as error:
        send_facts(channel, event="broken", error=describe(error))
        raise
    parent = os.getpid()
    while True:
        data, fds, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            return None
        order = json.loads(data)
        try:
            if "reap" in order:
                ended, status = os.waitpid(order["reap"], os.WNOHANG)
                send_facts(channel, code=os.waitstatus_to_exitcode(status) if ended else None)
                continue
            pid = os.fork()
            if pid == 0:
                become_worker(parent, order, fds)
                return list(order["args"])
            with suppress(OSError):  # the worker does this too, perhaps later than the first kill
                os.setpgid(pid, pid)
            send_facts(channel, pid=pid)
        except OSError as error:
            send_facts(channel, error=describe(error))
        for fd in fds:
            os.close(fd)


def import_early(options: Sequence[str]) -> None:
    """Import all that workers need, without starting threads."""
    sys.modules.update({name: Postponed(name) for name in _POSTPONED})
    read_call(options)
    for name in _LATE_IMPORTS:
        with suppress(ImportError):  # a worker will name it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a later collection would write to these pages, and so copy them


def send_facts(channel: socket.socket, **facts: object) -> None:
    """Answer a request."""
    channel.send(json.dumps(facts).encode())


def become_worker(parent: int, order: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Take the pipes and the environment of a worker, in a process group of its own; die with the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
    os.setpgid(0, 0)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    for name in order["unset"]:
        os.environ.pop(name, None)
    os.environ.update(order["env"])  # variables that HawkEars has set itself stay


# --- main program -----------------------------------------------------------------------------------------------------


def work(pipe: OrderPipe, out: str, options: Sequence[str]) -> None:
    """Call HawkEars once, for all recordings."""
    analyze, call = read_call(options)
    from hawkears.core import analyzer as module  # type: ignore[import-not-found]

    try:
        attrgetter("Predictor", "Analyzer._process_recordings", "Analyzer._load_heuristics_manager")(module)
    except AttributeError as error:
        raise other_api("its class Analyzer is different") from error
    feed = Feed(pipe)
    reuse_predictors(module, feed.here)
    read_wav_at_once()
    module.Analyzer = type("FedAnalyzer", (FedAnalyzer, module.Analyzer), {"_feed": feed, "_module": module})
    if call.get("occurrence_metadata") is not None:
        module.OccurrenceManager = placing_manager(module, feed)
    call.update(
        input_path=out,
        output_path=out,
        rtype=None,
        quiet=True,
        raise_errors=True,
        recording_paths=_PLACEHOLDERS,
        recording_callback=feed.done,
        cancellation_callback=None,
    )
    analyze(**call)
    if not pipe.stopping.is_set():
        why = feed.last_error or "HawkEars ignored the recordings: a filelist in --cfg, or --threads 0?"
        raise ValueError(f"Error: Invalid value: {why.removeprefix('Error. ')}")


def main(args: Sequence[str]) -> None:
    """Process orders until the input ends; with ``--probe`` only report whether this HawkEars has the right API."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to all processes; the wrapper decides
    forked = args[0] == "--parent"
    if forked:
        with socket.socket(fileno=int(args[1])) as channel:
            args = fork_workers(channel, args[2:]) or ()
        if not args:
            return
    pipe = OrderPipe()
    try:
        if args[0] == "--probe":
            read_call(args[1:])
            pipe.send("probe", versions=versions())
        else:
            work(pipe, args[0], args[1:])
    except BaseException as error:
        pipe.send("broken", error=describe(error))
        raise
    pipe.send("bye")
    if forked:  # all results are sent; no profiler waits for an orderly end, which takes a second
        os._exit(0)


if __name__ == "__main__":
    sys.path.pop(0)  # do not import the other files of this folder
    main(sys.argv[1:])
