"""What the behaviour pack needs: its fixed inputs, a clock that stands, texts without what differs from run to run.

Nothing here imports a module of badcjobs: the pack must say the same before and after modules move. The inputs are
task databases as text (``sqlite3 FILE .dump | gzip -n9``), written once with the generators beside this file.
"""

import gzip
import html
import json
import os
import re
import shutil
import sqlite3
import sys
import tempfile
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

from rooms.store import empty_stamped_page, move_into_place
from support.badcjobs_program import Site
from support.cases import DATA

from badcjobs import __version__

INPUTS = DATA / "jobs"
START_MS = 1_800_000_000_000  # when the first task of every input began
APPLICATION_ID, SCHEMA_VERSION = 0x42414443, 1  # of the databases that the inputs become: the one place to change
_PROGRAMS = ("bash", "sh", "date", "cat", "env", "sleep", "kill", "mkdir")  # no Slurm, no nvidia-smi
_MOST_ROWS = 40  # of a table that is recorded row by row
_INLINE = "a|b|code|em|kbd|small|span|strong|sub|sup|time|td|th"


def lay_out(job: str, folder: Path, only: str = "*") -> Path:
    """Make the run folder of a recorded job: its task databases, and the files beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (INPUTS / job).glob("*.*"):
        (folder / source.name).write_text(source.read_text().replace("@FOLDER@", str(folder)))
    for source in sorted((INPUTS / job / "tasks").glob(f"{only}.sql.gz")):
        if not (path := folder / "tasks" / source.name.replace(".sql.gz", ".sqlite")).exists():
            load(source, path)
    return folder


def load(dump: Path, path: Path) -> None:
    """Make one task database, published, and as old as its last row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unpublished = path.with_name(".unpublished")
    unpublished.write_bytes(empty_stamped_page())
    with closing(sqlite3.connect(unpublished)) as db:
        db.execute("PRAGMA synchronous = OFF")
        db.executescript(gzip.decompress(dump.read_bytes()).decode())
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        moments = "SELECT started_at_ms AS at_ms FROM task UNION SELECT ended_at_ms FROM task"
        last = f"SELECT max(at_ms) FROM ({moments} UNION SELECT at_ms FROM host_sample)"
        ((last_ms,),) = db.execute(last)
    move_into_place(unpublished, path)
    unpublished.unlink()
    os.utime(path, (last_ms / 1000,) * 2)


class FixedSite(Site):
    """A site on a machine without Slurm, where every command begins at the same moment.

    Its path always has the same length, and is short: texts with paths in them are then broken at the same words.
    """

    def __init__(self, after_s: float | None = 86400) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="badcjobs", dir="/tmp")))
        self.after_s = after_s  # after the start of the first task; None: the true time
        self._programs = self.folder / "bin"
        self._programs.mkdir()
        for name in _PROGRAMS:
            (self._programs / name).symlink_to(shutil.which(name) or f"/bin/{name}")

    def environ(self, changes: dict[str, str] | None = None) -> dict[str, str]:
        env = super().environ()
        fixed = {"HOME": str(self.folder), "PATH": str(self._programs), "TZ": "UTC", "USER": "lab"}
        fixed["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent / "fixed_time"), env["PYTHONPATH"]))
        if self.after_s is not None:
            fixed["BADCJOBS_TEST_NOW_MS"] = str(START_MS + round(self.after_s * 1000))
        return {**env, **fixed, **(changes or {})}

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.folder)

    def say(self, *words: object, env: dict[str, str] | None = None) -> str:
        """Run a command and return all it says, with its exit code."""
        done = self.badcjobs(*words, env=env)
        said = f"exit code {done.exit_code}\n--- stdout\n{done.stdout}--- stderr\n{done.stderr}"
        return self.plain(f"$ badcjobs {' '.join(map(str, words))}\n{said}")

    def plain(self, text: str) -> str:
        """Return the text without what differs from run to run, or from machine to machine."""
        text = text.replace(str(self.folder), "SITE").replace(sys.executable, "PYTHON").replace("PYTHON -P", "PYTHON")
        text = re.sub(r"badcjobs: \d+ of \d+ task databases merged, .*\n", "", text)  # progress, where it takes long
        text = re.sub(rf"\b{re.escape(__version__)}\b", "VERSION", text)
        if self.after_s is None:
            return text
        now_ms = START_MS + round(self.after_s * 1000)
        return re.sub(r"\b\d{13}\b", lambda ms: "NOW" if 0 <= int(ms[0]) - now_ms < 60_000 else ms[0], text)


def pretty(document: Any) -> str:
    """Return a JSON document with a value on a line, floats to nine digits."""
    return json.dumps(_rounded(document), indent=1, ensure_ascii=False) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_rounded, value)]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def tables(database: Path) -> str:
    """Return the rows of every table and view, sorted; of a long one the first, the last and a checksum of all."""
    if not database.exists():
        return "there is no database"
    said = []
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        named = "SELECT type, name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY type, name"
        for kind, name in db.execute(named).fetchall():
            cursor = db.execute(f"SELECT * FROM {name}")
            said.append(f"## {kind} {name}\n{some_rows([one[0] for one in cursor.description], cursor.fetchall())}")
    return "\n".join(said)


def some_rows(columns: list[str], rows: list[tuple[Any, ...]]) -> str:
    """Return the rows of one table, as ``tables`` says."""
    lines = sorted(json.dumps(_rounded(row), ensure_ascii=False) for row in rows)
    if len(lines) > _MOST_ROWS:
        many = f"... {len(lines)} rows, checksum {zlib.crc32(chr(10).join(lines).encode()):08x} ..."
        lines = [*lines[:3], many, *lines[-3:]]
    return "\n".join((", ".join(columns), *lines)) + "\n"


def page_text(page: str) -> str:
    """Return what a reader of an HTML page sees: a line for a block or a row of a table."""
    page = re.sub(r"(?s)<(script|style|template)\b.*?</\1>", "<p>", page)
    page = re.sub(r"<t[dh]\b[^>]*>", " | ", page)
    page = re.sub(rf"</?(?:{_INLINE})\b[^>]*>", "", page)
    lines = (" ".join(html.unescape(line).split()) for line in re.sub(r"<[^>]*>", "\0", page).split("\0"))
    return "\n".join(line for line in lines if line) + "\n"
