"""What submitit calls in each array task: the child's exit code is the task's, and only what stopped comes back."""

from __future__ import annotations

import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import BatchTask


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """Give the process back its own handlers."""
    numbers = (signal.SIGTERM, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program for the task to run."""
    return tmp_path / "program.py"


def task_for(program: Path, requeues: int, *arguments: str) -> BatchTask:
    return BatchTask((sys.executable, str(program), *arguments), requeues)


def handle(task: BatchTask, seen: list[Any]) -> None:
    """Answer the warning as submitit does: ask for a checkpoint in the signal handler, then requeue and leave."""

    def checkpoint(_signum: int, _frame: object) -> None:
        seen.append(task.checkpoint())
        sys.exit(-1)

    signal.signal(signal.SIGUSR2, checkpoint)


@pytest.mark.parametrize("code", [1, 3, 70])
def test_the_exit_code_of_the_child_is_that_of_the_task(program: Path, code: int) -> None:
    program.write_text(f"raise SystemExit({code})")
    with pytest.raises(SystemExit) as left:
        task_for(program, 5)()
    assert left.value.code == code


def test_a_child_that_is_killed_counts_as_a_shell_would_count_it(program: Path) -> None:
    program.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(SystemExit) as left:
        task_for(program, 5)()
    assert left.value.code == 137


def test_a_task_that_is_done_returns_and_got_its_arguments(program: Path, tmp_path: Path) -> None:
    program.write_text(f"import sys; open({str(tmp_path / 'called')!r}, 'w').write(repr(sys.argv[1:]))")
    task_for(program, 5, "run", "a b.csv", "--out=x")()
    assert (tmp_path / "called").read_text() == "['run', 'a b.csv', '--out=x']"


def test_a_task_that_stopped_by_the_clock_asks_for_its_requeue_by_itself(program: Path) -> None:
    program.write_text("raise SystemExit(75)")
    task, seen = task_for(program, 2), []
    handle(task, seen)
    with pytest.raises(SystemExit) as left:
        task()
    assert left.value.code == -1
    (delayed,) = seen
    again = pickle.loads(pickle.dumps(delayed.function))  # what is kept for after the requeue
    assert vars(again) == vars(task_for(program, 1))


def test_a_task_without_requeues_left_ends_with_75(program: Path) -> None:
    program.write_text("raise SystemExit(75)")
    task, seen = task_for(program, 0), []
    handle(task, seen)
    with pytest.raises(SystemExit) as left:
        task()
    assert (left.value.code, seen) == (75, [])


STOPS_ON_USR1 = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))
signal.signal(signal.SIGTERM, lambda *_: None)
open({ready!r}, "w").close()
time.sleep(30)
sys.exit(9)
"""


@pytest.mark.parametrize(("code", "ends_with", "requeued"), [(75, -1, 1), (0, None, 0), (1, 1, 0)])
def test_a_warning_stops_the_child_in_order_and_only_what_has_work_left_is_requeued(
    program: Path, tmp_path: Path, code: int, ends_with: int | None, requeued: int
) -> None:
    ready = tmp_path / "ready"
    program.write_text(STOPS_ON_USR1.format(code=code, ready=str(ready)))
    task, seen = task_for(program, 2), []
    handle(task, seen)
    _when(ready, signal.SIGUSR2)
    if ends_with is None:
        task()
    else:
        with pytest.raises(SystemExit) as left:
            task()
        assert left.value.code == ends_with
    assert len(seen) == requeued


def test_a_cancelled_task_is_not_requeued(program: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program.write_text(
        STOPS_ON_USR1.format(code=75, ready=str(ready)).replace("sleep(30)", "sleep(0.5)").replace("(9)", "(75)")
    )
    task, seen = task_for(program, 2), []
    handle(task, seen)
    _when(ready, signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        task()
    assert (left.value.code, seen) == (75, [])


def test_what_slurm_would_not_requeue_ends_with_75_and_says_so(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.write_text("raise SystemExit(75)")

    def refuse(_signum: int, _frame: object) -> None:
        raise OSError("scontrol: requeue is disabled")

    signal.signal(signal.SIGUSR2, refuse)
    with pytest.raises(SystemExit) as left:
        task_for(program, 2)()
    assert left.value.code == 75
    assert "requeue is disabled" in capsys.readouterr().err


def _when(ready: Path, number: signal.Signals) -> None:
    """Send this process a signal once the child listens."""

    def wait() -> None:
        for _ in range(1000):
            if ready.exists():
                signal.pthread_kill(main, number)
                return
            stop.wait(0.01)

    main, stop = threading.main_thread().ident or 0, threading.Event()
    threading.Thread(target=wait, daemon=True).start()


def test_a_warning_that_comes_while_the_child_still_starts_does_not_end_it_and_is_told_again(program: Path) -> None:
    program.write_text(
        "import signal, sys, time\n"
        "time.sleep(1)\n"  # imports, as badcjobs has many
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))\n"
        "time.sleep(20)\n"
        "sys.exit(9)\n"
    )
    task, seen = task_for(program, 5), list[Any]()
    handle(task, seen)
    threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)).start()
    with pytest.raises(SystemExit) as left:
        task()
    assert left.value.code == -1
    assert len(seen) == 1, "it stopped in order, and is to be started again"
