"""Takes the README's pictures (timeline, live page, terminal; light and dark) and prints the summary it quotes.

    python tests/bench/pictures.py                  into badcjobs/guide/pictures
    python tests/bench/pictures.py --out pictures --tasks 8

It needs Chromium, and the packages of the tests: pip install -e '.[test]'
"""

import argparse
import io
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
    from rich.text import Text
    from rooms.live import UiState, draw, open_run_view
    from rooms.root import SystemClock
    from support.browser import Browser, Page
    from support.live_run import LiveServer
    from support.synthetic_job import write_job, write_mid_run, write_source
except ModuleNotFoundError as error:
    sys.exit(f"pictures: there is no package {error.name} here\n  try: {sys.executable} -m pip install -e '.[test]'")

_OUT = Path(__file__).parents[2] / "badcjobs" / "guide" / "pictures"
_WIDTH, _LIVE_HEIGHT = 1280, 868
_PAINTED_S = 0.2  # Bokeh paints in the next frames
_READY = "document.documentElement.dataset.ready === 'yes'"
_LIVE = "document.body.dataset.state === 'live' && document.getElementById('title').textContent !== '…'"
_STILL = """{ const style = document.createElement('style'); document.head.append(style);
  style.textContent = '*, ::before { transition: none !important; animation: none !important }'; 0 }"""
# From the heading of the timeline to the end of its chart, with a margin.
_TIMELINE = """(() => { const chart = document.querySelector('#chart-timeline').getBoundingClientRect();
  const top = document.querySelector('#timeline').getBoundingClientRect().top + scrollY - 16;
  return [chart.left - 16, top, chart.width + 32, chart.bottom + scrollY - top]; })()"""
_LIGHT_TERMINAL = TerminalTheme(
    (255, 255, 255),
    (36, 41, 47),
    [(36, 41, 47), (179, 29, 40), (26, 127, 55), (154, 103, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
     (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (45, 164, 78), (191, 135, 0), (33, 139, 255), (164, 117, 249), (49, 146, 170),
     (140, 149, 159)],
)  # fmt: skip


def take_pages(browser: Browser, report: str, live: str, out: Path) -> None:
    """Take the timeline of report.html and the top of the live page."""
    pages = {
        "timeline": browser.open(report, width=_WIDTH, ready=_READY),
        "live": browser.open(live, width=_WIDTH, ready=_LIVE),
    }
    for name, page in pages.items():
        page.call("Page.bringToFront")
        page.evaluate(_STILL)
        for shade in ("light", "dark"):
            page.prefer(dark=shade == "dark")
            _wait_for_paint(page)
            area = page.evaluate(_TIMELINE) if name == "timeline" else (0, 0, _WIDTH, _LIVE_HEIGHT)
            page.screenshot(out / f"{name}-{shade}.png", area=area)


def _wait_for_paint(page: Page) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    time.sleep(_PAINTED_S)


def take_terminal(browser: Browser, run: Path, out: Path) -> None:
    """Take what ``badcjobs monitor`` shows: rich draws it as SVG, Chromium makes a PNG of that."""
    frame = replace(open_run_view(run, SystemClock()).look(), title=f"runs/{run.name}")
    running = [number for number, task in enumerate(frame.tasks) if task.state == "running"]
    drawn = draw(frame, UiState(line=running[len(running) // 3]), width=110, height=26)
    for shade, theme in (("light", _LIGHT_TERMINAL), ("dark", SVG_EXPORT_THEME)):
        console = Console(
            record=True, file=io.StringIO(), width=110, force_terminal=True, color_system="truecolor", _environ={}
        )
        console.print(Text("\n").join(drawn.lines), no_wrap=True, overflow="crop")
        svg = console.export_svg(title=f"badcjobs monitor {frame.title}", theme=theme)
        if shade == "light":
            svg = svg.replace("rgba(255,255,255,0.35)", "rgba(0,0,0,0.35)")  # the frame
        vector = run.with_name(f"terminal-{shade}.svg")
        vector.write_text(svg, encoding="utf-8")
        page = browser.open(vector.as_uri())
        page.call("Emulation.setDefaultBackgroundColorOverride", color={"r": 0, "g": 0, "b": 0, "a": 0})
        wide, high = page.evaluate("(({width, height}) => [width, height])(document.documentElement.viewBox.baseVal)")
        page.resize(_WIDTH, round(_WIDTH * high / wide))
        page.screenshot(out / f"terminal-{shade}.png", whole=False)


def _badcjobs(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "badcjobs", *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main() -> int:
    """Take the pictures and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_OUT, metavar="DIR", help="where the pictures go")
    parser.add_argument("--tasks", type=int, default=60, metavar="N", help="array tasks of the synthetic job")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="badcjobs-") as temporary, Browser() as browser:
        folder = Path(temporary)
        over, under_way = folder / "june", folder / "under-way" / "june"
        write_job(over, options.tasks)
        write_source(over, options.tasks)
        write_mid_run(under_way, options.tasks, now_ms=time.time_ns() // 10**6)
        _badcjobs("merge", str(over))
        with LiveServer(folder, under_way) as server:
            take_pages(browser, (over / "report.html").as_uri(), server.url + "/", options.out)
        take_terminal(browser, under_way, options.out)
        print(_badcjobs("report", str(over)))
    for path in sorted(options.out.iterdir()):
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
