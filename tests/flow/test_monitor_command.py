"""``badcjobs monitor``: one frame as text, and live at a real terminal."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.badcjobs_program import ON_CPU, QUICK, Site, assert_refused
from support.live_run import write_live_run
from support.task_files import TaskFile
from support.terminal import Terminal
from support.waiting import wait_for

Open = Callable[..., Terminal]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of twenty tasks in the middle of its work, one of which has failed and one is silent."""
    folder = tmp_path_factory.mktemp("run") / "july"
    write_live_run(folder, 20, now_ms=int(time.time() * 1000), waiting=4, seconds=60)
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


# --- one frame --------------------------------------------------------------------------------------------------------


def test_without_a_terminal_one_frame_is_printed_as_plain_text(site: Site, run: Path) -> None:
    piped, once = site.badcjobs_each([("monitor", run), ("monitor", run, "--once")])
    assert piped.exit_code == once.exit_code == 0
    assert "\x1b" not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) <= 100
    assert "16 running · 4 waiting · 2 done · 1 failed · 1 silent" in piped.stdout
    assert sum("4821_" in line for line in once.stdout.splitlines()) >= 24


def test_json_is_one_document_with_everything(site: Site, run: Path) -> None:
    document = site.badcjobs("monitor", run, "--once", "--json").json
    assert document["version"] == 1
    assert len(document["tasks"]) == 24
    assert len(document["devices"]) == 80
    assert document["total"]["states"]["silent"] == 1
    first = document["devices"][0]
    assert first["reading"]["utilization_percent"] > 0
    assert first["reading"]["busy_percent"] is None
    assert document["alerts"][0]["device_index"] == 2


def test_a_run_that_is_just_beginning_and_one_file_of_it_can_be_looked_at(site: Site, run: Path) -> None:
    (site.folder / "new").mkdir()
    one = sorted((run / "tasks").glob("*_7.*.sqlite"))[0]
    new, file = site.badcjobs_each([("monitor", site.folder / "new"), ("monitor", one)])
    assert (new.exit_code, file.exit_code) == (0, 0)
    assert "no task has published anything yet" in new.stdout
    assert "1 failed" in file.stdout


def test_wrong_paths_and_words_are_refused(site: Site, run: Path) -> None:
    text = site.script("letter.txt", "echo")
    nowhere, letter, both = site.badcjobs_each(
        [
            ("monitor", "nowhere"),
            ("monitor", text),
            ("monitor", run, "--simulate", "2"),
        ]
    )
    assert_refused(nowhere, 4, "nowhere does not exist")
    assert_refused(letter, 4, "letter.txt cannot be read")
    assert_refused(both, 2, "a run folder shows the GPUs of its tasks", f"try: badcjobs monitor {run}")


def test_the_run_of_the_project_file_is_shown_where_none_is_named(site: Site, run: Path) -> None:
    (site.folder / "badcjobs.toml").write_text(f'[run]\nout = "{run}"\n')
    shown, machine = site.badcjobs_each([("monitor", "--once"), ("monitor", "--once", "--simulate", 2)])
    assert "4821_7" in shown.stdout
    assert f"showing {run}: [run] out in " in shown.stderr
    assert "2 GPUs" in machine.stdout


def test_this_machine_is_shown_without_an_argument(site: Site) -> None:
    simulated, none = site.badcjobs_each(
        [("monitor", "--simulate", "3", "--once"), ("monitor", "--once")], [{}, {"PATH": "/nowhere"}]
    )
    assert "3 GPUs" in simulated.stdout
    assert simulated.stdout.count("Simulated GPU") == 3
    assert_refused(none, 3, "this machine has no GPU")


def test_letters_are_ascii_where_the_locale_has_no_others(site: Site, run: Path) -> None:
    plain, asked = site.badcjobs_each(
        [("monitor", run, "--once"), ("monitor", run, "--once", "--ascii")], [{"LC_ALL": "C"}, {}]
    )
    assert plain.stdout.isascii()
    assert asked.stdout.isascii()
    assert "====" in plain.stdout


# --- live -------------------------------------------------------------------------------------------------------------


def test_at_eighty_by_twenty_four_everything_has_its_place(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run)
    shown = screen.wait_for(lambda text: "? help" in text, "the whole page").splitlines()
    assert len(shown) == 24
    assert "16 running" in shown[0]
    assert "chunks" in shown[1]
    assert "ETA" in shown[1]
    assert shown[-1].startswith("by task   q quit  s sort  r reverse  / filter  enter open")
    assert screen.screen.cursor.hidden
    screen.type("q")
    assert screen.end() == 0


def test_keys_sort_filter_open_and_quit_and_the_terminal_is_as_before(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run)
    screen.wait_for(lambda text: "4821_3" in text, "the tasks")
    assert screen.settings != screen.before
    screen.type("s")
    screen.wait_for(lambda text: "by state" in text and "▸  4821_7 " in text, "the failed task first")
    screen.type("/silent\r")
    screen.wait_for(lambda text: "only 'silent'" in text and "4821_15" in text and "4821_3 " not in text, "one task")
    screen.type("\r")
    screen.wait_for(lambda text: "last published 0:3" in text and "GPU 1" in text, "its page")
    screen.type("\x1b")
    screen.wait_for(lambda text: "only 'silent'" in text, "the list again")
    screen.type("\x1b")
    screen.wait_for(lambda text: "4821_3 " in text, "all of them again")
    screen.type("d")
    screen.wait_for(lambda text: "memory GiB" in text and "d tasks" in text, "the devices")
    screen.type("?")
    screen.wait_for(lambda text: "any key goes back" in text, "the help")
    screen.type("q")
    assert screen.end() == 0
    assert screen.settings == screen.before
    assert screen.raw.endswith(b"\x1b[?1049l\x1b[?25h")  # what stood there before is back, and the cursor


def test_a_new_size_of_the_terminal_is_obeyed_at_once(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run)
    screen.wait_for(lambda text: "4821_3" in text and "working on" not in text, "a narrow list")
    screen.resize(200, 50)
    wide = screen.wait_for(lambda text: "working on" in text and text.splitlines()[49:], "a wide list").splitlines()
    assert wide[49].startswith("by task")
    screen.resize(60, 12)
    small = screen.wait_for(lambda text: text.splitlines()[-1].startswith("by task   q"), "a small one").splitlines()
    assert max(map(len, small)) <= 60
    screen.type("q")
    assert screen.end() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_ends_it_with_the_terminal_as_before(
    terminal: Open, run: Path, number: signal.Signals, code: int
) -> None:
    screen = terminal("monitor", run)
    screen.wait_for(lambda text: "4821_3" in text, "the tasks")
    screen.send(number)
    assert screen.end() == code
    assert screen.settings == screen.before
    assert b"\x1b[?1049l" in screen.raw
    assert b"Traceback" not in screen.raw


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run)
    screen.wait_for(lambda text: "4821_3" in text, "the tasks")
    process = psutil.Process(screen.process.pid)
    screen.type("\x1a")
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "it has stopped")
    screen.read(0.1)
    assert screen.settings == screen.before
    sent = len(screen.raw)
    screen.send(signal.SIGCONT)
    wait_for(lambda: (screen.read(0.05), b"4821_3" in screen.raw[sent:])[1], "it goes on")
    screen.type("q")
    assert screen.end() == 0


def test_no_color_is_obeyed_and_the_words_are_the_same(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run, env={"NO_COLOR": "1"})
    shown = screen.wait_for(lambda text: "4821_3" in text, "the tasks")
    assert "running" in shown
    colours = {cell.fg for row in screen.screen.buffer.values() for cell in row.values()}
    assert colours == {"default"}
    screen.type("q")
    assert screen.end() == 0


def test_a_dumb_terminal_gets_one_plain_frame(terminal: Open, run: Path) -> None:
    screen = terminal("monitor", run, env={"TERM": "dumb"}, lines=60)
    assert screen.end() == 0
    assert b"\x1b[" not in screen.raw
    assert "4821_19" in screen.text


def test_devices_of_this_machine_are_alive(terminal: Open) -> None:
    screen = terminal("monitor", "--simulate", "2", "--interval", "0.2", columns=100)
    screen.wait_for(lambda text: text.count("Simulated GPU") == 2, "both devices")
    screen.wait_for(lambda text: any(line.count("▇") + line.count("█") > 3 for line in text.splitlines()), "a course")
    screen.type("q")
    assert screen.end() == 0


def test_a_run_is_followed_from_its_first_chunk_to_its_end(site: Site, terminal: Open) -> None:
    """The folder is written while it is looked at; a task that ends is shown as done."""
    site.out.mkdir()
    screen = terminal("monitor", site.out, "--interval", "0.2", columns=160)
    screen.wait_for(lambda text: "no task has published anything yet" in text, "an empty run")
    task = site.start_run(site.manifest(24), "--engine", "demo", "--engine-arg=--burn-s=0.3", "--simulate", "2")
    screen.wait_for(lambda text: "1 running" in text and "2 GPUs" in text, "a task that runs")
    screen.wait_for(lambda text: "rec" in text and "ETA 0:" in text, "what it is at, and when it will be done")
    assert task.wait().exit_code == 0
    shown = screen.wait_for(lambda text: "1 done" in text, "a task that is done")
    assert "100%  24/24 chunks" in shown
    screen.type("q")
    assert screen.end() == 0


def test_a_run_folder_that_is_removed_stays_on_the_screen_with_a_remark(site: Site, terminal: Open) -> None:
    TaskFile(site.folder / "run", states={"a": "done", "b": "pending"}, ended_at_ms=None).write()
    screen = terminal("monitor", site.folder / "run", "--interval", "0.1", columns=200)
    screen.wait_for(lambda text: "4821_0" in text, "the task")
    (site.folder / "run").rename(site.folder / "elsewhere")
    gone = screen.wait_for(lambda text: "run is gone; showing the last reading" in text, "a remark")
    assert "4821_0" in gone
    (site.folder / "elsewhere").rename(site.folder / "run")
    screen.wait_for(lambda text: "is gone" not in text, "the run again")
    screen.type("q")
    assert screen.end() == 0


# --- the bars of badcjobs run -----------------------------------------------------------------------------------------


def test_run_shows_one_bar_per_device_with_the_log_above_them(site: Site, terminal: Open) -> None:
    words = (
        "--engine",
        "demo",
        "--engine-arg=--burn-s=0.15",
        "--simulate",
        "2",
        "--config",
        "run.heartbeat_every_s=0.5",
        *QUICK,
    )
    screen = terminal("run", site.manifest(40), "--out", site.out, *words, columns=120, lines=40)
    shown = screen.wait_for(lambda text: "ETA 0:" in text and "heartbeat" in text, "bars").splitlines()
    rows = [number for number, line in enumerate(shown) if line.startswith(("GPU 0  Sim", "GPU 1  Sim", "all "))]
    assert len(rows) == 3
    assert rows[-1] - rows[0] == 2
    assert all("INFO" not in line for line in shown[rows[0] :])
    assert "chunks" in shown[rows[0]]
    assert "/40" in shown[rows[2]]
    assert screen.end(60) == 0
    assert "ETA" not in screen.text  # the bars are gone, the result stays
    assert "40 done of 40" in screen.text
    assert screen.settings == screen.before


def test_the_bars_fit_a_window_that_shrinks_and_do_without_colours_where_nobody_wants_them(
    site: Site, terminal: Open
) -> None:
    words = ("--engine", "demo", "--engine-arg=--burn-s=0.15", "--simulate", "2", *QUICK)
    screen = terminal("run", site.manifest(26), "--out", site.out, *words, env={"NO_COLOR": "1"})
    wide = screen.wait_for(lambda text: "ETA 0:" in text and "rec" in text, "bars").splitlines()
    assert sum(line.startswith(("GPU 0  Sim", "GPU 1  Sim", "all  ")) for line in wide) == 3
    screen.resize(40, 24)
    narrow = screen.wait_for(lambda text: "GPU 1 ━" in text, "narrow bars").splitlines()
    rows = [line for line in narrow if line.startswith(("GPU 0 ━", "GPU 1 ━", "all   ━"))]
    assert len(rows) == 3, narrow
    assert "chunk" in rows[0]
    assert "ETA" in rows[2]
    assert screen.end(60) == 0
    assert not re.search(rb"\x1b\[[0-9;]*3[0-9][0-9;]*m", screen.raw), "no colour"


def test_a_terminal_that_cannot_draw_gets_the_log_alone(site: Site, terminal: Open) -> None:
    words = (*ON_CPU, "--engine-arg=--burn-s=0.15", "--config", "run.heartbeat_every_s=0.1", *QUICK)
    screen = terminal("run", site.manifest(3), "--out", site.out, *words, env={"TERM": "dumb"})
    assert screen.end(60) == 0
    assert b"\x1b" not in screen.raw
    assert b"heartbeat cpu=" in screen.raw


def test_run_draws_nothing_with_json_or_in_a_log(site: Site, terminal: Open) -> None:
    words = (
        "--engine",
        "demo",
        "--engine-arg=--burn-s=0.1",
        "--simulate",
        "1",
        "--config",
        "run.heartbeat_every_s=0.3",
        *QUICK,
    )
    screen = terminal("run", site.manifest(8), "--out", site.folder / "json", *words, "--json", columns=200)
    assert screen.end(60) == 0
    assert b"ETA" not in screen.raw
    assert b"\x1b[" not in screen.raw
    logged = site.badcjobs("run", site.manifest(8), "--out", site.out, *words)
    assert "\x1b" not in logged.stderr
    assert "heartbeat cpu=" in logged.stderr


def test_run_goes_on_in_order_when_its_terminal_is_closed(site: Site) -> None:
    """A closed terminal is a signal to stop in order; nothing may break on the bars that nobody sees."""
    words = ("--engine", "demo", "--engine-arg=--burn-s=0.2", "--simulate", "1", *QUICK)
    argv = [sys.executable, "-m", "badcjobs", "run", str(site.manifest(60)), "--out", str(site.out), *words]
    screen = Terminal(argv, site.environ(), site.folder, columns=100)
    screen.wait_for(lambda text: "ETA 0:" in text, "bars")
    screen.hang_up()
    assert screen.process.wait(30) == 75
    (database,) = site.task_databases()
    ((verdict, code),) = site.rows("SELECT verdict, exit_code FROM task")
    assert (verdict, code) == ("stopped", 75)
    assert json.loads(site.badcjobs("monitor", database, "--json").stdout)["tasks"][0]["state"] == "stopped"
