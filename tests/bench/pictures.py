"""Takes pictures of the report, the terminal and the live page.

    python tests/bench/pictures.py                            the README's pictures, in badcjobs/guide/pictures
    python tests/bench/pictures.py --out pictures --all       the demo and a job of 1,000 tasks: about two minutes
    python tests/bench/pictures.py --out pictures --only monitor --tasks 60

It needs Chromium, and the packages of the tests: pip install -e '.[test]'

A new kind of picture is one function with ``@picture("name")`` that writes into ``stage.out``.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

try:
    from rich.console import Console
    from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
    from rich.text import Text
    from rooms.live import DEVICES, TASK, Snapshot, UiState, draw, open_run_view
    from rooms.root import SystemClock
    from support.browser import Browser, Page
    from support.live_server import LiveServer
    from support.mid_run import write_mid_run
    from support.synthetic_job import write_job, write_source
    from support.task_files import TaskFile
except ModuleNotFoundError as error:
    sys.exit(f"pictures: there is no package {error.name} here\n  try: {sys.executable} -m pip install -e '.[test]'")

_READY = "document.documentElement.dataset.ready === 'yes'"
_LIVE = "document.body.dataset.state === 'live' && document.getElementById('title').textContent !== '…'"
_STILL = """{ const style = document.createElement('style'); document.head.append(style);
  style.textContent = '*, ::before { transition: none !important; animation: none !important }'; 0 }"""
_EACH = {1280: ("light", "dark"), 420: ("light", "dark")}
_RARE = {1280: ("light",), 420: ("dark",)}
_RARE_ONES = ("one-task", "not-begun")
_PAINTED_S = 0.2  # Bokeh paints in the next frames
_README_FOLDER = Path(__file__).parents[2] / "badcjobs" / "guide" / "pictures"
_README_TASKS, _README_WIDTH, _LIVE_HEIGHT = 60, 1280, 868
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


@dataclass
class Stage:
    """What pictures are taken of; each is made when it is first asked for."""

    out: Path
    folder: Path
    browser: Browser
    tasks: int
    with_demo: bool = True

    @cached_property
    def demo(self) -> Path:
        """The run folder of the demo."""
        _badcjobs("demo", "--out", str(self.folder / "demo"))
        return self.folder / "demo"

    @cached_property
    def large(self) -> Path:
        """The run folder of a large job, merged."""
        write_job(self.folder / "june", self.tasks)
        write_source(self.folder / "june", self.tasks)
        _badcjobs("merge", str(self.folder / "june"))
        return self.folder / "june"

    @cached_property
    def under_way(self) -> Path:
        """The run folder of the same job when half of its time is over."""
        write_mid_run(self.folder / "under-way" / "june", self.tasks, now_ms=time.time_ns() // 10**6)
        return self.folder / "under-way" / "june"

    @cached_property
    def one_task(self) -> Path:
        """The run folder of a single task without telemetry, of which one chunk failed."""
        TaskFile(
            self.folder / "one", states={"a": "done", "b": "done", "c": "failed"}, samples=0, verdict="failed"
        ).write()
        _badcjobs("merge", str(self.folder / "one"))
        return self.folder / "one"

    @cached_property
    def not_begun(self) -> Path:
        """The run folder of a job of which no task has begun."""
        folder = self.folder / "july"
        folder.mkdir()
        write_source(folder, 20)
        return folder


MAKERS: dict[str, Callable[[Stage], None]] = {}


def picture(name: str) -> Callable[[Callable[[Stage], None]], Callable[[Stage], None]]:
    """Register a function that takes pictures."""

    def register(maker: Callable[[Stage], None]) -> Callable[[Stage], None]:
        MAKERS[name] = maker
        return maker

    return register


@picture("report")
def take_report(stage: Stage) -> None:
    """Take report.html of both jobs: light and dark, on a desk and on a telephone, a chart in use, on paper."""
    if stage.with_demo:
        _take_report(stage, "demo", stage.demo)
    _take_report(stage, "large", stage.large)
    page = stage.browser.open((stage.large / "report.html").as_uri(), dark=True, ready=_READY)
    _point_at(page, "#chart-timeline")
    page.screenshot(stage.out / "report-large-timeline.png", whole=False)
    page.evaluate("(() => { pick.value = '7'; pick.dispatchEvent(new Event('change')); })()")
    _point_at(page, "#chart-power_w")
    page.screenshot(stage.out / "report-large-one-device.png", whole=False)
    (stage.out / "report-large.pdf").write_bytes(page.print_pdf())


def _take_report(stage: Stage, name: str, folder: Path) -> None:
    _take_page(stage, (folder / "report.html").as_uri(), _READY, f"report-{name}")


def _take_page(stage: Stage, url: str, ready: str, name: str) -> None:
    """Take a page in both widths, each light and dark; what is rarely looked at in one shade for each width."""
    for width, shades in (_RARE if name.endswith(_RARE_ONES) else _EACH).items():
        page = stage.browser.open(url, width=width, ready=ready)
        page.evaluate(_STILL)
        for shade in shades:
            page.prefer(dark=shade == "dark")
            _wait_for_paint(page)
            page.screenshot(stage.out / f"{name}-{shade}-{width}.png")
        page.close()


def _wait_for_paint(page: Page) -> None:
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    time.sleep(_PAINTED_S)


@picture("monitor")
def take_monitor(stage: Stage) -> None:
    """Take the monitor: the demo when it is over, the large job in the middle of its work, page by page."""
    if stage.with_demo:
        _take_screen(stage, "demo", _frame(stage.demo))
    large = _frame(stage.under_way)
    running = [task for task in large.tasks if task.state == "running"]
    one = running[len(running) // 2]
    _take_screen(stage, "large", large, UiState(line=large.tasks.index(one)))
    _take_screen(stage, "large-devices", large, UiState(page=DEVICES))
    _take_screen(stage, "large-task", large, UiState(page=TASK, opened=one.name), height=36)
    _take_screen(stage, "large-80x24", large, UiState(order="ETA"), width=80, height=24)


def _frame(folder: Path) -> Snapshot:
    return open_run_view(folder, SystemClock()).look()


def _take_screen(
    stage: Stage, name: str, frame: Snapshot, desk: UiState | None = None, *, width: int = 120, height: int = 36
) -> None:
    """Write what a terminal would show as SVG, and as PNG by Chromium."""
    _draw_screen(stage, stage.out / f"monitor-{name}.svg", frame, desk, (width, height))


def _draw_screen(
    stage: Stage,
    vector: Path,
    frame: Snapshot,
    desk: UiState | None,
    size: tuple[int, int],
    theme: TerminalTheme = SVG_EXPORT_THEME,
) -> None:
    width, height = size
    title = f"badcjobs monitor runs/{Path(frame.title).name}"
    frame = replace(frame, title=f"runs/{Path(frame.title).name}")
    drawn = draw(frame, desk or UiState.at_start(of_run=frame.of_run), width=width, height=height)
    console = Console(
        record=True, file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor", _environ={}
    )
    console.print(Text("\n").join(drawn.lines), no_wrap=True, overflow="crop")
    svg = console.export_svg(title=title, theme=theme)
    if theme is _LIGHT_TERMINAL:
        svg = svg.replace("rgba(255,255,255,0.35)", "rgba(0,0,0,0.35)")  # the frame
    vector.write_text(svg, encoding="utf-8")
    page = stage.browser.open(vector.as_uri())
    page.call("Emulation.setDefaultBackgroundColorOverride", color={"r": 0, "g": 0, "b": 0, "a": 0})  # round corners
    wide, high = page.evaluate(
        "(() => { const b = document.documentElement.viewBox.baseVal; return [b.width, b.height]; })()"
    )
    page.resize(1280, round(1280 * high / wide))
    page.screenshot(vector.with_suffix(".png"), whole=False)
    page.close()


@picture("readme")
def take_readme(stage: Stage) -> None:
    """Take the README's pictures (timeline, live page, terminal; light and dark) and print the summary it quotes."""
    report = stage.browser.open((stage.large / "report.html").as_uri(), width=_README_WIDTH, ready=_READY)
    frame = _frame(stage.under_way)
    with LiveServer(stage.folder, stage.under_way) as server:
        live = stage.browser.open(server.url + "/", width=_README_WIDTH, ready=_LIVE)
        for shade in ("light", "dark"):
            for page, name in ((report, "timeline"), (live, "live")):
                page.call("Page.bringToFront")
                page.evaluate(_STILL)
                page.prefer(dark=shade == "dark")
                _wait_for_paint(page)
                area = page.evaluate(_TIMELINE) if page is report else (0, 0, _README_WIDTH, _LIVE_HEIGHT)
                page.screenshot(stage.out / f"{name}-{shade}.png", area=area)
    running = [number for number, task in enumerate(frame.tasks) if task.state == "running"]
    for shade, theme in (("light", _LIGHT_TERMINAL), ("dark", SVG_EXPORT_THEME)):
        vector = stage.out / f"terminal-{shade}.svg"
        _draw_screen(stage, vector, frame, UiState(line=running[len(running) // 3]), (110, 26), theme)
        vector.unlink()
    print(_badcjobs("report", str(stage.large)))


@picture("live")
def take_live(stage: Stage) -> None:
    """Take the page of ``badcjobs serve``: the demo when it is over, the large job in the middle of its work."""
    if stage.with_demo:
        _take_live(stage, "demo", stage.demo)
    _take_live(stage, "large", stage.under_way)


def _take_live(stage: Stage, name: str, folder: Path) -> None:
    with LiveServer(stage.folder, folder) as server:
        _take_page(stage, server.url + "/", _LIVE, f"live-{name}")


@picture("states")
def take_states(stage: Stage) -> None:
    """Take what is rarely looked at: a job of one task without telemetry, and a run that has not begun."""
    _take_report(stage, "one-task", stage.one_task)
    _take_screen(stage, "one-task", _frame(stage.one_task), height=16)
    _take_screen(stage, "not-begun", _frame(stage.not_begun), height=16)
    _take_live(stage, "one-task", stage.one_task)
    _take_live(stage, "not-begun", stage.not_begun)


def _point_at(page: Page, selector: str) -> None:
    page.evaluate(f"document.querySelector('{selector}').scrollIntoView({{behavior: 'instant', block: 'center'}})")
    _wait_for_paint(page)
    box = page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    page.point_at(box["x"] + box["width"] * 0.45, box["y"] + box["height"] * 0.4)
    _wait_for_paint(page)


def _badcjobs(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "badcjobs", *arguments], check=True, stdout=subprocess.PIPE, encoding="utf-8"
    )
    return done.stdout


def main() -> int:
    """Take the pictures and say where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=_README_FOLDER, metavar="DIR", help="where the pictures go")
    parser.add_argument("--only", action="append", choices=sorted(MAKERS), help="this kind alone; repeatable")
    parser.add_argument("--all", action="store_true", help="every kind")
    parser.add_argument("--without-demo", action="store_true", help="leave out the demo run, which takes ten seconds")
    parser.add_argument(
        "--tasks", type=int, metavar="N", help="array tasks of the large job (default: 60, --all: 1000)"
    )
    options = parser.parse_args()
    kinds = list(MAKERS) if options.all else options.only or ["readme"]
    tasks = options.tasks or (_README_TASKS if kinds == ["readme"] else 1000)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="badcjobs-") as folder, Browser() as browser:
        stage = Stage(options.out, Path(folder), browser, tasks, not options.without_demo)
        for name in kinds:
            MAKERS[name](stage)
    for path in sorted(options.out.iterdir()):
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
