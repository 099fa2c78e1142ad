"""The remarks of ``check`` and ``plan``, each with the line that fixes it, and the form of the rules behind them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from badcjobs.masking import mask
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, say
from badcjobs.report.words import count, plain

FINE = "fine"
SEVERITIES = (PROBLEM, WARNING, NOTE, FINE)
Cases = Iterable[Mapping[str, Any]]  # values by name, for each case
_COLUMNS = 100
_INDENT = 26
_DETAILS = 1000  # lines of a remark: each file without audio is named


@dataclass(frozen=True, slots=True)
class Remark:
    """One remark; a problem (the job would fail or be refused) and a warning always come with a fix."""

    severity: str
    subject: str  # one or two words: out, array, GPU-hours
    text: str
    fix: str | None = None
    details: tuple[str, ...] = ()  # one line each, if the text counts several things

    def __post_init__(self) -> None:
        """Hide secrets: a remark may quote a line of a script."""
        object.__setattr__(self, "text", mask(self.text))
        object.__setattr__(self, "fix", self.fix and mask(self.fix))


problem, warning, fine = partial(Remark, PROBLEM), partial(Remark, WARNING), partial(Remark, FINE)
RuleSet = Callable[[Any], Iterator[Remark]]


@dataclass(frozen=True, slots=True)
class Advice:
    """A remark that is made if ``when`` holds; severity and texts are templates, filled with facts; see ``say``."""

    severity: str
    says: str
    fix: str | None = None
    when: str | Callable[[Any], object] = lambda _facts: True  # an attribute that must be set, or a function

    def holds(self, facts: object) -> object:
        """Say whether the remark is to be made."""
        return attrgetter(self.when)(facts) if isinstance(self.when, str) else self.when(facts)


problem_if, warning_if, note_if, fine_if = (partial(Advice, one) for one in SEVERITIES)


def rules(subject: str, cases: Callable[[Any], Cases] = lambda _facts: ({},)) -> Callable[..., RuleSet]:
    """Return a function that makes a rule set of rows: for each case the first row that holds counts.

    A case holds what the rows need besides the facts; its ``details`` are copied into the remark.
    """

    def of_rows(*rows: Advice) -> RuleSet:
        def apply(facts: Any) -> Iterator[Remark]:
            for case in cases(facts):
                known = {**vars(facts), **case}
                found = SimpleNamespace(**known)
                row = next((one for one in rows if one.holds(found)), None)
                if row is not None:
                    fix = None if row.fix is None else say(row.fix, known) or None
                    severity, about, text = (say(part, known) for part in (row.severity, subject, row.says))
                    yield Remark(severity, about, text, fix, tuple(known.get("details", ())))

        return apply

    return of_rows


def apply_rules(rule_sets: Iterable[RuleSet], facts: object) -> Iterator[Remark]:
    """Yield the remarks of all rule sets; ``facts`` is any object whose attributes the rows name."""
    for rule_set in rule_sets:
        yield from rule_set(facts)


def remarks_text(remarks: Sequence[Remark]) -> str:
    """Return the verdict and all remarks as text, the worst first; sentences are wrapped, lines to paste are not."""
    problems, warnings = (sum(one.severity == kind for one in remarks) for kind in (PROBLEM, WARNING))
    verdict = "not ready" if problems else "ready to submit"
    unknown = f"; not checked: {', '.join(subjects)}" if (subjects := not_checked(remarks)) else ""
    lines = [f"{count(problems, PROBLEM)} and {count(warnings, WARNING)}: {verdict}{unknown}", ""]
    for one in worst_first(remarks):
        lines += folded(f"{one.severity:<8} {one.subject}", one.text, _INDENT)
        lines += below(one, _INDENT)
    return "\n".join(lines)


def not_checked(remarks: Iterable[Remark]) -> list[str]:
    """Return the subjects that could not be checked: their remarks say so."""
    return list(dict.fromkeys(one.subject for one in remarks if "not checked" in one.text))


def worst_first(remarks: Iterable[Remark]) -> list[Remark]:
    """Return the remarks by severity."""
    return sorted(remarks, key=lambda remark: SEVERITIES.index(remark.severity))


def folded(label: str, text: str, indent: int) -> list[str]:
    """Return a label and a text beside it, wrapped to the width of a terminal."""
    lines = textwrap.wrap(plain(text), _COLUMNS - indent, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{f'  {label}':<{indent - 1}} {lines[0]}", *(" " * indent + line for line in lines[1:])]


def below(remark: Remark, indent: int) -> list[str]:
    """Return the details of a remark and its fix, each on a line of its own; after some, how to list all."""
    shown, more = remark.details[:_DETAILS], len(remark.details) - _DETAILS
    lines = [" " * indent + plain(detail) for detail in shown]
    lines += [" " * indent + f"… and {more:,} more; --json lists all of them"] if more > 0 else []
    return [*lines, f"{'try: ':>{indent}}{plain(remark.fix)}"] if remark.fix else lines
