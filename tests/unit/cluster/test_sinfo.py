"""What sinfo says about GPUs: answers recorded on a real Slurm 22.05, and cells as other clusters write them."""

from __future__ import annotations

from pathlib import Path

from rooms.cluster import cluster_text, describe, largest_size, parse_sinfo, sum_gpus
from support.behaviour import pretty
from support.brief import page
from support.pages import Pages

DATA = Path(__file__).parents[2] / "data"
# Recorded with our question (blanks squeezed; memory, the last column, was asked for later): jobs hold 3 GPUs of gpu0,
# all of gpu1, 2 A100 of gpu2 and a shard of gpu6; gpu3 is down, gpu5 drained, the partition old closed.
# MIXED has sockets, slices of a card beside whole ones, cards without a type; gpu1 is drained, gpu3 while a job runs.
RECORDED, MIXED = ((DATA / f"sinfo_{name}.txt").read_text() for name in ("recorded", "mixed"))


def node(name: str, *, state: str = "idle", total: int = 4, used: int = 0, **more: object) -> str:
    values = {"partition": "gpu*", "up": "up", "cores": "0/24/0/24", "features": "(null)", "memory": 180000, **more}
    partition, up, cores, features, memory = values.values()
    gres = f"gpu:v100:{total}|gpu:v100:{used}(IDX:0-{used - 1})"
    return f"{name}|{partition}|{up}|{state}|7-00:00:00|{cores}|{features}|{gres}|{memory}|\n"


UNEVEN = "".join([node("a1", total=8), node("a2", total=8, used=8), *(node(f"b{n}", total=4) for n in range(3))])
TWO_PLACES = node("a1", used=3) + node("a2", used=4) + node("b1", used=2, partition="big")
ONE_LARGE = node("a1", total=8, used=8, partition="large") + node("b1") + node("b2")
LONG = node("a-very-long-name-of-a-node-0001.cluster.example", partition="x" * 40 + "_even_longer")
LONG = LONG.replace("v100:4", "v100:4,gpu:a100:4,gpu:h100:8")
# name → what sinfo says, how many GPUs are asked for and of which kind
VIEWS = {
    "recorded": (RECORDED, 2, None),
    "of a kind": (RECORDED, 1, "a100"),
    "of a feature": (RECORDED, 1, "gpu_mem_32"),
    "mixed": (MIXED, 8, "1g.10gb"),
    "waits where most are free": (TWO_PLACES, 3, None), "waits for a node that is large enough": (ONE_LARGE, 6, None),
    "several nodes": (UNEVEN, 12, None),
    "the default of two": (node("a1") + node("a1", partition="big"), 1, None),
    "all closed": (node("a1", up="down"), 1, None),
    "more than there are": (UNEVEN, 21, None),
    "long names": (RECORDED + LONG, 4, "h100"),
}  # fmt: skip


def test_the_table_and_its_advice(pages: Pages) -> None:
    said = {}
    for name, (text, gpus, kind) in VIEWS.items():
        view = describe(parse_sinfo(text), gpus, kind)
        said[f"{name.replace(' ', '-').replace(',', '')}.txt"] = shown = cluster_text(view)
        assert max(map(len, shown.partition("\n\n  best")[0].splitlines()[:-3])) <= 100
        if name in ("recorded", "several nodes", "of a kind"):
            said[f"{name.replace(' ', '-')}.json"] = pretty({key: view[key] for key in view if key != "nodes"})
    assert parse_sinfo(RECORDED.replace("|", "   ")) == parse_sinfo(RECORDED), "an older sinfo knows no suffix"
    said["nodes.json"] = pretty(describe(parse_sinfo(RECORDED), 2, None)["nodes"][:4])
    pages(said)


CELLS = (DATA / "sinfo_cells.txt").read_text().splitlines()  # GRES and GRES_USED, as clusters write them
STATES = """idle mixed mixed- planned idle~ idle# allocated completing idle* mixed* drained draining drained* down down*
    reserved maint idle$ mixed@ idle% idle! fail unknown inval mixed^ DRAINED*"""
NODES = {
    "no core": node("n1", state="mixed", cores="24/0/0/24"), "closed": node("n1", up="down"),
    "open elsewhere": node("n1", up="down", partition="x") + node("n1") + node("n1", up="down", partition="y"),
    "cores unknown": node("n1", cores="?"), "features": node("n1", features="Gpu_Mem_32,fast"),
    "a banner, and 2 before 10": "Welcome | to the cluster\n\n" + node("gpu10") + node("gpu2"),
}  # fmt: skip


def test_a_job_goes_to_the_fullest_node_where_it_fits_whole_or_to_the_fewest_even_nodes(pages: Pages) -> None:
    def best(text: str, gpus: int, kind: str | None = None) -> str:
        found = describe(parse_sinfo(text), gpus, kind)["best"]
        return found and {key: found[key] for key in ("partition", "node", "free", "nodes", "gpus_per_node")}

    places = [(1, None), (2, None), (3, None), (4, "v100"), (1, "a100"), (2, "a100"), (5, None)]
    found = {f"recorded, {gpus} of {kind or 'any'}": best(RECORDED, gpus, kind) for gpus, kind in places}
    pages({"best.txt": page({**found, **{f"uneven, {gpus}": best(UNEVEN, gpus) for gpus in (8, 9, 16, 17, 20, 21)}})})


def test_cells_and_states_are_understood_whatever_their_form(pages: Pages) -> None:
    cells, states = {}, {}
    for cell in CELLS:
        gres, used = cell.split(" ")
        (found,) = parse_sinfo(f"n|gpu|up|idle|1:00|0/2/0/2|(null)|{gres}|{used}|9|\n").nodes
        cells[cell] = [f"{one.kind}: {one.used} of {one.total} used" for one in found.gpus]
    for state in STATES.split():
        (found,) = parse_sinfo(node("n1", state=state)).nodes
        words = ["works" if found.works else "does not work", f"{found.free()} free", found.why_not]
        states[state] = [*words, "takes jobs" if found.takes_jobs else "takes none"]
    nodes = {name: [[one, one.why_not, one.free()] for one in parse_sinfo(text).nodes] for name, text in NODES.items()}
    pages({"cells.txt": page(cells), "states.txt": page(states), "nodes.txt": page(nodes)})


def test_the_most_that_a_job_can_ask_for_on_one_node_is_known_unless_one_is_not() -> None:
    fat = node("f1", total=8, partition="fat", memory=380_000)
    old = node("o1", total=16, partition="old", up="down")
    cpu = "c1|cpu|up|idle|infinite|0/36/0/36|(null)|(null)|gpu:0|180000|\n"
    known = parse_sinfo(node("g1") + node("g2", state="down") + fat + old + cpu)
    sizes = {
        None: (8, 36, 380_000), "gpu": (4, 24, 180_000), "gpu,fat": (8, 24, 380_000), "old": (16, 24, 180_000),
        "cpu": (0, 36, 180_000), "hidden": None, "gpu,hidden": None,
    }  # fmt: skip
    assert {one: largest_size(known, one) for one in sizes} == sizes
    strange = parse_sinfo(node("g1") + node("g2", cores="(null)", memory="(null)"))
    assert (largest_size(strange), largest_size(parse_sinfo(""))) == ((4, None, None), None)
    assert [one.name for one in parse_sinfo(NODES["features"]).gpu_nodes("gpu_mem_32")] == ["n1"]
    assert sum_gpus(parse_sinfo(RECORDED).nodes, "a100") == {"total": 3, "used": 2, "free": 1, "unreachable": 0}
