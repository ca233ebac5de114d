"""The token budget: what is spent and reserved never exceeds it, and who finds no room waits or is refused."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import RefusedError
from models.token_budget import TokenBudget


def test_a_call_that_does_not_fit_is_refused_with_the_next_step():
    budget = TokenBudget(1000, 300, "run-a")
    with pytest.raises(RefusedError) as refused:
        budget.reserve(701)
    assert str(refused.value) == (
        "token budget of run run-a: has no room for the next call: got 300 tokens spent, up to 701 to come, want at "
        "most 1000 in all. Raise grader.token_budget (in --config, or as DARTFLOW_GRADER__TOKEN_BUDGET) and `dartflow "
        "resume run-a`: what was paid for is kept."
    )
    budget.reserve(700)


def test_what_is_left_of_a_reservation_is_given_back():
    budget = TokenBudget(100, 0, "run-a")
    for _ in range(10):
        budget.reserve(90)
        budget.settle(90, 1)
    assert budget.spent == 10
    budget.reserve(90)
    budget.settle(90, 90)
    with pytest.raises(RefusedError):
        budget.reserve(1)


def test_without_a_limit_nothing_is_refused():
    budget = TokenBudget(None, 10**12, "run-a")
    budget.reserve(10**12)
    budget.settle(10**12, 5)
    assert budget.spent == 10**12 + 5


def test_who_finds_no_room_waits_for_the_calls_in_flight():
    budget = TokenBudget(100, 0, "run-a")
    budget.reserve(80)
    entered = threading.Event()

    def second():
        budget.reserve(50)
        entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.05)
    assert not entered.is_set()
    budget.settle(80, 20)
    thread.join(5)
    assert entered.is_set()


def test_who_waits_in_vain_is_refused():
    budget = TokenBudget(100, 0, "run-a")
    budget.reserve(80)
    refusals = []

    def second():
        try:
            budget.reserve(50)
        except RefusedError as error:
            refusals.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.05)
    budget.settle(80, 80)
    thread.join(5)
    assert len(refusals) == 1


@given(
    limit=st.integers(1, 300),
    calls=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1)), max_size=12),
    threads=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_spending_never_exceeds_the_limit_and_only_what_cannot_fit_is_refused(limit, calls, threads):
    budget = TokenBudget(limit, 0, "run-a")
    waiting, lock = list(calls), threading.Lock()
    held, most, spent, refused = 0, 0, 0, []

    def work():
        nonlocal held, most, spent
        while True:
            with lock:
                if not waiting:
                    return
                reserved, share = waiting.pop()
            used = int(reserved * share)
            try:
                budget.reserve(reserved)
            except RefusedError:
                refused.append(reserved)
                continue
            with lock:
                held += reserved
                most = max(most, held + spent)
            time.sleep(0)
            with lock:
                held -= reserved
                spent += used
            budget.settle(reserved, used)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(10)
    assert not any(thread.is_alive() for thread in running)
    assert budget.spent == spent <= limit
    assert most <= limit
    assert all(reserved + spent > limit for reserved in refused)
