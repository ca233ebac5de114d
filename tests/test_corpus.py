"""The corpus in memory: what a scope sees, and that searches under it are exact, total and the same every time."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.columns import Ragged
from contracts.errors import ConfigurationError, MissingArtifactError
from contracts.evidence import Family
from corpus.exact_search import cosines, exact_candidates
from corpus.scope import Scope, Scopes
from tests.corpora import make_corpus, make_queries, unit

CHUNKS = [
    {"chunk_id": "a", "text": "one", "acl": None, "version": "1", "source": "docs/a.md", "authority_tier": 2},
    {"chunk_id": "b", "text": "two", "acl": ["staff"], "version": "2", "source": "docs/b.md", "authority_tier": 1},
    {"chunk_id": "c", "text": "three", "acl": ["staff", "all"], "version": None, "source": "notes/c.md",
     "metadata": {"lang": "en"}},
    {"chunk_id": "d", "text": "four", "acl": [], "version": "1", "source": "notes/d.md", "metadata": {"lang": "pl"}},
]  # fmt: skip


def names(corpus, mask):
    return corpus.ids(np.flatnonzero(mask)).to_pylist()


def lists(found, name="row"):
    return [part.tolist() for part in np.split(np.asarray(found.values[name]), found.offsets[1:-1])]


@pytest.mark.parametrize(
    ("scope", "seen"),
    [
        (Scope(), "a"),
        (Scope(("all",)), "ac"),
        (Scope(("all", "staff")), "abc"),
        (Scope(("other",)), "a"),
        (Scope(("staff",), (("version", "2"),)), "b"),
        (Scope(("staff",), (("lang", "en"),)), "c"),
        (Scope(("staff",), (("lang", "en"), ("version", "1"))), ""),
        (Scope((), (("authority_tier", "2"), ("source", "docs/a.md"))), "a"),
    ],
)
def test_a_scope_sees_chunks_of_its_groups_that_pass_every_filter(scope, seen):
    corpus = make_corpus(CHUNKS)
    assert names(corpus, corpus.visible(scope)) == list(seen)


def test_without_access_control_groups_do_not_matter():
    corpus = make_corpus([{"chunk_id": "a", "text": "one"}, {"chunk_id": "b", "text": "two"}])
    assert corpus.visible(Scope(("any",))).all()


def test_a_filter_on_an_unknown_key_names_those_that_are_known():
    corpus = make_corpus(CHUNKS)
    with pytest.raises(
        ConfigurationError, match=r"no chunk has the metadata key: got lnag, want one of .*lang, .*version"
    ):
        corpus.visible(Scope((), (("lnag", "en"),)))


def test_of_equal_texts_the_highest_tier_then_the_lowest_id_is_eligible():
    texts = {"a": ("x", None), "b": ("x", 2), "c": ("x ", 1), "d": ("x", 1), "e": ("y", None), "f": ("y", None)}
    chunks = [{"chunk_id": i, "text": text, "authority_tier": tier} for i, (text, tier) in texts.items()]
    assert names(make_corpus(chunks), make_corpus(chunks).eligible(Scope())) == ["c", "e"]
    everything = make_corpus(chunks, collapse_identical_texts=False)
    assert everything.eligible(Scope()).all()


def test_the_representative_of_a_text_is_one_that_the_scope_sees():
    chunks = [
        {"chunk_id": "secret", "text": "x", "authority_tier": 1, "acl": ["staff"]},
        {"chunk_id": "open", "text": "x", "authority_tier": 2, "acl": ["all"]},
    ]
    corpus = make_corpus(chunks)
    assert names(corpus, corpus.eligible(Scope(("all",)))) == ["open"]
    assert names(corpus, corpus.eligible(Scope(("all", "staff")))) == ["secret"]


def test_members_of_a_family_match_source_metadata_and_authority():
    corpus = make_corpus(CHUNKS)

    def members(**parts):
        return names(corpus, corpus.members(Family(name="f", rescue_query="q", **parts)))

    assert members(source=r"^docs/") == ["a", "b"]
    assert members(source=r"[bc]\.md$") == ["b", "c"]
    assert members(metadata={"lang": "en"}) == ["c"]
    assert members(source="notes", metadata={"lang": "pl"}) == ["d"]
    assert members(source="docs", authority=[1]) == ["b"]
    assert members(source="notes", authority=[1]) == []  # a null tier is no authority


def test_ids_and_rows_are_each_others_inverse():
    corpus = make_corpus(CHUNKS)
    assert corpus.rows(pa.array(["d", "a", "d"])).tolist() == [3, 0, 3]
    assert corpus.ids(np.array([3, 0, 3])).to_pylist() == ["d", "a", "d"]
    with pytest.raises(MissingArtifactError, match="does not hold the chunk: got 'x'"):
        corpus.rows(pa.array(["a", "x"]))


def test_passage_texts_have_the_title_above_the_text():
    corpus = make_corpus([{"chunk_id": "a", "text": "one", "title": "T"}, {"chunk_id": "b", "text": "two"}])
    assert corpus.passage_texts(np.array([1, 0])) == ["two", "T\none"]


def test_dense_search_by_hand():
    # From [1, 0]: c is at cosine 1, a and b tie at 0.6, d is opposite.
    corpus = make_corpus(
        [{"chunk_id": i, "text": i} for i in "dcba"], [[-1.0, 0.0], [1.0, 0.0], [0.6, -0.8], [0.6, 0.8]]
    )
    found = corpus.dense_search(unit([[1.0, 0.0]]), Scopes.single(Scope(), 1), 3)
    assert corpus.ids(found.values["row"]).to_pylist() == ["c", "a", "b"]
    np.testing.assert_allclose(found.values["score"], [1.0, 0.6, 0.6], rtol=1e-7)
    assert found.values["score"].dtype == np.float32


def plain_search(corpus, vectors, scopes, depth):
    """Every eligible chunk scored in float64 and sorted: the slow twin of dense_search."""
    expected = []
    for vector, code in zip(vectors, scopes.codes, strict=True):
        rows = np.flatnonzero(corpus.eligible(scopes.distinct[code])).tolist()
        score = {
            row: np.float32(np.clip(np.dot(vector.astype(float), corpus.embeddings[row].astype(float)), -1, 1))
            for row in rows
        }
        expected.append(sorted(rows, key=lambda row, score=score: (-score[row], row))[:depth])
    return expected


@st.composite
def worlds(draw):
    """Vectors on a coarse grid, so that ties are many, and queries under different scopes."""
    count = draw(st.integers(1, 24))
    grid = st.lists(st.integers(-2, 2), min_size=3, max_size=3).filter(any)
    vectors = draw(st.lists(grid, min_size=count, max_size=count))
    groups = st.none() | st.lists(st.sampled_from("gh"), max_size=2, unique=True)
    chunks = [
        {"chunk_id": f"{place:03d}", "text": draw(st.sampled_from("stuvwxyz")), "acl": draw(groups)}
        for place in range(count)
    ]
    asked = draw(st.lists(st.tuples(grid, st.sampled_from([(), ("g",), ("g", "h"), ("h",)])), min_size=1, max_size=9))
    return chunks, vectors, asked, draw(st.integers(1, 30)), draw(st.booleans())


@given(worlds())
@settings(max_examples=100, deadline=None)
def test_dense_search_is_a_plain_search_of_all_that_is_eligible(world):
    chunks, vectors, asked, depth, collapse = world
    corpus = make_corpus(chunks, vectors, collapse_identical_texts=collapse)
    scopes = Scopes.of(make_queries([{"text": "q", "groups": list(groups)} for _, groups in asked]))
    queries = unit([vector for vector, _ in asked])
    found = corpus.dense_search(queries, scopes, depth)
    assert lists(found) == plain_search(corpus, queries, scopes, depth)


@cache
def large_corpus(count=9000, dimension=24, **more):
    """More chunks than one block of the search, of which every third text stands twice."""
    random = np.random.default_rng(5)
    vectors = random.normal(size=(count, dimension))
    vectors[1::3] = vectors[0::3][: len(vectors[1::3])]
    chunks = [
        {"chunk_id": f"{i:05d}", "text": str(i), "version": str(i % 50), "acl": ["all"] if i % 7 else ["staff"]}
        for i in range(count)
    ]
    return make_corpus(chunks, vectors, **more)


def large_queries(count, dimension=24):
    asked = []
    for number in range(count):
        filters = {"version": str(number % 5)} if number % 3 == 0 else {}
        asked.append({"text": "q", "groups": ["all"] if number % 2 else ["all", "staff"], "filters": filters})
    queries = make_queries(asked, dimension)
    return unit(queries.column("embedding").to_pylist()), Scopes.of(queries)


def test_a_search_over_many_blocks_is_a_plain_search():
    corpus, (vectors, scopes) = large_corpus(), large_queries(12)
    assert lists(corpus.dense_search(vectors, scopes, 40)) == plain_search(corpus, vectors, scopes, 40)


def test_a_flat_index_of_faiss_finds_the_same():
    corpus, (vectors, _) = (
        make_corpus([{"chunk_id": f"{i:04d}", "text": str(i)} for i in range(1000)]),
        large_queries(40, 8),
    )
    _, rows = corpus.index.search(vectors, 20)
    assert lists(corpus.dense_search(vectors, Scopes.single(Scope(), 40), 20)) == rows.tolist()


def test_ties_that_reach_far_beyond_the_depth_are_broken_by_chunk_id():
    chunks = [{"chunk_id": f"{i:04d}", "text": str(i)} for i in range(5000)]
    corpus = make_corpus(chunks, np.tile([[0.6, 0.8]], (5000, 1)))
    found = corpus.dense_search(unit([[1.0, 0.3]]), Scopes.single(Scope(), 1), 5)
    assert lists(found) == [[0, 1, 2, 3, 4]]


def test_a_depth_beyond_what_is_eligible_gives_all_of_it():
    corpus = make_corpus(CHUNKS)
    scopes = Scopes((Scope(), Scope(("staff",))), np.array([0, 1]))
    found = corpus.dense_search(unit(np.ones((2, 8))), scopes, 1000)
    assert [sorted(rows) for rows in lists(found)] == [[0], [0, 1, 2]]


def test_a_scope_that_sees_nothing_and_no_queries_give_empty_lists():
    corpus = make_corpus([{"chunk_id": "a", "text": "t", "acl": ["staff"]}])
    assert lists(corpus.dense_search(unit(np.ones((1, 8))), Scopes.single(Scope(), 1), 3)) == [[]]
    nothing = corpus.dense_search(np.zeros((0, 8), np.float32), Scopes.single(Scope(), 0), 3)
    assert (nothing.offsets.tolist(), len(nothing.values["row"])) == ([0], 0)


@pytest.mark.parametrize("index_factory", ["Flat", "HNSW16", "IVF20,Flat", "PCA16,IVF8,SQ8", "IVF8,SQ8,RFlat", "SQ8"])
def test_a_query_gets_the_same_hits_whatever_stands_beside_it(index_factory):
    corpus, (vectors, scopes) = large_corpus(2000, index_factory=index_factory), large_queries(300)
    together = lists(corpus.dense_search(vectors, scopes, 30))
    order = np.random.default_rng(0).permutation(300)
    assert lists(corpus.dense_search(vectors[order], scopes.take(order), 30)) == [together[i] for i in order]
    for query in range(0, 300, 43):
        alone = corpus.dense_search(vectors[query : query + 1], scopes.take(np.array([query])), 30)
        assert lists(alone) == [together[query]]


@pytest.mark.parametrize("index_factory", ["HNSW16", "IVF20,Flat", "PCA16,IVF8,SQ8", "IVF8,SQ8,RFlat", "SQ8"])
def test_an_approximate_index_returns_eligible_chunks_alone_and_as_many_as_asked(index_factory):
    corpus, (vectors, scopes) = large_corpus(2000, index_factory=index_factory), large_queries(30)
    found = corpus.dense_search(vectors, scopes, 40)
    exact = plain_search(corpus, vectors, scopes, 40)
    for rows, wanted, code in zip(lists(found), exact, scopes.codes, strict=True):
        assert len(set(rows)) == len(wanted)
        assert corpus.eligible(scopes.distinct[code])[rows].all()
    hit = sum(len(set(rows) & set(wanted)) for rows, wanted in zip(lists(found), exact, strict=True))
    assert hit / sum(map(len, exact)) > 0.6
    scores = lists(found, "score")
    assert all(one == sorted(one, reverse=True) for one in scores)


def test_exact_candidates_are_few_more_than_were_asked_for():
    corpus, (vectors, scopes) = large_corpus(), large_queries(50)
    found = exact_candidates(corpus.embeddings, vectors, scopes, corpus.eligible, 30)
    assert found.lengths.min() >= 30
    assert found.lengths.mean() < 32


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_a_cosine_depends_on_its_pair_alone(dimension, pairs, seed):
    random = np.random.default_rng(seed)
    vectors, embeddings = unit(random.normal(size=(4, dimension))), unit(random.normal(size=(5, dimension)))
    queries, rows = random.integers(0, 4, pairs), random.integers(0, 5, pairs)
    together = cosines(vectors, queries, embeddings, rows)
    expected = [
        float(vectors[q].astype(float) @ embeddings[r].astype(float)) for q, r in zip(queries, rows, strict=True)
    ]
    np.testing.assert_allclose(together, expected, atol=6e-8)
    for pair in range(pairs):
        assert cosines(vectors, queries[pair : pair + 1], embeddings, rows[pair : pair + 1]) == together[pair]


def test_lexical_overlap_by_hand():
    corpus = make_corpus([{"chunk_id": "a", "text": "red fox red"}, {"chunk_id": "b", "text": "blue fox"}])
    texts = ["red fox", "red red whale", "", "whale"]
    overlap = corpus.lexical_overlap(texts, np.array([0, 0, 1, 1, 2, 3]), np.array([0, 1, 0, 1, 0, 0]))
    assert overlap.tolist() == [1.0, 0.5, 0.5, 0.0, 0.0, 0.0]


WORDS = st.lists(st.sampled_from("abcdefg"), max_size=6).map(" ".join)


@given(st.lists(WORDS.filter(bool), min_size=1, max_size=8), st.lists(WORDS, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_lexical_overlap_is_the_share_of_words_in_common(texts, questions):
    corpus = make_corpus([{"chunk_id": f"{i}", "text": text} for i, text in enumerate(texts)])
    queries, rows = (part.ravel() for part in np.indices((len(questions), len(texts))))
    expected = []
    for query, row in zip(queries, rows, strict=True):
        asked = set(questions[query].split())
        expected.append(len(asked & set(texts[row].split())) / len(asked) if asked else 0.0)
    assert corpus.lexical_overlap(questions, queries, rows).tolist() == expected


def test_term_ids_keep_order_and_repeats():
    corpus = make_corpus([{"chunk_id": "a", "text": "b c"}, {"chunk_id": "b", "text": "a"}])
    found = corpus.term_ids(["c a unknown c", ""])
    assert (found.offsets.tolist(), found.values.tolist()) == ([0, 3, 3], [2, 0, 2])


def test_keyword_search_heeds_scopes_in_any_order_of_queries():
    corpus = make_corpus(CHUNKS)
    queries = make_queries(
        [{"text": text, "groups": groups} for text in ("two one", "three", "nothing") for groups in ([], ["staff"])]
    )
    search = corpus.keyword_search(1.5, 0.75, 0.25)
    found = search.search(queries.column("text").to_pylist(), Scopes.of(queries), 5)
    assert [set(rows) for rows in lists(found)] == [{0}, {0, 1}, set(), {2}, set(), set()]
    assert isinstance(found, Ragged)
    assert corpus.keyword_search(1.5, 0.75, 0.25) is search
    deepest = search.search(queries.column("text").to_pylist(), Scopes.of(queries), 2**63)
    assert deepest.values["row"].tolist() == found.values["row"].tolist()


def test_a_column_that_no_chunk_fills_is_no_filter_key():
    plain = make_corpus([{"chunk_id": "a", "text": "x"}])
    assert "version" not in plain.snapshot.filter_keys
    dated = make_corpus([{"chunk_id": "a", "text": "x", "version": "2"}, {"chunk_id": "b", "text": "y"}])
    assert "version" in dated.snapshot.filter_keys
