"""Calibrate: labels, the two halves, the limits that are chosen, and what their bands are worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.run import load_plan
from checkpoints.store import Store
from contracts.errors import InputError
from evaluation.bands import Labelled, Limits, Ratio, choose_limits, half_of, measured_bands
from evaluation.measures import read_qrels
from flows.calibrate import calibrate_run, labelled_passages
from flows.evaluate import load_qrels
from tests.example import ROOT, RUN, row_of, table_of

QRELS = ROOT / "examples" / "qrels.tsv"


def labelled(*passages: tuple[float, bool]) -> Labelled:
    scores, relevant = zip(*passages, strict=True)
    return Labelled(np.array(["q"] * len(passages)), np.array(scores, dtype=float), np.array(relevant, dtype=bool))


BY_HAND = labelled(
    (0.9, True), (0.8, True), (0.8, False), (0.7, True), (0.5, True), (0.4, False), (0.2, True), (0.1, False)
)


def test_upper_is_the_lowest_score_that_is_precise_enough_and_lower_the_highest_that_loses_little():
    # From 0.9 on 1 of 1 is relevant, from 0.8 on 2 of 3, 0.7 3 of 4, 0.5 4 of 5, 0.4 4 of 6, 0.2 5 of 7, 0.1 5 of 8.
    assert choose_limits(BY_HAND, 0.8, 0.8) == (Limits(0.5, 0.5), True)
    assert choose_limits(BY_HAND, 0.81, 0.8) == (Limits(0.9, 0.5), True)
    assert choose_limits(BY_HAND, 0.7, 0.81) == (Limits(0.2, 0.2), True)
    assert choose_limits(BY_HAND, 1.0, 1.0) == (Limits(0.9, 0.2), True)
    assert choose_limits(BY_HAND, 0.0, 0.0) == (Limits(0.1, 0.1), True), "of nothing asked the lowest limits are enough"


def test_a_precision_that_no_limit_reaches_gives_the_nearest_and_says_so():
    passages = labelled((0.9, False), (0.8, True), (0.7, True), (0.6, False))
    assert choose_limits(passages, 0.9, 1.0) == (Limits(0.7, 0.7), False), "2 of 3 from 0.7 on"


def test_limits_are_written_down_short_and_take_in_the_passage_that_they_come_from():
    passages = labelled((2 / 3, True), (1 / 3 * 1e-7, True), (0.0, False))
    assert choose_limits(passages, 1.0, 0.5) == (Limits(0.0000000333333, 0.0000000333333), True)
    limits, _ = choose_limits(labelled((2 / 3, True), (0.5, False)), 1.0, 1.0)
    assert limits == Limits(0.666666, 0.666666)


def test_bands_are_counted_by_hand():
    bands = measured_bands(BY_HAND, Limits(0.7, 0.2))
    assert {name: (band.passages, band.relevant) for name, band in bands.items()} == {
        "correct": (4, 3), "ambiguous": (3, 2), "incorrect": (1, 0),
    }  # fmt: skip
    shares = {name: (band.precision.share, band.recall.share) for name, band in bands.items()}
    assert shares == {"correct": (3 / 4, 3 / 5), "ambiguous": (2 / 3, 2 / 5), "incorrect": (0.0, 0.0)}
    assert measured_bands(BY_HAND, Limits(0.0, 0.0))["incorrect"].precision == Ratio(None, None, None)


def test_an_interval_is_wilsons():
    # Of a textbook: 8 of 10 are from 49.0 to 94.3 %; all of 3 are no certainty.
    found = Ratio.of(8, 10)
    assert (found.low, found.high) == (pytest.approx(0.490, abs=5e-4), pytest.approx(0.943, abs=5e-4))
    assert (Ratio.of(3, 3).low, Ratio.of(3, 3).high) == (pytest.approx(0.4385, abs=5e-4), pytest.approx(1.0))
    assert Ratio.of(0, 3).low == 0.0


PASSAGES = st.lists(st.tuples(st.integers(0, 12).map(lambda n: n / 12), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(PASSAGES, st.integers(0, 10).map(lambda n: n / 10), st.integers(0, 10).map(lambda n: n / 10))
def test_limits_agree_with_a_try_of_every_score(passages, precision, recall):
    passages = [*passages, (0.5, True)]
    found, reached = choose_limits(labelled(*passages), precision, recall)
    tried = sorted({score for score, _ in passages})

    def precise(limit: float) -> float:
        inside = [relevant for score, relevant in passages if score >= limit]
        return sum(inside) / len(inside)

    good = [limit for limit in tried if precise(limit) >= precision]
    best = max(precise(limit) for limit in tried)
    upper = min(good) if good else min(limit for limit in tried if precise(limit) == best)
    relevant = [score for score, one in passages if one]
    kept = [limit for limit in relevant if sum(score >= limit for score in relevant) >= recall * len(relevant) - 1e-9]
    assert reached == bool(good)
    assert found.upper == pytest.approx(upper, rel=1e-5)
    assert found.lower == pytest.approx(min(max(kept), upper), rel=1e-5)
    assert 0 <= found.lower <= found.upper <= upper


def test_a_query_is_always_in_the_same_half_and_both_halves_have_some():
    assert [half_of(name) for name in ("q-0", "q-1", "q-2", "q-3")] == [half_of(f"q-{n}") for n in range(4)]
    # sha256("a") begins with ca, sha256("b") with 3e, sha256("d") with 18, sha256("hello") with 2c, "abc" with ba,
    # "" with e3: even ones are in half 0.
    assert [half_of(name) for name in ("a", "b", "d", "hello", "abc", "")] == [0, 0, 0, 0, 0, 1]
    share = sum(half_of(f"query {n}") for n in range(1000)) / 1000
    assert 0.45 < share < 0.55
    both = Labelled(np.array(["a", "", "a"]), np.array([0.1, 0.2, 0.3]), np.array([True, False, True]))
    assert both.half(0).scores.tolist() == [0.1, 0.3]
    assert both.half(0).counts() == {"queries": 1, "relevant": 2, "not_relevant": 0}
    assert both.half(1).counts() == {"queries": 1, "relevant": 0, "not_relevant": 1}


def opened(folder):
    store = Store(str(folder))
    return store, load_plan(store, RUN)


def test_an_unlabelled_passage_is_no_negative_unless_it_is_said_so(example_store):
    graded = row_of(example_store, RUN, "crag_grading", "log-0003")["candidates"]
    names = [one["chunk_id"] for one in graded]
    qrels = read_qrels(f"log-0003 0 {names[0]} 1\nlog-0003 0 {names[1]} 0\nlog-0003 0 elsewhere 1\n", "qrels")
    found = labelled_passages(*opened(example_store), qrels, complete=False)
    assert found.scores.tolist() == [one["score"] for one in graded[:2]]
    assert found.relevant.tolist() == [True, False]
    whole = labelled_passages(*opened(example_store), qrels, complete=True)
    assert whole.scores.tolist() == [one["score"] for one in graded]
    assert whole.relevant.tolist() == [True] + [False] * (len(graded) - 1)
    assert set(whole.queries.tolist()) == {row_of(example_store, RUN, "queries", "log-0003")["query_id"]}


def test_a_passage_that_one_of_two_lines_of_a_query_calls_relevant_is_relevant(example_store):
    lines: dict[str, list[str]] = {}
    for line in table_of(example_store, RUN, "log_lines").to_pylist():
        lines.setdefault(line["query_id"], []).append(line["logged_id"])
    first, second = next(ids for query, ids in lines.items() if query is not None and len(set(ids)) > 1)[:2]
    chunk = row_of(example_store, RUN, "crag_grading", first)["candidates"][0]["chunk_id"]
    for labels in ((0, 1), (1, 0)):
        qrels = {first: {chunk: labels[0]}, second: {chunk: labels[1]}}
        found = labelled_passages(*opened(example_store), qrels, complete=False)
        assert found.relevant.tolist() == [True]


def test_what_is_reported_is_measured_on_queries_that_were_not_looked_at(example_store):
    qrels = load_qrels(QRELS)
    found = calibrate_run(*opened(example_store), qrels, precision=0.8, recall=0.95, complete=True)
    labels = labelled_passages(*opened(example_store), qrels, complete=True)
    assert (found.limits, found.reached) == choose_limits(labels.half(0), 0.8, 0.95)
    assert found.proposed_bands == measured_bands(labels.half(1), found.limits)
    assert found.now == Limits(0.9, 0.01)
    assert (found.chosen_on, found.held_out) == (labels.half(0).counts(), labels.half(1).counts())
    assert sum(band.passages for band in found.proposed_bands.values()) == len(labels.half(1).scores)
    # Labels of the held-out half change nothing but the report.
    held_out = {
        line["logged_id"]
        for line in table_of(example_store, RUN, "log_lines").to_pylist()
        if line["query_id"] is not None and half_of(line["query_id"]) == 1
    }
    fewer = {query: dict(list(judged.items())[:1]) if query in held_out else judged for query, judged in qrels.items()}
    other = calibrate_run(*opened(example_store), fewer, precision=0.8, recall=0.95, complete=True)
    assert other.limits == found.limits
    assert other.proposed_bands != found.proposed_bands


def test_judgements_without_negatives_are_refused_with_a_way_out(example_store):
    with pytest.raises(InputError, match=r"and 0 other .* say --complete if"):
        calibrate_run(*opened(example_store), load_qrels(QRELS), precision=0.8, recall=0.95, complete=False)


def test_the_command_prints_what_a_rerun_takes(dartflow):
    words = ("calibrate", RUN, "--qrels", str(QRELS), "--complete")
    status, out, err = dartflow(*words)
    assert status == 0, err
    assert "chosen on " in out
    assert "measured on " in out
    found = dartflow.json(*words)
    assert found["set"] in out
    assignments = found["set"].split()
    assert assignments[::2] == ["--set", "--set"]
    rows = dartflow.json("rerun", RUN, *assignments, "--dry-run")["stages"]
    assert [row["stage"] for row in rows if row["computed"]] == ["crag_grading", "context"]
    upper = found["limits"]["upper"]
    assert assignments[1] == f"crag_grading.upper={upper!r}"
    bands = found["proposed_bands"]
    assert set(bands) == {"correct", "ambiguous", "incorrect"}
    assert bands["correct"]["precision"]["low"] <= bands["correct"]["precision"]["share"]
    assert not math.isclose(upper, 0.9)
