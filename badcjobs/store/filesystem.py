"""Says which filesystem a folder is on, and whether SQLite's usual habits (locks, shared memory) are safe there.

Only what is known to be local counts as local: on a filesystem that several machines see, a lock may be invisible to
the next machine, and a live database is then destroyed by whoever looks at it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MOUNTINFO = Path("/proc/self/mountinfo")
UNKNOWN = "unknown"

LOCAL = frozenset({
    "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay", "ramfs", "reiserfs", "rootfs",
    "tmpfs", "ufs", "vfat", "xfs", "zfs", "fuse.fuse-overlayfs",
})  # fmt: skip
SHARED = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "cvmfs2", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "gpfs", "lustre", "mmfs", "ncpfs",
    "nfs", "nfs3", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "virtiofs", "vboxsf", "wekafs",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What a folder lies on."""

    kind: str  # as in /proc/self/mountinfo; "unknown": the system did not say
    mount: str = ""

    @property
    def shared(self) -> bool:
        """Whether other machines may see it; what nobody knows is treated as if they did."""
        return self.kind not in LOCAL

    @property
    def words(self) -> str:
        """The filesystem and what is thought of it, for the log."""
        if self.kind in LOCAL:
            return f"{self.kind}, local"
        if self.kind in SHARED:
            return f"{self.kind}, shared"
        return f"{self.kind}, treated as shared because nobody has said that it is local"


def read_filesystem(folder: Path) -> Filesystem:
    """Ask this machine what a folder lies on; the folder need not exist yet."""
    try:
        text = _MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
        return parse_mountinfo(text, str(folder.resolve()))
    except (OSError, RuntimeError):  # no /proc; a loop of links
        return Filesystem(UNKNOWN)


def parse_mountinfo(text: str, path: str) -> Filesystem:
    """Find the mount that a resolved absolute path lies on, in the text of /proc/self/mountinfo.

    The longest mount point wins; of several mounts on one point the last does, for it hides the others.
    """
    best = Filesystem(UNKNOWN)
    for line in text.splitlines():
        before, found, after = line.partition(" - ")  # a lone hyphen ends the optional fields before the type
        fields = before.split(" ")
        if not found or len(fields) < 6:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])  # blanks, backslashes
        if PurePosixPath(path).is_relative_to(mount) and len(mount) >= len(best.mount):
            best = Filesystem(after.split(" ")[0], mount)
    return best
