"""The page of the live view that explains the others."""

from __future__ import annotations

from rich.text import Text

from badcjobs.monitor.columns import Paper
from badcjobs.monitor.fitting import wrap

_WORDS = 16  # width of the first column
_HELP = (
    ("up down j k", "go from line to line; page up, page down, home, end"),
    ("enter", "open the task of this line; escape goes back"),
    ("s   r", "the next order of the lines; the other way round"),
    ("/", "only lines with these words: 'gpu03 running'; escape shows all"),
    ("d", "tasks or devices"),
    ("?   q", "this page; quit"),
    ("", ""),
    ("running", "its database was published in time"),
    ("silent", "it should have been by now: a dead node, or a disk that hangs"),
    ("stopped", "it ended in order with work left: run it again"),
    ("waiting", "of the array, and nothing was heard of it yet"),
    ("unbegun", "never begun: the emulation that was to start it is over"),
    ("rate", "seconds of audio per second since the task began"),
    ("ETA", "until the last chunk, at the pace so far"),
    ("GPU  busy", "how busy the devices are; of a task that has ended, the mean"),
    ("history", "the same since the task began"),
    ("chunks 8/~20", "about 20 (20+: or more): some tasks have not listed theirs yet"),
)


def help_lines(paper: Paper) -> list[Text]:
    """Return the lines of the page, as many as it takes; none is too long."""
    lines = []
    for word, meaning in _HELP:
        said = wrap(meaning, paper.width - _WORDS) or [""]
        for number, part in enumerate(said):
            first = f"  {word}" if number == 0 else ""
            lines.append(Text(end="").append(first.ljust(_WORDS), "bold").append(paper.text(part)))
    return lines
