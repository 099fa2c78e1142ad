"""Trust: which files, of those that the user did not name, can name a program that is run."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISDIR, S_IWGRP, S_IWOTH

from badcjobs.errors import BadInput
from badcjobs.paths import shell_line, user_name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """The user, and the files and folders that the user trusts."""

    uid: int
    list_file: Path
    without: str  # the command that continues without a refused file
    listed: tuple[str, ...] = ()

    @classmethod
    def read(cls, uid: int, environ: Mapping[str, str], without: str) -> Trust:
        """Read the user's list of trusted files and folders; one that other users can change counts as empty."""
        config = environ.get("XDG_CONFIG_HOME") or f"{environ.get('HOME', '')}/.config"
        trust = cls(uid, Path(config, "badcjobs", "trusted"), without)
        with suppress(OSError, ValueError), trust.list_file.open(encoding="utf-8") as file:
            if trust.check(trust.list_file, os.fstat(file.fileno()), {}):
                listed = tuple(os.path.realpath(line.strip()) for line in file if line.startswith("/"))
                return replace(trust, listed=listed)
        return trust

    def check(self, path: Path, opened: os.stat_result, programs: Mapping[str, str], *, warn: bool = False) -> bool:
        """Say whether a file is trusted; refuse one that is not if it names programs, which are given by key.

        ``opened`` is the status of the descriptor that was read: by now the path may lead to another file.
        ``warn``: log a warning if the group can change the file.
        """
        target = Path(os.path.realpath(path))
        is_listed = any(target.is_relative_to(trusted) for trusted in self.listed)
        if is_listed and os.path.samestat(opened, target.stat()):
            return True
        # A link has an owner, too, and relative paths in the file start at the link.
        strangers = {opened.st_uid, path.lstat().st_uid} - {0, self.uid}
        modes = opened.st_mode
        if not S_ISDIR(modes):
            modes |= path.parent.stat().st_mode | target.parent.stat().st_mode
        is_trusted = not strangers and not modes & S_IWOTH
        folder = shell_line(self.list_file.parent)
        line = f"mkdir -p {folder} && echo {shell_line(path)} >> {folder}/{self.list_file.name}"
        if programs and not is_trusted:
            owner = user_name(min(strangers, default=opened.st_uid))
            raise BadInput(
                f"{path} is not trusted: it belongs to {owner}, other users can change it, and it names programs",
                why="\n".join(f"{key} = {value}" for key, value in programs.items()),
                fix=f"{self.without}   # without it\n       {line}   # trusts it",
            )
        if programs and warn and modes & S_IWGRP:
            log.warning("%s names programs, and its group can change it; try: %s", path, line)
        return is_trusted
