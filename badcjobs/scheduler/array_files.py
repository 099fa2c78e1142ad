"""The files of an array in its logs folder: drafts while it has no number, then named after that, as submitit wants.

All drafts of one submission carry the name of its script, by which Slurm knows the job as well: whoever finds drafts
can find the job.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_BEFORE, _AFTER = ".submission_file_", ".sh"
_DRAFT = re.compile(r"[0-9a-f]{32}-[0-9]+\.pkl(\.save_tmp)?|\.submission_file_[0-9a-f]{32}\.sh")


def remove_left(logs: Path, before_ms: int) -> None:
    """Take away what submits that were killed over their drafts have left; what is younger may still be written."""
    for name in filter(_DRAFT.fullmatch, os.listdir(logs) if logs.is_dir() else ()):  # noqa: PTH208
        if (logs / name).stat().st_mtime * 1000 < before_ms:
            (logs / name).unlink()


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was written for one submission."""

    script: Path

    @classmethod
    def write(cls, logs: Path, text: str, dump: Callable[[Path], None], count: int) -> Drafts:
        """Write the script, and for each of so many tasks what it is to do; ``dump`` writes that once."""
        drafts = cls(logs / f"{_BEFORE}{uuid.uuid4().hex}{_AFTER}")
        try:
            first = logs / f"{drafts._prefix}0.pkl"
            dump(first)
            content = first.read_bytes()
            for number in range(1, count):
                (logs / f"{drafts._prefix}{number}.pkl").write_bytes(content)
            drafts.script.write_text(text, encoding="utf-8")
        except BaseException:
            drafts.remove()
            raise
        return drafts

    def name(self, job_id: str, indices: Sequence[int]) -> None:
        """Give each array index its file, and the script its name at last; what is named already stays."""
        logs, names = self.script.parent, set(os.listdir(self.script.parent))  # noqa: PTH208 - 10,000 paths are slow
        wanted = (f"{job_id}_{index}_submitted.pkl" for index in indices)
        lacking = [name for name in wanted if name not in names]
        for mine, yours in zip(self._pickles(names), lacking, strict=False):
            os.rename(logs / mine, logs / yours)  # noqa: PTH104 - as above, and tasks are waiting for their file
        if self.script.exists():
            self.script.rename(logs / f"{job_id}_submission.sh")

    def remove(self) -> None:
        """Take them away again."""
        for name in os.listdir(self.script.parent):  # noqa: PTH208
            if name.startswith(self._prefix):  # also what submitit has not written to its end, .save_tmp
                (self.script.parent / name).unlink()
        self.script.unlink(missing_ok=True)

    @property
    def _prefix(self) -> str:
        return self.script.name.removeprefix(_BEFORE).removesuffix(_AFTER) + "-"

    def _pickles(self, names: Sequence[str] | set[str]) -> list[str]:
        return sorted(name for name in names if name.startswith(self._prefix) and name.endswith(".pkl"))
