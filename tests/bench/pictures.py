"""Takes the README's pictures (timeline, live page, terminal; light and dark) and prints the summary it quotes.

    python tests/bench/pictures.py                  into badcjobs/guide/pictures
    python tests/bench/pictures.py --out pictures --tasks 8

It needs Chromium, and the packages of the tests: pip install -e '.[test]'
"""

import argparse
import io
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    from rich.color import parse_rgb_hex
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
    from rich.text import Text
    from rooms.live import UiState, draw, open_run_view
    from rooms.root import SystemClock
    from support.browser import Browser
    from support.live_run import LiveServer
    from support.measured import measure
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
_NORMAL = "24292f b31d28 1a7f37 9a6700 0969da 8250df 1b7c83 6e7781"
_BRIGHT = "57606a a40e26 2da44e bf8700 218bff a475f9 3192aa 8c959f"
_INKS = [[parse_rgb_hex(ink) for ink in inks.split()] for inks in (_NORMAL, _BRIGHT)]
_LIGHT_TERMINAL = TerminalTheme((255, 255, 255), (36, 41, 47), *_INKS)


def take_pages(browser: Browser, report: str, live: str, out: Path) -> None:
    """Take the timeline of report.html and the top of the live page."""
    for name, url, ready in (("timeline", report, _READY), ("live", live, _LIVE)):
        page = browser.open(url, width=_WIDTH, ready=ready)
        page.call("Page.bringToFront")
        page.evaluate(_STILL)
        for shade in ("light", "dark"):
            page.prefer(dark=shade == "dark")
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            time.sleep(_PAINTED_S)
            area = page.evaluate(_TIMELINE) if name == "timeline" else (0, 0, _WIDTH, _LIVE_HEIGHT)
            page.screenshot(out / f"{name}-{shade}.png", area=area)


def take_terminal(browser: Browser, run: Path, out: Path) -> None:
    """Take what ``badcjobs monitor`` shows: rich draws it as SVG, Chromium makes a PNG of that."""
    frame = replace(open_run_view(run, SystemClock()).look(), title=f"runs/{run.name}")
    running = [number for number, task in enumerate(frame.tasks) if task.state == "running"]
    drawn = draw(frame, UiState(line=running[len(running) // 3]), width=110, height=26)
    for shade, theme in (("light", _LIGHT_TERMINAL), ("dark", SVG_EXPORT_THEME)):
        console = Console(record=True, file=io.StringIO(), width=110, color_system="truecolor", _environ={})
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


def main() -> int:
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
        measure("merge", over, cwd=folder)
        with LiveServer(folder, under_way) as server:
            take_pages(browser, (over / "report.html").as_uri(), server.url + "/", options.out)
        take_terminal(browser, under_way, options.out)
        print(measure("report", over, cwd=folder).stdout)
    for path in sorted(options.out.iterdir()):
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
