"""Claims on the same part of a source, played through with a clock that the test moves."""

import errno
import json
import os
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from rooms.root import BadcjobsError, Holder, RunFolder, find_process
from rooms.task import Claim, Part
from support.cases import read_data
from support.hand_clock import HandClock
from support.waiting import wait_for

START_MS = HandClock().now_ms()
HERE = find_process(os.getpid())
NAMES = {"PID": os.getpid(), "HERE": HERE, "GONE": f"{' '.join(HERE.split()[:2])} 4194305 1"}
OTHER = Holder("4821_0.r0.gpu1", 4194305, None, 2.0, START_MS, beat_at_ms=START_MS, works=True)
ME = replace(OTHER, name="4900_0.r0.gpu2", every_s=10.0, works=False)


class Play(HandClock):
    """The task that claims a part, and what another one does while it sleeps."""

    def __init__(self, folder, other="", mine="", events=""):
        super().__init__()
        theirs, ours = (eval(f"dict({text})", NAMES) for text in (other, mine))
        self.events = [event.split() for event in filter(None, events.strip().split("; "))]
        self.out, self.stopped = RunFolder(folder), False
        self.out.create()
        source, line, index, count = ours.pop("part", "7-all-0-2").split("-")
        self.user = ours.pop("user", os.geteuid())
        part = Part(source * 8, line, int(index), int(count))
        self.claim = Claim(self.out, part, replace(ME, **ours), self, self.look)
        name = f".claim-{'7' * 7}{theirs.pop('part', '7-all-0-2')}-{theirs.pop('token', 0)}"
        self.path, self.text = self.out.tasks / name, theirs.pop("text", "")
        if not theirs.pop("folder", False):
            self.other = replace(OTHER, **theirs)
            self.path.touch()
            self.beat()
        else:
            self.path.mkdir()

    def beat(self, **changes):
        self.other = replace(self.other, beat=self.other.beat + 1, **changes)
        if self.path.exists():
            self.path.write_text(self.text * self.other.beat or json.dumps(asdict(self.other)))

    def works(self):
        self.beat(works=True)

    def goes(self):
        self.path.unlink()

    def hang(self):
        super().sleep(1000)

    def rob(self):
        self.claim.path.unlink()

    def stop(self):
        self.stopped = True

    def look(self):
        if self.stopped:
            raise KeyboardInterrupt

    @property
    def passed_s(self):
        return self.monotonic_s() - START_MS / 1000

    def sleep(self, seconds):
        super().sleep(seconds)
        while self.events and self.passed_s >= float(self.events[0][0]):
            getattr(self, self.events.pop(0)[1])()

    def end(self):
        """Play it and return how it ended."""
        try:
            with self.claim as claim:
                text = claim.path.read_text()
                return f"works, {len(text)} bytes: {text.replace(HERE, 'HERE').strip()}"
        except (BadcjobsError, KeyboardInterrupt) as error:
            return f"{error}".replace(str(self.out.path), "RUN")


def test_of_two_claims_one_wins(tmp_path, pages, monkeypatch):
    said = []
    for number, line in enumerate(line for line in read_data("claim_stories.txt").splitlines() if line[0] != "#"):
        name, *story = line.split("|")
        play = Play(tmp_path / str(number), *story)
        monkeypatch.setattr(os, "geteuid", lambda user=play.user: user)
        ended = play.end()
        assert not play.claim.path.exists(), name
        there = "is there" if play.path.exists() else "is gone"
        said.append(f"{name}\n  after {play.passed_s:g} s the other claim {there}; {ended}")
    pages({"stories.txt": "\n".join(said)})


def test_a_claim_whose_folder_cannot_be_written_names_it(tmp_path):
    play = Play(tmp_path)
    play.goes()
    play.out.tasks.rmdir()
    assert "cannot be used" in play.end()


def test_after_a_suspension_a_holder_looks_before_it_goes_on(tmp_path):
    play = Play(tmp_path, "part='8-all-0-1'")
    with play.claim as claim:
        play.sleep(20)
        assert (claim.check(), claim.check(), json.loads(claim.path.read_text())["beat"]) == (True, True, 1)
        play.sleep(1)
        assert (claim.check(), claim.check(), json.loads(claim.path.read_text())["beat"]) == (True, True, 2)
        play.rob()
        play.sleep(20)
        assert claim.check(), "it has just looked"
        play.sleep(1)
        assert not claim.check()


@pytest.mark.parametrize(("number", "is_lost"), [("ESTALE", True), ("ENOENT", True), ("EIO", False), ("EACCES", False)])
def test_only_a_file_that_is_gone_means_that_another_task_has_the_part(tmp_path, monkeypatch, number, is_lost):
    def fail(*_how, **_more):
        raise OSError(getattr(errno, number), "no")

    play = Play(tmp_path, "part='8-all-0-1'")
    with play.claim as claim:
        monkeypatch.setattr(Path, "open", fail)
        play.sleep(30)
        assert claim.check() is not is_lost
    claim.lost = False
    play.sleep(30)
    assert claim.check(), "after its end nothing is lost"


def test_a_holder_beats_until_its_claim_is_gone_or_it_ends(tmp_path):
    def beat(play):
        return json.loads(play.claim.path.read_bytes() or "{}").get("beat", 0)

    plays = [Play(tmp_path / name, "part='8-all-0-1'", "every_s=0.02") for name in ("robbed", "ended")]
    robbed, ended = plays
    with robbed.claim:
        wait_for(lambda: beat(robbed) > 3, "it beats")
        robbed.rob()
        wait_for(lambda: robbed.claim.lost, "it has noticed")
    with ended.claim:
        wait_for(lambda: beat(ended) > 3, "it beats")
    assert not ended.claim.lost


def test_parts_overlap_if_they_have_a_row_in_common():
    parts = [Part("7", "all", index, count) for count in range(1, 7) for index in range(count)]
    for one, other in product(parts, parts):
        common = any(row % one.count == one.index and row % other.count == other.index for row in range(60))
        assert one.overlaps(other) == common
    line = Part("7", "2", 0, 1)
    others = (parts[3], Part("7", "3", 0, 1), Part("8", "2", 0, 1))
    assert [line.overlaps(other) for other in others] == [True, False, False]
