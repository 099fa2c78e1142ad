"""The one queue of a task: nothing lost, nothing handed out twice, in any order."""

import math
import threading
from queue import Empty, SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk
from rooms.root import SystemClock
from rooms.workers import Batch, WorkQueue
from support.cases import read_lines
from support.hand_clock import HandClock


def every(chunk):
    return True


def never():
    return False


def chunks(count, first=0):
    return [Chunk("r", f"c{number}", "a.wav", "/a.wav") for number in range(first, first + count)]


class Room:
    """Room for so many seconds of audio in all."""

    def __init__(self, seconds):
        self.left_s = seconds

    def __call__(self, chunk):
        fits = (chunk.audio_s or 0.0) <= self.left_s
        self.left_s -= fits * (chunk.audio_s or 0.0)
        return fits


@settings(max_examples=70)
@given(
    st.lists(st.none() | st.integers(1, 100), max_size=30), st.integers(0, 300) | st.just(math.inf), st.integers(1, 9),
    st.booleans(),
)  # fmt: skip
def test_each_chunk_taken_is_the_longest_that_still_fits_and_can_be_seen_before(lengths_s, seconds, wants, at_work):
    """A chunk of unknown length may be the longest; of equal ones the first of the source comes first."""
    queue = WorkQueue(SystemClock(), workers=1, wants=wants)
    source = [Chunk("r", str(n), "a", "/a", 500, s and 500 + s * 1000) for n, s in enumerate(lengths_s)]
    queue.add(source, complete=True)
    ordered = sorted(source, key=lambda chunk: -999 if chunk.audio_s is None else -chunk.audio_s)
    assert [queue.upcoming(count) for count in (0, wants, 99)] == [[], ordered[:wants], ordered]
    greedy, room, got = Room(seconds), Room(seconds), list[Chunk]()
    expected = [chunk for chunk in ordered if greedy(chunk)]
    if at_work:
        got = queue.more(99, idle=99, fits=room) or []
    while not at_work and (batch := queue.take(room, never)) is not None:
        assert batch == Batch(batch.chunks) and len(batch.chunks) <= wants
        got += batch.chunks
        for _ in batch.chunks:
            queue.finish()
    assert [chunk.audio_s for chunk in got] == [chunk.audio_s for chunk in expected]
    assert seconds < math.inf or got == ordered
    rest = [chunk for chunk in ordered if chunk not in got]
    assert queue.upcoming(99) == (queue.more(99, idle=99, fits=every) or []) == rest, (
        "who has more time gets the longest first"
    )


def play(story):
    """Give orders to a queue, and return its answers; chunks that come back are named by their numbers."""
    clock, known, said = HandClock(), list[Chunk](), list[str]()
    many, _, _, wants = story.split("; ")[0].split()
    queue = WorkQueue(clock, workers=int(many), wants=int(wants))
    for order in story.split("; ")[1:]:
        verb, *words = order.split()
        numbers = [int(word) for word in words if word.lstrip("-").isdecimal()]
        answer = ""
        if verb in ("add", "begin", "lengths"):
            fresh = chunks(0 if verb == "lengths" else numbers[0], len(known))
            fresh += [Chunk("r", f"c{n}", "a", "/a", 0, 1000 * s) for n, s in enumerate(numbers) if verb == "lengths"]
            known += fresh
            queue.add(fresh, complete=verb != "begin")
        elif verb == "take":
            batch = queue.take(Room(numbers[0] if numbers else math.inf), never)
            answer = batch and (batch.chunks, *(mark for mark in ("alone", "apart") if getattr(batch, mark)))
        elif verb == "more":
            answer = queue.more(numbers[0], idle=numbers[1], fits=every)
        elif verb == "back":
            first, _, last = words[0].partition("-")
            back = known[int(first) : int(last or first) + 1]
            rest_s = numbers[-1] if "rest" in words else 0
            queue.put_back(back, delay_s=rest_s, alone="alone" in words, apart="apart" in words)
        elif verb == "seen":
            answer = queue.upcoming(numbers[0])
        elif verb == "room":
            answer = queue.room
        else:
            deeds = {
                "sleep": clock.sleep,
                "workers": queue.change_workers,
                "done": lambda count=1: [queue.finish() for _ in range(count)],
                "drain": queue.drain,
            }
            deeds["pause"] = queue.pause
            deeds[verb](*numbers)  # type: ignore[operator]
        said.append(f"  {order} {'' if answer == '' else f'-> {named(answer)}'}".rstrip())
    return said


def named(answer):
    if isinstance(answer, tuple):
        return " ".join([named(answer[0]), *answer[1:]])
    if isinstance(answer, list):
        names = [chunk.chunk_id for chunk in answer]
        return " ".join(names if len(names) < 13 else [names[0], f"... {len(names)} ...", names[-1]]) or "nothing"
    return str(answer)


def test_what_a_queue_hands_out_in_each_story(pages):
    said = []
    for line in read_lines("queue_stories.txt"):
        name, _, story = line.partition(": ")
        said += [f"# {name}: {story.split('; ')[0]}", *play(story)]
    pages({"stories.txt": "\n".join(said)})


def take_apart(queue, over=never):
    """Take once, in a thread of its own, as a worker does; return where the answer comes."""
    asked, answers = threading.Event(), SimpleQueue()

    def take():
        answers.put(queue.take(every, lambda: asked.set() or over()))  # type: ignore[func-returns-value]

    threading.Thread(target=take, daemon=True).start()
    assert asked.wait(60)
    return answers


NEWS = {
    "comes back": (lambda queue, first: queue.put_back(first), Batch(chunks(1))),
    "comes back later": (lambda queue, first: queue.put_back(first, delay_s=0.02), Batch(chunks(1))),
    "comes back alone": (
        lambda queue, first: queue.put_back(first, apart=True),
        Batch(chunks(1), alone=True, apart=True),
    ),
    "fresh": (lambda queue, first: queue.add(chunks(1, first=5), complete=True), Batch(chunks(1, first=5))),
    "settled": (lambda queue, first: queue.finish(), None),
    "drained": (lambda queue, first: queue.drain(), None),
}


@pytest.mark.parametrize("name", NEWS)
def test_while_a_chunk_in_flight_may_come_back_a_taker_waits_for_news(name):
    queue, (news, answer) = WorkQueue(SystemClock(), workers=1, wants=1), NEWS[name]
    queue.add(chunks(1), complete=True)
    first, taker = queue.take(every, never).chunks, take_apart(queue)
    assert taker.empty()
    news(queue, first)
    assert taker.get(timeout=60) == answer


def test_a_taker_waits_for_the_end_of_a_pause():
    clock = HandClock()
    queue = WorkQueue(clock, workers=1, wants=1)
    queue.add(chunks(1), complete=True)
    queue.pause(0.02)
    taker = take_apart(queue)
    with pytest.raises(Empty):
        taker.get(timeout=0.2)
    clock.sleep(0.02)
    assert taker.get(timeout=60) == Batch(chunks(1))


def test_every_taker_goes_home_when_the_last_chunk_is_settled_and_one_that_is_told_to_at_once():
    queue, over = WorkQueue(SystemClock(), workers=2, wants=1), threading.Event()
    queue.add(chunks(2), complete=False)
    assert [queue.take(every, never), queue.more(1, idle=1, fits=every)] == [Batch(chunks(1)), chunks(1, first=1)]
    reported, *takers = take_apart(queue, over.is_set), take_apart(queue), take_apart(queue)
    over.set()
    queue.change_workers(-1)
    assert reported.get(timeout=60) is None
    queue.finish()
    queue.finish()
    assert all(taker.empty() for taker in takers), "the source has more"
    queue.add([], complete=True)
    assert [taker.get(timeout=60) for taker in takers] == [None] * 2
