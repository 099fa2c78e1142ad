"""The screens of the monitor, whole, at terminals of many sizes; and what its keys do."""

from ast import literal_eval
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rooms import live
from rooms.live import DEVICES, HELP, Snapshot, UiState, draw, press
from rooms.model import ProcessFacts, Reading
from rooms.store import DeviceFacts, DeviceWork, TaskAlert, TaskFacts, Trail
from support.cases import read_data
from support.task_files import START_MS

NOW_MS = START_MS + 600_000
GIB = 2**30


def task(index, state="running", **values):
    """Return a task that began ten minutes ago, on a node of its own."""
    usual = {"started_at_ms": START_MS, "last_sign_ms": NOW_MS, "heard_at_ms": NOW_MS, "node": f"gpu{index:02d}",
             "engine": "demo", "devices": 2, "workers": 1}  # fmt: skip
    return TaskFacts(f"4821_{index}.r0.gpu{index:02d}", "4821", index, state=state, **{**usual, **values})


def device(of, index, busy=(), **values):
    used = [None if one is None else one * GIB // 10 for one in busy]
    heat, power = (tuple(one and a + b * one // 2 for one in busy) for a, b in ((40, 1), (0, 6)))
    trail = Trail(START_MS, 1000, busy, tuple(used), heat, power)
    made = DeviceFacts(of.name, of.node, index, f"GPU-{of.array_index}{index}", str(index), "Tesla V100-SXM2", "nvml")
    metrics = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w") if busy else ()
    last = {metric: getattr(trail, metric)[-1] for metric in metrics}
    sizes = {"memory_total_bytes": 16 * GIB, "power_limit_w": 300.0, "rate": 1.5 * index or None}
    return replace(made, **{"reading": Reading(**last), "trail": trail, **sizes, **values})


WAVES = tuple(range(0, 101, 4))
RUNNING = (
    task(0, done=120, pending=200, audio_s=5970.0, working_on=("rec0/c120", "rec0/c121")),
    task(1, done=1, failed=2, before=3, pending=3000, audio_s=60.0, cpu_percent=41.4, memory_percent=12.6),
    task(2, pending=50, working_on=("rec2/c0",), errors=(("not_audio", 1, "no audio: a.wav"),)),
    task(3, "silent", done=9, pending=1, audio_s=90.0, last_sign_ms=START_MS + 30_000, heard_at_ms=START_MS + 30_000),
)
ENDED = (
    task(4, "done", done=20, audio_s=59_999_700.0, ended_at_ms=NOW_MS - 60_000, exit_code=0, restart=1),
    task(5, "failed", failed=20, ended_at_ms=NOW_MS - 1000, exit_code=1, devices=1, workers=2),
    task(6, "killed", done=2, pending=3, verdict="killed"),
    task(7, "stopped", done=2, pending=3, ended_at_ms=NOW_MS),
    *(task(index, state, node="", started_at_ms=0, engine=None, devices=None, workers=None)
      for index, state in ((10, "waiting"), (11, "unbegun"))),
)  # fmt: skip
COURSE = (
    device(RUNNING[0], 0, WAVES, chunks=("rec0/c120",), work=DeviceWork(done=100, audio_s=3000.0)),
    device(RUNNING[0], 1, (*WAVES[::-1], 9), chunks=("rec0/c121",), work=DeviceWork(done=1)),
    device(RUNNING[1], 0, (None, 19, None, 19), memory_total_bytes=180 * GIB, power_limit_w=None, name="B200"),
    replace(device(RUNNING[2], 0), index=None, token="MIG-aaaa", name=None),
    device(RUNNING[3], 0, (70,) * 9, alive=False, means=Reading(70, power_w=210), trouble="its task is silent"),
    device(ENDED[0], 0, (99, 1), alive=False, means=Reading(50, None, 140 * GIB, 100, 1000.0), power_limit_w=1200.0,
           rate=123_456.0, memory_total_bytes=180 * GIB),
)  # fmt: skip
ALERTS = (
    TaskAlert("thermal", "warning", "device 1 is at 86 °C, above 83 °C", "gpu00", NOW_MS - 190_000, RUNNING[0].name, 1),
    TaskAlert("idle", "warning", "no work for 300 s", "gpu01", NOW_MS - 360_000_000, RUNNING[1].name, 0),
    TaskAlert("lost", "critical", "device 0 can no longer be read", "gpu02", NOW_MS + 5, RUNNING[2].name, 0),
)
STANDSTILL = "no task is running: 3,412 chunks left, 2 tasks not started, and the emulation has ended"
COMMAND = "badcjobs run /data/summer/july.csv --out=/runs/july --engine=hawkears --config='run.root=/data/a b'"
TASKS_NOW = [replace(one, its_devices=tuple(d for d in COURSE if d.task == one.name)) for one in (*RUNNING, *ENDED)]
FRAME = Snapshot(
    NOW_MS, "runs/july", True, tuple(TASKS_NOW), COURSE, ALERTS,
    replace(live.add_up((*RUNNING, *ENDED), COURSE, RUNNING), source_chunks=85_900, parts=40, parts_listed=8),
    ("4821_8.r0.gpu08.sqlite cannot be read: the file is empty", "two", "three", "four"), unread=3, files=12,
)  # fmt: skip
OVER = replace(FRAME, total=replace(FRAME.total, standstill=STANDSTILL, go_on=(COMMAND,)), alerts=(), unread=0)
PAGES = (UiState(), UiState(page=DEVICES), UiState(opened=RUNNING[0].name), UiState(opened=HELP))
SIZES = [(20, 4), (40, 10), (60, 16), (80, 24), (110, 30), (200, 20)]


def text(page):
    return "\n".join(line.plain.rstrip() for line in page.lines)


def styles(page):
    """Return which letters of each line are in which style; colours on letters, not on gaps."""
    said = []
    for line in page.lines:
        spans = [(one.start, one.end, str(one.style)) for one in line.spans if line.plain[one.start : one.end].strip()]
        said.append(", ".join(f"{style} {start}-{end}" for start, end, style in sorted(spans) if style))
    return "\n".join(said)


def shown(frame, width, height, **more):
    """Return all four pages at a size; a ruler is above them."""
    ruler = f"\n{'=' * width}\n"
    return ruler + ruler.join(
        text(draw(frame, replace(ui, line=3), width=width, height=height, **more)) for ui in PAGES
    )


def test_every_page_at_every_size(pages):
    said = {f"{width}x{height}.txt": shown(FRAME, width, height) for width, height in SIZES}
    said |= {f"over-{width}x{height}.txt": shown(OVER, width, height) for width, height in ((50, 15), (90, 28))}
    said["ascii.txt"] = shown(FRAME, 100, 26, ascii_only=True)
    scrolled = [draw(FRAME, UiState(opened=HELP, scroll=lines), width=60, height=10) for lines in (1, 5, 99)]
    said["scrolled.txt"] = "\n\n".join(f"{text(one)}\n{one.rows} rows" for one in scrolled)
    assert said["ascii.txt"].isascii()
    uis = (*PAGES[:2], UiState(opened=ENDED[0].name), PAGES[3])
    said["styles.txt"] = "\n\n".join(styles(draw(FRAME, ui, width=120, height=30)) for ui in uis)
    pages(said)


def test_pages_of_single_tasks_of_this_machine_and_of_odd_runs(pages):
    both = (ProcessFacts(7, "python", "b", 1), ProcessFacts(8, None, None, None))
    lost = replace(COURSE[3], task="", trouble="GPU is lost")
    machine = Snapshot(
        NOW_MS, "node1", False, total=live.Total(devices=2, power_w=12_345.6, utilization_percent=49.6),
        devices=(*(replace(one, task="", chunks=(), processes=both) for one in COURSE[:2]), lost),
    )  # fmt: skip
    almost = live.Total(chunks=100_000, done=99_999)
    odd = {
        "machine.txt": (machine, UiState.at_start(of_run=False)),
        "quiet-machine.txt": (replace(machine, devices=(replace(COURSE[0], task=""),)), UiState(page=DEVICES)),
        "nothing.txt": (Snapshot(NOW_MS, "run", True, total=live.add_up([], [])), UiState()),
        "filtered.txt": (FRAME, UiState(filter="gpu00 RUNNING")), "nothing-matches.txt": (FRAME, UiState(filter="owl")),
        "one-file.txt": (replace(FRAME, title="a.sqlite"), UiState(opened=FRAME.tasks[0].name)),
        "gone.txt": (FRAME, UiState(opened="4821_0.r9.gpu1")),
        "almost.txt": (Snapshot(NOW_MS, "run", True, total=almost), UiState()),
        "strange.txt": (replace(strange(), alerts=ALERTS[:1]), UiState()),
        "strange-devices.txt": (strange(), UiState(page=DEVICES)),
        "strange-task.txt": (strange(), UiState(opened="\x1b")),
    }  # fmt: skip
    for one in FRAME.tasks:
        odd[f"task-{one.array_index}-{one.state}.txt"] = FRAME, UiState(opened=one.name)
    said = {name: text(draw(frame, ui, width=100)) for name, (frame, ui) in odd.items()}
    many = [TaskAlert("power", "warning", f"warning {n}", "gpu1", NOW_MS - n) for n in range(30)]
    alarmed = replace(FRAME, alerts=(*many, *ALERTS), remarks=())
    said["alerts.txt"] = "\n\n".join(text(draw(alarmed, UiState(), width=70, height=h)) for h in (None, 40, 17, 12))
    pages(said)
    assert not [name for name, one in said.items() if "\x1b" in one or "\x07" in one]


def strange():
    """Return a run with wide letters and with names that would like to steer the terminal."""
    evil, birds = "\x1b[2J\x1b]0;owned\x07x", "鳥の声" * 9
    its = replace(COURSE[0], task=f"{birds}_0.r0.gpu1", node="鳥の声", name="鳥の声", chunks=(evil,))
    one = replace(RUNNING[0], name="\x1b", job_id=birds, node="鳥の声", working_on=(evil,), its_devices=(its,))
    return replace(FRAME, title=f"jul\udcff/{birds}", tasks=(one,), devices=(its, replace(its, task="\x1b")), alerts=(),
                   remarks=(evil,))  # fmt: skip


@settings(max_examples=60)
@given(st.integers(1, 250), st.integers(1, 80), st.integers(0, 99), st.sampled_from(PAGES), st.booleans())
def test_no_size_of_a_terminal_is_too_strange(width, height, line, page, plain):
    for frame in (FRAME, OVER, strange()):
        ui = replace(page, line=line, scroll=line)
        lines = [one.plain for one in draw(frame, ui, width=width, height=height, ascii_only=plain).lines]
        assert len(lines) == height
        assert max(map(cell_len, lines)) <= max(20, width)
        assert not any("\n" in one or (plain and not one.isascii()) for one in lines)
        if frame is FRAME and page.opened is None and height >= 24 and width >= 80:
            chosen = sum(one.startswith(">  " if plain else "▸  ") for one in lines)
            assert chosen == 1, "the chosen line is on the page"


def test_an_alert_that_is_longer_than_its_line_is_wrapped_and_a_word_that_is_longer_is_cut():
    words = [f"word{n}" for n in range(30)]
    alert = replace(ALERTS[0], kind="odd", severity="critical", message=" ".join(words), fix=" ".join(words), task=None)
    endless = replace(alert, message="a" * 90, fix="b" * 90, node=None)
    for width in (40, 77):
        frame = replace(FRAME, alerts=(alert,))
        lines = text(draw(frame, UiState(), width=width, height=40)).split("4821_8.r0")[1].split("\n\n")[0]
        assert [word for word in lines.split() if word in words] == words * 2, "nothing is lost"
        assert max(map(len, lines.splitlines()[1:])) in range(width - 6, width + 1)
        cut = text(draw(replace(frame, alerts=(endless,)), UiState(), width=width, height=40)).splitlines()
        assert ("a" * (width - 1) + "…" in cut) and (f"  {'b' * (width - 3)}…" in cut)


TYPED = dict(line.split(": ", 1) for line in read_data("monitor_keys.txt").splitlines())


def after(keys, ui, height):
    for key in live.parse_keys(keys):
        page = draw(FRAME, ui, width=80, height=height)
        ui = press(ui, key, rows=page.rows, names=list(page.names))
    return ui


def test_what_each_key_does(pages):
    def line(keys, ui, height):
        values = {one.name: getattr(ui, one.name) for one in fields(ui) if getattr(ui, one.name) != one.default}
        return f"{keys!r:<28} {height:>2}  {', '.join(f'{name}={value!r}' for name, value in values.items())}"

    said = {}
    for name, some in TYPED.items():
        start, heights = UiState.at_start(of_run=name != "machine"), (14,) if name == "machine" else (14, 60)
        lines = [line(keys, after(keys, start, height), height) for keys in literal_eval(some) for height in heights]
        said[f"{name}.txt"] = "\n".join(lines)
    typed = ("q\x1b[A\x1bOB\r\x7f/", "\x1b", "\x1b\x1b[B", "\x1bOH\x1b[8~ ")
    pages({**said, "names.txt": "\n".join(f"{one!r} {live.parse_keys(one)}" for one in typed)})
    assert press(UiState(line=50), "up", rows=2, names=["a", "b", "c"]).line == 1, "there were more lines before"
    assert press(UiState(), "enter", rows=2, names=[]) == press(UiState(), "enter", rows=2, names=[None]) == UiState()


def test_every_order_of_tasks_and_devices_and_one_frame_for_a_file(pages):
    said = []
    for start in (UiState(), UiState(page=DEVICES)):
        for order in start.orders:
            page = draw(FRAME, replace(start, order=order), width=200)
            rows = [line.plain for line in page.lines if line.plain.startswith("   4821_")]
            names = [" ".join(row.split()[: 3 if start.page == DEVICES else 1]) for row in rows]
            said.append(f"{start.page} by {order}: {', '.join(names)}")
    pages({"orders.txt": "\n".join(said), "file.txt": live.as_plain_text(FRAME)})
    assert {one.state for one in FRAME.tasks} == set(live.STATES), "every state is on these pages"
