"""Job scripts as sbatch reads them: #SBATCH lines, the command line before them, and mistakes found here already."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from badcjobs.errors import BadInput
from badcjobs.scheduler.array_spec import parse_array
from badcjobs.scheduler.job_script import JobRequest, read_options, read_request
from badcjobs.scheduler.local_values import EarlySignal

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"


def request(*lines: str, options: tuple[str, ...] = ()) -> JobRequest:
    return read_request("\n".join(["#!/bin/bash", *lines, ""]), options)


def test_options_end_at_the_first_line_that_is_no_comment() -> None:
    found = request("# why", "#SBATCH --time=5", "", "##SBATCH --account=x", "echo hi", "#SBATCH --time=7")
    assert found.time_s == 300
    assert found.ignored == ()


def test_several_options_may_share_a_line_and_a_comment_may_follow() -> None:
    found = request("#SBATCH --job-name=probe # a comment", "#SBATCH -c2 --gpus-per-node=2 -a 0-3", "#SBATCH --time 5")
    assert (found.name, found.cpus, found.gpus, found.time_s) == ("probe", 2, 2, 300)
    assert found.array == parse_array("0-3")


def test_the_command_line_goes_before_the_script() -> None:
    found = request("#SBATCH --array=0-3 --gpus-per-node=4", options=("--array=7", "--gpus-per-node=1"))
    assert found.array == parse_array("7")
    assert found.gpus == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5", 300), ("5:30", 360), ("1:00:00", 3600), ("1-0", 86_400), ("1-2:30", 95_400), ("2-00:00:01", 172_860),
        ("0:03", 60), ("UNLIMITED", None), ("infinite", None), ("0", None), ("0:00", None), ("0-0", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_read_in_all_of_slurms_forms_and_counted_in_whole_minutes(
    text: str, seconds: int | None
) -> None:
    assert request(f"#SBATCH --time={text}").time_s == seconds


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B:USR1@180", EarlySignal(signal.SIGUSR1, 180, True)),
        ("B:SIGUSR2@60", EarlySignal(signal.SIGUSR2, 60, True)),
        ("10@5", EarlySignal(signal.SIGUSR1, 5, False)),
        ("TERM", EarlySignal(signal.SIGTERM, 60, False)),
        ("RB:USR1@9", EarlySignal(signal.SIGUSR1, 9, True)),
    ],
)
def test_the_early_signal_knows_whether_the_script_hears_it(text: str, expected: EarlySignal) -> None:
    assert request(f"#SBATCH --signal={text}").warning == expected


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("--gpus-per-node=4", 4), ("--gpus-per-node=v100:2", 2), ("--gpus-per-node=v100:1,a100:1", 2), ("-G2", 2),
        ("--gpus=a100:1", 1), ("--gres=gpu:2", 2), ("--gres=gpu:a100:2,shard:4", 2), ("--gres=gpu", 1),
        ("--gres=gpu:a100", 1), ("--gres=none", 0), ("--gpus-per-task=2 --ntasks=2", 4), ("--mem=4G", 0),
        ("--gres=gpu:2 --gpus-per-node=1", 2), ("--gpus-per-node=1 --gres=gpu:2", 2), ("--gpus-per-task=2 -G4", 4),
        ("--gres=gpu:1,gpu:2", 2), ("--gpus-per-task=1 -N1", 1), ("--gpus-per-task=1 --ntasks-per-node=2", 2),
        ("--gpus=2 --gpus-per-node=2", 2), ("--gres=gres:gpu:2", 2), ("--gpus-per-node=0", 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_whichever_option_asks_for_them(line: str, gpus: int) -> None:
    assert request(f"#SBATCH {line}").gpus == gpus


def test_logs_open_modes_and_exports_are_kept() -> None:
    found = request("#SBATCH -o %x-%A_%a.log -e err --open-mode=append --export=ALL,A=1 --no-requeue -D sub")
    assert (found.output, found.error, found.append, found.export) == ("%x-%A_%a.log", "err", True, "ALL,A=1")
    assert (found.requeue, found.chdir) == (False, "sub")
    assert request().append is False


def test_what_only_a_cluster_has_is_named_and_left_alone() -> None:
    found = request("#SBATCH --account=st-x-gpu --mem=16G --constraint=gpu_mem_32", "#SBATCH -p gpu -H")
    assert found.ignored == ("account", "constraint", "hold", "mem", "partition")


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16G", "16384"), ("4096", "4096"), ("512M", "512"), ("1T", "1048576"), ("1GB", "1024"), ("1gb", "1024"),
        ("1500K", "2"), ("1KB", "1"), ("+1G", "1024"), ("0", None), ("0G", None),
    ],
)  # fmt: skip
def test_memory_is_told_in_mebibytes(text: str, mib: str | None) -> None:
    assert request(f"#SBATCH --mem={text}").told.get("SLURM_MEM_PER_NODE") == mib


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("--job=x --arr=0-3 --gpus-per-n=1", {"job-name": "x", "array": "0-3", "gpus-per-node": "1"}),
        ("--time 5 --ou x --no-r", {"time": "5", "output": "x", "no-requeue": ""}),
        ("--tasks-per=2 --cluster=a", {"ntasks-per-node": "2", "clusters": "a"}),
        ("--exclus --nice=3 --nice", {"exclusive": "", "nice": ""}),
        ("-HQt5 -c 2 -koff", {"hold": "", "quiet": "", "time": "5", "cpus-per-task": "2", "no-kill": "off"}),
        ("--gres=gpu:1 --mem=1G --export=ALL", {"gres": "gpu:1", "mem": "1G", "export": "ALL"}),
    ],
)
def test_options_are_read_as_getopt_reads_them(line: str, given: dict[str, str]) -> None:
    mistakes: list[str] = []
    assert read_options(line.split(), mistakes) == given
    assert mistakes == []


def test_options_of_which_it_is_not_clear_what_they_mean_are_named_with_what_they_could_be() -> None:
    mistakes: list[str] = []
    assert read_options(["--tim=5", "--hold=x", "--help", "--=3", "--gpus-per=1", "-sx"], mistakes) == {
        "oversubscribe": ""
    }
    assert mistakes == [
        "--tim=5 may be any of --time, --time-min",
        "--hold takes no value: --hold=x",
        "with --help sbatch would run nothing",
        "sbatch knows no option --=3",
        "--gpus-per=1 may be any of --gpus-per-node, --gpus-per-socket, --gpus-per-task",
        "-x needs a value",
    ]


def test_a_value_that_is_missing_in_the_script_is_not_taken_from_the_command_line() -> None:
    with pytest.raises(BadInput, match="--time needs a value"):
        request("#SBATCH --time", options=("--array=0-3",))


@pytest.mark.parametrize(
    ("line", "tasks", "cores"),
    [
        ("-c4", None, 4), ("-n2 -c4", 2, 8), ("--gpus-per-task=2 --gpus=4", 2, 2), ("--ntasks-per-node=2 -c3", 2, 6),
        ("--gpus-per-task=1 -N1", 1, 1), ("-G2 --ntasks-per-gpu=2", 4, 4), ("-G2 --cpus-per-gpu=3", None, 6),
    ],
)  # fmt: skip
def test_tasks_and_cores_follow_from_several_options(line: str, tasks: int | None, cores: int) -> None:
    found = request(f"#SBATCH {line}")
    assert (found.ntasks, found.cores) == (tasks, cores)


def test_a_job_is_exclusive_only_if_nobody_may_share_the_node() -> None:
    assert request("#SBATCH --exclusive").exclusive
    assert not request("#SBATCH --exclusive=user").exclusive
    assert not request().exclusive


def test_an_option_of_the_command_line_may_take_the_place_of_one_that_it_excludes() -> None:
    with pytest.raises(BadInput, match="--mem and --mem-per-cpu exclude each other"):
        request("#SBATCH --mem=1G --mem-per-cpu=1G")
    assert request("#SBATCH --mem-per-cpu=1G", options=("--mem=1G",)).told["SLURM_MEM_PER_NODE"] == "1024"


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        request(
            "#SBATCH --arary=1 --time=x --nodes=2", "#SBATCH --open-mode=x --cpus-per-task=none --array=5-2 nonsense"
        )
    for word in (
        "--arary=1",
        "--time=x",
        "--nodes=2",
        "--open-mode=x",
        "--cpus-per-task=none",
        "--array=5-2",
        "nonsense",
    ):
        assert word in str(refused.value), word


@pytest.mark.parametrize(
    "line",
    [
        "--signal=XX", "--signal=B:", "--gpus-per-node=x", "--time=1:2:3:4", "--array", "--mem=lots", "--comment=don't",
        "--gpus-per-task=1", "--gpus-per-task=1 --gpus-per-node=1", "--gpus-per-task=2 --gpus=3", "--exclusive=x",
        "--gpus-per-task=1 -n2 --gpus=4", "--gres=gpu:2 --gpus=1", "--gpus=3 --gres=gpu:2", "--gpus-per-socket=1",
        "--gpus-per-task=1 -n2 --gres=gpu:3", "--mem=1.5G", "--mem=1GiB", "--mem=-1", "--mem=", "--ntasks=0",
        "--cpus-per-gpu=1 -c1 -G1", "--tim=5",
    ],
)  # fmt: skip
def test_what_sbatch_refuses_is_refused(line: str) -> None:
    with pytest.raises(BadInput):
        request(f"#SBATCH {line}")


@pytest.mark.parametrize("line", ["--gpus=2 --gpus-per-node=1", "-n3 --ntasks-per-node=1", "-N2"])
def test_what_would_take_several_nodes_is_refused_here(line: str) -> None:
    with pytest.raises(BadInput, match="the emulation is one machine") as refused:
        request(f"#SBATCH {line}")
    assert refused.value.why == "only a cluster can do it"


def test_a_script_without_an_interpreter_is_refused_like_by_sbatch() -> None:
    with pytest.raises(BadInput, match="batch script"):
        read_request("echo hello\n")


@pytest.mark.parametrize("template", sorted(path.name for path in TEMPLATES.glob("*.sbatch")))
def test_every_template_can_be_read(template: str) -> None:
    text = (TEMPLATES / template).read_text()
    if template == "multinode.sbatch":
        with pytest.raises(BadInput, match="one machine"):
            read_request(text)
    else:
        assert read_request(text).output
