"""``badcjobs cluster`` on a stand-in sinfo; tests/slurm asks a real one."""

from __future__ import annotations

from support.behaviour import FixedSite
from support.pages import Pages

ROW = "gpu{n}|gpu*|up|{state}|7-00:00:00|0/24/0/24|(null)|gpu:v100:4|gpu:v100:{used}(IDX:0)|180000|"
NODES = "\n".join([ROW.format(n=1, state="mixed", used=1), ROW.format(n=2, state="idle", used=0)])
SAYS = f'[ -z "$SINFO_FORMAT" ] || exit 3; echo "$@" >> $0.called; cat <<\'EOF\'\n{NODES}\nEOF'
# name → arguments, what sinfo does
ASKED: dict[str, tuple[str, str | None]] = {
    "for-people": ("", SAYS),
    "json": ("--gpus-per-task 4 --constraint V100 --json", SAYS),
    "unknown-kind": ("--constraint a40", SAYS),
    "no-gpus": ("", "echo 'n1|cpu*|up|idle|infinite|0/24/0/24|(null)|(null)|gpu:0|180000|'"),
    "no-slurm": ("", None),
    "refused": ("", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"),
    "none-asked": ("--gpus-per-task 0", None),
    "too-many": ("--gpus-per-task 6", SAYS),
    "all-closed": ("", SAYS.replace("|up|", "|down|")),
}


def test_what_the_cluster_has_is_asked_once_and_told_with_the_best_place(pages: Pages) -> None:
    site, said = FixedSite(), {}
    for name, (args, script) in ASKED.items():
        (site.folder / name).mkdir()
        (site.folder / name / "cat").symlink_to("/bin/cat")
        if script is not None:
            site.script(f"{name}/sinfo", script)
        env = {"PATH": str(site.folder / name), "SINFO_FORMAT": "%N"}
        said[f"{name}.txt"] = site.say("cluster", *args.split(), env=env)
    said["asked.txt"] = (site.folder / "json" / "sinfo.called").read_text()
    site.close()
    pages(said)
