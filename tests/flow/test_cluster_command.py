"""``badcjobs cluster`` on a stand-in sinfo; tests/slurm asks a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.badcjobs_program import Outcome, Site, assert_refused

ROW = "gpu{n}|gpu*|up|{state}|7-00:00:00|0/24/0/24|(null)|gpu:v100:4|gpu:v100:{used}(IDX:0)|180000|"
NODES = "\n".join([ROW.format(n=1, state="mixed", used=1), ROW.format(n=2, state="idle", used=0)])

# name → arguments, what sinfo does
ASKED: dict[str, tuple[str, str | None]] = {
    "for people": ("", f"cat <<'EOF'\n{NODES}\nEOF"),
    "json": ("--gpus-per-task 4 --constraint V100 --json", f"echo called >> calls; cat <<'EOF'\n{NODES}\nEOF"),
    "unknown kind": ("--constraint a40", f"cat <<'EOF'\n{NODES}\nEOF"),
    "no GPUs": ("", "echo 'n1|cpu*|up|idle|infinite|0/24/0/24|(null)|(null)|gpu:0|180000|'"),
    "no Slurm": ("", None),
    "refused": ("", "echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1"),
    "its own format": ("--json", f"[ -z \"$SINFO_FORMAT\" ] || exit 3; cat <<'EOF'\n{NODES}\nEOF"),
    "none asked": ("--gpus-per-task 0", None),
    "too many": ("--gpus-per-task 6", f"cat <<'EOF'\n{NODES}\nEOF"),
    "too many, json": ("--gpus-per-task 9 --json", f"cat <<'EOF'\n{NODES}\nEOF"),
    "all closed": ("", f"cat <<'EOF'\n{NODES.replace('|up|', '|down|')}\nEOF"),
}


@pytest.fixture(scope="module")
def answers(shared_site: Site) -> dict[str, Outcome]:
    """What the program answers, asked for together because that takes half the time."""
    envs = []
    for number, (_, script) in enumerate(ASKED.values()):
        folder = shared_site.folder / f"bin{number}"
        folder.mkdir()
        (folder / "cat").symlink_to("/bin/cat")
        if script is not None:
            shared_site.script(f"bin{number}/sinfo", script)
        envs.append({"PATH": str(folder), "SINFO_FORMAT": "%N"})
    found = shared_site.badcjobs_each([("cluster", *args.split()) for args, _ in ASKED.values()], envs)
    return dict(zip(ASKED, found, strict=True))


def test_people_see_partitions_nodes_and_the_best_place(answers: dict[str, Outcome]) -> None:
    found = answers["for people"]
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("7 of 8 GPUs are free on 2 nodes: 1 used")
    assert "best for 1 GPU: partition gpu\n    on node gpu1\n" in found.stdout


def test_scripts_get_one_document_from_one_call_of_sinfo(answers: dict[str, Outcome], shared_site: Site) -> None:
    said = answers["json"].json
    assert said["asked"] == {"gpus": 4, "kind": "v100"}
    assert (said["total"], said["free"], said["used"]) == (8, 7, 1)
    assert (said["best"]["partition"], said["best"]["node"]) == ("gpu", "gpu2")
    assert {one["name"]: one["free"] for one in said["nodes"]} == {"gpu1": 3, "gpu2": 4}
    assert Path(shared_site.folder / "calls").read_text() == "called\n"


@pytest.mark.parametrize(
    ("case", "exit_code", "words"),
    [
        ("unknown kind", 3, ("a40", "v100")),
        ("no GPUs", 3, ("no node of this cluster has a GPU",)),
        ("no Slurm", 3, ("there is no Slurm here", "badcjobs gpus")),
        ("refused", 5, ("Unable to contact slurm controller",)),
        ("none asked", 2, ("--gpus-per-task",)),
    ],
)
def test_what_cannot_be_answered_is_said_in_words(
    answers: dict[str, Outcome], case: str, exit_code: int, words: tuple[str, ...]
) -> None:
    assert_refused(answers[case], exit_code, *words)


def test_what_the_user_has_set_for_sinfo_does_not_reach_it(answers: dict[str, Outcome]) -> None:
    assert answers["its own format"].exit_code == 0
    assert answers["its own format"].json["total"] == 8


def test_more_than_any_node_has_exits_3_with_the_table_the_most_there_is_and_what_to_ask_for(
    answers: dict[str, Outcome],
) -> None:
    found = answers["too many"]
    assert found.exit_code == 3
    assert found.stdout.startswith("7 of 8 GPUs are free")
    assert "no node has 6 GPUs; the largest has 4" in found.stdout
    assert "try: badcjobs template multinode --set nodes=2 --set gpus-per-node=3 " in found.stdout
    assert "best for" not in found.stdout
    said = answers["too many, json"]
    assert (said.exit_code, said.json["fits"], said.json["most_on_a_node"]) == (3, False, 4)
    assert said.json["best"] is None  # nine are more than both nodes have


def test_where_every_partition_is_closed_nothing_is_best(answers: dict[str, Outcome]) -> None:
    assert answers["all closed"].exit_code == 3
    assert "every partition with such GPUs is down" in answers["all closed"].stdout
