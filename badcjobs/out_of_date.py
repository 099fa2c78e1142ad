"""Whether a job database is behind its task databases: one remark with the command that merges them again."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from badcjobs.model import Freshness
from badcjobs.report.headlines import news_words
from badcjobs.store.job_reader import read_freshness


def find_news(db: sqlite3.Connection, database: Path) -> str | None:
    """Return the remark of an open job database; None: it is up to date, or nobody can say."""
    try:
        merged, file_folders = read_freshness(db, database.parent)
    except (sqlite3.Error, OSError):  # a damaged page elsewhere is no reason to give nothing
        return None
    news, command = news_words(merged), merge_again(database, file_folders, merged)
    if not news:
        return None
    return f"merged: {news}" + ("" if command is None else f"; to take that in: {command}")


def merge_again(database: Path, file_folders: Sequence[str], merged: Freshness) -> str | None:
    """Return the command that brings a job database up to date; None: there is nothing to merge.

    That files are not here is no reason for a command: what is not here cannot be merged.
    """
    if merged == Freshness(merged.as_of_ms, gone=merged.gone, closed=merged.closed):
        return None
    if database.name == "job.sqlite" and tuple(file_folders) == ("tasks",):
        return shlex.join(["badcjobs", "merge", str(database.parent)])
    folders = [str(database.parent / folder) for folder in file_folders]
    return shlex.join(["badcjobs", "merge", *folders, "-o", str(database)])
