"""Jobs of recordings with all kinds of names: each has heard a robin, at a second of its own."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

from support.cases import read_data
from support.databases import join_again
from support.task_files import TaskFile, merge_run

_CASES = read_data("label_names.txt").split("\n=== ")[1:]
LABELLED = {name: text.splitlines() for name, _, text in (case.partition("\n") for case in _CASES)}
# A recording in two chunks, and its robin.
_ROWS = (
    """INSERT INTO chunk (task_id, recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, status, attempts,
                          is_cut)
       SELECT task_id, :recording, column1, iif(:how = 'pieces', :second || column1, :source),
              iif(:how = 'pieces', '/cut/' || :second || column1, :audio), column2, column2 + 30000,
              iif(:how = 'failed', 'failed', 'done'), 1, :how <> 'pieces'
       FROM task, (VALUES ('a.wav', 0), ('b.wav', 30000)) WHERE :how <> 'left out'""",
    """INSERT INTO detection SELECT task_id, recording_id, chunk_id, :second * 1000, :second * 1000 + 500, 'AMRO',
              'American Robin', 0.5
       FROM chunk WHERE recording_id = :recording AND start_ms = 0 AND status = 'done'""",
    """INSERT INTO recording (task_id, recording_id, source_path, left_out)
       SELECT task_id, :recording, :source, 'no_place' FROM task WHERE :how = 'left out'""",
)


def make_labelled(folder: Path, lines: list[str]) -> dict[float, Path]:
    """Write the audio files and the job database of a case; return which file was heard at which second."""
    TaskFile(folder, states={"x": "done"}, labels=(), samples=1).write()
    merge_run(folder)
    heard = {}
    with closing(sqlite3.connect(folder / "job.sqlite")) as db, db:
        db.execute("DELETE FROM chunk")
        for second, line in enumerate(lines, 1):
            root, path, how = f"{line} | ".split(" | ")[:3]
            audio = folder / "audio" / root / path
            place = Path(os.path.normpath(audio))
            place.parent.mkdir(parents=True, exist_ok=True)
            if how == "link":
                link, place = place, folder / "annex" / f"SHA256E-s{second}--key.wav"
                place.parent.mkdir(exist_ok=True)
                link.symlink_to(place)
            place.touch()
            values = {"recording": f"{root}/{path}", "source": path, "audio": str(audio), "second": second, "how": how}
            if how == "absolute":
                values["source"] = str(audio)
            if how == "pieces":
                values["recording"] = str(Path(path).with_suffix(""))
            for sql in _ROWS:
                db.execute(sql, values)
            if how not in ("failed", "left out"):
                heard[float(second)] = place
        join_again(db)
    return heard
