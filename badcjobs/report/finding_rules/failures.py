"""Chunks that failed, killed the engine or did not fit, and what the failures cost."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from badcjobs.model import NOTE, PROBLEM, WARNING, ErrorFacts, FailedChunk, Finding, JobFacts
from badcjobs.report.finding_rules.device_time import gpu_time, share
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, number, plain

_MOST_CLASSES = 5
_MANY = 0.01  # of the chunks: from here on it is no accident
_COSTLY_S, _COSTLY = 300.0, 0.05  # of GPU time, for tries that failed though their chunks were done in the end
_OOM = "out_of_memory"
_ADVICE = {
    "bad_audio": "These files cannot be read: look at one of them, restore or drop them, then run again.",
    "missing_audio": "These files are missing, or break off: fetch or restore them, then run again.",
    "no_space": "A disk was full: free space (or quota) on the node or in the run folder, then run again.",
    "host_memory": "The node's memory ran out: ask for more, or run fewer workers.",
    "configuration": "The engine cannot work with these settings: check its models and options, then run again.",
    "gpu_error": "CUDA failed on these: if it is always one node, leave it out; if always these chunks, cut them.",
}
_BEYOND = re.compile(
    r" s of audio, and none after [\d.]+ s|ends at [\d.]+ s, so the chunk from "
)  # whoever cuts says so
_ROWS_BEYOND = "bad_audio, a row beyond the end of its file"
_ADVICE[_ROWS_BEYOND] = (
    "The files can be read, but end before these rows do: compare start_ms and end_ms of a row with its file's length;"
    " correct the rows (or restore files that were cut short), then run again."
)
_USUAL = "Read what the engine said; a run tries its failed chunks again."


def judge_failures(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield what failed, by its class."""
    by_class: dict[str, list[FailedChunk]] = defaultdict(list)
    for chunk in facts.failed:
        by_class[_class_of(chunk) if chunk.status == "failed" else "poison"].append(chunk)
    yield from _poison(by_class.pop("poison", []), facts)
    yield from _out_of_memory(by_class.pop(_OOM, []), facts)
    known = sum(map(len, by_class.values()))
    read, total = sum(chunk.status == "failed" for chunk in facts.failed), facts.chunks.get("failed", 0)
    scale = max(1.0, total / read) if read else 1.0  # only the first thousand are read
    for error_class, chunks in sorted(by_class.items(), key=lambda item: -len(item[1]))[:_MOST_CLASSES]:
        yield _failed(error_class, chunks, round(scale * len(chunks)), facts, summary)
    if not known:
        yield from _costly(facts, summary)


def _class_of(chunk: FailedChunk) -> str:
    is_beyond = chunk.error_class == "bad_audio" and _BEYOND.search(chunk.error)
    return _ROWS_BEYOND if is_beyond else chunk.error_class


def _failed(error_class: str, chunks: list[FailedChunk], many: int, facts: JobFacts, summary: Summary) -> Finding:
    cost = f"; failed tries of all kinds took {gpu_time(facts.failed_gpu_s)}" if facts.failed_gpu_s >= 60 else ""
    is_estimate = many > len(chunks) and many != facts.chunks.get("failed")  # there are other classes as well
    about = "About " if is_estimate else ""
    return Finding(
        "failed_chunks", PROBLEM if many > _MANY * summary.chunks else WARNING,
        f"{about}{count(many, 'chunk')} failed for good: {plain(error_class or 'no class')}.",
        (f"{share(many, summary.chunks)} of {count(summary.chunks, 'chunk')}{cost}", _said(chunks[0].error),
         *_some_named(facts)),
        _ADVICE.get(error_class, _USUAL), (), _names(chunks), facts.failed_gpu_s / 3600,
    )  # fmt: skip


def _poison(chunks: list[FailedChunk], facts: JobFacts) -> Iterator[Finding]:
    many = facts.chunks.get("poison", 0)
    if many:
        classes = Counter(chunk.error_class for chunk in chunks)
        how = ", ".join(f"{times} × {plain(name)}" for name, times in classes.most_common(3))
        were = "was" if many == 1 else "were"
        yield Finding(
            "poison_chunks", WARNING, f"{count(many, 'chunk')} took the engine down twice and {were} given up.",
            (f"{many:,} of {count(sum(facts.chunks.values()), 'chunk')}", *([f"how: {how}"] if how else []),
             *_some_named(facts)),
            "Listen to one of these files, or cut it; the next run tries them again.", (), _names(chunks),
        )  # fmt: skip


def _out_of_memory(for_good: list[FailedChunk], facts: JobFacts) -> Iterator[Finding]:
    error = next((error for error in facts.errors if error.error_class == _OOM), None)
    if error is None and not for_good:
        return
    tries = ErrorFacts(_OOM, len(for_good), len(for_good), 0, 0, "") if error is None else error
    limits = [d for d in facts.decisions if d.kind == "memory_limit" and d.value is not None]
    learned = [plain(f"learned: on {d.subject or 'this GPU'}, {number(d.value, 0)} s: {d.reason}") for d in limits]
    shortest_s = min((d.value for d in limits if d.value is not None), default=None)
    shorter = "shorter" if shortest_s is None else f"shorter than {number(shortest_s, 0)} s"
    rescued = f"{tries.rescued:,} of {count(tries.chunks, 'chunk')} done in the end: shorter, or with more room"
    fate = f"{len(for_good):,} failed for good" if for_good else "all were done in the end"
    if not for_good and tries.rescued < tries.chunks:
        fate = f"{tries.chunks - tries.rescued:,} of them not done yet"
    yield Finding(
        _OOM, PROBLEM if for_good else NOTE,
        f"{count(tries.chunks, 'chunk')} did not fit into the memory of the GPU; {fate}.",
        (f"{count(tries.tries, 'try', 'tries')} out of memory", rescued, *learned),
        f"Cut the chunks {shorter}, or use GPUs with more memory; fewer workers on each GPU leave more for each.",
        (), _names(for_good),
    )  # fmt: skip


def _costly(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    gpu_s = facts.failed_gpu_s
    if gpu_s < max(_COSTLY_S, _COSTLY * 3600 * summary.gpu_hours):
        return
    worst = max(facts.errors, key=lambda error: error.tries, default=None)
    if worst is not None and worst.error_class != _OOM:
        yield Finding(
            "failed_chunks", NOTE,
            f"No chunk failed for good, but tries that failed took {share(gpu_s, 3600 * summary.gpu_hours)} of the GPU"
            " time.",
            (
                f"{gpu_time(gpu_s)} of {gpu_time(3600 * summary.gpu_hours)}",
                plain(f"{count(worst.tries, 'try', 'tries')}: {worst.error_class}"), _said(worst.example),
            ),
            _ADVICE.get(worst.error_class, "Read what the engine said; the table attempt has every try."),
            gpu_hours=gpu_s / 3600,
        )  # fmt: skip


def _some_named(facts: JobFacts) -> tuple[str, ...]:
    """Say that there are more than are named here: only the first thousand are read."""
    total, named = facts.chunks.get("failed", 0) + facts.chunks.get("poison", 0), len(facts.failed)
    return (f"of all {total:,} chunks that failed, the first {named:,} are named",) if named < total else ()


def _said(error: str) -> str:
    return plain(f"the engine said: {(error.strip().splitlines() or ['nothing'])[-1][:200]}")


def _names(chunks: list[FailedChunk]) -> tuple[str, ...]:
    return tuple(
        plain(c.recording_id if c.chunk_id == c.recording_id else f"{c.recording_id}/{c.chunk_id}") for c in chunks
    )
