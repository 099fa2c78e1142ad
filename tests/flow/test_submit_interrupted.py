"""``badcjobs submit`` that is interrupted, killed or left without an answer while sbatch has the array: nothing twice.

Each story is a few commands on a run folder of its own. sbatch and squeue do what a story says, by their environment,
so that all commands of all stories can follow one another in no time.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from rooms.cluster import call_sbatch
from support.badcjobs_program import ON_CPU, Outcome, Site, assert_refused
from support.login_node import LoginNode

RUN = ("--gpus-per-task", "0", "--", *ON_CPU)
SBATCH = """
echo "$@" >> $0.called
case "$*" in *--parsable*) echo "$3" > $0.merge; eval "${TEST_MERGE:-echo 4822}"; exit ;; esac
echo "$1" > $0.script
eval "$TEST_SBATCH"
"""
SQUEUE = """
case "$*" in *%o*) eval "$TEST_SQUEUE" ;; *) echo '4821_0 PENDING 0 Resources' ;; esac
"""
TAKES = "echo '--> Checking allocation...OK'; echo Submitted batch job 4821"
LOST = "echo 'Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
HAS_IT = 'echo "4821|$(cat $(dirname $0)/sbatch.script)"'
HAS_BOTH = HAS_IT + '; echo "4822|$(cat $(dirname $0)/sbatch.merge)"'
HAS_OTHERS = "echo '4821|/somebody/elses.sh'"
SILENT = "echo Unable to contact slurm controller >&2; exit 1"


def hit(name: str) -> str:
    """Return what ends whoever has called sbatch, before that has ended itself."""
    return f"kill -{name} $PPID; sleep 0.1"


LATE = f"kill -KILL $PPID; sleep 1; touch $0.late; {TAKES}"
HAS_LATE = f"[ ! -e $(dirname $0)/sbatch.late ] || {HAS_IT}"

# By run folder: the arguments of each command, what sbatch does then, what squeue says of scripts; and what sbatch does
# when it gets the merge job.
STORIES = {
    "INT": [
        ("--sbatch=--array=1-5:2 --wait", f"{TAKES}; {hit('INT')}", SILENT),
        ("--sbatch=--array=1-5:2", TAKES, SILENT),
    ],
    "TERM": [
        ("--sbatch=--array=1-5:2 --wait", f"{TAKES}; {hit('TERM')}", SILENT),
        ("--sbatch=--array=1-5:2", TAKES, SILENT),
    ],
    "killed": [
        ("--tasks 2", f"{TAKES}; {hit('KILL')}", HAS_IT),
        ("--tasks 2 --dry-run", TAKES, HAS_IT),
        ("--tasks 2", TAKES, SILENT),
        ("--tasks 2 --again", TAKES, HAS_IT),
        ("--tasks 3", TAKES, HAS_IT),
        ("--tasks 2", TAKES, HAS_IT),
    ],
    "for-nothing": [("", hit("KILL"), SILENT), ("", TAKES, HAS_OTHERS)],
    "lost": [("", LOST, HAS_OTHERS), ("", TAKES, HAS_IT)],
    "looked-at": [
        ("--tasks 3 --time 9", LOST, SILENT),
        ("monitor --json --once", TAKES, SILENT),
        ("check --json -- --engine demo", TAKES, SILENT),
        ("--tasks 3 --time 9", TAKES, HAS_IT, LOST),
        ("monitor --json --once", TAKES, SILENT),
        ("--tasks 3 --time 9", TAKES, HAS_BOTH),
        ("monitor --json --once", TAKES, SILENT),
        ("check --json -- --engine demo", TAKES, SILENT),
    ],
    "lost-and-found": [("", LOST, HAS_IT)],
    "late": [("", LATE, HAS_LATE), ("", TAKES, HAS_LATE)],
    "other-wish": [
        ("--time 5", LOST, SILENT),
        ("--time 9 --dry-run", TAKES, HAS_IT),
        ("--time 9 --dry-run", TAKES, SILENT),
        ("--time 9", TAKES, HAS_IT),
        ("--time 5", TAKES, HAS_IT),
        ("--time 5", TAKES, SILENT),
    ],
    "merge-killed": [("", TAKES, SILENT, f"echo 4822; {hit('KILL')}"), ("", TAKES, HAS_BOTH)],
    "merge-lost-and-found": [("", TAKES, HAS_BOTH, LOST)],
    "merge-lost": [("", TAKES, SILENT, LOST), ("--json", TAKES, SILENT), ("", TAKES, HAS_BOTH)],
    "merge-refused": [("", TAKES, SILENT, "echo No such account >&2; exit 1"), ("", TAKES, SILENT)],
    "emulated": [
        ("", LOST, SILENT),
        ("--cluster local", TAKES, HAS_IT),
        ("--cluster local", TAKES, SILENT),
        ("--cluster local --dry-run", TAKES, HAS_IT),
        ("--cluster local --dry-run", TAKES, SILENT),
        ("--cluster local --dry-run", TAKES, HAS_OTHERS),
        ("--cluster local --json", TAKES, HAS_OTHERS),
    ],
    "idle": [
        ("--tasks 9 --dry-run", TAKES, SILENT),
        ("--tasks 9", TAKES, SILENT),
        ("--tasks 9", TAKES, SILENT),
        ("--tasks 9 --json", TAKES, SILENT),
    ],
    "shown": [
        ("--time 5", TAKES, SILENT),
        ("--time 5 --dry-run", TAKES, SILENT),
        ("--time 9 --dry-run", TAKES, SILENT),
        ("--time 5 --again --dry-run", TAKES, SILENT),
    ],
}


@dataclass(frozen=True)
class Told:
    """How the commands of one story ended, and what they have left."""

    out: Path
    ends: list[Outcome]
    submitted: int  # how often sbatch was called

    @property
    def names(self) -> set[str]:
        return {path.name for path in (self.out / "logs").iterdir()}


def _command(manifest: str, out: Path, words: str) -> list[str]:
    if words.startswith("monitor"):
        return [*words.split(), str(out)]
    if words.startswith("check"):
        return ["check", "--out", str(out), *words.split()[1:]]
    return ["submit", manifest, "--out", str(out), *words.split(), *RUN]


@pytest.fixture(scope="module")
def told(shared_site: Site) -> dict[str, Told]:
    login, manifest = LoginNode(shared_site), str(shared_site.manifest(6))
    login.program("sbatch", SBATCH)
    login.program("squeue", SQUEUE)
    path = f"{login.folder}:/usr/bin:/bin"
    orders = [(shared_site.folder / name, *order) for name, orders in STORIES.items() for order in orders]
    commands = [_command(manifest, out, words) for out, words, *_ in orders]
    names = ("TEST_SBATCH", "TEST_SQUEUE", "TEST_MERGE")
    envs = [{"PATH": path, **dict(zip(names, does, strict=False))} for _, _, *does in orders]
    ends = iter([shared_site.badcjobs(*command, env=env) for command, env in zip(commands, envs, strict=True)])

    def tell(name: str) -> Told:
        out = shared_site.folder / name
        return Told(out, [next(ends) for _ in STORIES[name]], sum(f"{out}/" in call for call in login.calls))

    return {name: tell(name) for name in STORIES}


@pytest.mark.parametrize(("name", "exit_code"), [("INT", 128 + signal.SIGINT), ("TERM", -signal.SIGTERM)])
def test_interrupted_right_after_sbatch_it_says_its_job_and_the_same_command_finds_it(
    told: dict[str, Told], name: str, exit_code: int
) -> None:
    story = told[name]
    cut, found = story.ends
    assert cut.exit_code == exit_code, cut.stderr
    assert "job 4821 is submitted: 3 array tasks for 6 chunks, merge job 4822" in cut.stdout
    assert f"SIG{name}: sbatch is submitting the job; waiting for its answer" in cut.stderr
    assert f"SIG{name}: job 4821 continues; the same command finds it again" in cut.stderr
    assert "job 4821 exists already: 3 array tasks for 6 chunks, merge job 4822" in found.stdout, found.stderr
    assert story.submitted == 2, "the array and its merge job, once"
    assert story.names == {"array.pkl", "4821_submission.sh", "4821_merge.sh"}
    assert {path.name for path in story.out.iterdir()} == {"logs", "tasks", "submitted.json"}


def test_killed_right_after_sbatch_slurm_is_asked_for_the_job_by_its_script(told: dict[str, Told]) -> None:
    story = told["killed"]
    killed, shown, silent, again, other, found = story.ends
    assert killed.exit_code == -signal.SIGKILL
    assert (shown.exit_code, "already has job 4821" in shown.stderr) == (0, True), shown.stderr
    assert_refused(silent, 5, "it is not known whether Slurm accepted the array of an interrupted submit")
    assert_refused(again, 2, "job 4821 has not ended yet")
    assert_refused(other, 2, "already has job 4821", "--sbatch=--array was 0-1, now 0-2")
    assert "job 4821 exists already: 2 array tasks for 6 chunks, merge job 4822" in found.stdout, found.stderr
    assert story.submitted == 2, "the array, and at last its merge job"
    assert story.names == {"array.pkl", "4821_submission.sh", "4821_merge.sh"}


def test_where_the_killed_submit_came_to_nothing_the_same_command_submits(told: dict[str, Told]) -> None:
    killed, done = told["for-nothing"].ends
    assert killed.exit_code == -signal.SIGKILL
    assert "job 4821 is submitted" in done.stdout, done.stderr
    assert told["for-nothing"].names == {"array.pkl", "4821_submission.sh", "4821_merge.sh"}


def test_an_answer_of_sbatch_that_was_lost_is_looked_for_and_the_job_gets_its_merge_job(told: dict[str, Told]) -> None:
    lost, found = told["lost"].ends
    assert_refused(lost, 5, "it is not known whether Slurm accepted the array", "Socket timed out", "the same command")
    assert "job 4821 exists already: 1 array task for 6 chunks, merge job 4822" in found.stdout, found.stderr
    (at_once,) = told["lost-and-found"].ends
    assert "job 4821 is submitted: 1 array task for 6 chunks, merge job 4822" in at_once.stdout, at_once.stderr


def test_an_sbatch_that_outlives_its_submit_is_waited_for_and_its_job_found(told: dict[str, Told]) -> None:
    killed, found = told["late"].ends
    assert killed.exit_code == -signal.SIGKILL
    assert "job 4821 exists already: 1 array task for 6 chunks, merge job 4822" in found.stdout, found.stderr
    assert told["late"].names == {"array.pkl", "4821_submission.sh", "4821_merge.sh"}


def test_a_job_that_is_found_again_keeps_its_wishes_and_gets_its_merge_job_whoever_was_refused_before(
    told: dict[str, Told],
) -> None:
    lost, shown, silent, other, same, later = told["other-wish"].ends
    assert_refused(lost, 5, "it is not known whether Slurm accepted the array")
    assert_refused(shown, 2, "already has job 4821", "--time was 5, now 9")
    assert_refused(silent, 5, "it was killed, or its answer was lost, and now Slurm does not answer")
    assert_refused(other, 2, "already has job 4821", "--time was 5, now 9")
    for end in (same, later):
        assert "job 4821 exists already: 1 array task for 6 chunks, merge job 4822" in end.stdout, end.stderr
    assert told["other-wish"].submitted == 2
    assert {path.name for path in told["other-wish"].out.iterdir()} == {"logs", "submitted.json"}


def test_a_merge_job_that_slurm_has_taken_is_found_and_not_submitted_twice(told: dict[str, Told]) -> None:
    killed, found = told["merge-killed"].ends
    assert killed.exit_code == -signal.SIGKILL
    (at_once,) = told["merge-lost-and-found"].ends
    lost, silent, at_last = told["merge-lost"].ends
    for end in (found, at_once, at_last):
        assert "1 array task for 6 chunks, merge job 4822" in end.stdout, end.stderr
    assert (lost.exit_code, "it is not known whether the merge job exists" in lost.stdout) == (0, True), lost.stderr
    facts = json.loads(silent.stdout)
    assert (facts["merge_job_id"], facts["merge_unsure"]) == (None, True)
    assert {told[name].submitted for name in ("merge-killed", "merge-lost-and-found", "merge-lost")} == {2}


def test_a_job_without_a_merge_job_says_so_each_time_it_is_found(told: dict[str, Told]) -> None:
    story = told["merge-refused"]
    for end in story.ends:
        assert f"there is no merge job; later: badcjobs merge {story.out}" in end.stdout, end.stderr
    assert story.submitted == 2


def test_an_emulation_is_refused_where_slurm_may_have_an_array_that_nobody_has_written_down(
    told: dict[str, Told],
) -> None:
    _, *refused, shown, has_not = told["emulated"].ends
    for has_it, silent in (refused[:2], refused[2:]):  # without and with --dry-run
        assert_refused(has_it, 2, "already has job 4821 of --cluster slurm", "scancel 4821")
        assert_refused(silent, 2, "was killed", "or its answer was lost", "Unable to contact slurm controller")
    assert shown.exit_code == 0, shown.stderr
    assert (has_not.exit_code, has_not.json["idle_tasks"]) == (0, 0), has_not.stderr
    # Slurm has said that there is no such array: nobody need be told of it for ever.
    assert not (told["emulated"].out / ".submitting.json").exists()
    assert not [name for name in told["emulated"].names if name.startswith(".submission")]


def test_who_looks_at_a_run_is_told_of_a_submit_that_was_cut_short_and_of_the_command_that_finds_its_job(
    told: dict[str, Told],
) -> None:
    _, seen, checked, _, without_merge, _, whole, fine = told["looked-at"].ends
    manifest, out = told["looked-at"].out.parent / "manifest.csv", told["looked-at"].out
    words, _ = seen.json["remarks"]
    assert words == "a submit was interrupted here, or is still running; the same command finds its job"
    assert seen.json["total"]["standstill"] == "no task is running"
    (command,) = seen.json["total"]["go_on"]
    assert command.startswith(f"badcjobs submit {manifest} --out={out} ") and "--sbatch=--array=0-2 " in command, (
        command
    )
    assert [one["fix"] for one in checked.json["findings"] if one["subject"] == "submit"] == [command]
    assert "the submit of job 4821 was interrupted" in without_merge.json["remarks"][0]
    assert without_merge.json["total"]["go_on"] == [command]
    assert whole.json["total"]["go_on"] == []
    assert whole.json["remarks"] == ["no task has published anything yet"]
    assert "submit" not in [one["subject"] for one in fine.json["findings"]]


def test_of_an_sbatch_that_does_not_answer_its_own_words_are_told_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program, script = tmp_path / "sbatch", tmp_path / "job.sh"
    program.write_text(
        "#!/bin/bash\necho Slurm temporarily unable to accept job, sleeping and retrying >&2\nexec sleep 60\n"
    )
    program.chmod(0o755)
    script.touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = call_sbatch(script, patience_s=2)
    assert (answer.job_id, answer.sure) == (None, False)
    assert answer.said.splitlines() == [
        "sbatch did not answer within 2 s",
        "Slurm temporarily unable to accept job, sleeping and retrying",
    ]
    (told,) = caplog.messages  # long before
    assert told.startswith("sbatch has not answered yet; waiting up to 2 s: ")


def test_a_dry_run_refuses_what_would_be_refused_and_says_where_nothing_would_be_submitted(
    told: dict[str, Told],
) -> None:
    first, same, other, again = told["shown"].ends
    assert first.exit_code == 0, first.stderr
    assert (same.exit_code, "#SBATCH --time=5\n" in same.stdout) == (0, True), same.stderr
    assert f"{told['shown'].out} already has job 4821: this command would submit nothing" in same.stderr
    assert_refused(other, 2, "--time was 5, now 9")
    assert_refused(again, 2, "job 4821 has not ended yet")


def test_tasks_without_work_are_told_of_when_they_are_submitted_and_counted_in_json(told: dict[str, Told]) -> None:
    shown, new, found, as_json = told["idle"].ends
    words = "9 tasks for 6 chunks: 3 have nothing to do; --tasks 6 is enough"
    assert words in shown.stderr and words not in shown.stdout
    assert f"\n  tasks       {words}\n" in new.stdout, new.stderr
    assert words not in found.stdout + found.stderr
    assert (as_json.json["found"], as_json.json["idle_tasks"]) == (True, 3)
