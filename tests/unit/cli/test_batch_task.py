"""What submitit calls in each array task, and signals that wait until a job is submitted."""

import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import BatchTask, DelayedSignals
from support.waiting import wait_for

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


@pytest.fixture(autouse=True)
def own_folder_and_signals(tmp_path, monkeypatch):
    """Work in a folder; in the end give the process back its own handlers."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Lines of a child: it is there; it waits until the signal was sent; what it does at the signal that is passed on.
READY = "open('ready', 'w').close()\n"
SENT = "while not os.path.exists('sent'): time.sleep(0.01)\n"
DONE, FAILED, STOPPED = (f"signal.signal(signal.SIGUSR1, lambda *_: os._exit({code}))\n" for code in (0, 1, 75))
LONG = "time.sleep(60)\n"


def run(program, requeues=2, send=()):
    """Run a program as a task, answer the warning as submitit does; return the exit code and what is requeued."""
    Path("program.py").write_text(f"import os, signal, time\n{program}")
    task, seen = BatchTask((sys.executable, "program.py", "a b.csv"), requeues), list[Any]()
    main = threading.main_thread().ident or 0

    def checkpoint(_signum, _frame):
        seen.append(task.checkpoint())
        sys.exit(-1)

    def warn():
        wait_for(Path("ready").exists, "the child is there")
        for number in send:
            time.sleep(0.3)  # Python would handle two at once in the order of their numbers
            signal.pthread_kill(main, number)
        Path("sent").touch()

    signal.signal(signal.SIGUSR2, checkpoint)
    if send:
        threading.Thread(target=warn, daemon=True).start()
    try:
        task()
    except SystemExit as over:
        return over.code, seen
    return None, seen


def test_a_task_has_its_childs_exit_code_and_only_work_left_is_requeued(capsys):
    kill, stop = "import os; os.kill(os.getpid(), 9)", "raise SystemExit(75)"
    ends = {"raise SystemExit(0)": None, "raise SystemExit(1)": 1, "raise SystemExit(70)": 70, kill: 137, stop: -1}
    assert {program: run(program)[0] for program in ends} == ends
    _, (delayed,) = run(stop)
    again = pickle.loads(pickle.dumps(delayed.function))  # what is kept for after the requeue
    assert vars(again) == vars(BatchTask((sys.executable, "program.py", "a b.csv"), 1))
    assert run(stop, requeues=0) == (75, [])
    twin = f"open(os.environ['BADCJOBS_NO_RESTART'], 'w').write('another task has its work')\n{stop}"
    assert run(twin) == (75, [])
    assert run("import sys; open('called', 'w').write(repr(sys.argv[1:]))")[0] is None
    assert Path("called").read_text() == "['a b.csv']"

    def refuse(_signum, _frame):
        raise OSError("scontrol: requeue is disabled")

    Path("program.py").write_text(stop)
    signal.signal(signal.SIGUSR2, refuse)
    with pytest.raises(SystemExit) as left:
        BatchTask((sys.executable, "program.py"), 2)()
    assert left.value.code == 75
    assert "this task cannot be requeued: scontrol: requeue is disabled" in capsys.readouterr().err


WARNING, CANCELLED = (signal.SIGUSR2,), (signal.SIGTERM,)
SIGNALLED = [  # what the child does, what the task receives → how the task ends, and how often it is requeued
    (STOPPED + READY + LONG, WARNING, (-1, 1)),
    (DONE + READY + LONG, WARNING, (None, 0)),
    (FAILED + READY + LONG, WARNING, (1, 0)),
    (READY + SENT + STOPPED + LONG, WARNING, (-1, 1)),  # sent again once it listens
    (READY + SENT + "os._exit(75)", CANCELLED, (75, 0)),
    (STOPPED + READY + LONG, CANCELLED + WARNING, (75, 0)),
]


def test_a_warning_stops_the_child_in_order_and_a_cancelled_task_is_not_requeued(tmp_path):
    for number, (child, signals, expected) in enumerate(SIGNALLED):
        (tmp_path / f"{number}").mkdir()
        os.chdir(tmp_path / f"{number}")
        end, seen = run(child, send=signals)
        assert (end, len(seen)) == expected, (child, signals)


def test_a_signal_waits_while_the_job_is_submitted_and_leaves_before_that(capfd):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    steps, heard = list[object](), list[int]()
    with pytest.raises(KeyboardInterrupt), DelayedSignals("the job is being submitted") as delayed:
        delayed.begin()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        steps.append(delayed.came)
    assert steps == [signal.SIGINT], "it goes on"
    assert capfd.readouterr().err == "badcjobs: SIGINT: the job is being submitted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    with DelayedSignals("x") as delayed:
        delayed.begin()
        signal.raise_signal(signal.SIGHUP)
        assert delayed.came is None
        signal.raise_signal(signal.SIGTERM)
        assert heard == []
    assert heard == [signal.SIGTERM], "it has come once all is done"
    with pytest.raises(ZeroDivisionError), DelayedSignals("x") as delayed:
        delayed.begin()
        signal.raise_signal(signal.SIGTERM)
        raise ZeroDivisionError
    assert heard == [signal.SIGTERM], "another error ends the program anyway"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with DelayedSignals() as delayed:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)  # a second one does not interrupt the cleanup
            steps.append(delayed.came)
            delayed.came = None
    assert steps[1:] == [signal.SIGTERM]
