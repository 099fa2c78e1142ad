"""The remarks of ``check`` and ``plan``, each with the line that fixes it, and their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from badcjobs.masking import mask
from badcjobs.report.rules import NOTE, PROBLEM, WARNING
from badcjobs.report.tables import WIDTH
from badcjobs.report.text import wrap
from badcjobs.words import count, plain

FINE = "fine"
SEVERITIES = (PROBLEM, WARNING, NOTE, FINE)
_INDENT = 26
_DETAILS = 1000  # lines of a remark: each file without audio is named


@dataclass
class Remark:
    """One remark; a problem (the job would fail or be refused) and a warning always come with a fix."""

    severity: str
    subject: str  # one or two words: out, array, GPU-hours
    text: str
    fix: str | None = None
    details: Sequence[str] = ()  # one line each, if the text counts several things
    checked: bool = True  # False: something about the subject could not be checked; the text says so

    def __post_init__(self) -> None:
        """Hide secrets, and what would steer a terminal: a remark may quote a line of a script."""
        self.text = plain(mask(self.text))
        self.fix = self.fix and plain(mask(self.fix))

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON document."""
        document = asdict(self)
        del document["checked"]
        return document


problem = partial(Remark, PROBLEM)
warning = partial(Remark, WARNING)
note = partial(Remark, NOTE)
fine = partial(Remark, FINE)


def remarks_text(remarks: Sequence[Remark], width: int = WIDTH) -> str:
    """Return the verdict and all remarks as text, the worst first; sentences are wrapped, lines to paste are not."""
    severities = Counter(remark.severity for remark in remarks)
    problems = severities[PROBLEM]
    verdict = "not ready" if problems else "ready"
    unchecked = not_checked(remarks)
    if unchecked:
        verdict += f"; not checked: {', '.join(unchecked)}"
    lines = [f"{count(problems, PROBLEM)} and {count(severities[WARNING], WARNING)}: {verdict}", ""]
    for remark in worst_first(remarks):
        lines += folded(f"{remark.severity:<8} {remark.subject}", remark.text, _INDENT, width)
        lines += below(remark, _INDENT)
    return "\n".join(lines)


def not_checked(remarks: Iterable[Remark]) -> list[str]:
    """Return the subjects that could not be checked."""
    return list(dict.fromkeys(remark.subject for remark in remarks if not remark.checked))


def worst_first(remarks: Iterable[Remark]) -> list[Remark]:
    """Return the remarks by severity."""
    return sorted(remarks, key=lambda remark: SEVERITIES.index(remark.severity))


def folded(
    label: str,
    text: str,
    indent: int,
    width: int = WIDTH,
) -> list[str]:
    """Return a label and a text beside it, wrapped to the width."""
    head = f"  {label}"
    return wrap(f"{head:<{indent - 1}} {text}", indent=indent, width=width)


def below(remark: Remark, indent: int) -> list[str]:
    """Return the details of a remark and its fix, each on a line of its own; after some, how to list all."""
    margin = " " * indent
    lines = [f"{margin}{plain(detail)}" for detail in remark.details[:_DETAILS]]
    hidden = len(remark.details) - _DETAILS
    if hidden > 0:
        lines.append(f"{margin}… and {hidden:,} more; --json lists all of them")
    if remark.fix:
        lines.append(f"{'try: ':>{indent}}{remark.fix}")
    return lines
