"""The recorder's half of the task database, seen from the wrapper, whether the recorder lives or not."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

from badcjobs.paths import LocalFolder
from badcjobs.store.live.halves import SealedHalf, left_behind
from badcjobs.telemetry.sidecar import Sidecar

_PATIENCE_S = 5.0
_LITTLE_PATIENCE_S = 0.5  # with a recorder that gave none the last time: its disk may be full


class RecorderHalf:
    """Opens the recorder's file where that is safe, and asks the recorder for a snapshot where it is not.

    It is not on a shared filesystem while the recorder writes; and it is not possible at all where somebody has tidied
    up the node-local folder: then the file has no name any more, but the recorder still has it open.
    """

    tables: ClassVar[Collection[str]] = SealedHalf.tables

    def __init__(self, local: LocalFolder, target: Path, *, shared: bool) -> None:
        self.recorder: Sidecar | None = None  # None: it was not started yet
        self._local = local
        self._shared = shared
        self._patience_s = _PATIENCE_S
        self._beside_target = target.with_name(f".{target.name}.recorder.tmp")

    def uri(self, workplace: Path) -> str | None:
        """Return where the recorder's rows can be read now."""
        if self.recorder is None:
            return None
        if not self.recorder.over and (self._shared or self._is_tidied_away):
            self._patience_s = _PATIENCE_S if self._ask(self.recorder) else _LITTLE_PATIENCE_S
        return self._at_hand(workplace)

    def uri_at_hand(self) -> str | None:
        """Return where recent readings can be read without asking anybody; None: nowhere."""
        try:
            return self._at_hand(self._local.path)
        except (OSError, sqlite3.Error):
            return None

    def _ask(self, recorder: Sidecar) -> bool:
        return recorder.ask_for_snapshot(self._snapshot, self._patience_s)

    def _at_hand(self, workplace: Path) -> str | None:
        writes_on = self.recorder is not None and not self.recorder.over
        if self._is_tidied_away or (self._shared and writes_on):
            return SealedHalf(self._snapshot).uri(workplace)
        return left_behind(self._local.recorder_file, shared=self._shared).uri(workplace)

    @property
    def refuge(self) -> Path | None:
        """Where the recorder must leave its readings before it closes a file that has no name any more."""
        return self._beside_target if self._is_tidied_away else None

    def tidy_up(self) -> None:
        """Remove what we had put beside the published file."""
        self._beside_target.unlink(missing_ok=True)

    @property
    def _is_tidied_away(self) -> bool:
        return not self._local.path.exists()

    @property
    def _snapshot(self) -> Path:
        return self._beside_target if self._is_tidied_away else self._local.recorder_snapshot
