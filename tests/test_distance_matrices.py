"""distance_matrices: cosine distances, exact where it matters and 0 for copies."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.candidates import Candidates
from contracts.errors import ConfigurationError, ContractError, MissingArtifactError
from contracts.query import DistinctQuery
from contracts.table import schema
from stages.distance_matrices import STAGE, Params, cosine_distances
from tests.corpora import make_corpus, make_queries, unit


def candidates(*lists):
    rows = [
        {
            "query_id": f"q-{number:04d}",
            "candidates": [{"rank": i + 1, "chunk_id": c, "score": 1.0 - i / 100} for i, c in enumerate(one)],
        }
        for number, one in enumerate(lists)
    ]
    return pa.Table.from_pylist(rows, schema=schema(Candidates))


def run(queries, oversample, corpus):
    return STAGE.checked_run({"queries": queries, "oversample": oversample}, {"corpus": corpus}, Params())


def random_shard(seed, queries=6, dimension=None):
    """Vectors, offsets, rows and embeddings, some candidates shared between queries and one list empty."""
    random = np.random.default_rng(seed)
    dimension = dimension or int(random.integers(1, 70))
    lengths = random.integers(0, 12, size=queries)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    rows = random.integers(0, 30, size=offsets[-1])
    return unit(random.normal(size=(queries, dimension))), offsets, rows, unit(random.normal(size=(30, dimension)))


def test_distances_of_a_case_by_hand():
    corpus = make_corpus(
        [{"chunk_id": c, "text": c} for c in ("east", "north", "north-east", "west")],
        [[1.0, 0.0], [0.0, 1.0], [3.0, 4.0], [-1.0, 0.0]],
    )
    queries = make_queries([{"text": "q", "embedding": [1.0, 0.0]}])
    output = run(queries, candidates(["east", "north-east", "north", "west"]), corpus)
    (row,) = output.table.to_pylist()
    # Cosines with (1, 0): 1, 3/5, 0, -1.
    assert row["query_distances"] == pytest.approx([0.0, 0.4, 1.0, 2.0])
    # Rows of the lower triangle: (ne, e), (n, e), (n, ne), (w, e), (w, ne), (w, n).
    assert row["document_distances"] == pytest.approx([0.4, 1.0, 0.2, 2.0, 1.6, 1.0])
    assert output.account.candidates_in == output.account.candidates_out == 4


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_agrees_with_a_plain_loop_in_float64(seed):
    vectors, offsets, rows, embeddings = random_shard(seed)
    to_query, to_each_other = cosine_distances(vectors, offsets, rows, embeddings)

    def distance(left, right):
        value = 1.0 - float(np.dot(left.astype(np.float64), right.astype(np.float64)))
        return 0.0 if value < 1e-6 else min(value, 2.0)

    queries, pairs = [], []
    for query, vector in enumerate(vectors):
        own = [embeddings[row] for row in rows[offsets[query] : offsets[query + 1]]]
        queries += [distance(vector, one) for one in own]
        pairs += [distance(own[i], own[j]) for i in range(len(own)) for j in range(i)]
    assert to_query.dtype == to_each_other.dtype == np.float32
    np.testing.assert_allclose(to_query, queries, rtol=1e-6, atol=0)
    np.testing.assert_allclose(to_each_other, pairs, rtol=1e-6, atol=0)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_query_has_the_same_distances_whatever_else_is_in_its_shard(seed):
    vectors, offsets, rows, embeddings = random_shard(seed)
    to_query, to_each_other = cosine_distances(vectors, offsets, rows, embeddings)
    pairs = np.concatenate(([0], np.cumsum(np.diff(offsets) * (np.diff(offsets) - 1) // 2)))
    for query in range(len(vectors)):
        own = rows[offsets[query] : offsets[query + 1]]
        alone = cosine_distances(vectors[query : query + 1], np.array([0, len(own)]), own, embeddings)
        assert alone[0].tobytes() == to_query[offsets[query] : offsets[query + 1]].tobytes()
        assert alone[1].tobytes() == to_each_other[pairs[query] : pairs[query + 1]].tobytes()


def renormalised_copies(vector, count, random):
    """One direction, scaled and brought back to length 1 in float32: equal but for the last bits."""
    scaled = (vector * random.uniform(0.1, 10.0, size=(count, 1))).astype(np.float32)
    return scaled / np.linalg.norm(scaled, axis=1, keepdims=True)


@pytest.mark.parametrize("dimension", [8, 384, 1536])
def test_exact_copies_are_at_distance_zero_although_their_floats_differ(dimension):
    random = np.random.default_rng(dimension)
    copies = renormalised_copies(random.normal(size=dimension), 40, random)
    plain = 1.0 - copies.astype(np.float64) @ copies.T.astype(np.float64)
    assert np.abs(plain).max() > 1e-8  # rounding is there, and would be a distance
    to_query, to_each_other = cosine_distances(copies[:1], np.array([0, 40]), np.arange(40), copies)
    assert not to_query.any()
    assert not to_each_other.any()


def test_a_distance_just_above_rounding_is_kept():
    angle = 2e-3  # 1 - cos(0.002) = 2e-6
    embeddings = unit([[1.0, 0.0], [np.cos(angle), np.sin(angle)], [np.cos(angle / 2), np.sin(angle / 2)]])
    to_query, _ = cosine_distances(embeddings[:1], np.array([0, 3]), np.arange(3), embeddings)
    assert to_query[0] == 0.0
    assert to_query[1] == pytest.approx(2e-6, rel=0.05)
    assert to_query[2] == 0.0  # 5e-7 counts as rounding


def test_distances_stay_in_bounds_where_rounding_leaves_them():
    vector = np.full((1, 3), np.float32(0.5773503))  # its length is a little above 1
    assert np.sum(vector.astype(np.float64) ** 2) > 1.0
    embeddings = np.concatenate((vector, -vector))
    to_query, to_each_other = cosine_distances(vector, np.array([0, 2]), np.arange(2), embeddings)
    assert to_query.tolist() == [0.0, 2.0]
    assert to_each_other.tolist() == [2.0]


def test_empty_lists_and_empty_tables_work():
    corpus = make_corpus([{"chunk_id": "a", "text": "a"}, {"chunk_id": "b", "text": "b"}])
    output = run(make_queries([{"text": "x"}, {"text": "y"}, {"text": "z"}]), candidates([], ["b"], []), corpus)
    lists = output.table.select(["query_distances", "document_distances"]).to_pylist()
    assert [(len(one["query_distances"]), one["document_distances"]) for one in lists] == [(0, []), (1, []), (0, [])]
    nothing = run(schema(DistinctQuery).empty_table(), candidates(), corpus)
    assert nothing.table.num_rows == 0
    assert nothing.account.balanced


def test_a_chunk_that_the_snapshot_does_not_hold_is_refused():
    corpus = make_corpus([{"chunk_id": "a", "text": "a"}])
    with pytest.raises(MissingArtifactError, match="gone"):
        run(make_queries([{"text": "q"}]), candidates(["gone"]), corpus)


def test_an_embedding_of_another_width_is_refused():
    corpus = make_corpus([{"chunk_id": "a", "text": "a"}], dimension=8)
    with pytest.raises(ConfigurationError, match="query q-0000: its embedding has another width"):
        run(make_queries([{"text": "q"}], dimension=5), candidates(["a"]), corpus)


def test_fewer_distances_than_candidates_are_refused():
    corpus = make_corpus([{"chunk_id": "a", "text": "a"}, {"chunk_id": "b", "text": "b"}])
    queries, listed = make_queries([{"text": "q"}]), candidates(["a", "b"])
    short = run(queries, candidates(["a"]), corpus).table
    check = STAGE.success[1]
    assert check.problem({"queries": queries, "oversample": listed}, short) == "row 0 has 1 distances for 2 candidates"
    assert check.problem({"queries": queries, "oversample": listed}, run(queries, listed, corpus).table) is None


def test_queries_and_candidates_of_different_tables_are_refused():
    corpus = make_corpus([{"chunk_id": "a", "text": "a"}])
    with pytest.raises(ContractError, match="the query ids differ from those of queries"):
        run(make_queries([{"text": "q", "query_id": "other"}]), candidates(["a"]), corpus)
