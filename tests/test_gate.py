"""The gate: those who find it full come back when they are told to, and find room."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.server.errors import ApiError, bad_request
from moesched.server.gate import LONGEST_WAIT, Gate


class Queue:
    """A gate on a clock of its own, whose answers end one after the other, each after some seconds."""

    def __init__(self, running: int, waiting: int) -> None:
        self.now = 0.0
        self.gate = Gate(running, waiting, lambda: self.now)
        self._inside: list[AbstractContextManager[None]] = []

    def enter(self, answers: int = 1) -> None:
        entered = self.gate.entered(answers)
        entered.__enter__()
        self._inside.append(entered)

    def end(self, after: float, count: int = 1) -> None:
        self.now += after
        for _ in range(count):
            self._inside.pop(0).__exit__(None, None, None)

    def fill(self) -> None:
        while self.gate.inside < self.gate.most:
            self.enter()

    def told(self, answers: int = 1) -> int:
        """The seconds after which one who finds it full is to come back."""
        with pytest.raises(ApiError) as caught:
            self.enter(answers)
        assert caught.value.status == 429
        return int(caught.value.headers["Retry-After"])

    def at_work(self, ends: int, each: float) -> None:
        """Be full while answers end, and others come in their place."""
        for _ in range(ends):
            self.fill()
            self.end(each)
        self.fill()


def test_those_who_are_refused_are_told_to_come_back_one_after_the_other_as_answers_end() -> None:
    queue = Queue(4, 6)
    queue.at_work(20, each=2.0)
    assert [queue.told() for _ in range(5)] == [2, 4, 6, 8, 10]
    queue.at_work(2, each=2.0)
    assert queue.told() == 8


def test_several_answers_need_as_much_room() -> None:
    queue = Queue(4, 6)
    queue.at_work(20, each=2.0)
    assert queue.told(answers=3) == 6


@given(st.integers(1, 5), st.integers(0, 6), st.floats(0.05, 2.0), st.integers(1, 20))
def test_everyone_who_comes_back_in_time_finds_room_if_those_of_a_second_may_wait(
    running: int, more: int, each: float, refused: int
) -> None:
    queue = Queue(running, math.ceil(1 / each) + more)
    queue.at_work(3 * running, each)
    back = sorted(queue.now + seconds for _ in range(refused) if (seconds := queue.told()) < LONGEST_WAIT)
    for time in back:
        while queue.now + each <= time + 1e-6:
            queue.end(each, count=min(1, queue.gate.inside))
        queue.enter()


def test_answers_that_end_together_tell_the_same_rate() -> None:
    queue = Queue(8, 8)
    for _ in range(6):
        queue.fill()
        queue.end(4.0, count=8)
    queue.fill()
    assert [queue.told() for _ in range(4)] == [1, 1, 2, 2]


def test_requests_that_are_refused_inside_are_no_answers_that_ended() -> None:
    queue = Queue(2, 2)
    queue.at_work(10, each=2.0)
    queue.end(2.0)
    for _ in range(100):
        with pytest.raises(ApiError), queue.gate.entered(1):
            raise bad_request("its template does not take it")
    queue.fill()
    assert queue.told() == 2


def test_hours_without_requests_do_not_count() -> None:
    queue = Queue(2, 2)
    queue.at_work(10, each=1.0)
    queue.end(1.0, count=4)
    queue.now += 7200
    queue.at_work(2, each=1.0)
    assert queue.told() == 1


def test_nobody_is_told_to_wait_for_more_than_a_minute() -> None:
    queue = Queue(1, 1)
    queue.at_work(3, each=50.0)
    assert [queue.told() for _ in range(3)] == [50, 60, 60]


def test_before_any_answer_has_ended_one_is_to_come_back_soon() -> None:
    queue = Queue(1, 0)
    queue.fill()
    assert queue.told() == 1
