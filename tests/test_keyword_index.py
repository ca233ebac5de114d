"""The postings of a corpus, and BM25 Okapi over them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rank_bm25 import BM25Okapi

from contracts.columns import offsets_from_lengths
from corpus.bm25_top import bm25_top, ragged_hits
from corpus.keyword_index import KeywordIndex

# Lengths 4, 6 and 5: the mean is 5. "cat" stands in two of three chunks, everything else in one.
SENTENCES = [
    ["quick", "brown", "cat", "jumps"],
    ["lazy", "cat", "sleeps", "all", "day", "long"],
    ["dogs", "bark", "at", "night", "loud"],
]


def top(index, queries, *, scores=None, eligible=None, depth=10):
    """(row, score) lists of queries of token lists."""
    terms = [index.term_ids(query) for query in queries]
    chunks = len(index.lengths)
    hits = ragged_hits(
        *bm25_top(
            offsets_from_lengths(np.array([len(one) for one in terms])),
            np.array([term for one in terms for term in one], dtype=np.int64),
            index.offsets, index.rows,
            index.okapi_scores(1.5, 0.75, 0.25) if scores is None else scores,
            np.ones(chunks, bool) if eligible is None else np.array(eligible, bool),
            depth, chunks,
        )
    )  # fmt: skip
    pairs = list(zip(hits.values["row"].tolist(), hits.values["score"].tolist(), strict=True))
    return [pairs[start:end] for start, end in zip(hits.offsets[:-1], hits.offsets[1:], strict=True)]


def slow_top(chunks, query, eligible, depth, k1=1.5, b=0.75, epsilon=0.25):
    """BM25 Okapi word by word, in plain Python; chunks are token lists."""
    holding = {}
    for row, chunk in enumerate(chunks):
        for term in sorted(set(chunk)):
            holding.setdefault(term, []).append(row)
    idf = {t: math.log(len(chunks) - len(rows) + 0.5) - math.log(len(rows) + 0.5) for t, rows in holding.items()}
    mean = 0.0
    for value in idf.values():
        mean += value
    idf = {t: epsilon * (mean / len(idf)) if value < 0 else value for t, value in idf.items()}
    mean_length = sum(map(len, chunks)) / len(chunks)
    found = []
    for row, chunk in enumerate(chunks):
        if not eligible[row] or not set(query) & set(chunk):
            continue
        score = 0.0
        for term in query:
            if term in idf:
                f = chunk.count(term)
                score += idf[term] * (f * (k1 + 1) / (f + k1 * (1 - b + b * len(chunk) / mean_length)))
        found.append((row, score))
    return sorted(found, key=lambda hit: (-hit[1], hit[0]))[:depth]


def test_postings_say_which_chunk_holds_which_term_how_often():
    index = KeywordIndex.build([["b", "a", "b"], [], ["c", "b"]])
    assert index.terms == ("a", "b", "c")
    assert index.offsets.tolist() == [0, 1, 3, 4]
    assert index.rows.tolist() == [0, 0, 2, 2]
    assert index.frequencies.tolist() == [1, 2, 1, 1]
    assert index.lengths.tolist() == [3, 0, 2]
    assert index.document_frequencies.tolist() == [1, 2, 1]
    assert (index.rows.dtype, index.frequencies.dtype, index.lengths.dtype) == (np.int32,) * 3


def test_an_index_can_be_built_from_a_generator():
    once = KeywordIndex.build(chunk for chunk in SENTENCES)
    listed = KeywordIndex.build(SENTENCES)
    assert once.terms == listed.terms
    assert np.array_equal(once.rows, listed.rows)


@pytest.mark.parametrize("chunks", [[], [[]], [[], []]])
def test_an_index_without_terms_finds_nothing(chunks):
    index = KeywordIndex.build(chunks)
    assert index.terms == ()
    assert index.lengths.tolist() == [0] * len(chunks)
    assert index.token_bags() == chunks
    assert index.okapi_scores(1.5, 0.75, 0.25).tolist() == []
    assert index.inverse_document_frequencies(0.25).tolist() == []
    assert top(index, [["a"], []]) == [[], []]


def test_terms_that_no_chunk_has_are_left_out_and_repeats_are_kept():
    index = KeywordIndex.build([["b", "a"]])
    assert index.term_ids(["b", "z", "a", "b"]) == [1, 0, 1]


def test_token_bags_give_the_tokens_of_each_chunk_back_sorted():
    assert KeywordIndex.build([["b", "a", "b"], [], ["c", "b"]]).token_bags() == [["a", "b", "b"], [], ["b", "c"]]


def test_scores_of_three_sentences_worked_by_hand():
    index = KeywordIndex.build(SENTENCES)
    # "night" stands in one of three chunks, once, and the chunk has the mean length: tf = 1 (2.5) / (1 + 1.5) = 1.
    assert top(index, [["night"]]) == [[(2, pytest.approx(math.log(2.5 / 1.5)))]]
    # "cat" stands in two of three: idf = ln(1.5 / 2.5) < 0, so a quarter of the mean idf over all 14 terms.
    floor = 0.25 * (13 * math.log(2.5 / 1.5) + math.log(1.5 / 2.5)) / 14
    short = 2.5 / (1 + 1.5 * (0.25 + 0.75 * 4 / 5))
    long = 2.5 / (1 + 1.5 * (0.25 + 0.75 * 6 / 5))
    assert top(index, [["cat"]]) == [[(0, pytest.approx(floor * short)), (1, pytest.approx(floor * long))]]


def test_a_negative_idf_becomes_a_share_of_the_mean_idf():
    index = KeywordIndex.build(SENTENCES)
    idf = dict(zip(index.terms, index.inverse_document_frequencies(0.5), strict=True))
    assert idf["cat"] == pytest.approx(0.5 * (12 / 14) * math.log(2.5 / 1.5))
    assert index.inverse_document_frequencies(0.0)[index.terms.index("cat")] == 0


def test_the_floor_itself_is_negative_where_the_mean_is():
    index = KeywordIndex.build([["a", "b"], ["a", "b"], ["a", "b"]])
    assert index.inverse_document_frequencies(0.25) == pytest.approx([0.25 * math.log(0.5 / 3.5)] * 2)


def test_a_chunk_whose_only_shared_term_scores_below_zero_still_matches():
    hits = top(KeywordIndex.build([["a", "b"], ["a", "b"], ["a", "b", "b"]]), [["a"]])[0]
    assert [row for row, _ in hits] == [2, 0, 1]
    assert all(score < 0 for _, score in hits)


def test_a_chunk_whose_only_shared_term_scores_zero_still_matches():
    index = KeywordIndex.build([["a"], ["b"]])
    assert top(index, [["a"]]) == [[(0, 0.0)]]


def test_a_repeated_query_term_counts_each_time():
    index = KeywordIndex.build(SENTENCES)
    once, twice = top(index, [["night"], ["night", "night"]])
    assert twice == [(2, 2 * once[0][1])]


def test_equal_scores_come_in_row_order_and_are_cut_there():
    index = KeywordIndex.build([["z"], ["a"], ["b"], ["a"], ["a"], ["c"], ["a"], ["d"], ["e"]])
    assert [row for row, _ in top(index, [["a"]], depth=3)[0]] == [1, 3, 4]


def test_a_chunk_that_is_not_eligible_leaves_its_place_to_the_next():
    index = KeywordIndex.build([["a"], ["a"], ["a"], ["b"], ["b"], ["c"], ["d"]])
    eligible = [False, True, True, True, True, True, True]
    assert [row for row, _ in top(index, [["a"]], eligible=eligible, depth=1)[0]] == [1]


def test_one_query_leaves_nothing_behind_for_the_next():
    index = KeywordIndex.build(SENTENCES)
    first, nothing, again = top(index, [["cat", "night"], ["unknown"], ["cat", "night"]])
    assert first == again
    assert len(first) == 3
    assert nothing == []


def test_an_index_of_read_only_arrays_gives_the_same():
    index = KeywordIndex.build(SENTENCES)
    expected = top(index, [["cat", "day"]])
    for array in (index.offsets, index.rows, index.frequencies, index.lengths):
        array.setflags(write=False)
    assert top(index, [["cat", "day"]]) == expected


TOKENS = st.lists(st.sampled_from("abcdef"), max_size=6)
CHUNKS = st.lists(TOKENS, min_size=1, max_size=8).filter(any)


@settings(deadline=None, max_examples=100)
@given(CHUNKS)
def test_token_bags_hold_the_tokens_of_any_corpus(chunks):
    assert KeywordIndex.build(chunks).token_bags() == [sorted(chunk) for chunk in chunks]


@settings(deadline=None, max_examples=100)
@given(
    chunks=CHUNKS,
    queries=st.lists(st.lists(st.sampled_from("abcdefz"), max_size=5), max_size=4),
    data=st.data(),
    depth=st.integers(1, 9),
)
def test_search_equals_the_slow_oracle_cut_by_cut(chunks, queries, data, depth):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks)))
    found = top(KeywordIndex.build(chunks), queries, eligible=eligible, depth=depth)
    assert found == [slow_top(chunks, query, eligible, depth) for query in queries]


@settings(deadline=None, max_examples=100)
@example(chunks=[["a"], ["b"], ["a", "b", "c"]], query=["a", "b"], k1=1.5, b=0.75, epsilon=0.25)
@given(
    chunks=CHUNKS,
    query=st.lists(st.sampled_from("abcdefz"), min_size=1, max_size=5),
    k1=st.floats(0.1, 5),
    b=st.floats(0, 0.99),
    epsilon=st.floats(0, 1),
)
def test_scores_are_those_of_rank_bm25_to_the_last_bit_over_the_bags(chunks, query, k1, b, epsilon):
    index = KeywordIndex.build(chunks)
    expected = BM25Okapi(index.token_bags(), k1=k1, b=b, epsilon=epsilon).get_scores(query)
    found = dict(top(index, [query], scores=index.okapi_scores(k1, b, epsilon))[0])
    assert found == {row: expected[row] for row, chunk in enumerate(chunks) if set(chunk) & set(query)}
    # In their order of reading the tokens only move the last bits of the mean idf.
    read = BM25Okapi(chunks, k1=k1, b=b, epsilon=epsilon).get_scores(query)
    assert list(found.values()) == pytest.approx([read[row] for row in found], rel=1e-12, abs=1e-13)


def test_rare_and_common_terms_are_added_up_alike():
    chunks, random = 60, np.random.default_rng(3)
    holders = {
        term: np.sort(random.choice(chunks, size, replace=False)) for term, size in enumerate((1, 4, 25, 50, 60))
    }
    offsets = np.concatenate(([0], np.cumsum([len(rows) for rows in holders.values()]))).astype(np.int64)
    rows = np.concatenate(list(holders.values())).astype(np.int32)
    scores = random.normal(size=len(rows))
    eligible = random.random(chunks) < 0.7
    asked = [[0], [1], [0, 1], [2], [3], [0, 4], [1, 1, 3], [2, 3, 4], []]
    counts, top_rows, top_scores = bm25_top(
        np.concatenate(([0], np.cumsum([len(one) for one in asked]))).astype(np.int64),
        np.array([term for one in asked for term in one], np.int64), offsets, rows, scores, eligible, 10, chunks,
    )  # fmt: skip
    for query, terms in enumerate(asked):
        sums: dict[int, float] = {}
        for term in terms:
            for place in range(offsets[term], offsets[term + 1]):
                if eligible[rows[place]]:
                    sums[int(rows[place])] = sums.get(int(rows[place]), 0.0) + scores[place]
        best = sorted(sums.items(), key=lambda found: (-found[1], found[0]))[:10]
        found = zip(top_rows[query, : counts[query]].tolist(), top_scores[query, : counts[query]].tolist(), strict=True)
        assert list(found) == best
