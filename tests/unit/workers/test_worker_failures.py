"""Failures told apart by evidence: what programs really say, how they end, and how long they may be silent."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.workers import HangTimeout, classify, describe_exit, read_oom_kills

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
ENDS = {
    -9: "worker_died", 137: "worker_died",  # a shell or a container in between
    -15: "terminated", 143: "terminated", -11: "engine_crash", -6: "engine_crash", 139: "engine_crash",
    129: "engine_crash", 128 + 64: "engine_crash", 128: "exit_code", 128 + 65: "exit_code", 1: "exit_code",
    255: "exit_code", 0: "no_output", None: "engine_error",
}  # fmt: skip


def test_what_a_program_said_is_recognised_and_an_end_without_words_speaks_for_itself() -> None:
    assert [(classify(text), text) for _, text in SAID] == SAID
    for text in ("", "Elapsed time = 00:12"):
        assert {exit_code: classify(text, exit_code) for exit_code in ENDS} == ENDS


def test_the_machine_explains_more_than_audio_and_settings_do() -> None:
    assert classify("Could not load recording /a.wav: [Errno 28] No space left on device") == "no_space"
    said = {"std::bad_alloc": "host_memory", "CUDA out of memory": "out_of_memory"}
    assert {text: classify(text, -6) for text in said} == said
    for text in ("Could not load recording /a.wav", "Error: No such option: -x"):  # a signal has other reasons
        assert classify(text, -11) == "engine_crash"
    assert [describe_exit(code) for code in (-11, 139, 128 + 35, 1, None)] == [
        "by SIGSEGV", "by SIGSEGV", "by signal 35", "with exit code 1", "with exit code None",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cgroup", "file", "kills"),
    [
        ("0::/system.slice/job_4821/step_batch\n", "system.slice/job_4821/step_batch/memory.events", 2),
        (
            "10:cpu,cpuacct:/x\n9:memory:/slurm/job_4821\n1:name=systemd:/x\n",
            "memory/slurm/job_4821/memory.oom_control",
            2,
        ),
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


def test_silence_is_measured_by_the_engines_own_rate_and_the_length_of_the_audio() -> None:
    hang_timeout = HangTimeout(start_s=900, least_s=120, slowest=2)
    assert hang_timeout.limit_s(30) == 900 + 60, "nothing is known yet, and its models may be loading"
    hang_timeout.learn(0.3, 30)
    hang_timeout.learn(0.1, 30)
    assert hang_timeout.limit_s(30) == 120, "no silence under two minutes is a hang"
    assert hang_timeout.limit_s(3600) == pytest.approx(20 * 0.01 * 3600)
    hang_timeout.learn(60, 30)
    assert hang_timeout.limit_s(30) == pytest.approx(1200)
    without_lengths = HangTimeout()
    without_lengths.learn(30, None)
    assert without_lengths.limit_s(None) == without_lengths.limit_s(5) == 600
