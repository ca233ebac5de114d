"""Reciprocal rank fusion: scores, exact order, and what takes part."""

from __future__ import annotations

import gzip
import math
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import permutations

import ir_measures
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.candidates import FusedRanking, KeywordRanking, Selection
from contracts.errors import ConfigurationError, ContractError, StageError
from contracts.table import schema
from stages.rrf_merge import STAGE, Params, fuse, reciprocal_rank_fusion, rrf_merge_table

KEYWORD = ["reset", "billing", "password"]
VECTOR = ["password", "reset", "security"]


# Both lists alike, and the constant of the paper: what the worked examples are about.
EQUAL = {"greedy_selection_weight": 1.0, "sparse_search_weight": 1.0, "rank_constant": 60, "limit": 50}


def items(ids):
    return [{"rank": rank, "chunk_id": chunk_id, "score": -float(rank)} for rank, chunk_id in enumerate(ids, start=1)]


def greedy(*lists):
    """A greedy_selection table; list n belongs to query q{n}."""
    rows = [{"query_id": f"q{n}", "candidates": items(ids), "shortfall": 0} for n, ids in enumerate(lists)]
    return pa.Table.from_pylist(rows, schema=schema(Selection))


def sparse(*lists, outcomes=None):
    """A sparse_search table; the outcome is ok or no_match unless given."""
    outcomes = outcomes or ["ok" if ids else "no_match" for ids in lists]
    rows = [
        {"query_id": f"q{n}", "candidates": items(ids), "outcome": outcome}
        for n, (ids, outcome) in enumerate(zip(lists, outcomes, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=schema(KeywordRanking))


def merge(first, second, **params):
    return STAGE.checked_run({"greedy_selection": first, "sparse_search": second}, {}, Params(**(EQUAL | params)))


def fused(output, row=0):
    """(chunk_id, score) of one query."""
    return [(one["chunk_id"], one["score"]) for one in output.table.column("candidates")[row].as_py()]


def ids_of(pairs):
    return [name for name, _ in pairs]


def slow_fusion(rankings, weights, rank_constant):
    """Sums fractions and sorts: exact, one candidate at a time."""
    scores = defaultdict(Fraction)
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, name in enumerate(ranking, start=1):
            if weight:
                scores[name] += Fraction(weight) / (rank_constant + rank)
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


def kernel(ranks, weights=None, rank_constant=60):
    """Order and scores of one query whose candidate n has the id n and the n-th row of ranks."""
    ranks = np.array(ranks, dtype=np.int64)
    weights = [1.0] * ranks.shape[1] if weights is None else weights
    count = np.arange(len(ranks))
    order, scores = reciprocal_rank_fusion(np.zeros_like(count), count, ranks, weights, rank_constant)
    return order.tolist(), scores.tolist()


def test_the_worked_example_by_hand():
    result = fuse([KEYWORD, VECTOR])
    assert result == [
        ("reset", pytest.approx(1 / 61 + 1 / 62)),
        ("password", pytest.approx(1 / 63 + 1 / 61)),
        ("billing", pytest.approx(1 / 62)),
        ("security", pytest.approx(1 / 63)),
    ]
    assert [round(score, 6) for _, score in result] == [0.032522, 0.032266, 0.016129, 0.015873]


def test_the_worked_example_finds_both_passages_where_keywords_alone_find_one():
    qrels = [ir_measures.Qrel("q", name, 1) for name in ("reset", "password")]

    def recall_at_2(ranking):
        run = [ir_measures.ScoredDoc("q", name, -float(rank)) for rank, name in enumerate(ranking)]
        return ir_measures.calc_aggregate([ir_measures.R @ 2], qrels, run)[ir_measures.R @ 2]

    assert [recall_at_2(one) for one in (KEYWORD, VECTOR, ids_of(fuse([KEYWORD, VECTOR])))] == [0.5, 1.0, 1.0]


def test_the_table_of_the_worked_example():
    output = merge(greedy(VECTOR), sparse(KEYWORD))
    assert output.table.schema.equals(schema(FusedRanking))
    assert output.table.to_pylist() == [
        {
            "query_id": "q0",
            "candidates": [
                _fused(1, "reset", 1 / 62 + 1 / 61, 2, 1),
                _fused(2, "password", 1 / 61 + 1 / 63, 1, 3),
                _fused(3, "billing", 1 / 62, None, 2),
                _fused(4, "security", 1 / 63, 3, None),
            ],
            "best_possible": 1 / 61 + 1 / 61,
            "greedy_selection_outcome": "ok",
            "sparse_search_outcome": "ok",
        }
    ]
    assert output.account.model_dump() == {
        "candidates_in": 6, "added": {}, "removed": {"merged": 2}, "candidates_out": 4,
    }  # fmt: skip


def _fused(rank, chunk_id, score, greedy_rank, sparse_rank):
    return {
        "rank": rank, "chunk_id": chunk_id, "score": pytest.approx(score, rel=1e-15),
        "greedy_selection_rank": greedy_rank, "sparse_search_rank": sparse_rank,
    }  # fmt: skip


# What other projects' tests state.


def test_ranks_are_taken_as_given_and_not_from_the_position():
    # Of pyserini: the second document stands second in its file at rank 2 and at rank 3.
    order, scores = kernel([[1, 1], [2, 3]])
    assert order == [0, 1]
    assert scores == pytest.approx([0.03278688524590164, 0.03200204813108039], rel=1e-15)
    assert fuse([["hanxiao2"], []]) == [("hanxiao2", pytest.approx(0.01639344262295082, rel=1e-15))]


def test_elasticsearch_explains_the_same_scores_at_constant_1():
    result = fuse([["4", "3", "2", "1"], ["3", "2", "1", "5"]], rank_constant=1)
    assert ids_of(result) == ["3", "2", "4", "1", "5"]
    assert [score for _, score in result[:3]] == pytest.approx([0.8333334, 0.5833334, 0.5], abs=1e-6)


def test_elasticsearch_weights_a_list_the_same_way():
    assert fuse([["a"], ["b"]], [0.1, 0.9]) == [
        ("b", pytest.approx(0.01475, abs=1e-5)),
        ("a", pytest.approx(0.00164, abs=1e-5)),
    ]


def test_elasticsearch_orders_four_in_two_lists_the_same_way():
    lists = [["1", "2", "3", "4"], ["4", "3", "1", "2"]]
    assert ids_of(fuse(lists, rank_constant=10)) == ["1", "4", "3", "2"]
    # A smaller limit is a prefix; a smaller window is not.
    assert ids_of(fused(merge(greedy(lists[0]), sparse(lists[1]), rank_constant=10, limit=2))) == ["1", "4"]
    assert ids_of(fused(merge(greedy(lists[0]), sparse(lists[1]), rank_constant=10, rank_window=2))) == [
        "1",
        "4",
        "2",
        "3",
    ]


def test_ranx_gives_the_same_scores_on_three_runs_of_a_trec_track(shared_data):
    """17,601 rows of 100 topics; ours are in exact order with ties by ascending id."""
    folder = shared_data / "robust03_runs"
    runs = [
        _read_run((folder / "runs" / f"{name}.run").read_text()) for name in ("aplrob03a", "pircRBa1", "THUIRr0301")
    ]
    expected = _read_run(gzip.decompress((folder / "expected" / "rrf_k60.run.gz").read_bytes()).decode())
    assert sum(len(rows) for rows in expected.values()) == 17_601
    for topic, rows in expected.items():
        rankings = [[name for name, _ in run.get(topic, [])] for run in runs]
        result = fuse(rankings)
        assert dict(result) == pytest.approx(dict(rows), rel=1e-12, abs=0)
        assert ids_of(result) == ids_of(slow_fusion(rankings, [1, 1, 1], 60))


def _read_run(text):
    rows = defaultdict(list)
    for line in text.splitlines():
        topic, _, name, rank, score, _ = line.split()
        rows[topic].append((name, float(score)))
        assert int(rank) == len(rows[topic])
    return rows


# Exact ties and order.


def test_a_passage_of_both_lists_beats_one_that_leads_a_single_list():
    assert ids_of(fuse([["a", "b"], ["c", "b"]])) == ["b", "a", "c"]


def test_ties_break_by_ascending_id_whichever_list_an_id_came_from():
    assert ids_of(fuse([["b", "c"], ["a", "d"]])) == ["a", "b", "c", "d"]


def exact_ties_that_floats_miss():
    """Pairs of pairs of ranks with 1/(60+a) + 1/(60+b) equal exactly and unequal as floats."""
    by_sum = defaultdict(list)
    for a in range(1, 101):
        for b in range(a, 101):
            by_sum[Fraction(1, 60 + a) + Fraction(1, 60 + b)].append((a, b))
    return [
        (low, high)
        for pairs in by_sum.values()
        for low, high in permutations(pairs, 2)
        if 1 / (60 + low[0]) + 1 / (60 + low[1]) < 1 / (60 + high[0]) + 1 / (60 + high[1])
    ]


def test_equal_sums_whose_floats_differ_are_ordered_by_id():
    ties = exact_ties_that_floats_miss()
    assert ((3, 80), (24, 30)) in ties  # 1/63 + 1/140 = 1/84 + 1/90 = 29/1260
    for low, high in ties:
        for first, second in ((low, high), (high, low)):
            order, scores = kernel([first, second])
            assert order == [0, 1]
            exact = Fraction(1, 60 + low[0]) + Fraction(1, 60 + low[1])
            assert scores == [float(exact), float(exact)]


def test_equal_sums_whose_floats_differ_are_ordered_by_id_in_the_table_too():
    def ranked(places):
        return [places.get(rank, f"filler-{rank}-{min(places)}") for rank in range(1, 81)]

    for first, second in (("x", "y"), ("y", "x")):
        # x and y take the ranks (3, 80) and (24, 30) in turn.
        lists = ranked({3: first, 24: second}), ranked({80: first, 30: second})
        output = merge(greedy(lists[0]), sparse(lists[1]), limit=200)
        pairs = [pair for pair in fused(output) if pair[0] in ("x", "y")]
        assert pairs == [("x", 29 / 1260), ("y", 29 / 1260)]


def test_a_chain_of_near_ties_holds_more_than_one_exact_score():
    # Ranks (1, 2) and (2, 1) tie but for a third list that weighs less than a float can add.
    ranks = [[1, 2, 0], [2, 1, 5], [1, 2, 4], [2, 1, 0]]
    order, scores = kernel(ranks, weights=[1.0, 1.0, 1e-20])
    assert order == [2, 1, 0, 3]
    assert scores == [float(Fraction(1, 61) + Fraction(1, 62))] * 4


def test_near_ties_of_different_queries_do_not_mix():
    queries, ids = np.array([0, 0, 1, 1]), np.array([5, 7, 5, 7])
    ranks = np.array([[24, 30], [3, 80], [2, 0], [1, 0]])
    order, _ = reciprocal_rank_fusion(queries, ids, ranks, [1.0, 1.0], 60)
    assert order.tolist() == [0, 1, 3, 2]


def test_the_kernel_leaves_its_inputs_as_they_were():
    queries, ids, ranks = np.array([0, 0]), np.array([0, 1]), np.array([[24, 30], [3, 80]])
    before = [array.copy() for array in (queries, ids, ranks)]
    reciprocal_rank_fusion(queries, ids, ranks, [1.0, 1.0], 60)
    assert all(np.array_equal(*pair) for pair in zip(before, (queries, ids, ranks), strict=True))


RANKING = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=10)
WEIGHT = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 2.0, 1e-18, 1e-100, 1e100]) | st.floats(1e-6, 1e6)
CONSTANT = st.integers(1, 100) | st.just(10**9)


@settings(deadline=None, max_examples=100)
@given(lists=st.lists(st.tuples(RANKING, WEIGHT), min_size=1, max_size=5), rank_constant=CONSTANT)
def test_fusion_equals_the_oracle_of_fractions(lists, rank_constant):
    rankings, weights = zip(*lists, strict=True)
    if not any(weights):
        weights = [1.0] * len(weights)
    result, oracle = fuse(rankings, weights, rank_constant), slow_fusion(rankings, weights, rank_constant)
    assert ids_of(result) == ids_of(oracle)
    assert [score for _, score in result] == pytest.approx([float(score) for _, score in oracle], rel=1e-12, abs=0)
    assert [score for _, score in result] == sorted((score for _, score in result), reverse=True)


@settings(deadline=None, max_examples=60)
@given(rankings=st.lists(RANKING, min_size=1, max_size=4), rank_constant=CONSTANT)
def test_the_order_of_the_lists_does_not_matter_at_equal_weights(rankings, rank_constant):
    results = [fuse(order, rank_constant=rank_constant) for order in permutations(rankings)]
    assert all(ids_of(one) == ids_of(results[0]) for one in results)


@settings(deadline=None, max_examples=60)
@given(
    queries=st.lists(st.tuples(RANKING, RANKING, st.booleans()), max_size=4),
    weights=st.tuples(WEIGHT, WEIGHT).filter(lambda pair: pair[0] > 0),
    rank_constant=CONSTANT, rank_window=st.integers(1, 12), limit=st.integers(1, 12),
)  # fmt: skip
def test_a_shard_is_fused_query_by_query(queries, weights, rank_constant, rank_window, limit):
    keyword = [[] if off else second for _, second, off in queries]
    outcomes = [
        "disabled" if off else "ok" if ids else "no_match" for ids, (_, _, off) in zip(keyword, queries, strict=True)
    ]
    output = merge(
        greedy(*(first for first, _, _ in queries)),
        sparse(*keyword, outcomes=outcomes),
        greedy_selection_weight=weights[0], sparse_search_weight=weights[1],
        rank_constant=rank_constant, rank_window=rank_window, limit=limit,
    )  # fmt: skip
    assert output.table.column("sparse_search_outcome").to_pylist() == outcomes
    for row, ((first, _, off), second) in enumerate(zip(queries, keyword, strict=True)):
        expected = fuse([first[:rank_window], second[:rank_window]], weights, rank_constant)[:limit]
        assert fused(output, row) == [(name, pytest.approx(score, rel=1e-15, abs=0)) for name, score in expected]
        best = weights[0] / (rank_constant + 1) + (0.0 if off else weights[1] / (rank_constant + 1))
        assert output.table.column("best_possible")[row].as_py() == best


# What takes part.


def test_a_list_of_weight_zero_takes_no_part():
    output = merge(greedy(VECTOR), sparse(KEYWORD), greedy_selection_weight=0.0)
    assert ids_of(fused(output)) == KEYWORD
    row = output.table.to_pylist()[0]
    assert row["best_possible"] == 1 / 61
    assert [one["greedy_selection_rank"] for one in row["candidates"]] == [None] * 3
    assert row["greedy_selection_outcome"] == "ok"
    assert output.account.removed == {"weight_zero": 3}
    assert fuse([VECTOR, KEYWORD], [0, 1]) == fused(output)


def test_the_account_says_why_candidates_left():
    output = merge(greedy(["a", "b", "c", "d"]), sparse(["b", "a", "x", "y", "z"]), rank_window=3, limit=3)
    assert output.account.model_dump() == {
        "candidates_in": 9, "added": {}, "candidates_out": 3,
        "removed": {"beyond_window": 3, "merged": 2, "beyond_limit": 1},
    }  # fmt: skip


def test_first_in_every_list_that_takes_part_scores_the_best_possible():
    output = merge(
        greedy(["a", "b"], ["a"], ["a"]), sparse(["a", "c"], [], [], outcomes=["ok", "no_match", "disabled"]),
        greedy_selection_weight=0.3, sparse_search_weight=0.7,
    )  # fmt: skip
    best = output.table.column("best_possible").to_pylist()
    shares = [fused(output, row)[0][1] / best[row] for row in range(3)]
    # Keyword search that ran and found nothing counts; switched off it does not.
    assert shares == [1.0, pytest.approx(0.3), 1.0]


def test_outcomes_tell_an_empty_list_from_one_that_was_switched_off():
    output = merge(greedy(["a"], [], []), sparse([], ["b"], [], outcomes=["no_match", "ok", "disabled"]))
    assert output.table.column("greedy_selection_outcome").to_pylist() == ["ok", "no_match", "no_match"]
    assert output.table.column("sparse_search_outcome").to_pylist() == ["no_match", "ok", "disabled"]
    assert [ids_of(fused(output, row)) for row in range(3)] == [["a"], ["b"], []]


def test_a_failed_list_is_not_fused_as_an_empty_one():
    tables = greedy(["a"], ["a"]), sparse(["b"], [], outcomes=["ok", "failed"])
    with pytest.raises(
        StageError, match="sparse_search of query q1: the retriever failed, and a failed list is not"
    ) as error:
        merge(*tables)
    assert error.value.got == "the outcome failed for 1 of 2 queries"
    assert ids_of(fused(merge(*tables, sparse_search_weight=0.0), 1)) == ["a"]


def test_no_list_that_takes_part_is_an_error():
    with pytest.raises(ConfigurationError, match="sparse_search disabled and greedy_selection_weight 0"):
        merge(greedy(["a"]), sparse([], outcomes=["disabled"]), greedy_selection_weight=0.0)


def test_candidates_beside_another_outcome_than_ok_are_refused():
    with pytest.raises(ContractError, match=r"sparse_search.outcome, row 1.*got 'disabled'"):
        merge(greedy(["a"], ["a"]), sparse(["b"], ["b"], outcomes=["ok", "disabled"]))


def test_tables_of_different_queries_are_refused():
    with pytest.raises(ContractError, match=r"sparse_search\.query_id"):
        merge(greedy(["a"], ["a"]), sparse(["b"]))
    with pytest.raises(ContractError, match=r"sparse_search\.query_id"):
        merge(greedy(["a"], ["b"]), sparse(["a"], ["b"]).take([1, 0]))


def test_empty_tables_and_empty_lists_work():
    assert merge(greedy(), sparse()).table.num_rows == 0
    output = merge(greedy([], []), sparse([], []))
    assert output.table.column("candidates").to_pylist() == [[], []]
    assert output.account.model_dump() == {"candidates_in": 0, "added": {}, "removed": {}, "candidates_out": 0}
    assert fuse([]) == []
    assert fuse([[], []]) == []


def test_a_slice_of_a_shard_gives_the_same_as_its_queries_alone():
    tables = greedy(["a", "b"], VECTOR, ["c"]), sparse(["b"], KEYWORD, [])
    part = rrf_merge_table(
        greedy_selection=tables[0].slice(1, 1), sparse_search=tables[1].slice(1, 1), params=Params(**EQUAL)
    )
    assert part.table.equals(merge(*tables).table.slice(1, 1))


# What is refused.


@pytest.mark.parametrize("first", [True, False])
def test_an_id_twice_in_a_list_is_an_error_that_names_list_row_and_id(first):
    twice, once = (["c"], ["a", "b", "a"]), (["a"], ["b"])
    tables = (greedy(*twice), sparse(*once)) if first else (greedy(*once), sparse(*twice))
    name = "greedy_selection" if first else "sparse_search"
    with pytest.raises(ContractError, match=rf"{name}.candidates.chunk_id, row 1.*got 'a', want each id once"):
        merge(*tables)


def test_an_id_twice_in_a_list_is_an_error_even_beyond_the_window():
    with pytest.raises(ContractError, match="each id once"):
        merge(greedy(["a", "b", "a"]), sparse([]), rank_window=1)


@pytest.mark.parametrize("wrong", ["", None])
def test_an_empty_or_missing_id_is_an_error_that_names_the_list(wrong):
    with pytest.raises(ContractError, match=r"sparse_search.candidates.chunk_id, row 0.*a string that is not empty"):
        merge(greedy(["a"]), sparse(["b", wrong]))


@pytest.mark.parametrize("wrong", ["", None, 7, b"a", 1.5])
def test_fuse_names_the_ranking_and_the_id_that_is_no_id(wrong):
    with pytest.raises(ContractError, match=r"rankings\[1\], row 1") as error:
        fuse([["a"], ["b", wrong]])
    assert error.value.value == wrong


def test_fuse_names_the_ranking_and_the_id_that_stands_twice():
    with pytest.raises(ContractError, match=r"rankings\[1\], row 2.*got 'b', want each id once in a list"):
        fuse([["a"], ["b", "a", "b"]])


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.5], [1.0, math.nan], [1.0, math.inf], [0.0, 0.0], [1.0, 1e-200]])
def test_fuse_refuses_weights_that_make_no_score(weights):
    with pytest.raises(ConfigurationError, match="weights"):
        fuse([["a"], ["b"]], weights)


@pytest.mark.parametrize("constant", [0, -1, 60.0, True, "60", None, 10**10])
def test_fuse_refuses_a_rank_constant_that_is_no_positive_integer(constant):
    with pytest.raises(ConfigurationError, match="rank_constant"):
        fuse([["a"], ["b"]], rank_constant=constant)


@pytest.mark.parametrize("name", ["rank_constant", "rank_window", "limit"])
@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, "1", None, math.inf, 2**31])
def test_counts_of_the_settings_are_positive_integers(name, wrong):
    with pytest.raises(ValidationError, match=name):
        Params(**{name: wrong})


@pytest.mark.parametrize("name", ["greedy_selection_weight", "sparse_search_weight"])
@pytest.mark.parametrize("wrong", [-0.5, math.nan, math.inf, True, "1", None, 1e-200, 1e200])
def test_weights_of_the_settings_are_zero_or_sensible_numbers(name, wrong):
    with pytest.raises(ValidationError, match=name):
        Params(**{name: wrong})
    assert getattr(Params(**{name: 2}), name) == 2.0


def test_two_weights_of_zero_are_refused():
    with pytest.raises(ValidationError, match="both are 0, want one above 0"):
        Params(greedy_selection_weight=0, sparse_search_weight=0)


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValidationError, match="window_size"):
        Params(window_size=10)


def test_a_table_whose_scores_rise_or_pass_the_best_is_not_committed():
    (falls,) = [check.problem for check in STAGE.success if "never rise" in check.sentence]
    output = merge(greedy(VECTOR, []), sparse(KEYWORD, ["a"])).table
    assert falls({}, output) is None
    rows = output.to_pylist()
    rows[0]["candidates"][2]["score"] = 0.0325
    assert falls({}, output.from_pylist(rows, schema=output.schema)) == "row 0, rank 3 has the score 0.0325"
    rows = output.to_pylist()
    rows[1]["best_possible"] = 0.01
    assert "row 1, rank 1" in falls({}, output.from_pylist(rows, schema=output.schema))


def test_every_candidate_of_either_list_comes_out_once():
    counts = Counter(ids_of(fused(merge(greedy(VECTOR), sparse(KEYWORD)))))
    assert counts == Counter(set(VECTOR) | set(KEYWORD))
