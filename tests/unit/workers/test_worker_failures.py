"""Failures told apart by evidence: what programs really say, how they end, and how long they may be silent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, WorkerPlan
from rooms.root import SessionBroken, SubprocessLauncher, SystemClock
from rooms.workers import CommandEngine, EngineStart, HangTimeout, classify, describe_exit, read_oom_kills, signal_of

# Cut from real logs of HawkEars, PyTorch, the NVIDIA driver, Linux and Slurm.
SAID = [
    ("out_of_memory", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total"),
    ("out_of_memory", "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"),
    ("out_of_memory", "RuntimeError: CUDA error: out of memory"),
    ("out_of_memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("out_of_memory", "Failed to load model from /root/data/ckpt/m1.ckpt: CUDA out of memory. Tried to allocate"),
    ("out_of_memory", "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 8.00 GiB."),
    ("gpu_lost", "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system"),
    ("gpu_lost", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."),
    ("gpu_lost", "RuntimeError: CUDA error: no CUDA-capable device is detected"),
    ("gpu_error", "RuntimeError: CUDA error: unspecified launch failure\nCUDA kernel errors might be"),
    ("gpu_error", "RuntimeError: CUDA error: device-side assert triggered"),
    ("gpu_error", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("gpu_error", "RuntimeError: CUDA error: unknown error"),
    ("gpu_error", "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
    ("no_space", "OSError: [Errno 28] No space left on device: '/scratch/x'"),
    ("no_space", "OSError: [Errno 122] Disk quota exceeded"),
    ("no_space", "Exception: Failed to write Audacity labels to /x/a_scores.txt: [Errno 28] No space left on device"),
    ("host_memory", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate\nMemoryError"),
    ("host_memory", "OSError: [Errno 12] Cannot allocate memory"),
    ("host_memory", "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    ("host_memory", "terminate called after throwing an instance of 'std::bad_alloc'"),
    ("host_memory", "slurmstepd: error: Detected 1 oom_kill event in StepId=4821.batch."),
    ("configuration", "Model checkpoint files not found. Run 'hawkears init' to initialize environment."),
    ("configuration", "Exception: Error. No checkpoints found in /data/ckpt"),
    ("configuration", "Error: no checkpoints found in data/ckpt"),
    ("configuration", "Error: location XX-YY not found"),
    ("configuration", "ValueError: No eBird county found for latitude=0.0, longitude=0.0."),
    ("configuration", "Error: no eBird county found matching given region"),
    ("configuration", "Error: No such option: --loudly"),
    ("configuration", "Error: Invalid value for '--threads': 'x' is not a valid integer."),
    ("configuration", "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'"),
    ("configuration", "analyze.py: error: unrecognized arguments: --loudly"),
    (
        "bad_audio",
        "Caught exception in audio load of /a.wav: [Errno 1094995529] Invalid data found when processing input",
    ),
    ("bad_audio", 'britekit.core.exceptions.InferenceError: Could not load recording "/a.wav": No audio samples found'),
    ("bad_audio", 'britekit.core.exceptions.InferenceError: Recording "/a.wav" not found'),
    ("bad_audio", "No predictions generated for /a.wav (length=0.00 seconds, audio_error=Invalid data)"),
    ("bad_audio", "soundfile.LibsndfileError: Error opening '/x/a.flac': Format not recognised."),
    ("bad_audio", "wave.Error: file does not start with RIFF id"),
    ("engine_error", "RuntimeError: Given groups=1, weight of size [32, 1, 3, 3], expected input to have 1 channels"),
    ("engine_error", "No predictions generated for /a.wav (length=0.30 seconds, audio_error=None)"),
]


@pytest.mark.parametrize(("error_class", "text"), SAID)
def test_what_a_program_said_is_recognised(error_class: str, text: str) -> None:
    assert classify(text) == error_class


@pytest.mark.parametrize(
    ("exit_code", "error_class"),
    [
        (-9, "worker_died"),
        (-15, "terminated"),
        (-11, "engine_crash"),
        (-6, "engine_crash"),
        (-7, "engine_crash"),
        (137, "worker_died"),  # a shell or a container in between
        (139, "engine_crash"),
        (143, "terminated"),
        (1, "exit_code"),
        (255, "exit_code"),
        (0, "no_output"),
    ],
)
def test_an_end_without_words_speaks_for_itself(exit_code: int, error_class: str) -> None:
    assert classify("", exit_code) == error_class
    assert classify("Elapsed time = 00:12", exit_code) == error_class


def test_a_signal_is_explained_by_the_machine_but_not_by_audio_or_settings() -> None:
    assert classify("std::bad_alloc", -6) == "host_memory"
    assert classify("CUDA out of memory", -6) == "out_of_memory"
    assert classify("Could not load recording /a.wav", -11) == "engine_crash"
    assert classify("Error: No such option: -x", -11) == "engine_crash"


def test_a_full_disk_explains_bad_audio_and_not_the_other_way_round() -> None:
    assert classify("Could not load recording /a.wav: [Errno 28] No space left on device") == "no_space"


def test_signals_have_names() -> None:
    assert (signal_of(-11), signal_of(139), signal_of(1), signal_of(None), signal_of(255)) == (11, 11, 0, 0, 0)
    assert (describe_exit(-11), describe_exit(128 + 35)) == ("by SIGSEGV", "by signal 35")


# --- killed for memory ------------------------------------------------------------------------------------------------


def test_kills_for_memory_are_counted_by_the_jobs_own_control_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/system.slice/job_4821/step_batch\n")
    group = tmp_path / "fs" / "system.slice" / "job_4821" / "step_batch"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert read_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 2


def test_the_first_version_of_control_groups_counts_as_well(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("10:cpu,cpuacct:/x\n9:memory:/slurm/uid_7/job_4821\n1:name=systemd:/x\n")
    group = tmp_path / "fs" / "memory" / "slurm" / "uid_7" / "job_4821"
    group.mkdir(parents=True)
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert read_oom_kills(tmp_path / "cgroup", tmp_path / "fs") == 1


def test_where_nobody_counts_it_is_not_known(tmp_path: Path) -> None:
    assert read_oom_kills(tmp_path / "gone", tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/hidden\n")
    assert read_oom_kills(tmp_path / "cgroup", tmp_path) is None


# --- silence ----------------------------------------------------------------------------------------------------------


def test_silence_is_measured_by_the_engines_own_rate_and_the_length_of_the_audio() -> None:
    hang_timeout = HangTimeout(start_s=900, least_s=120, slowest=2)
    assert hang_timeout.limit_s(30) == 900 + 60, "nothing is known yet, and its models may be loading"
    hang_timeout.learn(0.3, 30)
    hang_timeout.learn(0.1, 30)
    assert hang_timeout.limit_s(30) == 120, "no silence under two minutes is a hang"
    assert hang_timeout.limit_s(3600) == pytest.approx(20 * 0.01 * 3600)
    hang_timeout.learn(60, 30)
    assert hang_timeout.limit_s(30) == pytest.approx(1200)


def test_without_a_length_the_slowest_chunk_is_the_measure() -> None:
    hang_timeout = HangTimeout()
    hang_timeout.learn(30, None)
    assert hang_timeout.limit_s(None) == 600
    assert hang_timeout.limit_s(5) == 600


def run_command(folder: Path, program: str) -> list[str | None]:
    start = EngineStart((), {"PATH": os.environ["PATH"]}, SubprocessLauncher("test"), SystemClock())
    hang_timeout = HangTimeout(start_s=0.3, least_s=0.3, slowest=0.0)
    engine = CommandEngine(start, f"sh -c '{program}' {{input}} {{output}}", hang_timeout)
    session = engine.open(WorkerPlan(0, None, None, 1), folder)
    try:
        news = list(session.process([Chunk("r", "c", "a.wav", "/a.wav", 0, 1000)]))
    finally:
        session.close()
    return [one.error_class for one in news if isinstance(one, ChunkResult)]


def test_a_program_that_is_silent_for_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(SessionBroken, match="no output from the program") as broken:
        run_command(tmp_path, "sleep 600")
    assert broken.value.error_class == "hang"


def test_a_program_that_says_something_is_waited_for(tmp_path: Path) -> None:
    talk = "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.1; done"
    assert run_command(tmp_path, talk) == ["no_output"]
