"""Values for a template's keys: what sbatch would not take is refused before it becomes a line of a script."""

from __future__ import annotations

import pytest
from rooms.cluster import fill_template, keys_of, list_templates, wrong_values
from rooms.root import BadInput, Project

TEMPLATES = {template.name: template.text for template in list_templates()}


def wrong(name: str, *given: str) -> list[str]:
    return [said for _, _, said in wrong_values(keys_of(TEMPLATES[name]), given)]


@pytest.mark.parametrize(
    "setting",
    [
        "array=0-99%10", "array=1-7:2", "array=1,2,3", "array=4",
        "time=12:00:00", "time=1-00:00:00", "time=90", "mem=16G", "mem=16000",
        "mem=16gb", "mem=0", "gpus-per-node=4", "gpus_per_node=v100:4", "nodes=1", "cpus-per-task=24", "ntasks=1",
        "account=st-pi-1", "partition=gpu,short", "qos=high", "constraint=gpu_mem_32&v100", "constraint=[a|b]",
        "signal=B:USR2@300", "open-mode=append", "job-name=two words", "output=logs/%x.log", "source=a b.csv",
        "out=/scratch/~x", "setup=module load gcc", "args=--max-gpus 2",
    ],
)  # fmt: skip
def test_what_sbatch_takes_is_taken(setting: str) -> None:
    assert wrong("array", setting) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("array=potato", "indices of an array, such as 0-9"),
        ("array=9-0", "indices of an array"),
        ("array=1,3,5,7", "a range, because Slurm does not pass a list to its tasks, such as 1-7:2"),
        ("array=1,2,6,7%2", "a range, because Slurm does not pass a list to its tasks, such as 0-3%2"),
        ("time=noon", "a time limit, such as 12:00:00"),
        ("time=unlimited", "a time limit"),
        ("time=2", "more than the 180 s of its early warning (this is 2 min), such as 2:00:00"),
        ("mem=lots", "an amount of memory, such as 16G"),
        ("mem=1.5G", "an amount of memory"),
        ("gpus-per-node=many", "a number of GPUs, such as 4 or v100:4"),
        ("gpus-per-node=0", "a number of GPUs"),
        ("nodes=none", "a number of nodes"),
        ("nodes=4-2", "a number of nodes"),
        ("cpus-per-task=0", "a whole number above 0"),
        ("account=my account", "a name without spaces"),
        ("account=<alloc>", "a name without spaces"),
        ("partition=gpu short", "names of partitions"),
        ("qos=<qos>", "a name without spaces"),
        ("constraint=gpu mem", "features of a node"),
        ("signal=B:BIRD@60", "a signal and its seconds before the end, such as B:USR1@180"),
        ("open-mode=a", "append or truncate"),
        ("signal=B:USR1@99999", "fewer seconds than the 43,200 of its time limit, 12:00:00, such as B:USR1@180"),
        ("out=~/results", "a path without ~"),
    ],
)
def test_what_sbatch_would_not_take_is_named_with_its_key_and_an_example(setting: str, words: str) -> None:
    (said,) = wrong("array", setting)
    assert said.startswith(f"--set {setting}: must be ")
    assert words in said


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        (("time=2", "signal=B:USR1@100"), None),
        (("time=2-00:00:00", "signal=B:USR1@99999"), None),
        (("time=4", "signal=B:USR1@300"), "--set time=2:00:00 --set signal=B:USR1@300"),
        (("signal=B:USR1@99999", "time=5:00:00"), "--set signal=B:USR1@99999 --set time=29:00:00"),
        (("signal=USR2@99999",), "--set signal=USR2@180"),
    ],
)
def test_a_time_limit_and_its_early_warning_are_judged_together(settings: tuple[str, ...], fix: str | None) -> None:
    try:
        fill_template("array", [*settings], Project(), complete=False)
    except BadInput as error:
        assert error.fix == f"badcjobs template array {fix}"
        fill_template("array", [word for word in (fix or "").split() if word != "--set"], Project(), complete=False)
    else:
        assert fix is None


@pytest.mark.parametrize(
    ("value", "good"), [("st-pi-1-gpu", True), ("st-pi-1", False), ("-gpu", False), ("gpu", False)]
)
def test_on_sockeye_an_account_has_the_form_that_gpu_jobs_need(value: str, good: bool) -> None:
    said = wrong("sockeye-array", f"account={value}")
    assert (said == []) == good
    assert good or f"the form <alloc>-gpu, such as {value}-gpu" in said[0]
    assert wrong("merge", f"account={value}") == []


@pytest.mark.parametrize(("value", "good"), [("afterany:4821", True), ("afterany:1:2", True), ("4821", False)])
def test_a_dependency_says_what_it_waits_for(value: str, good: bool) -> None:
    assert (wrong("merge", f"dependency={value}") == []) == good


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_stands_in_a_template_is_what_it_takes(name: str) -> None:
    given = [f"{key.name}={key.value}" for key in keys_of(TEMPLATES[name]) if key.value and not key.required]
    assert len(given) > 5
    assert wrong(name, *given) == []


def test_every_mistake_is_named_at_once_with_one_line_that_mends_the_values() -> None:
    with pytest.raises(BadInput) as refused:
        fill_template("sockeye-array", ["account=st-lab-1", "array=potato", "colour=red"], Project(), complete=True)
    said = str(refused.value)
    for words in ("--set account=st-lab-1:", "--set array=potato:", "has no key 'colour'", "keys of sockeye-array"):
        assert words in said
    assert refused.value.fix == "badcjobs template sockeye-array --set account=st-lab-1-gpu --set array=0-9"
    assert fill_template("sockeye-array", (refused.value.fix or "").split()[4::2], Project(), complete=True)


def test_a_single_wrong_value_is_the_message_itself() -> None:
    with pytest.raises(BadInput) as refused:
        fill_template("array", ["time=noon"], Project(), complete=True)
    assert refused.value.what == "--set time=noon: must be a time limit, such as 12:00:00 or 1-00:00:00"
    assert refused.value.fix == "badcjobs template array --set time=12:00:00"


@pytest.mark.parametrize("name", ["array", "single", "multinode", "apptainer-array", "merge"])
def test_partition_and_qos_add_a_line_only_where_they_are_set(name: str) -> None:
    text = fill_template(name, ["qos=high"], Project(), complete=False).text
    assert "#SBATCH --qos=high" in text.splitlines()
    assert not any(line.startswith("#SBATCH --partition") for line in text.splitlines())
    assert (
        "#SBATCH --partition=gpu" in fill_template(name, ["partition=gpu"], Project(), complete=False).text.splitlines()
    )
