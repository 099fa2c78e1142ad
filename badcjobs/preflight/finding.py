"""What a preflight finds: how bad it is, one sentence with the numbers, and the line that fixes it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

PROBLEM, WARNING, FINE = "problem", "warning", "fine"
SEVERITIES = (PROBLEM, WARNING, FINE)
_COLUMNS = 100
_INDENT = 26


@dataclass(frozen=True, slots=True)
class Finding:
    """One judgement; a problem and a warning always come with a fix."""

    severity: str
    subject: str  # a word or two to look for: out, array, GPU-hours
    text: str
    fix: str | None = None
    details: tuple[str, ...] = ()  # one line each, where the sentence counts several things


def problem(subject: str, text: str, fix: str, details: Sequence[str] = ()) -> Finding:
    """Say that the job would fail or be refused."""
    return Finding(PROBLEM, subject, text, fix, tuple(details))


def warning(subject: str, text: str, fix: str, details: Sequence[str] = ()) -> Finding:
    """Say that the job would run, but worse or dearer than it could."""
    return Finding(WARNING, subject, text, fix, tuple(details))


def fine(subject: str, text: str) -> Finding:
    """Say what was looked at and is as it should be."""
    return Finding(FINE, subject, text)


def headline(findings: Sequence[Finding]) -> str:
    """Return the verdict in one line."""
    problems, warnings = (sum(one.severity == kind for one in findings) for kind in (PROBLEM, WARNING))
    counted = [f"{many} {word}{'' if many == 1 else 's'}" for many, word in ((problems, PROBLEM), (warnings, WARNING))]
    return f"{' and '.join(counted)}: " + ("not ready" if problems else "ready to submit")


def findings_text(findings: Sequence[Finding]) -> str:
    """Return all findings for people, the worst first; sentences are folded, lines to paste are not."""
    lines = [headline(findings), ""]
    for one in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        label = f"  {one.severity:<8} {one.subject}"
        wrapped = textwrap.wrap(_plain(one.text), _COLUMNS - _INDENT, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{label:<{_INDENT - 1}} {wrapped[0]}")
        lines += [" " * _INDENT + line for line in wrapped[1:]]
        lines += [" " * _INDENT + _plain(detail) for detail in one.details]
        if one.fix:
            lines.append(f"{'try: ':>{_INDENT}}{_plain(one.fix)}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Keep control characters of a file's name away from the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
