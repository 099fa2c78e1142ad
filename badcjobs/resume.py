"""Goes on where earlier tasks stopped: what they have settled in the same run folder is skipped."""

from __future__ import annotations

import logging

from badcjobs.errors import DatabaseProblem
from badcjobs.left_behind import publish_left_behind
from badcjobs.model import TaskKey
from badcjobs.paths import RunFolder
from badcjobs.records import Records
from badcjobs.seams import Clock
from badcjobs.store.live.task_writer import TaskWriter
from badcjobs.store.look_back import merged_files
from badcjobs.telemetry.orphans import wait_for_orphans

log = logging.getLogger(__name__)

_ORPHAN_PATIENCE_S = 10.0


def skip_what_is_done(
    out: RunFolder, key: TaskKey, records: Records, *, retry_failed: bool, hostname: str, clock: Clock
) -> None:
    """Look into job.sqlite and the task databases it does not hold, those of killed tasks included."""
    wait_for_orphans(out.tasks, clock, _ORPHAN_PATIENCE_S)
    publish_left_behind(out, records.local, key, hostname=hostname)
    databases = [out.job_database] if out.job_database.exists() else []
    databases += out.earlier_databases(key, merged_files(out.job_database))
    for database in databases:
        try:
            records.writer.skip_done_in(database, retry_failed=retry_failed)
        except DatabaseProblem as problem:
            log.warning("%s", problem.what)
    tell_what_was_found(records.writer)


def tell_what_was_found(writer: TaskWriter) -> None:
    """Say how much of our part earlier tasks have settled."""
    skipped, failed = writer.count_by_status().get("skipped", 0), writer.count_failed_before()
    if skipped - failed:
        log.info("%d chunks are done already and are skipped", skipped - failed)
    if failed:
        log.warning("%d chunks failed in earlier tasks and are not tried again (--no-retry-failed)", failed)
    if writer.changed:
        log.warning("%d chunks were done with other audio than now lies there; they are done again", writer.changed)
