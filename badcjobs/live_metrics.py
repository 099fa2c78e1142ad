"""A frame of the live view as Prometheus samples, with the same names and meanings as those of a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from badcjobs import __version__
from badcjobs.monitor.frame import DeviceLine, Frame, TaskLine
from badcjobs.report.as_prometheus import device_samples, reading_samples, run_samples, task_samples
from badcjobs.report.metrics import Sample
from badcjobs.report.summarize import Summary


def frame_samples(frame: Frame, run: str, summary: Summary | None = None) -> Iterator[Sample]:
    """Yield the samples of a frame; ``run`` names the run, if it is of one, and ``summary`` has its accounts."""
    yield Sample("badcjobs_info", 1, {"version": __version__})
    for device in frame.devices:
        if device.alive:  # the last reading of a task that has ended is no reading of now
            yield from _readings(device)
    for task in frame.tasks:
        if task.state == "running":  # nor is that of one that went silent
            yield from _host(task)
    if summary is not None:
        for its_device in summary.devices:
            yield from device_samples(its_device)
        for its_task in summary.task_list:
            yield from task_samples(its_task)
        yield from run_samples(summary, run)


def _readings(device: DeviceLine) -> Iterator[Sample]:
    label = device.token if device.index is None else str(device.index)
    labels = {"device": label or "", "uuid": device.uuid or "", "task": device.task or ""}
    yield from reading_samples({**asdict(device.reading), "at_ms": device.read_at_ms}, labels)
    yield Sample("badcjobs_gpu_memory_total_bytes", device.memory_total_bytes, labels)
    yield Sample("badcjobs_gpu_power_limit_watts", device.power_limit_w, labels)


def _host(task: TaskLine) -> Iterator[Sample]:
    yield Sample("badcjobs_host_cpu_percent", task.cpu_percent, {"task": task.name})
    yield Sample("badcjobs_host_memory_used_bytes", task.memory_used_bytes, {"task": task.name})
