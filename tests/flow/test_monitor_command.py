"""``badcjobs monitor`` and the bars of ``badcjobs run`` at a real terminal; their pages are in tests/unit/live."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.badcjobs_program import ON_CPU, QUICK, Site
from support.live_run import write_live_run
from support.terminal import Terminal
from support.waiting import wait_for

Open = Callable[..., Terminal]
SLOW = ("--engine", "demo", "--engine-arg=--burn-s=0.2", "--simulate", "2", *QUICK)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of twenty tasks in the middle of its work, one of which has failed and one is silent."""
    folder = tmp_path_factory.mktemp("run") / "july"
    write_live_run(folder, 20, now_ms=int(time.time() * 1000), waiting=4, seconds=30)
    return folder


@pytest.fixture
def terminal(site: Site) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*args: object, env: dict[str, str] | None = None, columns: int = 80, lines: int = 24) -> Terminal:
        argv = [sys.executable, "-m", "badcjobs", *map(str, args)]
        opened.append(Terminal(argv, site.environ(env), site.folder, columns=columns, lines=lines))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_without_a_terminal_one_frame_is_printed_as_plain_text_or_json(site: Site, run: Path) -> None:
    (site.folder / "badcjobs.toml").write_text(f'[run]\nout = "{run}"\n')
    one = next((run / "tasks").glob("*_7.*.sqlite"))
    commands = [("--once",), (run, "--json", "--config", "run.simulate=2"), (one,), (run,), ("--simulate", 3, "--once")]
    done = site.badcjobs_each([("monitor", *words) for words in commands], [{}, {}, {}, {"LC_ALL": "C"}, {}])
    assert [one.exit_code for one in done] == [0] * 5
    named, document, file, ascii_only, machine = done
    assert f"showing {run}: [run] out in {site.folder}/badcjobs.toml" in named.stderr
    assert "16 running · 4 waiting · 2 done · 1 failed · 1 silent" in named.stdout
    assert (max(map(len, named.stdout.splitlines())) <= 100, "\x1b" in named.stdout) == (True, False)
    assert sum("4821_" in line for line in named.stdout.splitlines()) >= 24
    assert (len(document.json["tasks"]), len(document.json["devices"])) == (24, 80)
    assert ("1 failed" in file.stdout, machine.stdout.count("Simulated GPU")) == (True, 3)
    assert (ascii_only.stdout.isascii(), "====" in ascii_only.stdout) == (True, True)


def test_keys_sizes_and_ctrl_z_are_obeyed_and_the_terminal_is_as_before(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run)
    shown = screen.wait_for(lambda text: "4821_3" in text and "? help" in text, "the tasks").splitlines()
    assert "16 running" in shown[0] and shown[-1].startswith("by task   q quit") and screen.screen.cursor.hidden
    assert screen.settings != screen.before
    for keys, look in (
        ("s", lambda text: "by state" in text and "▸  4821_7 " in text),
        ("/silent\r", lambda text: "only 'silent'" in text and "4821_15" in text and "4821_3 " not in text),
        ("\r", lambda text: "last published 0:3" in text and "GPU 1" in text),
        ("\x1b", lambda text: "only 'silent'" in text),
        ("\x1b", lambda text: "4821_3 " in text),
        ("d", lambda text: "memory GiB" in text and "d tasks" in text),
        ("d", lambda text: "by task" in text and "memory GiB" not in text),
    ):
        screen.type(keys)
        screen.wait_for(look, repr(keys))
    screen.resize(200, 50)
    screen.wait_for(lambda text: "working on" in text and text.splitlines()[49:], "a wide list")
    screen.resize(60, 12)
    screen.wait_for(lambda text: text.splitlines()[-1].startswith("by task   q"), "a small one")
    process, sent = psutil.Process(screen.process.pid), len(screen.raw)
    screen.type("\x1a")
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "it has stopped")
    screen.wait_for(lambda text: b"\x1b[?1049l" in screen.raw[sent:], "the terminal is given back")
    assert screen.settings == screen.before
    sent = len(screen.raw)
    screen.send(signal.SIGCONT)
    screen.wait_for(lambda text: b"4821_3" in screen.raw[sent:], "fg takes it again")
    screen.type("?")
    screen.wait_for(lambda text: "move between lines" in text, "the help")
    screen.type("q")
    assert (screen.end(), screen.settings) == (0, screen.before)
    assert screen.raw.endswith(b"\x1b[?1049l\x1b[?25h")  # what stood there before is back, and the cursor


def test_a_signal_ends_it_with_the_terminal_as_before_and_a_dumb_one_gets_one_frame(terminal: Open, run: Path) -> None:
    ends = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}
    screens = {number: terminal("monitor", run, env={"NO_COLOR": "1"}) for number in ends}
    dumb = terminal("monitor", run, env={"TERM": "dumb"}, lines=60)
    for number, screen in screens.items():
        screen.wait_for(lambda text: "4821_3" in text and "running" in text, "the tasks")
        assert {cell.fg for row in screen.screen.buffer.values() for cell in row.values()} == {"default"}
        screen.send(number)
        assert (screen.end(), screen.settings) == (ends[number], screen.before)
        assert (b"\x1b[?1049l" in screen.raw, b"Traceback" in screen.raw) == (True, False)
    assert (dumb.end(), b"\x1b[" in dumb.raw, "4821_19" in dumb.text) == (0, False, True)


def test_a_run_is_followed_from_its_first_chunk_to_its_end_by_bars_and_monitor(site: Site, terminal: Open) -> None:
    """The folder is written while it is looked at; bars are drawn below the log, and are gone in the end."""
    site.out.mkdir()
    monitor = terminal("monitor", site.out, "--interval", "0.2", columns=160)
    monitor.wait_for(lambda text: "no task has published anything yet" in text, "an empty run")
    often = ("--config", "run.heartbeat_every_s=0.5")
    bars = terminal("run", site.manifest(36), "--out", site.out, *SLOW, *often, columns=120, lines=40)
    shown = bars.wait_for(lambda text: "ETA 0:" in text and "heartbeat" in text, "bars").splitlines()
    rows = [number for number, line in enumerate(shown) if line.startswith(("GPU 0  Sim", "GPU 1  Sim", "all "))]
    assert (len(rows), rows[-1] - rows[0]) == (3, 2)
    assert all("INFO" not in line for line in shown[rows[0] :])
    assert ("chunk" in shown[rows[0]], "/36" in shown[rows[2]]) == (True, True)
    monitor.wait_for(lambda text: "1 running" in text and "2 GPUs" in text and "ETA 0:" in text, "a task that runs")
    assert (bars.end(), bars.settings) == (0, bars.before)
    assert ("ETA" in bars.text, "36 done of 36" in bars.text) == (False, True)
    assert "100%  36/36 chunks" in monitor.wait_for(lambda text: "1 done" in text, "a task that is done")
    site.out.rename(site.folder / "elsewhere")
    gone = monitor.wait_for(lambda text: "run is gone; showing the last reading" in text, "a remark")
    assert "36/36 chunks" in gone
    (site.folder / "elsewhere").rename(site.out)
    monitor.wait_for(lambda text: "is gone" not in text, "the run again")
    monitor.type("q")
    assert monitor.end() == 0


def test_bars_fit_their_window_and_are_not_drawn_with_json_or_where_the_terminal_cannot(
    site: Site, terminal: Open
) -> None:
    """And the run stops in order when its terminal is closed."""
    manifest = site.manifest(90)
    screen = terminal("run", manifest, "--out", site.out, *SLOW, env={"NO_COLOR": "1"})
    few = (site.manifest(4, name="few.csv"), *ON_CPU, "--engine-arg=--burn-s=0.15", *QUICK)
    beat = ("--config", "run.heartbeat_every_s=0.1")
    dumb = terminal("run", *few, "--out", site.folder / "dumb", *beat, env={"TERM": "dumb"})
    as_json = terminal("run", *few, "--out", site.folder / "json", "--json", columns=200)
    wide = screen.wait_for(lambda text: "ETA 0:" in text and "rec" in text, "bars").splitlines()
    assert sum(line.startswith(("GPU 0  Sim", "GPU 1  Sim", "all  ")) for line in wide) == 3
    screen.resize(40, 24)
    narrow = screen.wait_for(lambda text: "GPU 1 ━" in text and "all   ━" in text, "narrow bars").splitlines()
    rows = [line for line in narrow if line.startswith(("GPU 0 ━", "GPU 1 ━", "all   ━"))]
    assert (len(rows), "chunk" in rows[0], "ETA" in rows[2]) == (3, True, True)
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m", screen.raw), "no colour"
    screen.hang_up()
    for other in (dumb, as_json):
        assert (other.end(), b"\x1b[" in other.raw, b"ETA" in other.raw) == (0, False, False)
    assert b"heartbeat cpu=" in dumb.raw
    assert screen.process.wait(60) == 75
    assert site.rows("SELECT verdict, exit_code FROM task") == [("stopped", 75)]
