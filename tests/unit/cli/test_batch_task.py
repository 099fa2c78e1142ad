"""What submitit calls in each array task, and signals that wait until a job is submitted."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import BatchTask, DelayedSignals
from support.waiting import wait_for

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Give the process back its own handlers."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


ENDS = {
    "done": "raise SystemExit(0)", "failed": "raise SystemExit(1)", "bug": "raise SystemExit(70)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "stopped": "raise SystemExit(75)",
}  # fmt: skip
LISTENS = """
import signal, sys, time
{late}
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
open({ready!r}, "w").close()
time.sleep(60)
"""


def run(program: str, folder: Path, requeues: int = 2, tell: signal.Signals | None = None) -> tuple[object, list[Any]]:
    """Run a program as a task, answer the warning as submitit does; return the exit code and what is requeued."""
    path, seen = folder / "program.py", list[Any]()
    path.write_text(program)
    task = BatchTask((sys.executable, str(path), "a b.csv"), requeues)

    def checkpoint(_signum: int, _frame: object) -> None:
        seen.append(task.checkpoint())
        sys.exit(-1)

    signal.signal(signal.SIGUSR2, checkpoint)
    if tell is not None:
        main = threading.main_thread().ident or 0

        def send() -> None:
            wait_for((folder / "ready").exists, "the child listens")
            signal.pthread_kill(main, tell)

        threading.Thread(target=send, daemon=True).start()
    try:
        task()
    except SystemExit as over:
        return over.code, seen
    return None, seen


def test_the_exit_code_of_the_child_is_that_of_the_task_and_only_what_has_work_left_is_requeued(tmp_path: Path) -> None:
    ends = {name: run(text, tmp_path)[0] for name, text in ENDS.items()}
    assert ends == {"done": None, "failed": 1, "bug": 70, "killed": 137, "stopped": -1}
    _, (delayed,) = run(ENDS["stopped"], tmp_path)
    again = pickle.loads(pickle.dumps(delayed.function))  # what is kept for after the requeue
    assert vars(again) == vars(BatchTask((sys.executable, str(tmp_path / "program.py"), "a b.csv"), 1))
    assert run(ENDS["stopped"], tmp_path, requeues=0) == (75, [])
    called = f"import sys; open({str(tmp_path / 'called')!r}, 'w').write(repr(sys.argv[1:]))"
    assert (run(called, tmp_path)[0], (tmp_path / "called").read_text()) == (None, "['a b.csv']")


@pytest.mark.parametrize(
    ("number", "code", "ends_with", "requeued"),
    [(signal.SIGUSR2, 75, -1, 1), (signal.SIGUSR2, 0, None, 0), (signal.SIGUSR2, 1, 1, 0), (signal.SIGTERM, 75, 75, 0)],
)
def test_a_warning_stops_the_child_in_order_and_a_cancelled_task_is_not_requeued(
    tmp_path: Path, number: signal.Signals, code: int, ends_with: int | None, requeued: int
) -> None:
    late = "" if number == signal.SIGUSR2 else "import os, threading; threading.Timer(0.3, os._exit, [75]).start()"
    listens = LISTENS.format(code=code, ready=str(tmp_path / "ready"), late=late)
    end, seen = run(listens, tmp_path, tell=number)
    assert (end, len(seen)) == (ends_with, requeued)


def test_a_warning_before_the_child_listens_does_not_end_it_and_is_told_again(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    late = f"open({str(ready)!r}, 'w').close(); time.sleep(0.5)"  # imports, as badcjobs has many
    end, seen = run(LISTENS.format(code=75, ready=str(tmp_path / "later"), late=late), tmp_path, tell=signal.SIGUSR2)
    assert (end, len(seen)) == (-1, 1)


def test_what_slurm_would_not_requeue_ends_with_75_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_signum: int, _frame: object) -> None:
        raise OSError("scontrol: requeue is disabled")

    (tmp_path / "program.py").write_text(ENDS["stopped"])
    signal.signal(signal.SIGUSR2, refuse)
    with pytest.raises(SystemExit) as left:
        BatchTask((sys.executable, str(tmp_path / "program.py")), 2)()
    assert left.value.code == 75
    assert "this task cannot be requeued: scontrol: requeue is disabled" in capsys.readouterr().err


# --- signals while a job is submitted ---------------------------------------------------------------------------------


def test_a_signal_waits_until_the_job_is_submitted_and_before_that_leaves_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    steps = list[str]()
    with pytest.raises(KeyboardInterrupt), DelayedSignals("the job is being submitted") as delayed:
        delayed.begin()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        steps.append(f"goes on after {delayed.came}")
    assert steps == [f"goes on after {signal.SIGINT}"]
    assert capfd.readouterr().err == "badcjobs: SIGINT: the job is being submitted\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    heard = list[int]()
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
    ended = list[int]()
    with DelayedSignals() as delayed:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)  # a second one does not interrupt the cleanup
            ended.append(delayed.came or 0)
            delayed.came = None
    assert ended == [signal.SIGTERM]
