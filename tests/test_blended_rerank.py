"""blended_rerank: scores are the stated sums of their parts, and the selection covers the required families."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.candidates import FusedRanking
from contracts.errors import ConfigurationError, ModelError
from contracts.evidence import EvidencePlan, RescuedRanking
from contracts.manifest import Account
from contracts.table import schema
from corpus.corpus import Corpus
from corpus.exact_tokens import exact_tokens
from corpus.scores import document_support, min_max, scores_in_order
from corpus.selection import fill_selection, serve_families
from stages.blended_rerank import STAGE, Params
from stages.stage import StageOutput
from tests.corpora import make_corpus, make_queries

BEST = 2 / 61


class TableCrossEncoder:
    """Logits looked up by (query, passage), 0 where there is none; keeps what it was asked."""

    model_id = "table"

    def __init__(self, logits: Mapping[tuple[str, str], float] | None = None) -> None:
        self.logits = logits or {}
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        pairs = list(zip(queries, passages, strict=True))
        self.calls.append(pairs)
        return np.array([self.logits.get(pair, 0.0) for pair in pairs], dtype=np.float32)


def fused(chunk_id: str, score: float, *families: str) -> dict[str, Any]:
    return {
        "chunk_id": chunk_id, "score": score, "families": list(families), "family_ranks": [0] * len(families),
        "rescued": False,
    }  # fmt: skip


def rescued(chunk_id: str, *families: str) -> dict[str, Any]:
    return {**fused(chunk_id, 0.0, *families), "rescued": True}


def make_inputs(
    queries: pa.Table, lists: Sequence[Sequence[Mapping[str, Any]]], required: Sequence[Sequence[str]] | None = None
) -> dict[str, pa.Table]:
    ids = queries.column("query_id").to_pylist()
    required = [[] for _ in ids] if required is None else required
    merged = [
        {
            "query_id": query_id,
            "candidates": [
                {
                    "rank": rank,
                    "chunk_id": one["chunk_id"],
                    "score": one["score"],
                    "greedy_selection_rank": None,
                    "sparse_search_rank": rank,
                }
                for rank, one in enumerate((one for one in candidates if not one["rescued"]), start=1)
            ],
            "best_possible": BEST,
            "greedy_selection_outcome": "ok",
            "sparse_search_outcome": "ok",
        }
        for query_id, candidates in zip(ids, lists, strict=True)
    ]
    ranked = [
        {
            "query_id": query_id,
            "shape": "shape" if families else None,
            "recognised_by": "words" if families else None,
            "coverage": [
                {"family": family, "wanted": 1, "found": 1, "rescued": 0, "outcome": "enough"} for family in families
            ],
            "candidates": [{"rank": rank, **one} for rank, one in enumerate(candidates, start=1)],
        }
        for query_id, candidates, families in zip(ids, lists, required, strict=True)
    ]
    return {
        "queries": queries,
        "rrf_merge": pa.Table.from_pylist(merged, schema=schema(FusedRanking)),
        "family_rescue": pa.Table.from_pylist(ranked, schema=schema(RescuedRanking)),
    }


def rerank(
    corpus: Corpus,
    inputs: Mapping[str, pa.Table],
    cross_encoder: TableCrossEncoder | None = None,
    plan: EvidencePlan | None = None,
    **params: Any,
) -> StageOutput:
    """What the stage gives; the selection is not spread where a test does not ask for it."""
    chosen = Params(**{"spread_below": 0.0, **params})
    return STAGE.checked_run(inputs, {"corpus": corpus, "cross_encoder": cross_encoder, "plan": plan}, chosen)


def only(output: StageOutput) -> list[dict[str, Any]]:
    """The candidates of the only query."""
    (row,) = output.table.to_pylist()
    candidates: list[dict[str, Any]] = row["candidates"]
    return candidates


def selection(output: StageOutput) -> list[str]:
    """The selected chunks of the only query, in order."""
    taken = [(one["selected_rank"], one["chunk_id"]) for one in only(output) if one["selected_rank"] is not None]
    return [chunk for _, chunk in sorted(taken)]


def scored(scores: Mapping[str, float], **families: str) -> list[dict[str, Any]]:
    """Fused candidates by retrieval part; `a="x y"` says that chunk a serves the families x and y."""
    return [fused(chunk, score * BEST, *families.get(chunk, "").split()) for chunk, score in scores.items()]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))


@pytest.fixture(scope="module")
def letters() -> Corpus:
    """Chunks a to h with different texts that share no word with the query `zzz`; a, b and c of one document."""
    return make_corpus(
        [{"chunk_id": c, "text": f"text {c}", "document_id": "abc" if c in "abc" else c} for c in "abcdefgh"]
    )


ZZZ = make_queries([{"text": "zzz"}])
RETRIEVAL_ONLY = {"lexical_weight": 0.0, "exact_token_bonus": 0.0}


def test_a_blended_score_is_the_stated_sum_of_its_parts():
    corpus = make_corpus(
        [
            {"chunk_id": "a", "text": "pods restart on ERR-4102 often", "title": None},
            {"chunk_id": "b", "text": "restart policy", "title": "Pods"},
        ]
    )
    queries = make_queries([{"text": "Why pods restart ERR-4102", "normalised_text": "why pods restart err-4102"}])
    inputs = make_inputs(queries, [[fused("b", 1 / 61), fused("a", 1 / 62)]])
    # The model reads what every line of the query has in common, whatever line came first.
    text = "why pods restart err-4102"
    cross_encoder = TableCrossEncoder(
        {(text, "pods restart on ERR-4102 often"): 1.5, (text, "Pods\nrestart policy"): -0.5}
    )
    first, second = only(rerank(corpus, inputs, cross_encoder))
    # Terms of the query: why, pods, restart, err, 4102. Chunk a has four of the five, b has two, one of
    # them in its title. Best possible is 2/61: half of it for rank 1.
    assert first == {
        "rank": 1,
        "chunk_id": "a",
        "score": pytest.approx(0.4 * sigmoid(1.5) + 0.3 * (61 / 124) + 0.3 * (4 / 5) + 0.1, abs=1e-12),
        "cross_encoder": pytest.approx(sigmoid(1.5)),
        "retrieval": pytest.approx(61 / 124),
        "lexical": pytest.approx(4 / 5),
        "exact_bonus": 0.1,
        "absolute_score": pytest.approx(sigmoid(1.5)),
        "families": [],
        "rescued": False,
        "selected_rank": 1,
        "drawn_in_by": None,
    }
    assert second["score"] == pytest.approx(0.4 * sigmoid(-0.5) + 0.3 * 0.5 + 0.3 * (2 / 5), abs=1e-12)
    assert cross_encoder.calls == [[(text, "Pods\nrestart policy"), (text, "pods restart on ERR-4102 often")]]


def test_weights_are_rescaled_to_sum_to_one(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.5})])
    (one,) = only(
        rerank(
            letters,
            inputs,
            TableCrossEncoder({("zzz", "text a"): 2.0}),
            cross_encoder_weight=4.0,
            retrieval_weight=3.0,
            lexical_weight=1.0,
        )
    )
    assert one["score"] == pytest.approx(0.5 * sigmoid(2.0) + 0.375 * 0.5)


def test_a_sum_above_one_is_clipped():
    corpus = make_corpus([{"chunk_id": "a", "text": "ERR-4102"}])
    inputs = make_inputs(make_queries([{"text": "ERR-4102"}]), [[fused("a", BEST)]])
    (one,) = only(rerank(corpus, inputs, TableCrossEncoder({("ERR-4102", "ERR-4102"): 20.0}), exact_token_bonus=0.5))
    assert one["exact_bonus"] == 0.5
    assert one["score"] == 1.0


def test_the_bonus_is_the_share_of_exact_tokens_that_stand_alone():
    corpus = make_corpus(
        [
            {"chunk_id": "a", "text": "both ERR-4102 and `dial tcp` here"},
            {"chunk_id": "b", "text": "only dial tcp, err-4102 in lower case"},
            {"chunk_id": "c", "text": "ERR-41020 and XERR-4102 are other codes"},
            {"chunk_id": "d", "text": "see the title", "title": "(ERR-4102)"},
        ]
    )
    inputs = make_inputs(make_queries([{"text": 'ERR-4102 with "dial tcp"'}]), [scored(dict.fromkeys("abcd", 0.5))])
    bonus = {one["chunk_id"]: one["exact_bonus"] for one in only(rerank(corpus, inputs, exact_token_bonus=0.2))}
    assert bonus == {"a": 0.2, "b": 0.1, "c": 0.0, "d": 0.1}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("why does ERR-4102 come up?", ("ERR-4102",)),
        ("what is kube-apiserver, a well-known and/or state-of-the-art server", ()),
        ("what is `kube-apiserver`", ("kube-apiserver",)),
        ('"exact phrase here" and \'another one\'', ("exact phrase here", "another one")),
        ("don't take the dogs' bowl, it's the cats'", ()),
        ("set spec.nodeName, max_tokens=5 and ClusterRole.", ("spec.nodeName", "max_tokens=5", "ClusterRole")),
        ("open /etc/hosts or docs/tasks/run", ("/etc/hosts", "docs/tasks/run")),
        ("with --dry-run and -v (since v1.21)", ("--dry-run", "-v", "v1.21")),
        ("a .gitignore ...and more", (".gitignore",)),
        ("C++ or C# e.g. in the U.S. RBAC at 10:30, 404 times 3.5", ("C++", "C#")),
        ("10.0.0.1 on 2021-07-22", ("10.0.0.1", "2021-07-22")),
        ('"ERR-4102" twice: ERR-4102', ("ERR-4102",)),
        ('5" disc', ()),
        ("", ()),
    ],
)  # fmt: skip
def test_exact_tokens_are_what_looks_made_up_or_is_quoted(text: str, tokens: tuple[str, ...]):
    assert exact_tokens(text) == tokens


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab4-_./'\"`«» \n(", max_size=30))
def test_every_exact_token_stands_in_the_text_and_is_found_in_it(text: str):
    tokens = exact_tokens(text)
    assert all(token and token in text for token in tokens)
    assert len(set(tokens)) == len(tokens)


def test_one_candidate_and_equal_scores_need_no_special_case(letters: Corpus):
    queries = make_queries([{"text": "zzz"}, {"text": "zzz", "groups": ["g"]}, {"text": "none", "groups": ["g"]}])
    inputs = make_inputs(queries, [scored({"d": 0.5}), scored({"c": 0.5, "b": 0.5, "a": 0.5}), []])
    for normalisation in ("absolute", "min_max"):
        output = rerank(letters, inputs, TableCrossEncoder(), normalisation=normalisation)
        scores = [[(c["chunk_id"], c["score"]) for c in row["candidates"]] for row in output.table.to_pylist()]
        expected = pytest.approx(0.4 * 0.5 + 0.3 * 0.5)
        assert scores == [[("d", expected)], [("a", expected), ("b", expected), ("c", expected)], []]


def test_min_max_stretches_each_part_within_its_query():
    part = np.array([0.2, 0.6, 0.4, 0.3, np.nan, 0.7, 0.7, np.nan])
    stretched = min_max(part, np.array([0, 0, 0, 1, 1, 2, 2, 3]), 4)
    # Query 1 has one value and query 2 equal ones: they keep their absolute values.
    np.testing.assert_allclose(stretched, [0.0, 1.0, 0.5, 0.3, np.nan, 0.7, 0.7, np.nan])


def test_min_max_shows_the_parts_that_the_score_sums(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.8, "b": 0.4, "c": 0.2})])
    logits = {("zzz", "text a"): -1.0, ("zzz", "text b"): 1.0}
    by_id = {
        one["chunk_id"]: one
        for one in only(
            rerank(letters, inputs, TableCrossEncoder(logits), normalisation="min_max", cross_encoder_depth=2)
        )
    }
    assert [by_id[c]["cross_encoder"] for c in "abc"] == [0.0, 1.0, None]
    assert [by_id[c]["retrieval"] for c in "abc"] == [1.0, pytest.approx(1 / 3), 0.0]
    assert [by_id[c]["score"] for c in "abc"] == [pytest.approx(0.3), pytest.approx(0.4 + 0.1), 0.0]


def test_what_a_grade_is_taken_from_is_never_stretched(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.8, "b": 0.4, "c": 0.2})])
    model = TableCrossEncoder({("zzz", "text a"): -1.0, ("zzz", "text b"): 1.0})
    for one in (model, None):
        plain, stretched = (
            {found["chunk_id"]: found for found in only(rerank(letters, inputs, one, normalisation=how, **depth))}
            for how in ("absolute", "min_max")
            for depth in [{"cross_encoder_depth": 2}]
        )
        graded = {name: found["absolute_score"] for name, found in plain.items()}
        assert graded == {name: found["absolute_score"] for name, found in stretched.items()}
        assert graded == {name: found["score" if one is None else "cross_encoder"] for name, found in plain.items()}
        assert [found["score"] for found in stretched.values()] != [found["score"] for found in plain.values()]
    assert graded == {"a": pytest.approx(0.4), "b": pytest.approx(0.2), "c": pytest.approx(0.1)}


def test_without_a_cross_encoder_the_other_weights_are_rescaled():
    corpus = make_corpus([{"chunk_id": "a", "text": "pods run"}])
    inputs = make_inputs(make_queries([{"text": "pods"}]), [[fused("a", 1 / 61)]])
    output = rerank(corpus, inputs, retrieval_weight=0.1)
    assert output.table.column("rerank_status").to_pylist() == ["no_cross_encoder"]
    # 0.3 of 0.1 + 0.3, for passages that are found later.
    assert output.table.column("lexical_weight").to_pylist() == pytest.approx([0.75])
    (one,) = only(output)
    assert one["cross_encoder"] is None
    assert one["score"] == pytest.approx(0.25 * 0.5 + 0.75 * 1.0)


def test_without_a_cross_encoder_its_weight_alone_is_refused(letters: Corpus):
    with pytest.raises(ConfigurationError, match=r"cross_encoder_weight: is the only weight above 0"):
        rerank(letters, make_inputs(ZZZ, [[]]), retrieval_weight=0.0, lexical_weight=0.0)
    with pytest.raises(ValidationError, match="must be above 0"):
        Params(cross_encoder_weight=0.0, retrieval_weight=0.0, lexical_weight=0.0)


def test_the_model_reads_the_first_fused_candidates_and_every_rescued_one_in_one_call(letters: Corpus):
    queries = make_queries([{"text": "zzz"}, {"text": "yyy"}])
    lists = [[*scored({"d": 0.9, "b": 0.5, "a": 0.3}), rescued("e")], scored({"f": 0.2})]
    model = TableCrossEncoder()
    output = rerank(letters, make_inputs(queries, lists), model, cross_encoder_depth=2)
    assert model.calls == [
        [("zzz", "text d"), ("zzz", "text b"), ("zzz", "text e"), ("yyy", "text f")],
    ]
    first, _ = output.table.column("candidates").to_pylist()
    assert [(one["chunk_id"], one["cross_encoder"]) for one in first] == [
        ("d", 0.5),
        ("b", 0.5),
        ("e", 0.5),
        ("a", None),
    ]
    assert first[2]["retrieval"] == 0.0
    assert first[3]["score"] == pytest.approx(0.3 * 0.3)


def test_a_model_without_a_finite_logit_for_each_pair_is_a_failure(letters: Corpus):
    for answer in ([0.0], [0.0, float("nan")]):
        model = TableCrossEncoder()
        model.score = lambda queries, passages, answer=answer: np.array(answer, np.float32)  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="gave no usable logits"):
            rerank(letters, make_inputs(ZZZ, [scored({"a": 0.5, "b": 0.4})]), model)


def test_ties_break_by_chunk_id(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"e": 0.5, "b": 0.7, "d": 0.5, "a": 0.5})])
    assert [one["chunk_id"] for one in only(rerank(letters, inputs))] == ["b", "a", "d", "e"]


def test_switched_off_the_order_of_family_rescue_stays(letters: Corpus):
    candidates = [*scored({"d": 0.9, "c": 0.5, "b": 0.5, "a": 0.6}, a="x"), rescued("f", "x"), rescued("e", "y")]
    output = rerank(letters, make_inputs(ZZZ, [candidates], [["y", "x"]]), TableCrossEncoder(), enabled=False, top_k=3)
    assert output.table.column("rerank_status").to_pylist() == ["disabled"]
    assert [one["chunk_id"] for one in only(output)] == ["d", "c", "b", "a", "f", "e"]
    assert [one["score"] for one in only(output)] == pytest.approx([0.9, 0.6, 0.6, 0.6, 0.0, 0.0])
    assert all(one["cross_encoder"] is None for one in only(output))
    assert selection(output) == ["e", "a", "d"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.3, 0.5, 1.0])), unique_by=lambda c: c[0], max_size=8
        )
    )
)
def test_scores_in_order_keep_any_order(lists: list[list[tuple[int, float]]]):
    flat = [one for candidates in lists for one in candidates]
    scores = np.array([score for _, score in flat])
    offsets = np.cumsum([0, *map(len, lists)])
    moved = scores_in_order(offsets, np.array([row for row, _ in flat], dtype=np.int64), scores)
    assert ((moved >= 0) & (moved <= 1)).all()
    for query, candidates in enumerate(lists):
        own = moved[offsets[query] : offsets[query + 1]].tolist()
        keys = [(-score, row) for score, (row, _) in zip(own, candidates, strict=True)]
        assert keys == sorted(keys)
        highest_behind = [max(score for _, score in candidates[place:]) for place in range(len(candidates))]
        assert own == pytest.approx(highest_behind, abs=1e-12)  # moved no further than the order asks


def test_families_come_first_then_the_global_order(letters: Corpus):
    candidates = scored({"a": 0.9, "d": 0.8, "e": 0.7, "f": 0.6, "g": 0.5, "h": 0.1}, e="x", f="x", h="y")
    output = rerank(letters, make_inputs(ZZZ, [candidates], [["y", "x"]]), top_k=4, **RETRIEVAL_ONLY)
    assert selection(output) == ["h", "e", "a", "d"]
    row = output.table.to_pylist()[0]
    assert (row["required"], row["slots"]) == (["y", "x"], 4)
    assert [one["families"] for one in row["candidates"]] == [[], [], ["x"], ["x"], [], ["y"]]


def test_each_query_has_its_own_families_in_its_own_order(letters: Corpus):
    queries = make_queries([{"text": "zzz"}, {"text": "yyy"}, {"text": "xxx"}])
    candidates = scored({"d": 0.9, "e": 0.8, "f": 0.7}, d="x", e="y", f="z")
    inputs = make_inputs(queries, [candidates] * 3, [["x", "y"], ["y", "x"], ["z", "y"]])
    lists = rerank(letters, inputs, top_k=3, **RETRIEVAL_ONLY).table.column("candidates").to_pylist()
    picks = [sorted((one["selected_rank"], one["chunk_id"]) for one in candidates) for candidates in lists]
    assert picks == [list(enumerate(order, start=1)) for order in ("def", "edf", "fed")]


def test_a_chunk_that_serves_two_families_is_taken_once_and_counts_for_both(letters: Corpus):
    candidates = scored({"d": 0.9, "e": 0.8, "f": 0.7, "g": 0.6}, f="x y", g="y")
    output = rerank(letters, make_inputs(ZZZ, [candidates], [["x", "y"]]), top_k=3, **RETRIEVAL_ONLY)
    assert selection(output) == ["f", "d", "e"]


def test_a_family_that_no_candidate_serves_leaves_its_slot_to_the_others(letters: Corpus):
    candidates = scored({"d": 0.9, "e": 0.8, "f": 0.7}, f="x")
    output = rerank(letters, make_inputs(ZZZ, [candidates], [["none", "x"]]), top_k=2, **RETRIEVAL_ONLY)
    assert selection(output) == ["f", "d"]


def test_more_families_than_slots_are_refused(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.5})], [["x", "y", "z"]])
    with pytest.raises(ConfigurationError, match=r"blended_rerank.top_k: .* shape shape .*: got 2, want >= 3"):
        rerank(letters, inputs, top_k=2)
    assert rerank(letters, inputs, top_k=3).table.num_rows == 1


def test_no_text_is_selected_twice_not_even_for_a_family():
    chunks = [{"chunk_id": c, "text": text} for c, text in zip("abcd", ["same", "same", "other", "last"], strict=True)]
    corpus = make_corpus(chunks, collapse_identical_texts=False)
    inputs = make_inputs(ZZZ, [scored({"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}, a="x", b="y")], [["x", "y"]])
    assert selection(rerank(corpus, inputs, top_k=4, **RETRIEVAL_ONLY)) == ["a", "c", "d"]


def test_near_duplicates_are_passed_over_unless_a_family_has_nothing_else():
    vectors = [[1.0, 0.0], [0.99, 0.14], [0.0, 1.0], [0.1, 1.0], [0.7, 0.7]]
    corpus = make_corpus([{"chunk_id": c, "text": f"text {c}"} for c in "abcde"], vectors)
    scores = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "e": 0.5}
    plain = make_inputs(ZZZ, [scored(scores)])
    assert selection(rerank(corpus, plain, near_duplicate=0.95, top_k=4, **RETRIEVAL_ONLY)) == ["a", "c", "e"]
    assert selection(rerank(corpus, plain, near_duplicate=0.5, top_k=4, **RETRIEVAL_ONLY)) == ["a", "c"]
    # y is served by b, near a, and by e further down: e is taken. Without e, b is better than nothing.
    families = [["x", "y"]]
    both = make_inputs(ZZZ, [scored(scores, a="x", b="y", e="y")], families)
    assert selection(rerank(corpus, both, near_duplicate=0.95, top_k=3, **RETRIEVAL_ONLY)) == ["a", "e", "c"]
    alone = make_inputs(ZZZ, [scored(scores, a="x", b="y")], families)
    assert selection(rerank(corpus, alone, near_duplicate=0.95, top_k=3, **RETRIEVAL_ONLY)) == ["a", "b", "c"]


def test_near_duplicate_one_drops_equal_embeddings_in_spite_of_rounding():
    vector = np.random.default_rng(5).normal(size=64)
    corpus = make_corpus([{"chunk_id": c, "text": f"text {c}"} for c in "abc"], [vector, vector * 3, -vector])
    inputs = make_inputs(ZZZ, [scored({"a": 0.9, "b": 0.8, "c": 0.7})])
    assert selection(rerank(corpus, inputs, near_duplicate=1.0, **RETRIEVAL_ONLY)) == ["a", "c"]


def test_max_per_document_holds_back_until_slots_are_left(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6, "e": 0.5})])
    for top_k, expected in ((2, ["a", "d"]), (3, ["a", "d", "e"]), (4, ["a", "d", "e", "b"])):
        assert selection(rerank(letters, inputs, max_per_document=1, top_k=top_k, **RETRIEVAL_ONLY)) == expected


def test_the_bounds_of_the_selection_stand_in_the_table(letters: Corpus):
    queries = make_queries([{"text": "zzz"}, {"text": "yyy"}])
    inputs = make_inputs(queries, [scored({"a": 0.9}), []])
    for max_per_document, near_duplicate in ((2, 0.9), (None, None)):
        for enabled in (True, False):
            given = {"max_per_document": max_per_document, "near_duplicate": near_duplicate, "enabled": enabled}
            table = rerank(letters, inputs, **given).table
            assert table.column("max_per_document").to_pylist() == [max_per_document] * 2
            assert table.column("near_duplicate").to_pylist() == [near_duplicate] * 2
            assert table.column("spread").to_pylist() == [False] * 2


def test_the_most_slots_take_all_candidates(letters: Corpus):
    inputs = make_inputs(ZZZ, [scored({"a": 0.9, "b": 0.8, "d": 0.7})])
    most = 2**31 - 1
    for bound in (None, most):
        output = rerank(letters, inputs, top_k=most, max_per_document=bound, **RETRIEVAL_ONLY)
        assert selection(output) == ["a", "b", "d"]
        assert output.table.column("slots").to_pylist() == [most]
    with pytest.raises(ValidationError, match="less than or equal to 2147483647"):
        Params(max_per_document=most + 1)


def test_families_come_before_the_bound_and_count_towards_it(letters: Corpus):
    candidates = scored({"a": 0.9, "d": 0.8, "b": 0.7, "c": 0.6}, b="x", c="y")
    output = rerank(
        letters, make_inputs(ZZZ, [candidates], [["x", "y"]]), max_per_document=1, top_k=3, **RETRIEVAL_ONLY
    )
    assert selection(output) == ["b", "c", "d"]


def plain_selection(
    candidates: Sequence[Mapping[str, Any]],
    families: int,
    top_k: int,
    bound: int,
    near: float,
    vectors: Any,
    spread_from: int,
) -> list[int]:
    """The oracle: the picks of one query, written plainly."""
    picks: list[int] = []

    def same_text(one: int) -> bool:
        return any(candidates[pick]["text"] == candidates[one]["text"] for pick in picks)

    def near_copy(one: int) -> bool:
        return any(
            float(np.dot(vectors[candidates[pick]["vector"]], vectors[candidates[one]["vector"]])) >= near - 1e-6
            for pick in picks
        )

    for family in range(families):
        if any(family in candidates[pick]["families"] for pick in picks):
            continue
        able = [one for one in range(len(candidates)) if family in candidates[one]["families"] and not same_text(one)]
        fresh = [one for one in able if not near_copy(one)] or able
        picks.extend(sorted(fresh, key=lambda one: (-candidates[one]["fit"], one))[:1])

    def fill(order: Sequence[int], most: int, until: int) -> None:
        for one in order:
            documents = [candidates[pick]["document"] for pick in picks]
            held_back = documents.count(candidates[one]["document"]) >= most
            if len(picks) < until and not held_back and not same_text(one) and not near_copy(one):
                picks.append(one)

    in_order = range(len(candidates))
    if spread_from <= top_k:
        fill(in_order, bound, spread_from - 1)
        fill(sorted(in_order, key=lambda one: (-candidates[one]["support"], one)), 1, top_k)
    fill(in_order, bound, top_k)
    fill(in_order, top_k, top_k)
    return picks


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_selection_agrees_with_the_plain_one(data: st.DataObject):
    families = data.draw(st.integers(0, 3))
    candidate = st.fixed_dictionaries(
        {
            "document": st.integers(0, 2),
            "text": st.integers(0, 7),
            "vector": st.integers(0, 4),
            "families": st.sets(st.integers(0, max(families - 1, 0)), max_size=families),
            "fit": st.integers(0, 3),
            "support": st.integers(0, 3),
        }
    )
    queries = data.draw(st.lists(st.lists(candidate, max_size=9), max_size=3))
    required = [data.draw(st.integers(0, families)) for _ in queries]
    top_k = data.draw(st.integers(max(families, 1), 6))
    bounds = [data.draw(st.integers(1, 4)) for _ in queries]
    spread_from = [data.draw(st.integers(1, 7)) for _ in queries]
    near = data.draw(st.sampled_from([0.5, 0.8, 0.9, 1.0, math.inf]))
    angles = np.array([0.0, 0.2, 0.6, 1.2, 2.5])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    flat = [one for candidates in queries for one in candidates]
    members = np.zeros((len(flat), families), dtype=bool)
    for row, one in enumerate(flat):
        members[row, list(one["families"])] = True
    fits = np.repeat(np.array([one["fit"] for one in flat], dtype=np.float64)[:, np.newaxis], families, axis=1)
    offsets = np.cumsum([0, *map(len, queries)])
    spread_order = [
        offsets[query] + place
        for query, candidates in enumerate(queries)
        for place in sorted(range(len(candidates)), key=lambda one, of=candidates: (-of[one]["support"], one))
    ]
    documents, texts, places = (
        np.array([one[name] for one in flat], dtype=np.int64) for name in ("document", "text", "vector")
    )
    picks = serve_families(offsets, members, fits, np.array(required, dtype=np.int64), texts, vectors, places, near)
    ranks = fill_selection(
        offsets,
        picks,
        documents,
        texts,
        vectors,
        places,
        near,
        top_k,
        np.array(bounds, dtype=np.int64),
        np.array(spread_from, dtype=np.int64),
        np.array(spread_order, dtype=np.int64),
    )
    for query, candidates in enumerate(queries):
        own = ranks[offsets[query] : offsets[query + 1]]
        chosen = [int(place) for place in np.argsort(own, kind="stable") if own[place]]
        assert chosen == plain_selection(
            candidates, required[query], top_k, bounds[query], near, vectors, spread_from[query]
        )
        assert sorted(own[own > 0].tolist()) == list(range(1, len(chosen) + 1))


def test_a_family_is_served_by_what_its_own_search_ranks_high(letters: Corpus):
    candidates = scored({"d": 0.9, "e": 0.6, "f": 0.5}, d="x", e="x", f="x")
    candidates[1]["family_ranks"], candidates[2]["family_ranks"] = [2], [1]
    inputs = make_inputs(ZZZ, [candidates], [["x"]])
    # 0.9; 0.6 + w/2; 0.5 + w: f comes before d from 0.4 on, and e never does before both.
    for weight, best in ((0.0, "d"), (0.3, "d"), (0.45, "f"), (5.0, "f")):
        output = rerank(letters, inputs, top_k=1, family_fit=weight, **RETRIEVAL_ONLY)
        assert selection(output) == [best]
        assert [one["chunk_id"] for one in only(output)] == ["d", "e", "f"]


@pytest.fixture(scope="module")
def pages() -> Corpus:
    """Chunks a1, a2 and b1 to b3 of the pages a and b, and single chunks c, d; c has both words of `red blue`."""
    texts = {"a1": "red one", "a2": "red two", "b1": "three", "b2": "four", "b3": "five", "c": "red blue", "d": "six"}
    return make_corpus([{"chunk_id": name, "text": text, "document_id": name[0]} for name, text in texts.items()])


RED_BLUE = make_queries([{"text": "red blue"}])
FUSED = {"a1": 0.9, "a2": 0.8, "d": 0.5, "b1": 0.4, "b2": 0.35, "b3": 0.3}


def test_a_question_whose_best_passage_lacks_its_terms_is_spread_over_documents(pages: Corpus):
    inputs = make_inputs(RED_BLUE, [scored(FUSED)])
    settings_of = {"spread_below": 0.7, "top_k": 4, **RETRIEVAL_ONLY}
    # a1 has one word of two. From the third slot on each document comes once, those found often first: b1.
    output = rerank(pages, inputs, document_support=1.0, **settings_of)
    assert selection(output) == ["a1", "a2", "b1", "d"]
    assert output.table.column("spread").to_pylist() == [True]
    assert output.table.column("max_per_document").to_pylist() == [1]  # whoever fills a slot later spreads too
    assert selection(rerank(pages, inputs, document_support=0.0, **settings_of)) == ["a1", "a2", "d", "b1"]
    assert selection(rerank(pages, inputs, document_support=0.0, spread_from=1, **settings_of)) == [
        "a1",
        "d",
        "b1",
        "a2",
    ]
    # No document is left for the fifth slot: it is filled in order.
    assert selection(rerank(pages, inputs, **{**settings_of, "top_k": 5})) == ["a1", "a2", "b1", "d", "b2"]


def test_a_question_that_one_passage_answers_is_not_spread(pages: Corpus):
    for candidates in ({"c": 0.95, **FUSED}, FUSED):
        inputs = make_inputs(RED_BLUE, [scored(candidates)])
        spread = rerank(pages, inputs, spread_below=0.7 if "c" in candidates else 0.5, **RETRIEVAL_ONLY)
        plain = rerank(pages, inputs, **RETRIEVAL_ONLY)
        assert spread.table.equals(plain.table)


def test_a_question_that_needs_families_is_not_spread(pages: Corpus):
    candidates = scored(FUSED, d="x")
    inputs = make_inputs(RED_BLUE, [candidates], [["x"]])
    output = rerank(pages, inputs, spread_below=1.0, top_k=3, **RETRIEVAL_ONLY)
    assert selection(output) == ["d", "a1", "a2"]
    assert output.table.column("spread").to_pylist() == [False]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("defgh"), st.sampled_from([0.1, 0.4, 0.4, 0.9])), unique_by=lambda one: one[0])
)
def test_spreading_changes_nothing_where_every_document_is_one_chunk(letters: Corpus, candidates: list[Any]):
    inputs = make_inputs(ZZZ, [scored(dict(candidates))])
    plain, spread = (selection(rerank(letters, inputs, spread_below=share, top_k=4)) for share in (0.0, 1.0))
    assert plain == spread


def test_the_support_of_a_candidate_is_what_the_others_of_its_document_gain():
    queries, documents = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([5, 5, 5, 3, 5, 5, 5])
    gains = np.array([0.5, 0.3, 0.2, 0.9, 0.4, 0.0, 0.7])
    # Query 0: 0.3 + 0.2, 0.5 + 0.2 and 0.5 + 0.3; the last is the highest. Query 1: 0 and 0.4. An only one has none.
    expected = [0.5 / 0.8, 0.7 / 0.8, 1.0, 0.0, 0.0, 1.0, 0.0]
    np.testing.assert_allclose(document_support(queries, documents, gains), expected, atol=1e-12)
    assert document_support(queries[:0], documents[:0], gains[:0]).tolist() == []


def shape_plan(family: Mapping[str, Any], **shape: Any) -> EvidencePlan:
    named = {"name": "x", "source": r"\.md$", "rescue_query": "text", **family}
    return EvidencePlan.model_validate(
        {"name": "p", "version": "1", "shapes": [{"name": "shape", "recognise": ["zzz"], "families": [named], **shape}]}
    )


def test_a_shape_has_a_bound_of_its_own(letters: Corpus):
    queries = make_queries([{"text": "zzz"}, {"text": "yyy"}])
    candidates = scored({"a": 0.9, "b": 0.8, "d": 0.7}, a="x")
    inputs = make_inputs(queries, [candidates, candidates], [["x"], []])
    table = rerank(letters, inputs, None, shape_plan({}, max_per_document=1), top_k=2, **RETRIEVAL_ONLY).table
    assert table.column("max_per_document").to_pylist() == [1, None]
    lists = table.column("candidates").to_pylist()
    assert [[one["chunk_id"] for one in row if one["selected_rank"]] for row in lists] == [["a", "d"], ["a", "b"]]
    unbound = rerank(letters, inputs, None, shape_plan({}), max_per_document=3, **RETRIEVAL_ONLY).table
    assert unbound.column("max_per_document").to_pylist() == [3, 3]


def page_of(*chunks: Mapping[str, Any], **corpus: Any) -> Corpus:
    """One document of chunks 0, 1, 2 ... and another chunk z."""
    own = [
        {"chunk_id": f"p{place}", "text": f"part {place}", "document_id": "p", "chunk_index": place, **chunk}
        for place, chunk in enumerate(chunks)
    ]
    return make_corpus([*own, {"chunk_id": "z", "text": "elsewhere"}], **corpus)


def drawn(output: StageOutput) -> dict[str, str]:
    return {one["chunk_id"]: one["drawn_in_by"] for one in only(output) if one["drawn_in_by"]}


def test_neighbours_are_drawn_in_with_the_chunk_that_serves_a_family():
    corpus = page_of({}, {}, {}, {}, {})
    model = TableCrossEncoder({("zzz", "part 3"): 1.0})
    inputs = make_inputs(ZZZ, [scored({"z": 0.9, "p2": 0.5, "p1": 0.1}, p2="x", p1="x")], [["x"]])
    output = rerank(corpus, inputs, model, shape_plan({"keep_together": 2}), top_k=4)
    # What follows comes first, the nearest first; p0 and p4 are two away, and one slot is left for them.
    assert selection(output) == ["p2", "p3", "p1", "p4"]
    assert drawn(output) == {"p3": "p2", "p1": "p2", "p4": "p2"}
    assert output.account == Account(candidates_in=3, added={"drawn_in": 2}, removed={}, candidates_out=5)
    by_id = {one["chunk_id"]: one for one in only(output)}
    assert by_id["p3"]["cross_encoder"] == pytest.approx(sigmoid(1.0))  # the model reads what no ranking had
    assert (by_id["p3"]["retrieval"], by_id["p3"]["families"], by_id["p3"]["rescued"]) == (0.0, ["x"], False)
    assert [one["score"] for one in only(output)] == sorted((one["score"] for one in only(output)), reverse=True)
    assert selection(rerank(corpus, inputs, model, shape_plan({"keep_together": 1}), top_k=4)) == [
        "p2",
        "p3",
        "p1",
        "z",
    ]
    assert selection(rerank(corpus, inputs, model, shape_plan({}), top_k=4)) == ["p2", "z", "p1"]


def test_neighbours_take_only_slots_that_families_leave():
    corpus = page_of({}, {}, {})
    inputs = make_inputs(ZZZ, [scored({"z": 0.9, "p1": 0.5}, p1="x", z="y")], [["x", "y"]])
    plan = EvidencePlan.model_validate(
        {"name": "p", "version": "1", "shapes": [{"name": "shape", "recognise": ["zzz"], "families": [
            {"name": "x", "source": "^p", "rescue_query": "part", "keep_together": 5},
            {"name": "y", "source": "^z", "rescue_query": "else"},
        ]}]}
    )  # fmt: skip
    for top_k, expected in ((2, ["p1", "z"]), (3, ["p1", "z", "p2"]), (5, ["p1", "z", "p2", "p0"])):
        assert selection(rerank(corpus, inputs, None, plan, top_k=top_k)) == expected


def test_a_neighbour_crosses_no_border():
    acl = [{"acl": ["g"]}, {"acl": ["other"]}, {"acl": ["g"]}, {"acl": ["g"], "authority_tier": 2}, {"acl": ["g"]}]
    tiers = [{"authority_tier": 1, **one, "source": "p.md" if place != 0 else "q.txt"} for place, one in enumerate(acl)]
    corpus = page_of(*tiers)
    queries = make_queries([{"text": "zzz", "groups": ["g"]}])
    inputs = make_inputs(queries, [scored({"p2": 0.5}, p2="x")], [["x"]])
    plan = shape_plan({"keep_together": 3, "authority": [1]})
    # p1 is of another group, p3 of another tier, p0 of another source: p4 alone is left.
    assert selection(rerank(corpus, inputs, None, plan, top_k=5)) == ["p2", "p4"]


def test_a_neighbour_is_no_copy_of_what_is_picked():
    corpus = page_of({}, {"text": "part 0"}, {}, collapse_identical_texts=False)
    inputs = make_inputs(ZZZ, [scored({"p0": 0.5}, p0="x")], [["x"]])
    assert selection(rerank(corpus, inputs, None, shape_plan({"keep_together": 2}))) == ["p0", "p2"]
    vectors = [[1.0, 0.0], [0.99, 0.14], [0.0, 1.0], [0.7, 0.7]]
    near = page_of({}, {}, {}, embeddings=vectors)
    output = rerank(near, inputs, None, shape_plan({"keep_together": 2}), near_duplicate=0.95)
    assert selection(output) == ["p0", "p2"]


def test_neighbours_stand_by_chunk_index_and_a_gap_ends_them():
    corpus = page_of({"chunk_index": 7}, {"chunk_index": 5}, {"chunk_index": 6}, {"chunk_index": 9})
    inputs = make_inputs(ZZZ, [scored({"p2": 0.5}, p2="x")], [["x"]])
    assert selection(rerank(corpus, inputs, None, shape_plan({"keep_together": 2}))) == ["p2", "p0", "p1"]


@pytest.mark.parametrize("params", [{"normalisation": "min_max"}, {"enabled": False}, {"near_duplicate": 0.99}])
def test_neighbours_are_drawn_in_whatever_the_scores_are_made_of(params: dict[str, Any]):
    corpus = page_of({}, {}, {})
    queries = make_queries([{"text": "none"}, {"text": "zzz"}, {"text": "more"}])
    lists = [scored({"z": 0.9}), scored({"z": 0.9, "p1": 0.5}, p1="x"), []]
    inputs = make_inputs(queries, lists, [[], ["x"], []])
    output = rerank(corpus, inputs, TableCrossEncoder(), shape_plan({"keep_together": 1}), top_k=3, **params)
    rows = output.table.column("candidates").to_pylist()
    assert [[one["chunk_id"] for one in row if one["drawn_in_by"] == "p1"] for row in rows] in (
        [[], ["p0", "p2"], []], [[], ["p2", "p0"], []],
    )  # fmt: skip
    taken = sorted((one["selected_rank"], one["chunk_id"]) for one in rows[1] if one["selected_rank"])
    assert [chunk for _, chunk in taken] == ["p1", "p2", "p0"]


def copy_of(table: pa.Table) -> pa.Table:
    return pa.Table.from_pylist(table.to_pylist(), schema=table.schema)


CANDIDATES = st.lists(
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.sets(st.sampled_from("xy"))),
    unique_by=lambda one: one[0],
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    lists=st.lists(CANDIDATES, max_size=4),
    params=st.fixed_dictionaries(
        {
            "normalisation": st.sampled_from(["absolute", "min_max"]),
            "enabled": st.booleans(),
            "near_duplicate": st.none() | st.just(0.3),
            "max_per_document": st.none() | st.just(1),
            "cross_encoder_depth": st.integers(1, 4),
        }
    ),
    model=st.none() | st.builds(TableCrossEncoder),
)
def test_every_candidate_stays_and_no_input_changes(
    letters: Corpus, lists: list[Any], params: dict[str, Any], model: TableCrossEncoder | None
):
    queries = make_queries([{"text": f"text {number} a", "query_id": f"q{number}"} for number in range(len(lists))])
    chosen = [
        [
            *(fused(c, s * BEST, *sorted(f)) for c, s, f in one if s),
            *(rescued(c, *sorted(f)) for c, s, f in one if not s),
        ]
        for one in lists
    ]
    inputs = make_inputs(queries, chosen, [["x", "y"]] * len(lists))
    before = {name: copy_of(table) for name, table in inputs.items()}
    output = rerank(letters, inputs, model, **params)
    count = sum(map(len, lists))
    assert output.account == Account(candidates_in=count, added={}, removed={}, candidates_out=count)
    for row, candidates in zip(output.table.to_pylist(), chosen, strict=True):
        assert sorted(one["chunk_id"] for one in row["candidates"]) == sorted(one["chunk_id"] for one in candidates)
        assert {one["chunk_id"]: (one["families"], one["rescued"]) for one in row["candidates"]} == {
            one["chunk_id"]: (one["families"], one["rescued"]) for one in candidates
        }
        served = {name for one in row["candidates"] if one["selected_rank"] for name in one["families"]}
        assert served == {name for one in candidates for name in one["families"]}
        assert max((one["score"] for one in row["candidates"]), default=0.0) <= 1.0
    assert all(table.equals(before[name]) for name, table in inputs.items())
    assert rerank(letters, inputs, model, **params).table.equals(output.table)
