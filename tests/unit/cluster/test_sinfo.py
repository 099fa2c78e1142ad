"""What sinfo says about GPUs: answers recorded on a real Slurm 22.05, and cells as other clusters write them."""

from __future__ import annotations

import pytest
from rooms.cluster import (
    QUESTION,
    Cluster,
    GpuCount,
    Node,
    choose_best,
    cluster_text,
    describe,
    gpus_of_node,
    largest_size,
    parse_sinfo,
    parse_state,
    sum_gpus,
)

# Recorded with QUESTION (blanks squeezed; memory, the last column, was asked for later); jobs hold 3 GPUs of gpu0, all
# of gpu1, 2 A100 of gpu2 and a shard of gpu6; gpu3 is down, gpu5 drained, the partition old closed.
RECORDED = """\
gpu0|interactive_gpu|up|mixed|1-00:00:00|1/23/0/24|gpu_mem_32|gpu:v100:4|gpu:v100:3(IDX:0-2),shard:0|180000|
gpu0|gpu*|up|mixed|infinite|1/23/0/24|gpu_mem_32|gpu:v100:4|gpu:v100:3(IDX:0-2),shard:0|180000|
gpu1|interactive_gpu|up|allocated|1-00:00:00|24/0/0/24|gpu_mem_32|gpu:v100:4|gpu:v100:4(IDX:0-3),shard:0|180000|
gpu1|gpu*|up|allocated|infinite|24/0/0/24|gpu_mem_32|gpu:v100:4|gpu:v100:4(IDX:0-3),shard:0|180000|
gpu2|gpu*|up|mixed|infinite|1/23/0/24|(null)|gpu:a100:3,gpu:v100:1|gpu:a100:2(IDX:0-1),gpu:v100:0(IDX:N/A),shard:0|180000|
gpu3|gpu*|up|down|infinite|0/0/24/24|(null)|gpu:4|gpu:0,shard:0|180000|
gpu4|cpu|up|idle|infinite|0/24/0/24|(null)|(null)|gpu:0,shard:0|180000|
gpu4|gpu*|up|idle|infinite|0/24/0/24|(null)|(null)|gpu:0,shard:0|180000|
gpu5|gpu*|up|drained|infinite|0/0/24/24|(null)|gpu:v100:4|gpu:v100:0(IDX:N/A),shard:0|180000|
gpu5|old|down|drained|infinite|0/0/24/24|(null)|gpu:v100:4|gpu:v100:0(IDX:N/A),shard:0|180000|
gpu6|gpu*|up|mixed|infinite|1/23/0/24|(null)|gpu:v100:4,shard:v100:16|gpu:v100:0(IDX:N/A),shard:v100:1(IDX:0)|180000|
"""


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return parse_sinfo(RECORDED)


def node(name: str, *, state: str = "idle", total: int = 4, used: int = 0, **more: object) -> str:
    values = {"partition": "gpu*", "up": "up", "cores": "0/24/0/24", "features": "(null)", "memory": 180000, **more}
    gres = (f"gpu:v100:{total}", f"gpu:v100:{used}(IDX:0-{used - 1})")
    cells = (name, values["partition"], values["up"], state, "7-00:00:00", values["cores"], values["features"], *gres)
    cells += (values["memory"],)
    return "|".join(map(str, cells)) + "|\n"


def test_one_call_asks_for_partition_state_and_both_counts_of_every_node() -> None:
    program, *options, fields = QUESTION
    assert (program, options) == ("sinfo", ["-N", "-h", "-O"])
    assert {"NodeList", "Partition", "StateLong", "Gres", "GresUsed"} <= {
        one.split(":")[0] for one in fields.split(",")
    }


def test_a_node_in_two_partitions_is_one_node_and_counts_once(cluster: Cluster) -> None:
    assert [one.name for one in cluster.nodes] == [f"gpu{number}" for number in range(7)]
    assert cluster.nodes[0].partitions == ("gpu", "interactive_gpu")
    assert sum_gpus(cluster.nodes) == {"total": 24, "used": 9, "free": 7, "unreachable": 8}


@pytest.mark.parametrize(
    ("number", "free", "used", "total"),
    [(0, 1, 3, 4), (1, 0, 4, 4), (2, 2, 2, 4), (3, 0, 0, 4), (4, 0, 0, 0), (5, 0, 0, 4), (6, 4, 0, 4)],
)
def test_what_is_free_in_a_node_is_what_a_job_would_get_there_now(
    cluster: Cluster, number: int, free: int, used: int, total: int
) -> None:
    found = cluster.nodes[number]
    assert (found.free(), found.used(), found.total()) == (free, used, total)


def test_kinds_are_counted_apart_and_a_feature_names_a_kind_too(cluster: Cluster) -> None:
    assert cluster.kinds == ["a100", "gpu", "v100"]
    assert sum_gpus(cluster.nodes, "a100") == {"total": 3, "used": 2, "free": 1, "unreachable": 0}
    assert [one.name for one in cluster.gpu_nodes("gpu_mem_32")] == ["gpu0", "gpu1"]


def test_a_feature_keeps_its_letters_and_is_found_by_any_as_a_kind() -> None:
    found = parse_sinfo(node("n1", features="Gpu_Mem_32,fast"))
    assert found.nodes[0].features == ("Gpu_Mem_32", "fast")
    assert found.gpu_nodes("gpu_mem_32") == [*found.nodes]


def test_partitions_come_with_their_nodes_and_the_default_first(cluster: Cluster) -> None:
    assert [(one.name, one.default, one.up) for one in cluster.partitions] == [
        ("gpu", True, True),
        ("cpu", False, True),
        ("interactive_gpu", False, True),
        ("old", False, False),
    ]
    assert [one.name for one in cluster.members(cluster.partitions[2])] == ["gpu0", "gpu1"]
    assert cluster.partitions[2].time_limit == "1-00:00:00"


@pytest.mark.parametrize(
    ("gres", "used", "counts"),
    [
        ("(null)", "(null)", ()),
        ("", "gpu:0", ()),
        ("gpu:4", "gpu:1", (GpuCount("gpu", 4, 1),)),
        ("gpu:v100:4(S:0-1)", "gpu:v100:2(IDX:0,3)", (GpuCount("v100", 4, 2),)),
        ("gpu:A100:8(S:0,1)", "gpu:a100:8(IDX:0-7)", (GpuCount("a100", 8, 8),)),
        ("gpu:a100:4", "gpu:3", (GpuCount("a100", 4, 3),)),  # one side without the type
        ("gpu:1080:2", "gpu:1080:1(IDX:1)", (GpuCount("1080", 2, 1),)),
        ("gpu:1g.5gb:7,gpu:a100:1", "gpu:1g.5gb:3(IDX:0-2)", (GpuCount("1g.5gb", 7, 3), GpuCount("a100", 1, 0))),
        ("mps:400,gpu:2,shard:8,craynetwork:4", "gpu:0,shard:3,mps:100", (GpuCount("gpu", 2, 0),)),
        ("gpu:v100", "gpu:v100:0", (GpuCount("v100", 1, 0),)),
        ("gpu:tesla:2,gpu:tesla:2", "gpu:tesla:3(IDX:0-2)", (GpuCount("tesla", 4, 3),)),
        ("gpu:2", "gpu:5", (GpuCount("gpu", 2, 2),)),  # never more used than there are
        ("gpu:4(S:0-1)", "gpu:(null):2(IDX:0-1)", (GpuCount("gpu", 4, 2),)),  # no type, as some versions write it
        ("gpu:1g.10gb:7", "gpu:1g.10gb:2(IDX:0,3)", (GpuCount("1g.10gb", 7, 2),)),  # slices of a card
        (
            "gpu:a100_3g.20gb:2(S:0),gpu:a100:2(S:1)",
            "gpu:a100:2(IDX:2-3),gpu:a100_3g.20gb:1(IDX:0)",
            (GpuCount("a100", 2, 2), GpuCount("a100_3g.20gb", 2, 1)),
        ),
        ("gpu:a100:3,gpu:v100:1", "gpu:2(IDX:0-1)", (GpuCount("a100", 3, 2), GpuCount("v100", 1, 0))),
    ],
)
def test_cells_are_counted_whatever_their_form(gres: str, used: str, counts: tuple[GpuCount, ...]) -> None:
    assert gpus_of_node(gres, used) == counts


@pytest.mark.parametrize(
    ("state", "takes_jobs"),
    [
        ("idle", True), ("mixed", True), ("mixed-", True), ("planned", True), ("idle~", True), ("idle#", True),
        ("idle*", False), ("mixed*", False), ("allocated", False), ("drained", False), ("draining", False),
        ("drained*", False), ("down", False), ("down*", False), ("reserved", False), ("maint", False),
        ("idle$", False), ("mixed@", False), ("idle%", False), ("idle!", False), ("completing", False),
        ("fail", False), ("unknown", False), ("inval", False),
    ],
)  # fmt: skip
def test_only_some_states_let_a_job_start(state: str, takes_jobs: bool) -> None:
    (found,) = parse_sinfo(node("n1", state=state)).nodes
    assert (found.takes_jobs, found.free()) == (takes_jobs, 4 if takes_jobs else 0)


@pytest.mark.parametrize(
    ("state", "works"),
    [("idle", True), ("allocated", True), ("mixed-", True), ("completing", True), ("drained", False), ("idle*", False)],
)
def test_a_full_node_works_and_a_drained_one_does_not(state: str, works: bool) -> None:
    assert parse_sinfo(node("n1", state=state)).nodes[0].works == works


def test_a_state_is_told_from_its_marks() -> None:
    assert parse_state("mixed") == ("mixed", frozenset())
    assert parse_state("DRAINED*") == ("drained", frozenset("*"))


@pytest.mark.parametrize(("more", "why"), [({"cores": "24/0/0/24"}, "no core"), ({"up": "down"}, "closed")])
def test_free_gpus_without_a_free_core_or_an_open_partition_are_out_of_reach(more: dict[str, str], why: str) -> None:
    (found,) = parse_sinfo(node("n1", state="mixed", **more)).nodes
    assert found.free() == 0
    assert why in (found.why_not or "")


@pytest.mark.parametrize(
    ("gpus", "kind", "partition", "where"),
    [
        (1, None, "gpu", "gpu0"),  # the fullest with room
        (2, None, "gpu", "gpu2"),
        (3, None, "gpu", "gpu6"),
        (4, "v100", "gpu", "gpu6"),
        (1, "a100", "gpu", "gpu2"),
        (2, "a100", "gpu", None),
        (5, None, "gpu", None),
        (1, "gpu_mem_32", "gpu", "gpu0"),
    ],
)
def test_a_job_goes_to_the_fullest_node_where_it_fits_whole(
    cluster: Cluster, gpus: int, kind: str | None, partition: str, where: str | None
) -> None:
    best = choose_best(cluster, gpus, kind)
    assert best is not None
    assert (best["partition"], best["node"]) == (partition, where)


def test_where_it_fits_nowhere_the_partition_with_the_most_free_ones_is_named_with_numbers() -> None:
    text = node("a1", used=3) + node("a2", used=4) + node("b1", used=2, partition="big")
    best = choose_best(parse_sinfo(text), 3)
    assert best is not None
    assert (best["partition"], best["node"], best["free"]) == ("big", None, 2)
    assert "2 of 4" in best["why"]
    assert "waits" in best["why"]


def test_more_than_any_node_has_is_said_to_take_several() -> None:
    best = choose_best(parse_sinfo(node("a1") + node("a2")), 8)
    assert best is not None
    assert (best["node"], best["free"], best["nodes"], best["gpus_per_node"]) == (None, 8, 2, 4)
    assert "no node has 8, so the job takes 2" in best["why"]


@pytest.mark.parametrize(
    ("gpus", "nodes", "each"),
    [
        (9, 2, 5),  # 5 + 5, not 8 + 1: each node gets the same
        (12, 2, 6),
        (16, 2, 8),
        (20, 5, 4),  # the two large ones are not enough
        (21, None, None),
    ],
)
def test_a_job_too_large_for_any_node_is_told_over_how_many_it_can_be_spread(
    gpus: int, nodes: int | None, each: int | None
) -> None:
    text = "".join([node("a1", total=8), node("a2", total=8, used=8), *(node(f"b{n}", total=4) for n in range(3))])
    view = describe(parse_sinfo(text), gpus, None)
    assert (view["fits"], view["most_on_a_node"]) == (False, 8)
    best = view["best"] or {"nodes": None, "gpus_per_node": None}
    assert (nodes, each) == (best["nodes"], best["gpus_per_node"])
    said = cluster_text(view)
    assert f"no node has {gpus} GPUs; the largest has 8" in said
    assert ("template multinode" in said) == (nodes is not None)
    assert "--set gpus-per-node=8" in said


def test_a_job_waits_for_a_node_that_is_large_enough_not_where_most_small_ones_are_free() -> None:
    text = node("a1", total=8, used=8, partition="large") + node("b1") + node("b2")
    view = describe(parse_sinfo(text), 6, None)
    assert (view["best"]["partition"], view["best"]["node"], view["fits"]) == ("large", None, True)
    assert "waits" in view["best"]["why"]


# Recorded with QUESTION (blanks squeezed) on a real 22.05 with sockets, and slices of a card beside whole ones; gpu1 is
# drained, gpu3 is drained while a job still runs there, gpu4's GPUs have no type.
MIXED = """\
gpu0|gpu*|up|mixed|infinite|1/7/0/8|f_gpu0|gpu:v100:4(S:0-1)|gpu:v100:3(IDX:0-2)|180000|
gpu0|short|up|mixed|4:00:00|1/7/0/8|f_gpu0|gpu:v100:4(S:0-1)|gpu:v100:3(IDX:0-2)|180000|
gpu1|gpu*|up|drained|infinite|0/0/8/8|f_gpu1|gpu:v100:4|gpu:v100:0(IDX:N/A)|180000|
gpu1|short|up|drained|4:00:00|0/0/8/8|f_gpu1|gpu:v100:4|gpu:v100:0(IDX:N/A)|180000|
gpu2|gpu*|up|mixed|infinite|1/7/0/8|f_gpu2|gpu:1g.10gb:7(S:0),gpu:h100:3(S:0-1)|gpu:1g.10gb:2(IDX:0-1),gpu:h100:1(IDX:7)|180000|
gpu2|short|up|mixed|4:00:00|1/7/0/8|f_gpu2|gpu:1g.10gb:7(S:0),gpu:h100:3(S:0-1)|gpu:1g.10gb:2(IDX:0-1),gpu:h100:1(IDX:7)|180000|
gpu3|gpu*|up|draining|infinite|1/0/7/8|f_gpu3|gpu:a100:4(S:0-1)|gpu:a100:1(IDX:0)|180000|
gpu4|gpu*|up|mixed|infinite|1/7/0/8|f_gpu4|gpu:4|gpu:2|180000|
"""


def test_a_cluster_of_several_kinds_and_states_is_counted_node_by_node() -> None:
    found = parse_sinfo(MIXED)
    numbers = {one.name: (one.free(), one.used(), one.total()) for one in found.nodes}
    assert numbers == {"gpu0": (1, 3, 4), "gpu1": (0, 0, 4), "gpu2": (7, 3, 10), "gpu3": (0, 1, 4), "gpu4": (2, 2, 4)}
    assert sum_gpus(found.nodes) == {"total": 26, "used": 9, "free": 10, "unreachable": 7}
    assert sum_gpus(found.nodes, "1g.10gb") == {"total": 7, "used": 2, "free": 5, "unreachable": 0}
    short = next(one for one in found.partitions if one.name == "short")
    assert sum_gpus(found.members(short)) == {"total": 18, "used": 6, "free": 8, "unreachable": 4}


def test_with_every_partition_down_there_is_no_best() -> None:
    assert choose_best(parse_sinfo(node("a1", up="down")), 1) is None


def test_gpu2_comes_before_gpu10_and_banners_are_left_out() -> None:
    text = "Welcome | to the cluster\n\n" + node("gpu10") + node("gpu2")
    assert [one.name for one in parse_sinfo(text).nodes] == ["gpu2", "gpu10"]


def test_an_older_sinfo_that_knows_no_suffix_is_read_by_its_blanks() -> None:
    assert parse_sinfo(RECORDED.replace("|", "   ")) == parse_sinfo(RECORDED)


@pytest.mark.parametrize("kind", [None, "v100", "a100"])
def test_the_table_has_every_gpu_node_and_at_most_100_columns(cluster: Cluster, kind: str | None) -> None:
    wide = node("a-very-long-name-of-a-node-0001.cluster.example", partition="an_even_longer_partition_of_theirs")
    for found in (cluster, parse_sinfo(RECORDED + wide.replace("v100:4", "v100:4,gpu:a100:4,gpu:h100:8"))):
        text = cluster_text(describe(found, 2, kind))
        assert max(len(line) for line in text.splitlines()) <= 100
        listed = [one for one in found.gpu_nodes(kind) if one.name.startswith("gpu")]
        assert all(f"\n  {one.name} " in text for one in listed)
        assert "gpu4" not in text  # it has none


def test_the_document_narrows_every_number_to_the_kind(cluster: Cluster) -> None:
    said = describe(cluster, 1, "a100")
    assert (said["total"], said["free"], [one["name"] for one in said["nodes"]]) == (3, 1, ["gpu2"])
    assert [(one["name"], one["total"]) for one in said["partitions"]] == [("gpu", 3)]
    assert said["best"]["node"] == "gpu2"


def test_a_node_without_a_count_of_cores_is_judged_by_its_state_alone() -> None:
    assert Node("n", "idle", ("gpu",), (GpuCount("gpu", 2, 0),), cores_idle=None).free() == 2


@pytest.mark.parametrize(
    ("partitions", "size"),
    [
        (None, (8, 24, 380_000)),  # the most of each, of all that a job can reach
        ("gpu", (4, 24, 180_000)),
        ("gpu,fat", (8, 24, 380_000)),
        ("old", (16, 24, 180_000)),  # asked for by its name, though it is closed
        ("cpu", (0, 24, 180_000)),
        ("hidden", None),
        ("gpu,hidden", None),
    ],
)
def test_the_most_that_a_job_can_ask_for_on_one_node_is_known(
    partitions: str | None, size: tuple[int, int | None, int | None] | None
) -> None:
    fat = node("f1", total=8, partition="fat", memory=380_000)
    old = node("o1", total=16, partition="old", up="down")
    cpu = "c1|cpu|up|idle|infinite|0/24/0/24|(null)|(null)|gpu:0|180000|\n"
    assert largest_size(parse_sinfo(node("g1") + node("g2", state="down") + fat + old + cpu), partitions) == size


def test_what_sinfo_does_not_say_about_one_node_is_not_known_of_all() -> None:
    strange = parse_sinfo(node("g1") + node("g2", cores="(null)", memory="(null)"))
    assert largest_size(strange) == (4, None, None)
    assert largest_size(parse_sinfo("")) is None
