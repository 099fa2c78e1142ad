"""Job scripts as sbatch reads them: #SBATCH lines, the command line before them, and mistakes found here already."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from rooms.cluster import EarlySignal, JobRequest, find_srun, parse_array, read_request, read_script
from rooms.root import BadInput

TEMPLATES = Path(__file__).resolve().parents[3] / "templates"


def request(*lines: str, options: tuple[str, ...] = ()) -> JobRequest:
    return read_request("\n".join(["#!/bin/bash", *lines, ""]), options)


def test_options_end_at_the_first_line_that_is_no_comment() -> None:
    found = request("# why", "#SBATCH --time=5", "", "##SBATCH --account=x", "echo hi", "#SBATCH --time=7")
    assert found.time_s == 300
    assert found.ignored == []


def test_several_options_may_share_a_line_and_a_comment_may_follow() -> None:
    found = request("#SBATCH --job-name=probe # a comment", "#SBATCH -c2 --gpus-per-node=2 -a 0-3", "#SBATCH --time 5")
    assert (found.given["job-name"], found.cpus, found.gpus, found.time_s) == ("probe", 2, 2, 300)
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
        ("--gpus-per-task=1 -N1", 1), ("--gpus-per-task=1 --ntasks-per-node=2", 2),
        ("--gpus=2 --gpus-per-node=2", 2), ("--gres=gres:gpu:2", 2), ("--gpus-per-node=0", 0),
    ],
)  # fmt: skip
def test_gpus_are_counted_whichever_option_asks_for_them(line: str, gpus: int) -> None:
    assert request(f"#SBATCH {line}").gpus == gpus


def test_logs_open_modes_and_exports_are_kept() -> None:
    found = request("#SBATCH -o %x-%A_%a.log -e err --open-mode=append --export=ALL,A=1 --no-requeue -D sub")
    assert (found.given["output"], found.given["error"], found.exports) == ("%x-%A_%a.log", "err", {"A": "1"})
    assert (found.given["no-requeue"], found.given["chdir"]) == ("", "sub")


def test_what_only_a_cluster_has_is_named_and_left_alone() -> None:
    found = request("#SBATCH --account=st-x-gpu --mem=16G --constraint=gpu_mem_32", "#SBATCH -p gpu --hold --comment=x")
    assert found.ignored == ["account", "comment", "constraint", "hold", "mem", "partition"]


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("16G", 16384), ("4096", 4096), ("512M", 512), ("1T", 1048576), ("1GB", 1024), ("1gb", 1024), ("1500K", 2),
        ("1KB", 1), ("+1G", 1024), ("0", None), ("0G", None),
    ],
)  # fmt: skip
def test_memory_is_told_in_mebibytes(text: str, mib: int | None) -> None:
    assert request(f"#SBATCH --mem={text}").mem_mib == mib


@pytest.mark.parametrize(
    ("export", "expected"),
    [
        ("ALL", {}),
        ("ALL,OUT=a b,X=", {"OUT": "a b", "X": ""}),
        ("ALL,ARGS='--simulate 2,3',KEEP", {"ARGS": "--simulate 2,3"}),
    ],
)
def test_export_sets_variables(export: str, expected: dict[str, str]) -> None:
    assert request(options=(f"--export={export}",)).exports == expected


@pytest.mark.parametrize(
    ("line", "tasks", "cores"),
    [
        ("-c4", None, 4), ("-n2 -c4", 2, 8), ("--ntasks-per-node=2 -c3", 2, 6), ("-N1", None, 1),
    ],
)  # fmt: skip
def test_tasks_and_cores_follow_from_several_options(line: str, tasks: int | None, cores: int) -> None:
    found = request(f"#SBATCH {line}")
    assert (found.ntasks, found.cores) == (tasks, cores)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        request("#SBATCH --time=x --nodes=2", "#SBATCH --cpus-per-task=none --array=5-2 nonsense")
    for word in ("--time=x", "--nodes=2", "--cpus-per-task=none", "--array=5-2", "nonsense"):
        assert word in str(refused.value), word


@pytest.mark.parametrize(
    "line",
    [
        "--signal=XX", "--signal=B:", "--gpus-per-node=x", "--time=1:2:3:4", "--time", "--comment=don't", "--ntasks=0",
        "--mem=lots", "--mem=1.5G", "--mem=-1",
        "--gpus=2 --gpus-per-node=1", "--gres=gpu:2 --gpus=1", "-N2", "--nodes=2-4", "-Z", "--tiem=5", "--arr=0-4",
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(line: str) -> None:
    with pytest.raises(BadInput):
        request(f"#SBATCH {line}")


@pytest.mark.parametrize("line", ["--exclusive", "--wrap=hostname", "--input=a.txt", "--export=NONE"])
def test_what_would_change_the_work_is_refused_and_not_ignored(line: str) -> None:
    with pytest.raises(BadInput, match="the emulation"):
        request(f"#SBATCH {line}")


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
        assert read_request(text).given["output"]


# --- lines of shell ---------------------------------------------------------------------------------------------------


def test_the_run_folder_of_a_script_is_what_its_badcjobs_gets_or_its_out() -> None:
    text = script_of(
        "RUNS=/scratch/july", ': "${OUT:=out}"', "# badcjobs run no", '$BADCJOBS run "$S" \\', "  --out=$RUNS/a"
    )
    found = read_script(text, "job.sbatch", {"S": "my birds"})
    assert [(call.line, call.values) for call in found.starts] == [(5, {"out": "/scratch/july/a"})]
    assert found.out == "out"
    assert read_script(text, "job.sbatch", {"OUT": "mine"}).out == "mine"
    assert read_script(script_of(r': "${OUT:=/a \}b\"c}"'), "job.sbatch", {}).out == '/a }b"c'


@pytest.mark.parametrize(
    ("line", "calls"), [("srun -n1 x", True), ("X=1 exec srun x", True), ("# srun", False), ('echo "srun"', False)]
)
def test_a_script_that_calls_srun_is_found(line: str, calls: bool) -> None:
    assert find_srun(script_of("echo a", line)) == (3 if calls else None)


def script_of(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])
