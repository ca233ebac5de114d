"""BM25 search of a shard of queries."""

from __future__ import annotations

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rank_bm25 import BM25Okapi

from contracts.candidates import KeywordRanking
from contracts.errors import ContractError
from contracts.table import schema
from corpus.keyword_index import KeywordIndex
from corpus.tokeniser import Tokeniser, TokeniserParams
from stages.sparse_search import STAGE, Params, sparse_search_table
from tests.corpora import make_corpus, make_queries

# Lengths 4, 6 and 5: the mean is 5. "cat" stands in two of three chunks, everything else in one.
SENTENCES = [
    {"chunk_id": "c1", "text": "quick brown cat jumps"},
    {"chunk_id": "c2", "text": "lazy cat sleeps all day long"},
    {"chunk_id": "c3", "text": "dogs bark at night loud"},
]
ENGINES = pytest.mark.parametrize("engine", ["bulk", "rank-bm25"])


def search(corpus, queries, **params):
    return STAGE.checked_run({"queries": make_queries(queries)}, {"corpus": corpus}, Params(**params))


def found(output, row=0):
    """(chunk_id, score) of one query."""
    return [(one["chunk_id"], one["score"]) for one in output.table.column("candidates")[row].as_py()]


def found_ids(output, row=0):
    return [chunk_id for chunk_id, _ in found(output, row)]


def outcomes(output):
    return output.table.column("outcome").to_pylist()


def slow_search(corpus, query, depth, k1=1.5, b=0.75, epsilon=0.25):
    """The whole stage for one query, chunk by chunk in plain Python."""
    rows = corpus.chunks.to_pylist()
    words = {row["chunk_id"]: row["text"].split() for row in rows}
    frequency = {}
    for row in rows:
        for word in sorted(set(words[row["chunk_id"]])):
            frequency[word] = frequency.get(word, 0) + 1
    idf = {word: math.log(len(rows) - n + 0.5) - math.log(n + 0.5) for word, n in frequency.items()}
    mean = 0.0
    for value in idf.values():
        mean += value
    mean_length = sum(map(len, words.values())) / len(rows)
    visible = [
        row
        for row in rows
        if (row["acl"] is None or set(row["acl"]) & set(query["groups"]))
        and all(row[key] == value for key, value in query["filters"].items())
    ]
    best_of = {}
    for row in sorted(visible, key=lambda row: (row["authority_tier"] or 99, row["chunk_id"])):
        best_of.setdefault(row["text"], row["chunk_id"])
    hits = []
    for chunk_id in best_of.values():
        score, shared = 0.0, False
        for word in query["text"].split():
            if word in frequency:
                weight = epsilon * (mean / len(idf)) if idf[word] < 0 else idf[word]
                f = words[chunk_id].count(word)
                score += weight * (f * (k1 + 1) / (f + k1 * (1 - b + b * len(words[chunk_id]) / mean_length)))
                shared = shared or f > 0
        if shared:
            hits.append((chunk_id, score))
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:depth]


@ENGINES
def test_scores_of_three_sentences_worked_by_hand(engine):
    output = search(make_corpus(SENTENCES), [{"text": "Night cat"}], engine=engine)
    # "night": one of three chunks, once, in a chunk of mean length: tf = 1 (2.5) / (1 + 1.5) = 1.
    # "cat": idf = ln(1.5 / 2.5) < 0, so a quarter of the mean over all 14 terms.
    floor = 0.25 * (13 * math.log(2.5 / 1.5) + math.log(1.5 / 2.5)) / 14
    assert found(output) == [
        ("c3", pytest.approx(math.log(2.5 / 1.5))),
        ("c1", pytest.approx(floor * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 4 / 5)))),
        ("c2", pytest.approx(floor * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 6 / 5)))),
    ]
    assert output.table.column("candidates")[0].as_py()[0]["rank"] == 1
    assert output.table.schema.equals(schema(KeywordRanking))


@ENGINES
def test_a_chunk_whose_only_shared_term_scores_below_zero_still_matches(engine):
    chunks = [{"chunk_id": name, "text": text} for name, text in [("a", "x y"), ("b", "x y y"), ("c", "x x y")]]
    output = search(make_corpus(chunks), [{"text": "x"}], engine=engine)
    assert found_ids(output) == ["b", "a", "c"]
    assert all(score < 0 for _, score in found(output))
    assert outcomes(output) == ["ok"]


@ENGINES
def test_a_query_without_a_shared_term_matches_nothing(engine):
    output = search(
        make_corpus(SENTENCES), [{"text": "unknown words"}, {"text": "?!"}, {"text": "dogs"}], engine=engine
    )
    assert [found_ids(output, row) for row in range(3)] == [[], [], ["c3"]]
    assert outcomes(output) == ["no_match", "no_match", "ok"]
    assert output.account.added == {"found": 1}
    assert output.account.candidates_out == 1


@ENGINES
def test_ties_break_by_chunk_id_also_at_the_cut(engine):
    chunks = [{"chunk_id": name, "text": f"same {name}"} for name in ("d", "b", "a", "c", "e")]
    corpus = make_corpus([*chunks, *({"chunk_id": f"z{n}", "text": f"other word{n}"} for n in range(9))])
    assert found_ids(search(corpus, [{"text": "same"}], depth=3, engine=engine)) == ["a", "b", "c"]


@ENGINES
def test_a_query_sees_its_groups_and_filters_alone(engine):
    chunks = [
        {"chunk_id": "everybody", "text": "reset one", "acl": None, "version": "1"},
        {"chunk_id": "staff", "text": "reset two", "acl": ["staff"], "version": "1"},
        {"chunk_id": "staff-2", "text": "reset three", "acl": ["staff", "guests"], "version": "2"},
        {"chunk_id": "nobody", "text": "reset four", "acl": [], "version": "1"},
    ]
    queries = [
        {"text": "reset"},
        {"text": "reset", "groups": ["staff"]},
        {"text": "reset", "groups": ["staff"], "filters": {"version": "1"}},
        {"text": "reset", "groups": ["guests", "others"]},
        {"text": "reset", "filters": {"version": "3"}},
    ]
    output = search(make_corpus(chunks), queries, engine=engine)
    assert [sorted(found_ids(output, row)) for row in range(5)] == [
        ["everybody"], ["everybody", "staff", "staff-2"], ["everybody", "staff"], ["everybody", "staff-2"], [],
    ]  # fmt: skip
    assert outcomes(output) == ["ok", "ok", "ok", "ok", "no_match"]


@ENGINES
def test_of_equal_texts_the_highest_authority_that_the_query_sees_stands_for_all(engine):
    chunks = [
        {"chunk_id": "a", "text": "reset it", "acl": None, "authority_tier": 3},
        {"chunk_id": "b", "text": "reset it", "acl": ["staff"], "authority_tier": 1},
        {"chunk_id": "c", "text": "reset it", "acl": None, "authority_tier": 3},
        {"chunk_id": "d", "text": "reset all", "acl": None},
    ]
    queries = [{"text": "reset"}, {"text": "reset", "groups": ["staff"]}]
    output = search(make_corpus(chunks), queries, depth=2, engine=engine)
    assert [sorted(found_ids(output, row)) for row in range(2)] == [["a", "d"], ["b", "d"]]
    every = search(make_corpus(chunks, collapse_identical_texts=False), queries, engine=engine)
    assert sorted(found_ids(every, 1)) == ["a", "b", "c", "d"]


def test_the_normalised_text_is_searched_and_has_the_terms_of_the_raw_text():
    corpus = make_corpus(SENTENCES)
    plain, other = "dogs bark", {"text": "cat", "normalised_text": "dogs bark"}
    assert found(search(corpus, [other])) == found(search(corpus, [{"text": plain}]))
    assert corpus.tokeniser.tokens(" \uff24ogs\t bark\n") == corpus.tokeniser.tokens(plain)


def test_switched_off_every_list_is_empty_and_says_disabled():
    output = search(make_corpus(SENTENCES), [{"text": "cat"}, {"text": "unknown"}], enabled=False)
    assert outcomes(output) == ["disabled", "disabled"]
    assert output.table.column("candidates").to_pylist() == [[], []]
    assert (output.account.added, output.account.candidates_out) == ({}, 0)


@ENGINES
def test_an_empty_corpus_an_empty_log_and_chunks_without_words_work(engine):
    assert outcomes(search(make_corpus([]), [{"text": "cat"}], engine=engine)) == ["no_match"]
    wordless = make_corpus([{"chunk_id": "a", "text": "..."}, {"chunk_id": "b", "text": "?"}])
    assert outcomes(search(wordless, [{"text": "cat"}], engine=engine)) == ["no_match"]
    one_wordless = make_corpus([*SENTENCES, {"chunk_id": "c4", "text": "..."}])
    assert found_ids(search(one_wordless, [{"text": "dogs"}], engine=engine, b=1.0)) == ["c3"]
    nothing = sparse_search_table(
        queries=make_queries([{"text": "x"}]).slice(0, 0), corpus=make_corpus(SENTENCES), params=Params(engine=engine)
    )
    assert nothing.table.num_rows == 0


@ENGINES
def test_deeper_than_the_corpus_finds_no_more_than_there_is(engine):
    assert len(found(search(make_corpus(SENTENCES), [{"text": "cat"}], depth=2**31 - 1, engine=engine))) == 2


def test_settings_reach_the_scores():
    corpus = make_corpus(SENTENCES)
    # At b = 0 the length of a chunk does not count, so both cats tie.
    assert len({score for _, score in found(search(corpus, [{"text": "cat"}], b=0.0))}) == 1
    # At epsilon = 0 a term of more than half of the chunks is worth nothing.
    assert [score for _, score in found(search(corpus, [{"text": "cat"}], epsilon=0.0))] == [0.0, 0.0]
    # f = 1 in a chunk of mean length gives idf whatever k1 is; a longer chunk is held back more by a larger one.
    small, large = (found(search(corpus, [{"text": "day"}], k1=k1))[0][1] for k1 in (0.1, 10.0))
    assert large < small


@pytest.mark.parametrize(
    "wrong",
    [
        {"depth": 0}, {"depth": True}, {"depth": 10.0}, {"k1": 0.0}, {"k1": math.inf}, {"k1": 1001.0}, {"b": -0.1},
        {"b": 1.1}, {"epsilon": -0.1}, {"epsilon": 1.1}, {"epsilon": math.nan}, {"engine": "lucene"}, {"enabled": 1},
        {"top": 5},
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Params(**wrong)


def test_a_table_whose_outcome_and_list_disagree_is_not_committed():
    output = search(make_corpus(SENTENCES), [{"text": "cat"}, {"text": "unknown"}])
    (agree,) = [check.problem for check in STAGE.success if "outcome" in check.sentence]
    assert agree({}, output.table) is None
    wrong = output.table.set_column(2, "outcome", [["ok", "ok"]])
    assert agree({}, wrong) == "row 1 has the outcome ok and candidates: False"


def test_other_queries_than_those_read_are_refused():
    queries = make_queries([{"text": "cat"}, {"text": "dogs"}])
    other = sparse_search_table(queries=queries.slice(0, 1), corpus=make_corpus(SENTENCES), params=Params())
    (same,) = [check.problem for check in STAGE.success if "same queries" in check.sentence]
    assert "query ids differ" in same({"queries": queries}, other.table)


def test_a_query_that_stands_twice_is_refused():
    queries = make_queries([{"text": "cat", "query_id": "q"}, {"text": "dogs", "query_id": "q"}])
    with pytest.raises(ContractError, match="query_id, row 1"):
        STAGE.checked_run({"queries": queries}, {"corpus": make_corpus(SENTENCES)}, Params())


def test_inputs_are_left_as_they_were():
    corpus, queries = make_corpus(SENTENCES), make_queries([{"text": "cat"}])
    before = (queries.to_pylist(), corpus.keywords.rows.copy(), corpus.chunks.to_pylist())
    sparse_search_table(queries=queries, corpus=corpus, params=Params())
    assert queries.to_pylist() == before[0]
    assert np.array_equal(corpus.keywords.rows, before[1])
    assert corpus.chunks.to_pylist() == before[2]


WORDS = st.lists(st.sampled_from("abcde"), min_size=1, max_size=5).map(" ".join)
GROUPS = st.lists(st.sampled_from(["g1", "g2"]), unique=True, max_size=2).map(sorted)
CHUNK = st.fixed_dictionaries(
    {
        "text": WORDS,
        "acl": st.none() | GROUPS,
        "version": st.sampled_from(["1", "2", None]),
        "authority_tier": st.none() | st.integers(1, 2),
    }
)
QUERY = st.fixed_dictionaries(
    {
        "text": st.lists(st.sampled_from("abcdez"), min_size=1, max_size=4).map(" ".join),
        "groups": GROUPS,
        "filters": st.just({}) | st.just({"version": "1"}),
    }
)


@settings(deadline=None, max_examples=60)
@given(
    chunks=st.lists(CHUNK, min_size=1, max_size=9),
    queries=st.lists(QUERY, min_size=1, max_size=4),
    depth=st.integers(1, 6),
)
def test_search_equals_the_slow_oracle_and_both_engines_give_the_same_table(chunks, queries, depth):
    corpus = make_corpus([{**chunk, "chunk_id": f"c{number}"} for number, chunk in enumerate(chunks)])
    output = search(corpus, queries, depth=depth)
    for row, query in enumerate(queries):
        assert found(output, row) == slow_search(corpus, query, depth)
    assert search(corpus, queries, depth=depth, engine="rank-bm25").table.equals(output.table)
    assert output.account.balanced


def test_scores_on_scifact_are_those_of_rank_bm25(shared_data):
    """5,183 chunks, 100 queries, the default tokeniser; state and scores float64.

    Measured: the largest relative difference to `BM25Okapi.get_scores` is 0 (no term stands in more than half
    of the chunks, and every other operation is the same in the same order); 1e-12 leaves room for other
    machines. The top 100 are the same in the same order.
    """
    corpus_file = pq.read_table(shared_data / "scifact" / "corpus.parquet", columns=["chunk_id", "text", "title"])
    corpus = make_corpus(corpus_file.to_pylist())
    corpus.tokeniser = Tokeniser(TokeniserParams())
    tokens = [corpus.tokeniser.tokens(text) for text in corpus.passage_texts(np.arange(len(corpus.chunks)))]
    corpus.keywords = KeywordIndex.build(tokens)
    logged = pq.read_table(shared_data / "scifact" / "queries.parquet").to_pylist()
    queries = [query["text"] for query in logged if query["split"] == "test"][:100]
    output = search(corpus, [{"text": text} for text in queries])
    reference, ids = BM25Okapi(tokens), corpus.column("chunk_id").to_pylist()
    for row, text in enumerate(queries):
        scores = reference.get_scores(corpus.tokeniser.tokens(text))
        order = np.lexsort((np.arange(len(ids)), -scores))[:100]
        assert found_ids(output, row) == [ids[place] for place in order]
        assert [score for _, score in found(output, row)] == pytest.approx(scores[order], rel=1e-12, abs=0)
