"""What probes have found, in one small file of TOML: written by ``badcjobs probe``, read by later runs and plans.

It lies in the user's cache, or where --store says; a run also looks into its own folder. Of a probe that is not
finished the trials are kept, so that the same command goes on.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from badcjobs import __version__
from badcjobs.model import Probed, ProbeKey, ProbeResult, Trial
from badcjobs.paths import user_cache

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

STORE = "probe.toml"
_VERSION = 1
_HEAD = """\
# How long a chunk may be: found by badcjobs probe, read by later runs (badcjobs guide probe).
# A table for each model of device, engine and settings; delete one, or the file, to have it probed anew.
"""
_BEGIN = _HEAD.partition(":")[0].encode()
Noun = TypeVar("Noun", ProbeKey, ProbeResult, Trial)


class Damaged(Exception):
    """The file is there, but is not as a probe writes it."""


class NoStore(Exception):
    """The file is there, and is somebody's: no probe has ever written it."""


def default_store(environ: Mapping[str, str]) -> Path | None:
    """Return the file in the user's cache; None: there is no home."""
    cache = user_cache(environ)
    return cache and cache / STORE


def probe_files(out: Path, environ: Mapping[str, str]) -> list[Path]:
    """Return where a run looks for what probes have found: in its own folder, then in the user's cache."""
    cached = default_store(environ)
    return [out / STORE, *([cached] if cached else [])]


def readers_of(store: Path, environ: Mapping[str, str]) -> str:
    """Say who will read a file that a probe has written."""
    cached = default_store(environ)
    if cached is not None and os.path.realpath(store) == os.path.realpath(cached):
        return "later runs read it"
    if store.name == STORE:
        return f"runs with --out {shlex.quote(str(store.parent))} read it"
    return f"badcjobs plan --from FILE reads it; a run looks for OUT/{STORE}, and not for this file"


# --- the file ---------------------------------------------------------------------------------------------------------


def read_probes(file: Path) -> list[Probed]:
    """Return all entries of a file, none where there is no file; raise Damaged, or OSError where it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise Damaged(str(error)) from error
    return parse_probes(text)


def parse_probes(text: str) -> list[Probed]:
    """Understand the text of a file."""
    try:
        document = tomllib.loads(text)
        if document.get("version") != _VERSION:
            raise Damaged(f"its version is {document.get('version')!r}, not {_VERSION}")
        return [_parse_entry(table) for table in document.get("gpu", [])]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise Damaged(str(error) or repr(error)) from error


def _parse_entry(table: Mapping[str, Any]) -> Probed:
    trials = tuple(_parse(Trial, trial) for trial in table.get("trial", []))
    result = _parse(ProbeResult, table["result"]) if "result" in table else None
    return Probed(_parse(ProbeKey, table), trials, result, table.get("finished") is True, table.get("at"))


def _parse(noun: type[Noun], table: Mapping[str, Any]) -> Noun:
    """Return a noun from a table: what is missing is not known, what is of another kind is damage."""
    values: dict[str, Any] = {}
    for field in fields(noun):
        kinds, value = str(field.type).split(" | "), table.get(field.name)
        if field.name in table:
            values[field.name] = _checked(field.name, value, kinds)
        elif "None" in kinds and field.default is MISSING:
            values[field.name] = None
        elif field.default is MISSING:
            raise ValueError(f"{field.name} is missing")
    return noun(**values)


def _checked(name: str, value: Any, kinds: list[str]) -> Any:
    if "float" in kinds and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if type(value).__name__ in kinds and type(value) is not float:
        return value
    raise ValueError(f"{name} = {value!r} is not {' or '.join(kinds)}")


def to_toml(probes: Iterable[Probed]) -> str:
    """Return the text of a file; the same entries give the same text."""
    lines = [_HEAD, f"version = {_VERSION}", f"written_by = {_toml(f'badcjobs {__version__}')}"]
    for probed in sorted(probes, key=lambda one: tuple(map(str, asdict(one.key).values()))):
        lines += ["", "[[gpu]]", *_pairs(asdict(probed.key)), *_pairs({"finished": probed.finished, "at": probed.at})]
        if probed.result is not None:
            lines += ["", "[gpu.result]", *_pairs(asdict(probed.result))]
        for trial in sorted(probed.trials, key=lambda one: (one.lean, one.length_s)):
            lines += ["", "[[gpu.trial]]", *_pairs(asdict(trial))]
    return "\n".join(lines) + "\n"


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{key} = {_toml(value)}" for key, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    # JSON's texts, numbers, true and false are TOML's too, but for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_more(there: Probed, new: Probed) -> bool:
    """Say whether an entry is finished by somebody else; with fewer trials than the new one it was its beginning."""
    return there.finished and bool(new.trials) and not new.finished and not set(there.trials) <= set(new.trials)


def _locked(lock: Path) -> int | None:
    """Wait until a file is ours alone, and return it; None: this filesystem has no locks.

    A file of its own, for the one that is kept is replaced; and no folder, which NFS does not lock.
    """
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(fd), lock.stat()):
                return fd
        except FileNotFoundError:
            pass  # who had it before us has taken it away
        except OSError:
            os.close(fd)
            return None
        os.close(fd)


class ProbeStore:
    """The file while a probe writes it; others may write it as well, each their own entries."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def open(self) -> Path | None:
        """Make sure that the file can be read and written; return where a damaged one was put aside, or None.

        Where there is none it comes with its first entry: a probe that finds nothing leaves no file behind.
        Raise NoStore where it is no damaged store, but somebody's; OSError where it cannot be written.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            aside = None
            try:
                probes = read_probes(self.file)
            except Damaged as error:
                if not self._is_ours():
                    raise NoStore(str(error)) from error
                aside = self._free_name()
                log.warning("%s is damaged (%s); it is kept as %s", self.file, error, aside.name)
                self.file.rename(aside)
                probes = []
            self._write(probes)
            return aside

    def find(self, key: ProbeKey) -> Probed:
        """Return what is known already."""
        return next((one for one in read_probes(self.file) if one.key == key), Probed(key))

    def put(self, probed: Probed) -> None:
        """Write an entry in place of the one of the same key; without trials it is none.

        What another probe has finished meanwhile stays as long as this one is not finished.
        """
        with self._alone():
            known = read_probes(self.file)
            if any(_is_more(one, probed) for one in known if one.key == probed.key):
                return
            others = [one for one in known if one.key != probed.key]
            self._write([*others, *([probed] if probed.trials else [])])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one probe after the other read the file and write it."""
        lock = self.file.with_name(f".{self.file.name}.lock")
        fd = _locked(lock)
        try:
            yield
        finally:
            if fd is not None:
                lock.unlink(missing_ok=True)  # while it is ours: who waits for it finds that it is gone
                os.close(fd)

    def _write(self, probes: Sequence[Probed]) -> None:
        temporary = self.file.with_name(f".{self.file.name}.{os.uname().nodename}.{os.getpid()}.tmp")
        try:
            temporary.write_text(to_toml(probes), encoding="utf-8")
            if probes or self.file.exists():
                temporary.replace(self.file)
        finally:
            temporary.unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        """Say whether a damaged file was ours: by its name, because it is empty, or by how it begins."""
        if self.file.name == STORE:
            return True
        with self.file.open("rb") as file:
            begin = file.read(len(_BEGIN))
        return not begin or begin == _BEGIN

    def _free_name(self) -> Path:
        names = (self.file.with_name(f"{self.file.name}.damaged-{number}") for number in range(1, 1000))
        return next(name for name in names if not name.exists())
