"""Work that was done by the CPU although there were GPUs: the engine says so, or the GPUs do."""

from __future__ import annotations

from collections.abc import Iterator

from badcjobs.model import NOTE, PROBLEM, WARNING, DeviceFacts, Finding, JobFacts, TaskFacts
from badcjobs.report.cards import cards
from badcjobs.report.finding_rules.device_time import busy_share, each_once, gpu_time, labels, share, total_s
from badcjobs.report.words import count, memory, number, plain

_NEVER_BUSY = 0.01
_LEAST_CHUNKS, _LEAST_S = 3, 60.0
_CONTEXT_BYTES = 100 * 2**20  # CUDA alone takes more than that on any card
_EMPTY_BYTES = 2**30  # what a driver shows as used on a card that nobody uses is less


def never_worked(device: DeviceFacts) -> bool:
    """Say whether chunks were done in the name of a device that did nothing for them.

    The plain utilization reads 0 at light load, so the memory has to say it, too: it never rose.
    """
    working = device.states.get("working")
    held = device.metrics.get("memory_used_bytes")
    if working is None or working.total_s < _LEAST_S or device.work.done < _LEAST_CHUNKS or held is None:
        return False
    busy = busy_share([device])
    was_empty = held.maximum < _EMPTY_BYTES and held.maximum - held.minimum < _CONTEXT_BYTES
    return busy is not None and busy < _NEVER_BUSY and was_empty


def judge_cpu(facts: JobFacts) -> Iterator[Finding]:
    """Yield what was not done on a GPU; where --cpu-workers was asked for, that is as somebody wanted it."""
    idle = [device for device in facts.devices if never_worked(device)]
    if idle:
        yield _silent(idle)
    for error in facts.errors:
        if error.error_class == "ran_on_cpu":
            yield Finding(
                "ran_on_cpu",
                PROBLEM,
                f"The engine could not use {count(error.devices, 'GPU')} and turned to the CPU: these workers ended.",
                (f"{count(error.tries, 'try', 'tries')} there", _said(error.example)),
                "Look why CUDA does not work there: the driver, the module, a container without --nv.",
                ("badcjobs check", "nvidia-smi"),
            )  # fmt: skip
    tasks = [task for task in facts.tasks if task.engine and not task.devices and task.done]
    if facts.cpu_tries and tasks and not any(task.devices for task in facts.tasks):
        yield from _all_on_cpu(tasks, facts)
    elif facts.cpu_tries and tasks and any(task.devices for task in facts.tasks):
        yield Finding(
            "ran_on_cpu", WARNING, f"{count(len(tasks), 'task')} had no GPU and worked on the CPU.",
            (
                f"{count(facts.cpu_tries, 'chunk')}, {number(facts.cpu_audio_s / 3600, 1)} hours of audio on the CPU",
                f"{len(tasks):,} of {count(len(facts.tasks), 'task')} without a GPU",
            ),
            "Ask Slurm for a GPU in every task; without --cpu-workers such a task ends at once instead.",
            ("#SBATCH --gpus-per-node=1",), each_once(task.name for task in tasks),
        )  # fmt: skip


def _all_on_cpu(tasks: list[TaskFacts], facts: JobFacts) -> Iterator[Finding]:
    if facts.last_settings.get("cpu_workers"):
        return  # --cpu-workers: it is as somebody wanted it
    yield Finding(
        "ran_on_cpu", NOTE, f"No GPU was used: {count(facts.cpu_tries, 'chunk')} on the CPU.",
        (
            f"{number(facts.cpu_audio_s / 3600, 1)} hours of audio, in {count(len(tasks), 'task')}",
            f"{count(sum(task.workers or 0 for task in tasks), 'worker')} planned, none on a GPU",
        ),
        "Where there are GPUs, ask for one in every task: the engine is many times as fast there.",
        ("#SBATCH --gpus-per-node=1",), each_once(task.name for task in tasks),
    )  # fmt: skip


def _silent(devices: list[DeviceFacts]) -> Finding:
    done, gpu_s = sum(device.work.done for device in devices), sum(total_s(device) for device in devices)
    rise = max(d.metrics["memory_used_bytes"].maximum - d.metrics["memory_used_bytes"].minimum for d in devices)
    return Finding(
        "ran_on_cpu", PROBLEM, f"The engine never used {count(cards(devices), 'GPU')} that its workers were given.",
        (
            f"{count(done, 'chunk')} done in {gpu_time(gpu_s)}, the GPUs busy {share(busy_share(devices) or 0.0, 1.0)}",
            f"their memory never rose by more than {memory(round(rise))}",
        ),
        "The program runs on the CPU: install it with CUDA, and give it the device it is shown (CUDA_VISIBLE_DEVICES).",
        ("badcjobs check",), labels(devices),
    )  # fmt: skip


def _said(example: str) -> str:
    return plain(f"it said: {(example.strip().splitlines() or ['nothing'])[-1][:200]}")
