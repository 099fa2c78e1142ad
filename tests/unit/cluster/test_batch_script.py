"""Job scripts: their ``#SBATCH`` lines, and how they call badcjobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.cluster import BatchScript, parse_memory, parse_signal, read_script
from rooms.planning import PreflightFacts, check_script
from rooms.root import folder

SOCKEYE = """#!/bin/bash
#SBATCH --account=st-lab-1-gpu --array=0-99%10
#SBATCH --gpus-per-node=4 -c 24   # all of a node
#SBATCH --mem=64G -t 3-00:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
#SBATCH --output=/scratch/st-lab-1/%x-%A_%a.out

module load gcc cuda/11.8
: "${SOURCE:=manifest.csv}"
: "${OUT:=/scratch/st-lab-1/july}"
HK=/scratch/st-lab-1/hawkears
ARGS=(
    --workers-per-gpu auto # as many as pay
    --hawkears-root "$HK/root"
)
exec "$BADCJOBS" run "$SOURCE" --out "$OUT" \\
    "${ARGS[@]}" --config=run.grace_s=12
"""


def facts(text: str, **environ: str) -> BatchScript:
    return read_script(text, "job.sbatch", environ)


def script(*lines: str) -> str:
    return "\n".join(["#!/bin/bash", *lines, ""])


def test_a_whole_script_is_understood() -> None:
    found = read_script(SOCKEYE, "job.sbatch", {})
    asked = found.asked
    assert (asked.tasks, asked.last_index, asked.gpus_per_task, asked.cpus) == (100, 99, 4, 24)
    assert (asked.memory_gb_per_node, asked.time_s, asked.account) == (64, 72 * 3600, "st-lab-1-gpu")
    assert found.signal == parse_signal("B:USR1@180")
    assert found.options["open-mode"] == "append"
    assert found.modules == ("gcc", "cuda/11.8")
    assert found.options["output"] == "/scratch/st-lab-1/%x-%A_%a.out"
    assert found.mistakes == ()
    start = found.start
    assert start is not None
    assert (start.line, start.by_exec, start.by_srun) == (17, True, False)
    assert start.values["out"] == "/scratch/st-lab-1/july"
    assert start.values["hawkears_root"] == "/scratch/st-lab-1/hawkears/root"
    assert start.values["config"] == ["run.grace_s=12"]


def test_a_variable_of_the_environment_goes_before_a_default_and_what_is_unknown_stays_unknown() -> None:
    start = facts(SOCKEYE, OUT="/scratch/other").start
    assert start is not None
    assert start.values["out"] == "/scratch/other"
    start = facts(script("exec badcjobs run m.csv --out $WHERE/x --engine demo")).start
    assert start is not None
    assert start.values == {"engine": "demo"}


@pytest.mark.parametrize(
    ("line", "by_exec", "by_srun"),
    [
        ("badcjobs run m.csv --out o", False, False),
        ("exec badcjobs run m.csv --out o", True, False),
        ("exec /opt/venv/bin/badcjobs run m.csv", True, False),
        ("exec python -m badcjobs run m.csv", True, False),
        ('exec "${BADCJOBS}" run m.csv', True, False),
        ("exec srun --ntasks-per-node=1 badcjobs run m.csv", True, True),
        ("srun badcjobs run m.csv", False, True),
        ("OMP_NUM_THREADS=2 exec badcjobs run m.csv", True, False),
        ("exec apptainer exec --nv image.sif badcjobs run m.csv", True, False),
        ("apptainer exec --nv image.sif badcjobs run m.csv", False, False),
        ("source venv/bin/activate && exec badcjobs run m.csv", True, False),
        ("cd x; badcjobs run m.csv", False, False),
        ("exec badcjobs run m.csv > log 2>&1", True, False),
        ('CMD=(badcjobs run "a b.csv" --out o)\nexec "${CMD[@]}"', True, False),
        ("if true; then exec badcjobs run m.csv; fi", True, False),
        ("exec timeout 3h badcjobs --debug run m.csv", True, False),
    ],
)
def test_how_badcjobs_is_started_is_seen(line: str, by_exec: bool, by_srun: bool) -> None:
    start = facts(script(line)).start
    assert start is not None
    assert (start.by_exec, start.by_srun) == (by_exec, by_srun)


@pytest.mark.parametrize(
    "line",
    [
        "# exec badcjobs run m.csv", "echo badcjobs run m.csv", "true # badcjobs run", "ls", "MSG='badcjobs run'",
        "cat > next.sh <<EOF\nexec badcjobs run m.csv\nEOF",
    ],
)  # fmt: skip
def test_a_line_that_only_speaks_of_it_starts_nothing(line: str) -> None:
    assert facts(script(line)).start is None


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("--gres=gpu:v100:2", "gpus_per_task", 2),
        ("--gpus=v100:1,a100:2", "gpus_per_task", 3),
        ("-N 2 --gpus-per-node=4", "gpus_per_task", 8),
        ("-N 2 --gpus-per-node=4", "gpus_per_node", 4),
        ("-N 2 --gres=gpu:4", "gpus_per_task", 8),
        ("-N 2 --gpus=5", "gpus_per_task", 5),
        ("-N 2 --gpus=5", "gpus_per_node", 3),  # 3 and 2
        ("--gpus=8", "gpus_per_node", None),  # on as many nodes as it takes
        ("-N2 --ntasks-per-node=4 --gpus-per-task=1", "gpus_per_task", 8),
        ("-N2 --ntasks-per-node=4 --gpus-per-task=1", "gpus_per_node", 4),
        ("-n 1 --gpus-per-task=2", "gpus_per_node", 2),
        ("--exclusive", "gpus_per_task", None),  # a whole node comes with its GPUs
        ("--gres=tmp:10G --gpus=2", "gpus_per_task", 2),
        ("--nodes=2", "nodes", 2),
        ("--nodes=2-4", "nodes", 2),
        ("-N2 --ntasks-per-node=2 -c 6", "cpus_per_node", 12),
        ("-N2 --ntasks-per-node=2 -c 6", "cpus", 24),
        ("-N2 -n4 -c 6", "cpus_per_node", 12),
        ("-n 48 -c 1", "cpus_per_node", 1),  # Slurm may part them
        ("-n 48 -c 1", "cpus", 48),
        ("-N2 --mem=16G", "memory_gb_per_node", 16),
        ("-N2 --gpus-per-node=4 --mem-per-gpu=4G", "memory_gb_per_node", 16),
        ("--mem-per-gpu=8G --gpus=2", "memory_gb_per_node", 16),
        ("--mem-per-cpu=2000M -c 4", "memory_gb_per_node", 7.8125),
        ("--mem=0", "memory_gb_per_node", 0),
        ("--array=1,3,7-9", "tasks", 5),
        ("--array=10-100:10", "last_index", 100),
        ("-t 90", "time_s", 5400),
        ("--time=UNLIMITED", "time_s", None),
        ("--time=UNLIMITED", "no_time_limit", True),
        ("--time=0", "no_time_limit", True),
        ("-t -1", "no_time_limit", True),
        ("-t infinite", "no_time_limit", True),
        ("--time=60", "no_time_limit", False),
        ("--mem=1G", "no_time_limit", False),  # not said is not unlimited
        ("-Ast-x-1", "account", "st-x-1"),
    ],
)
def test_each_way_to_ask_is_understood(option: str, field: str, value: object) -> None:
    asked = facts(script(f"#SBATCH {option}")).asked
    assert getattr(asked, field) == value


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("#SBATCH --time=1:00\nexec badcjobs run x\n", "#!"),
        ("#!/bin/bash\r\nexec badcjobs run x\r\n", "Windows"),
        (script("#SBATCH --gpus-pernode=4"), "--gpus-pernode=4"),
        (script("#SBATCH --time=noon"), "--time=noon"),
        (script("#SBATCH --array=9-0"), "--array=9-0"),
        (script("#SBATCH --signal=B:BIRD@60"), "--signal=B:BIRD@60"),
        (script("#SBATCH --mem=lots"), "--mem=lots"),
        (script("#SBATCH --gpus-per-task=1"), "--gpus-per-task=1 needs --ntasks"),
        (script("#SBATCH --job-name='x"), "quotation"),
    ],
)
def test_what_sbatch_would_refuse_is_named(text: str, word: str) -> None:
    assert any(word in mistake.text and mistake.fix for mistake in facts(text).mistakes)


def test_options_behind_the_first_command_are_found() -> None:
    found = facts(script("#SBATCH --mem=1G", "cd /x", "#SBATCH --open-mode=append", "#SBATCH --nice"))
    (late,) = found.mistakes
    assert late.text.startswith(" line 4, 5: sbatch ignores #SBATCH after the first command")
    assert late.fix.startswith("sed -i -e '4d;5d' -e '1a #SBATCH --open-mode=append' -e '1a #SBATCH --nice' job.sbatch")
    assert "open-mode" not in found.options


@pytest.mark.parametrize(
    ("line", "keeper", "without"),
    [
        ("exec badcjobs run m.csv", None, ""),
        ("exec nice -n 5 env A=1 badcjobs run m.csv", None, ""),
        ("exec timeout -k 5 100 badcjobs run 'a b.csv'", "timeout", "exec badcjobs run 'a b.csv'"),
        ("timeout 100 badcjobs run m.csv", "timeout", "exec badcjobs run m.csv"),
        ("exec timeout -s USR1 100 badcjobs run m.csv", None, ""),  # that one it hands on
        ("srun timeout 9 badcjobs run m.csv", "timeout", "srun badcjobs run m.csv"),
        ("exec timeout 9 apptainer exec x.sif badcjobs run m", "timeout", "exec apptainer exec x.sif badcjobs run m"),
        ("exec /usr/bin/time -v badcjobs run m.csv", "time", "exec badcjobs run m.csv"),
        ("exec conda run -n birds badcjobs run m.csv", "conda", "exec badcjobs run m.csv"),
        ("exec setsid badcjobs run m.csv", "setsid", "exec badcjobs run m.csv"),
    ],
)
def test_a_program_that_keeps_signals_to_itself_is_found_with_the_line_without_it(
    line: str, keeper: str | None, without: str
) -> None:
    found = facts(script(line))
    assert found.start is not None
    assert found.start.keeper == keeper
    said = [one for one in check_script(PreflightFacts(script=found, start=found.start)) if "behind" in one.text]
    assert [(one.severity, (one.fix or "").partition("   (")[0]) for one in said] == (
        [] if keeper is None else [("warning", without)]
    )


@pytest.mark.parametrize(
    ("line", "gpus"),
    [
        ("exec badcjobs run m.csv", 0),
        ("exec badcjobs run m.csv --cpu-workers 2", None),
        ("exec badcjobs run m.csv --simulate=2", 0),  # which stand in for GPUs that are granted
        ("exec badcjobs merge out", None),
    ],
)
def test_no_gpu_is_asked_for_only_where_one_would_be_missed(line: str, gpus: int | None) -> None:
    assert read_script(script(line), "job.sbatch", {}).asked.gpus_per_task == gpus


@pytest.mark.parametrize(
    ("text", "gb"), [("16G", 16), ("512", 0.5), ("1024K", 2**-10), ("1T", 1024), ("2gb", 2), ("0", 0)]
)
def test_sizes_are_read_as_sbatch_reads_them(text: str, gb: float) -> None:
    assert parse_memory(text) == gb * 1024


@pytest.mark.parametrize("path", sorted(folder("templates").glob("*.sbatch")), ids=lambda path: path.name)
def test_our_own_templates_are_as_the_preflight_wants_them(path: Path) -> None:
    found = facts(path.read_text())
    assert found.calls
    assert [
        one
        for one in check_script(PreflightFacts(found.asked, script=found, start=found.start))
        if one.severity != "fine"
    ] == []
