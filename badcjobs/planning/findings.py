"""The remarks of ``check`` and ``plan``, each with the line that fixes it, and the form of the rules behind them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from badcjobs.masking import mask
from badcjobs.report.rules import NOTE, PROBLEM, WARNING, say
from badcjobs.report.tables import WIDTH
from badcjobs.words import count, plain

FINE = "fine"
SEVERITIES = (PROBLEM, WARNING, NOTE, FINE)
Cases = Iterable[Mapping[str, Any]]  # values by name, for each case
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
    checked: bool = True  # False: something about the subject could not be checked; the text says so

    def __post_init__(self) -> None:
        """Hide secrets: a remark may quote a line of a script."""
        object.__setattr__(self, "text", mask(self.text))
        object.__setattr__(self, "fix", self.fix and mask(self.fix))

    def to_dict(self) -> dict[str, Any]:
        """Return it for a JSON document."""
        document = asdict(self)
        del document["checked"]
        return document


problem, warning, fine = partial(Remark, PROBLEM), partial(Remark, WARNING), partial(Remark, FINE)
RuleSet = Callable[[Any], Iterator[Remark]]


@dataclass(frozen=True, slots=True)
class Advice:
    """A remark that is made if ``when`` holds; severity and texts are templates, filled with facts; see ``say``."""

    severity: str
    says: str
    fix: str | None = None
    when: str | Callable[[Any], object] = lambda _facts: True  # an attribute that must be set, or a function
    checked: bool = True  # see Remark

    def holds(self, facts: object) -> object:
        """Say whether the remark is to be made."""
        return attrgetter(self.when)(facts) if isinstance(self.when, str) else self.when(facts)

    def fill(self, subject: str, facts: Mapping[str, Any]) -> Remark:
        """Return the remark about a case."""
        return Remark(
            severity=say(self.severity, facts),
            subject=say(subject, facts),
            text=say(self.says, facts),
            fix=say(self.fix or "", facts) or None,
            details=tuple(facts.get("details", ())),
            checked=self.checked,
        )


problem_if, warning_if, note_if, fine_if = (partial(Advice, severity) for severity in SEVERITIES)


def rules(subject: str, cases: Callable[[Any], Cases] = lambda _facts: ({},)) -> Callable[..., RuleSet]:
    """Return a function that makes a rule set of rows: for each case the first row that holds counts.

    A case holds what the rows need besides the facts; its ``details`` are copied into the remark.
    """

    def of_rows(*rows: Advice) -> RuleSet:
        def apply(facts: Any) -> Iterator[Remark]:
            for case in cases(facts):
                figures = {**vars(facts), **case}
                holding = (row for row in rows if row.holds(SimpleNamespace(**figures)))
                for row in islice(holding, 1):
                    yield row.fill(subject, figures)

        return apply

    return of_rows


def apply_rules(rule_sets: Iterable[RuleSet], facts: object) -> Iterator[Remark]:
    """Yield the remarks of all rule sets; ``facts`` is any object whose attributes the rows name."""
    for rule_set in rule_sets:
        yield from rule_set(facts)


def remarks_text(remarks: Sequence[Remark], width: int = WIDTH) -> str:
    """Return the verdict and all remarks as text, the worst first; sentences are wrapped, lines to paste are not."""
    severities = Counter(remark.severity for remark in remarks)
    problems = severities[PROBLEM]
    verdict = "not ready" if problems else "ready to submit"
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


def folded(label: str, text: str, indent: int, width: int = WIDTH) -> list[str]:
    """Return a label and a text beside it, wrapped to the width."""
    room = width - indent
    first, *more = textwrap.wrap(plain(text), room, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{f'  {label}':<{indent - 1}} {first}", *(" " * indent + line for line in more)]


def below(remark: Remark, indent: int) -> list[str]:
    """Return the details of a remark and its fix, each on a line of its own; after some, how to list all."""
    margin = " " * indent
    lines = [f"{margin}{plain(detail)}" for detail in remark.details[:_DETAILS]]
    hidden = len(remark.details) - _DETAILS
    if hidden > 0:
        lines.append(f"{margin}… and {hidden:,} more; --json lists all of them")
    if remark.fix:
        lines.append(f"{'try: ':>{indent}}{plain(remark.fix)}")
    return lines
