"""The table of responses to failures, walked through: each failure has one, nothing is retried for ever or dropped."""

from itertools import chain, combinations

import pytest
from rooms import workers
from rooms.cli import failures_text
from rooms.model import Chunk
from rooms.workers import ALL, POLICY, Circumstance, Retries, RetryPolicy, TaskStep, WorkerStep, find_rule

COUNTED = {Circumstance.FIRST_TIMES, Circumstance.SECOND_DEATH, Circumstance.RETRIES_SPENT}
# They end by themselves: with the task, after some starts or pauses, or because the next try is alone.
PASSING = {
    Circumstance.STOPPED, Circumstance.STARTING, Circumstance.STARTS_SPENT, Circumstance.MPS_SUSPECT,
    Circumstance.SHARED, Circumstance.UNCERTAIN, Circumstance.NODE_AT_FAULT, Circumstance.PAUSES_SPENT,
}  # fmt: skip
LASTING = set(Circumstance) - COUNTED - PASSING - {Circumstance.SMALLER_WAY}  # which ends: test_too_long
CHUNK = Chunk("r", "c", "a.wav", "/a.wav")


def subsets(circumstances):
    ordered = sorted(circumstances, key=lambda one: one.name)
    return map(set, chain.from_iterable(combinations(ordered, size) for size in range(len(ordered) + 1)))


def subsets_for(error_class):
    """Return all sets of the circumstances that make a difference for a class."""
    return subsets(set().union(*(rule.circumstances for rule in POLICY if error_class in rule.errors)))


@pytest.mark.parametrize("error_class", ALL)
def test_every_failure_in_every_circumstance_has_a_response_that_drops_nothing(error_class):
    for circumstances in subsets_for(error_class):
        rule = find_rule(error_class, circumstances)
        step = rule.chunk
        assert error_class in rule.errors and rule.circumstances <= circumstances
        assert step.status in ("pending", "failed", "poison")
        assert step.recorded or not rule.charged, "a charged failure is a try"
        assert rule.charged or step.status == "pending", "a chunk fails only by failures that count"
        assert not (step.rests and step in (workers.LEAVE, workers.BACK, workers.HALVES))
        if Circumstance.STOPPED in circumstances:
            assert (step, rule.charged) == (workers.LEAVE, False), "the task is ending: the chunk is for the next"


@pytest.mark.parametrize("retries", [0, 2, 5])
@pytest.mark.parametrize("error_class", ALL)
def test_a_chunk_that_fails_for_ever_is_given_up_or_its_worker_or_task_ends(error_class, retries):
    for circumstances in subsets(LASTING):
        history = Retries(RetryPolicy(retries))
        counted = 0
        for number in range(99):
            assert history.try_number(CHUNK) <= number + 1
            response = history.respond(CHUNK, error_class, circumstances)
            counted += response.charged
            if response.chunk.status != "pending":
                assert 1 <= counted <= retries + 1 and history.try_number(CHUNK) == 1
                break
            if response.worker is WorkerStep.STOP or response.task is not TaskStep.GO_ON:
                assert not counted, "the node, the device or the settings are at fault"
                break
        else:
            pytest.fail(f"{error_class} is retried for ever in {circumstances}")


def test_what_is_tried_again_without_being_counted_ends_by_itself():
    for rule in POLICY:
        ends = rule.task is not TaskStep.GO_ON or rule.worker is WorkerStep.STOP
        passes = rule.circumstances & (PASSING | {Circumstance.FIRST_TIMES})
        assert rule.charged or ends or passes, f"{rule} has no end"
    starts = {error_class: RetryPolicy(2).most_starts(error_class) for error_class in ALL}
    assert {starts.pop(name) for name in ("worker_died", "terminated")} == {15}
    assert (starts.pop("out_of_memory"), set(starts.values())) == (2, {3})


def test_no_rule_is_hidden_by_those_above_it(pages):
    used = [find_rule(name, circumstances) for name in ALL for circumstances in subsets_for(name)]
    assert [rule for rule in POLICY if not any(rule is one for one in used)] == []
    pages({"failures.txt": failures_text()})
