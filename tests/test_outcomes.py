"""Outcomes: how each call of a cross-encoder ended is counted, and nothing else about it changes."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts import errors
from contracts.errors import (
    DartflowError,
    InvalidAnswerError,
    ModelError,
    RefusedError,
    TimedOutError,
    TransientError,
)
from flows.executor import retrying
from flows.settings import ExecutorParams
from models.outcomes import CountedCrossEncoder, Spending, outcome_of

ENDS = {
    "ok": None,
    "failed": ModelError("encoder", "gave no answer", next_step="Look."),
    "refused": RefusedError("encoder", "refuses us", next_step="Pay."),
    "timed_out": TimedOutError("encoder", "was too slow", next_step="Wait."),
}


class Scripted:
    """A cross-encoder whose calls end as told; a passage scores its length."""

    model_id = "scripted-7"

    def __init__(self, *ends: Exception | None) -> None:
        self.ends = list(ends)

    def score(self, queries, passages):
        end = self.ends.pop(0)
        if end is not None:
            raise end
        return np.array([len(passage) for passage in passages], dtype=np.float32)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TimedOutError("a", "b", next_step="C."), "timed_out"),
        (RefusedError("a", "b", next_step="C."), "refused"),
        (TransientError("a", "b", next_step="C."), "failed"),
        (ModelError("a", "b", next_step="C."), "failed"),
        (InvalidAnswerError("a", "b", next_step="C."), "invalid"),
        (errors.StageError("a", "b", next_step="C."), "failed"),
        (TimeoutError(), "failed"),
        (ValueError("no"), "failed"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_error_is_an_outcome(error, outcome):
    assert outcome_of(error) == outcome


def test_a_call_counts_once_however_many_pairs_it_has():
    calls = Counter()
    encoder = CountedCrossEncoder(Scripted(None, None, None), calls)
    assert encoder.score(["q"] * 3, ["a", "bb", "ccc"]).tolist() == [1, 2, 3]
    assert encoder.score([], []).shape == (0,)
    assert encoder.score(["q"], ["dddd"]).dtype == np.float32
    assert calls == {"ok": 3}


def test_nothing_is_counted_before_the_first_call():
    calls = Counter()
    assert CountedCrossEncoder(Scripted(), calls).model_id == "scripted-7"
    assert calls == {}


@pytest.mark.parametrize("end", [error for error in ENDS.values() if error is not None], ids=outcome_of)
def test_an_error_passes_as_it_is(end):
    calls = Counter()
    with pytest.raises(DartflowError) as caught:
        CountedCrossEncoder(Scripted(end), calls).score(["q"], ["a"])
    assert caught.value is end
    assert calls == {outcome_of(end): 1}


def test_an_interruption_is_no_outcome():
    calls = Counter()
    with pytest.raises(KeyboardInterrupt):
        CountedCrossEncoder(Scripted(KeyboardInterrupt()), calls).score(["q"], ["a"])
    assert calls == {}


@given(ends=st.lists(st.sampled_from(sorted(ENDS)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_calls_are_counted_by_how_they_ended(ends):
    calls = Counter()
    encoder = CountedCrossEncoder(Scripted(*(ENDS[end] for end in ends)), calls)
    for _ in ends:
        with suppress(ModelError):
            encoder.score(["q"], ["a"])
    assert calls == Counter(ends)


def test_each_try_of_a_repeated_call_is_counted_by_itself():
    calls = Counter()
    encoder = CountedCrossEncoder(Scripted(ENDS["timed_out"], TransientError("a", "b", next_step="C."), None), calls)
    score = retrying(lambda pairs: encoder.score(*pairs), ExecutorParams(retries=2, retry_seconds=0), lambda: None)
    assert score((["q"], ["abc"])).tolist() == [3]
    assert calls == {"timed_out": 1, "failed": 1, "ok": 1}


def test_shards_that_run_at_once_count_their_own_calls():
    encoder = Scripted(*[None] * 400)
    counters = [Counter() for _ in range(4)]

    def shard(calls):
        counted = CountedCrossEncoder(encoder, calls)
        for _ in range(100):
            counted.score(["q"], ["a"])

    threads = [threading.Thread(target=shard, args=(calls,)) for calls in counters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters == [{"ok": 100}] * 4


def test_spending_adds_up_over_threads():
    spending = Spending()

    def work():
        for _ in range(500):
            spending.note("ok", tokens=3, cost=0.5)
            spending.note("refused", times=0)
            spending.note("reused", times=2)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (spending.calls, spending.tokens, spending.cost) == ({"ok": 2000, "reused": 4000}, 6000, 1000.0)
