"""The report as one self-contained page: numbers and tables, no network, no script. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from badcjobs import __version__
from badcjobs.report.headlines import VERDICTS, finish_words, headlines
from badcjobs.report.summarize import DeviceSummary, Summary
from badcjobs.report.words import UNKNOWN, duration, energy, memory, number, percent

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2a33; --soft: #5b6b76; --line: #d7dee3; --paper: #fff; --good: #1b7f4b;
        --bad: #b3261e; --wait: #9a6700 }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9ed; --soft: #9db0bc; --line: #33424c; --paper: #151c21;
        --good: #5fd39a; --bad: #ff8a80; --wait: #f0c060 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 88rem;
       margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2rem }
.verdict { font-weight: 600 } .done { color: var(--good) } .failed { color: var(--bad) } .stopped { color: var(--wait) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.5rem }
dt { color: var(--soft) } dd { margin: 0 }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th.text, td.text { text-align: left } td.long { white-space: pre-wrap; text-align: left; max-width: 40rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .6rem .8rem }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem }
@media print { body { margin: 0; max-width: none } }
"""


def page(summary: Summary, title: str) -> str:
    """Return the page."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict {summary.verdict}">{escape(VERDICTS[summary.verdict])}</p>',
        "<dl>" + "".join(f"<dt>{escape(n)}</dt><dd>{escape(w)}</dd>" for n, w in headlines(summary)) + "</dl>",
        *_finish(summary),
        *_section("Tasks", _tasks(summary), empty="None."),
        *_section("Devices", _devices(summary.devices), empty="No device took part."),
        *_section("Gaps in the telemetry", _gaps(summary), empty="None."),
        *_section("What was heard", _labels(summary), empty="Nothing."),
        *_section("Chunks that failed for good", _failed(summary), empty="None."),
        *_section("Files with a remark", _files(summary), empty="None."),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – badcjobs</title><style>{_STYLE}</style></head>\n<body><main>"
        + "\n".join(body)
        + f"</main>\n<footer>Made by badcjobs {__version__}; {UNKNOWN} means that the device did not say."
        "</footer></body></html>\n"
    )


def _finish(summary: Summary) -> Iterable[str]:
    """Yield what is missing or too much, and the commands that finish the job; nothing when there is nothing to say."""
    rows = _strays(summary)
    if len(rows) > 1:
        yield from _section("Rows that do not match", rows, empty="")
    for words, command in finish_words(summary):
        yield f"<p>{escape(words[0].upper() + words[1:])}</p><pre>{escape(command)}</pre>"


def _strays(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("<where", "rows", "<<the first of them")]
    proof = summary.completeness
    if proof is not None and proof.not_listed_examples:
        rows.append(("in the source, in no task", f"{proof.not_listed:,}", "\n".join(proof.not_listed_examples)))
    if proof is not None and proof.strangers_examples:
        rows.append(("in the job, not in the source", f"{proof.strangers:,}", "\n".join(proof.strangers_examples)))
    return rows


def _section(heading: str, rows: list[Sequence[str]], *, empty: str) -> Iterable[str]:
    yield f"<h2>{escape(heading)}</h2>"
    yield _table(rows) if len(rows) > 1 else f"<p>{escape(empty)}</p>"


def _table(rows: list[Sequence[str]]) -> str:
    """Return a table; headings that start with '<' are texts, with '<<' long texts."""
    kinds = ["long" if h.startswith("<<") else "text" if h.startswith("<") else "" for h in rows[0]]
    head = "".join(f'<th class="text" scope="col">{escape(h.lstrip("<"))}</th>' if kind else
                   f'<th scope="col">{escape(h)}</th>' for h, kind in zip(rows[0], kinds, strict=True))  # fmt: skip
    lines = [
        "<tr>" + "".join(f'<td class="{k}">{escape(cell)}</td>' for cell, k in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows[1:]
    ]
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _tasks(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("<task", "<node", "<verdict", "exit code", "devices", "done", "failed", "left", "audio", "wall time"),
    ]
    for t in summary.task_list:
        verdict, exit_code = t.verdict or "running", UNKNOWN if t.exit_code is None else str(t.exit_code)
        counts = (f"{t.devices}", f"{t.done:,}", f"{t.failed:,}", f"{t.pending:,}")
        rows.append((t.name, t.node, verdict, exit_code, *counts, duration(t.audio_s), duration(t.wall_s)))
    return rows


def _devices(devices: Sequence[DeviceSummary]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("<device", "<model", "<task", "samples", "busy", "utilization", "p50", "p95", "max", "memory peak", "hottest",
         "power mean", "energy", "gaps"),
    ]  # fmt: skip
    for d in devices:
        rows.append(
            (
                f"{d.token if d.index is None else d.index}",
                f"{d.name or UNKNOWN} ({d.backend})",
                d.task,
                f"{d.samples:,}",
                percent(d.busy_mean_percent),
                percent(d.utilization_mean_percent),
                percent(d.utilization_p50_percent),
                percent(d.utilization_p95_percent),
                percent(d.utilization_max_percent),
                memory(d.memory_peak_bytes),
                UNKNOWN if d.temperature_max_c is None else f"{d.temperature_max_c} °C",
                UNKNOWN if d.power_mean_w is None else f"{number(d.power_mean_w)} W",
                energy(None if d.energy_j is None else d.energy_j / 3600),
                duration(d.gap_s) if d.gap_s else "none",
            )
        )
    return rows


def _gaps(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("<reason", "<what", "gaps", "time", "tasks")]
    for gap in summary.gaps:
        what = gap.metric or "all readings"
        rows.append((gap.reason, what, f"{gap.gaps:,}", duration(gap.seconds), f"{gap.tasks:,}"))
    return rows


def _labels(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("<label", "<name", "detections")]
    return rows + [(label, name or "", f"{many:,}") for label, name, many in summary.labels]


def _failed(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("<recording", "<chunk", "<state", "tries", "<class", "<<what it said")]
    for c in summary.failed_chunks:
        rows.append((c.recording_id, c.chunk_id, c.status, f"{c.attempts:,}", c.error_class, c.error))
    return rows


def _files(summary: Summary) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("<file", "<<remark")]
    return rows + [(path, reason) for path, reason in summary.file_remarks]
