"""Failures told apart by evidence: what programs really say, how they end, and how long they may be silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.workers import HangTimeout, classify, describe_exit, read_oom_kills

WORDS = Path(__file__).parents[2] / "data" / "engine_words.txt"
ENDS = {
    -9: "worker_died", 137: "worker_died",  # a shell or a container in between
    -15: "terminated", 143: "terminated", -11: "engine_crash", -6: "engine_crash", 139: "engine_crash",
    129: "engine_crash", 128 + 64: "engine_crash", 128: "exit_code", 128 + 65: "exit_code", 1: "exit_code",
    255: "exit_code", 0: "no_output", None: "engine_error",
}  # fmt: skip


def test_what_a_program_said_is_recognised_and_an_end_without_words_speaks_for_itself() -> None:
    for part in WORDS.read_text().split("\n\n")[1:]:
        kind, *said = part.splitlines()
        assert {text: classify(text.replace("⏎", "\n")) for text in said} == dict.fromkeys(said, kind.strip("[]"))
    for text in ("", "Elapsed time = 00:12"):
        assert {exit_code: classify(text, exit_code) for exit_code in ENDS} == ENDS


def test_the_machine_explains_more_than_audio_and_settings_do() -> None:
    assert classify("Could not load recording /a.wav: [Errno 28] No space left on device") == "no_space"
    said = {"std::bad_alloc": "host_memory", "CUDA out of memory": "out_of_memory"}
    assert {text: classify(text, -6) for text in said} == said
    for text in ("Could not load recording /a.wav", "Error: No such option: -x"):  # a signal has other reasons
        assert classify(text, -11) == "engine_crash"
    words = {
        -11: "by SIGSEGV",
        139: "by SIGSEGV",
        163: "by signal 35",
        1: "with exit code 1",
        None: "with exit code None",
    }
    assert {code: describe_exit(code) for code in words} == words


V1 = "10:cpu,cpuacct:/x\n9:memory:/slurm/job_4821\n1:name=systemd:/x\n"


@pytest.mark.parametrize(
    ("cgroup", "file", "kills"),
    [
        ("0::/system.slice/job_4821/step_batch\n", "system.slice/job_4821/step_batch/memory.events", 2),
        (V1, "memory/slurm/job_4821/memory.oom_control", 2),
        ("0::/hidden\n", "elsewhere", None),
        ("", "elsewhere", None),
    ],
)
def test_kills_for_memory_are_counted_by_the_jobs_own_control_group(
    tmp_path: Path, cgroup: str, file: str, kills: int | None
) -> None:
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\nunder_oom 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    if cgroup:
        (tmp_path / "cgroup").write_text(cgroup)
    assert read_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == kills


def test_how_long_a_worker_may_be_silent_follows_from_its_slowest_chunk_and_the_length_of_the_audio() -> None:
    limit = HangTimeout(start_s=100, least_s=10, slowest=2)
    said = []
    for took_s, audio_s in [(None, None), (0.1, None), (3, 30), (1, 30), (60, 30)]:
        if took_s is not None:
            limit.learn(took_s, audio_s)
        said.append([limit.limit_s(length_s) for length_s in (30, 300, None)])
    assert said == [[160, 700, 7300], [10, 10, 10], [60, 600, 60], [60, 600, 60], [1200, 12_000, 1200]]
    assert (HangTimeout().limit_s(None), HangTimeout().start_s, HangTimeout().least_s) == (8100, 900, 120)
