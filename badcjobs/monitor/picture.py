"""A frame as a picture: what a terminal would show, as SVG that needs nothing from the network."""

from __future__ import annotations

import io
import re

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from badcjobs.monitor.desk import Desk
from badcjobs.monitor.draw import draw
from badcjobs.monitor.frame import Frame

# The colours of our pages in the dark: a terminal has its owner's, a picture has none by itself.
_THEME = TerminalTheme(
    (17, 24, 29),
    (230, 236, 240),
    [(46, 59, 69), (255, 138, 125), (111, 218, 164), (243, 197, 107), (108, 188, 240), (204, 153, 205), (102, 204, 204),
     (214, 222, 228)],
)  # fmt: skip
_FONTS_FROM_ELSEWHERE = re.compile(r"@font-face \{[^}]*\}")


def frame_svg(
    frame: Frame,
    desk: Desk | None = None,
    *,
    width: int = 120,
    height: int | None = 36,
    title: str = "badcjobs monitor",
) -> str:
    """Return a page of the live view as an SVG document; ``height`` None: as long as it takes, without keys."""
    page = draw(frame, desk or Desk.at_start(of_run=frame.of_run), width=width, height=height)
    # Not the environment's business: a picture has its colours wherever it is made.
    console = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", _environ={}
    )
    console.print(Text("\n").join(page.lines), no_wrap=True, overflow="crop")
    return _FONTS_FROM_ELSEWHERE.sub("", console.export_svg(title=title, theme=_THEME))
