"""Which filesystem a folder is on: read from mount tables as clusters have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.store import UNKNOWN, Filesystem, parse_mountinfo, read_filesystem

ROOT = "22 1 8:2 / / rw,relatime shared:1 - xfs /dev/sda2 rw,attr2,inode64,logbufs=8,noquota"
TMP = "61 22 8:5 / /tmp rw,nosuid,nodev shared:30 - ext4 /dev/sda5 rw"
SHM = "27 25 0:22 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64"
SCRATCH = "143 22 0:63 / /scratch rw,relatime shared:78 - lustre 10.10.1.1@o2ib:10.10.1.2@o2ib:/scratch rw,flock"
HOME = "150 22 0:64 / /home rw,relatime shared:80 - nfs4 10.20.0.5:/export/home rw,vers=4.2,hard,proto=tcp"
PROJECT = "171 22 0:70 / /arc/project rw,relatime shared:90 - gpfs arc rw,relatime"
FAST = "180 22 0:71 / /mnt/beegfs rw,relatime shared:91 - beegfs beegfs_nodev rw,cfgFile=/etc/beegfs/beegfs-client.conf"
WINDOWS = r"190 22 0:72 / /mnt/field\040data rw,relatime shared:92 - cifs //lab/field rw,vers=3.1.1,cache=strict"
SSH = "200 22 0:73 / /mnt/far rw,nosuid,nodev,relatime shared:93 - fuse.sshfs user@far:/ rw,user_id=1000"
BIND = "210 22 0:63 /users/ada /local/ada rw,relatime shared:78 - lustre 10.10.1.1@o2ib:/scratch rw,flock"
IMAGE = "300 299 0:80 / / ro,nodev,relatime - overlay overlay rw,lowerdir=/a:/b,upperdir=/c,workdir=/d"
PLAIN = "36 35 98:0 / /plain rw,noatime - xfs /dev/sdb rw"  # no optional fields at all
MANY = "37 35 98:1 / /many rw,noatime shared:1 master:2 propagate_from:3 - btrfs /dev/sdc rw"
STRANGE = "220 22 0:74 / /mnt/new rw,relatime shared:94 - shinyfs shiny rw"
NODE = "\n".join((ROOT, TMP, SHM, SCRATCH, HOME, PROJECT, FAST, WINDOWS, SSH, BIND, PLAIN, MANY, STRANGE)) + "\n"


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/var/spool", "xfs", False),
        ("/tmp/slurm.4821", "ext4", False),
        ("/tmpfoo", "xfs", False),
        ("/dev/shm", "tmpfs", False),
        ("/scratch/st-birds-1/runs/july", "lustre", True),
        ("/scratch", "lustre", True),
        ("/home/ada", "nfs4", True),
        ("/arc/project/birds", "gpfs", True),
        ("/mnt/beegfs/x", "beegfs", True),
        ("/mnt/field data/june", "cifs", True),
        ("/mnt/far", "fuse.sshfs", True),
        ("/local/ada/tmp", "lustre", True),  # a bind mount is what it shows, not where it hangs
        ("/local/bob", "xfs", False),
        ("/plain/x", "xfs", False),
        ("/many/x", "btrfs", False),
        ("/mnt/new", "shinyfs", True),
    ],
)
def test_a_folder_is_on_the_longest_mount_above_it(path: str, kind: str, shared: bool) -> None:
    found = parse_mountinfo(NODE, path)
    assert (found.kind, found.shared) == (kind, shared)


def test_inside_a_container_the_image_is_local_and_what_is_bound_into_it_may_not_be() -> None:
    text = "\n".join((IMAGE, SCRATCH.replace("143 22", "301 300")))
    assert parse_mountinfo(text, "/tmp").kind == "overlay"
    assert not parse_mountinfo(text, "/tmp").shared
    assert parse_mountinfo(text, "/scratch/x").shared


def test_a_mount_over_a_mount_hides_it() -> None:
    over = "62 61 0:90 / /tmp rw shared:31 - nfs server:/tmp rw"
    assert parse_mountinfo("\n".join((ROOT, TMP, over)), "/tmp/x").kind == "nfs"


@pytest.mark.parametrize("text", ["", "rubbish\n", "22 1 8:2 / /\n", "a - b\n"])
def test_a_table_that_says_nothing_is_treated_as_shared(text: str) -> None:
    found = parse_mountinfo(text, "/tmp")
    assert found == Filesystem(UNKNOWN)
    assert found.shared


def test_only_a_filesystem_that_is_known_to_be_local_counts_as_local() -> None:
    assert Filesystem("xfs").description == "xfs, local"
    assert Filesystem("lustre").description == "lustre, treated as shared"


def test_a_link_is_followed_before_its_filesystem_is_asked_for(tmp_path: Path) -> None:
    link = tmp_path / "proc"
    link.symlink_to("/proc")
    assert read_filesystem(link).kind == "proc"
    assert read_filesystem(link).shared
    assert read_filesystem(tmp_path / "not" / "yet") == read_filesystem(tmp_path)
