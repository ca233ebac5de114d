"""oversample: nearest different texts, under what each query may see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.columns import ragged
from contracts.errors import ConfigurationError, ContractError
from contracts.query import DistinctQuery
from contracts.table import schema
from corpus.corpus import Corpus
from corpus.scope import Scopes
from stages.oversample import STAGE, Params
from tests.corpora import make_corpus, make_queries


def run(queries, corpus, **params):
    return STAGE.checked_run({"queries": queries}, {"corpus": corpus}, Params(**params))


def listed(output):
    return [[hit["chunk_id"] for hit in row] for row in output.table.column("candidates").to_pylist()]


def test_candidates_stand_by_falling_cosine_with_ranks_from_one():
    corpus = make_corpus(
        [{"chunk_id": "far", "text": "x"}, {"chunk_id": "near", "text": "y"}, {"chunk_id": "opposite", "text": "z"}],
        [[3.0, 4.0], [4.0, 3.0], [-1.0, 0.0]],
    )
    output = run(make_queries([{"text": "q", "embedding": [1.0, 0.0]}]), corpus, k=1, oversampling=2)
    # (4, 3) / 5 and (3, 4) / 5 against (1, 0): cosines 0.8 and 0.6; 1 x 2 leaves no room for the third.
    assert output.table.column("candidates").to_pylist() == [
        [
            {"rank": 1, "chunk_id": "near", "score": pytest.approx(0.8)},
            {"rank": 2, "chunk_id": "far", "score": pytest.approx(0.6)},
        ]
    ]
    assert output.account.added == {"found": 2}
    assert output.account.candidates_out == 2


def test_k_times_oversampling_candidates_come_out():
    corpus = make_corpus([{"chunk_id": f"c-{i:02d}", "text": f"text {i}"} for i in range(40)])
    assert [len(one) for one in listed(run(make_queries([{"text": "q"}]), corpus, k=3, oversampling=4))] == [12]
    assert [len(one) for one in listed(run(make_queries([{"text": "q"}]), corpus))] == [30]


@pytest.mark.parametrize("index_factory", ["Flat", "HNSW8"])
def test_the_largest_depth_finds_all_that_there_is(index_factory):
    corpus = make_corpus([{"chunk_id": c, "text": c} for c in "abc"], index_factory=index_factory)
    for settings_of in ({"k": 2**31 - 1}, {"k": 2**31 - 1, "oversampling": 2**31 - 1}):
        output = run(make_queries([{"text": "q"}, {"text": "r"}]), corpus, **settings_of)
        assert [sorted(one) for one in listed(output)] == [["a", "b", "c"]] * 2


def test_identical_texts_collapse_and_the_search_goes_deeper():
    chunks = [{"chunk_id": f"c-{i:02d}", "text": f"text {i // 5}", "authority_tier": 9 - i % 5} for i in range(30)]
    places = np.repeat(np.random.default_rng(3).normal(size=(6, 8)), 5, axis=0)
    queries = make_queries([{"text": "q"}])
    output = run(queries, make_corpus(chunks, places), k=2, oversampling=3)
    # Six texts of five copies each: one of each text, the copy with the lowest authority tier.
    assert sorted(listed(output)[0]) == ["c-04", "c-09", "c-14", "c-19", "c-24", "c-29"]


def test_ties_break_by_chunk_id():
    corpus = make_corpus([{"chunk_id": i, "text": f"text {i}"} for i in "dbca"], [[1.0, 1.0]] * 4)
    assert listed(run(make_queries([{"text": "q", "embedding": [1.0, 0.0]}]), corpus, k=3, oversampling=1)) == [
        ["a", "b", "c"]
    ]


@st.composite
def worlds(draw):
    """A corpus with groups and versions, and queries that see parts of it."""
    groups = st.lists(st.sampled_from(["red", "green", "blue"]), max_size=2, unique=True)
    count = draw(st.integers(1, 25))
    chunks = [
        {
            "chunk_id": f"c-{i:02d}",
            "text": f"text {draw(st.integers(0, 12))}",
            "acl": draw(st.none() | groups),
            "version": draw(st.sampled_from(["1", "2"])),
        }
        for i in range(count)
    ]
    queries = [
        {"text": f"q {i}", "groups": sorted(draw(groups)), "filters": draw(st.sampled_from([{}, {"version": "1"}]))}
        for i in range(draw(st.integers(0, 5)))
    ]
    return chunks, queries, draw(st.integers(1, 4)), draw(st.integers(1, 4))


@given(worlds())
@settings(max_examples=60, deadline=None)
def test_agrees_with_a_plain_search_of_everything_each_query_may_see(world):
    chunks, asked, k, oversampling = world
    corpus, queries = make_corpus(chunks), make_queries(asked)
    output = run(queries, corpus, k=k, oversampling=oversampling)
    expected = []
    for query in queries.to_pylist():
        wanted = {pair["key"]: pair["value"] for pair in query["filters"]}
        best = {}
        for chunk in sorted(chunks, key=lambda chunk: chunk["chunk_id"]):
            seen = chunk["acl"] is None or bool(set(chunk["acl"]) & set(query["groups"]))
            if seen and chunk["version"] == wanted.get("version", chunk["version"]):
                best.setdefault(chunk["text"], chunk["chunk_id"])
        rows = {i: corpus.rows(corpus.ids(np.array([int(i[2:])])))[0] for i in best.values()}
        vector = np.array(query["embedding"])
        score = {i: np.float32(vector @ corpus.embeddings[row].astype(np.float64)) for i, row in rows.items()}
        expected.append(sorted(score, key=lambda i: (-score[i], i))[: k * oversampling])
    assert listed(output) == expected
    assert output.account.candidates_out == sum(map(len, expected))


def test_a_query_gets_the_same_candidates_whatever_else_is_in_its_shard():
    corpus = make_corpus([{"chunk_id": f"c-{i:03d}", "text": f"text {i}"} for i in range(200)], dimension=32)
    queries = make_queries([{"text": f"q {i}"} for i in range(17)], dimension=32)
    together = run(queries, corpus).table
    for row in range(17):
        assert run(queries.slice(row, 1), corpus).table.equals(together.slice(row, 1))


def test_a_query_that_sees_nothing_gets_an_empty_list():
    corpus = make_corpus([{"chunk_id": "c", "text": "t", "acl": ["staff"]}])
    output = run(make_queries([{"text": "q", "groups": ["guests"]}]), corpus)
    assert listed(output) == [[]]
    assert output.account.added == {}


def test_no_queries_give_an_empty_table():
    output = run(schema(DistinctQuery).empty_table(), make_corpus([{"chunk_id": "c", "text": "t"}]))
    assert output.table.num_rows == 0
    assert output.account.balanced


def test_an_embedding_of_another_width_is_refused_by_name():
    corpus = make_corpus([{"chunk_id": "c", "text": "t"}], dimension=8)
    queries = make_queries([{"text": "right"}, {"text": "wrong", "query_id": "q-wrong", "embedding": [1.0] * 6}])
    with pytest.raises(ConfigurationError, match="query q-wrong: its embedding has another width") as refused:
        run(queries, corpus)
    assert refused.value.got == "6 dimensions (1 of 2 queries differ)"
    assert refused.value.want == "8 (embedding model test)"


class LeakingCorpus(Corpus):
    """A corpus whose index forgets the selector: it searches everything for everybody."""

    def dense_search(self, vectors, scopes, depth):
        return super().dense_search(vectors, Scopes.single(scopes.distinct[-1], len(vectors)), depth)


@pytest.mark.parametrize(
    ("secret", "outsider", "insider"),
    [
        ({"acl": ["staff"]}, {"groups": ["guests"]}, {"groups": ["staff"]}),
        ({"version": "2"}, {"filters": {"version": "1"}}, {"filters": {"version": "2"}}),
    ],
)
def test_a_chunk_that_a_query_may_not_see_is_never_handed_on(secret, outsider, insider):
    corpus = make_corpus(
        [{"chunk_id": "open", "text": "a", "version": "1"}, {"chunk_id": "secret", "text": "b", **secret}]
    )
    queries = make_queries([{"text": "outsider", **outsider}, {"text": "insider", **insider}])
    assert "secret" not in listed(run(queries, corpus))[0]
    assert "secret" in listed(run(queries, corpus))[1]
    corpus.__class__ = LeakingCorpus
    with pytest.raises(ContractError, match="a chunk that query q-0000 may see") as refused:
        run(queries, corpus)
    assert (refused.value.stage, refused.value.row, refused.value.value) == ("oversample", 0, "secret")


@pytest.mark.parametrize("wrong", [{"k": 0}, {"oversampling": 0}, {"k": True}, {"k": 2.0}, {"depth": 3}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ValidationError):
        Params(**wrong)


def test_scores_stay_within_the_bounds_of_a_cosine():
    corpus = make_corpus([{"chunk_id": "c", "text": "t"}, {"chunk_id": "d", "text": "u"}], [[0.1, 0.7], [-0.1, -0.7]])
    scores = ragged(run(make_queries([{"text": "q", "embedding": [0.1, 0.7]}]), corpus).table, "candidates").numpy(
        "score"
    )
    assert scores.tolist() == pytest.approx([1.0, -1.0])
    assert np.abs(scores).max() <= 1.0
