"""The findings on the page: each with its severity, its sentence, what it rests on, and what to do."""

from __future__ import annotations

from html import escape

from badcjobs.model import Finding
from badcjobs.report.headlines import well_words
from badcjobs.report.page_parts import Section, folded, paragraph
from badcjobs.report.summarize import Summary

_FEW = 3


def findings_section(summary: Summary) -> Section:
    """Return what was found, the worst first; that nothing was is said as well."""
    if not summary.findings:
        return Section("findings", "Findings", paragraph(well_words(summary), "well"), 0)
    items = "".join(f"<li>{_finding(finding)}</li>" for finding in summary.findings)
    return Section("findings", "Findings", f'<ul class="findings">{items}</ul>', len(summary.findings))


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(figure)}</li>" for figure in finding.evidence)
    lines = f"<pre>{escape(chr(10).join(finding.lines))}</pre>" if finding.lines else ""
    severity = escape(finding.severity)
    heading = f'<h3><span class="severity">{severity}</span>{escape(finding.sentence)}</h3>'
    return (
        f'<article class="finding {severity}">{heading}'
        f"<ul>{evidence}</ul>{paragraph(finding.advice)}{lines}{_subjects(finding)}</article>"
    )


def _subjects(finding: Finding) -> str:
    if not finding.subjects:
        return ""
    words = paragraph("; ".join(finding.subjects), "quiet")
    many = len(finding.subjects)
    return words if many <= _FEW else folded(f"{many:,} by name", words)
