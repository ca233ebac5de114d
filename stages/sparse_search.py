"""sparse_search: the best chunks of each query by BM25 Okapi."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from annotated_types import Ge, Gt, Le
from rank_bm25 import BM25Okapi

from contracts.candidates import KeywordRanking
from contracts.columns import Ragged, column, offsets_from_lengths, ragged
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.corpus import Corpus
from corpus.scope import Scopes
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck, search_outcomes


class Params(BaseParams):
    """Settings of sparse_search.

    Attributes:
        enabled: off gives every query an empty list with the outcome `disabled`, for ablations; fusion
            then runs on dense search alone.
        depth: chunks kept for each query, >= 1. Small loses passages that fusion would have lifted; large
            costs candidates, and `rrf_merge.rank_window` decides how many of them count.
        k1: how long a repeated term goes on adding, in (0, 1000]. Near 0 only its presence counts; large
            values count every repeat in full.
        b: how much long chunks are held back, in [0, 1]: 0 not at all, 1 in proportion to their length.
        epsilon: what a term that stands in more than half of the chunks is worth, as a share of the mean
            idf, in [0, 1]: 0 nothing, 1 as much as a mean term.
        engine: `bulk` runs on precomputed scores; `rank-bm25` runs the package query by query, some
            hundreds of times slower, and gives the same table: it is there to check `bulk`.
    """

    enabled: bool = True
    depth: Count = 100
    k1: Annotated[float, Gt(0), Le(1000)] = 1.5
    b: Annotated[float, Ge(0), Le(1)] = 0.75
    epsilon: Annotated[float, Ge(0), Le(1)] = 0.25
    engine: Literal["bulk", "rank-bm25"] = "bulk"


def reference_search(corpus: Corpus, texts: Sequence[str], scopes: Scopes, params: Params) -> Ragged:
    """What `KeywordSearch.search` finds, computed by rank-bm25 itself, one query at a time.

    Scores every chunk with `BM25Okapi.get_scores` over the tokens of the index (their order within a chunk
    means nothing to BM25), then keeps the eligible chunks that share a term, by (-score, row).

    Returns:
        Lists of {row, score}, score float64.

    Source: rank-bm25 0.2.2. What differs: chunks without a shared term are no hits, and an index without
    any term gives empty lists where the package divides by zero.
    """
    index = corpus.keywords
    found = []
    # An empty chunk at b = 1 divides 0 by 0 inside the package; it shares no term, so its score is not used.
    with np.errstate(invalid="ignore"):
        okapi = BM25Okapi(index.token_bags(), k1=params.k1, b=params.b, epsilon=params.epsilon) if index.terms else None
        for text, code in zip(texts, scopes.codes.tolist(), strict=True):
            tokens = corpus.tokeniser.tokens(text)
            matches = np.zeros(len(index.lengths), dtype=bool)
            for term in index.term_ids(tokens):
                matches[index.rows[index.offsets[term] : index.offsets[term + 1]]] = True
            rows = np.flatnonzero(matches & corpus.eligible(scopes.distinct[code]))
            scores = np.zeros(0) if okapi is None else okapi.get_scores(tokens)[rows]
            order = np.lexsort((rows, -scores))[: params.depth]
            found.append((rows[order], scores[order]))
    return Ragged(
        offsets_from_lengths(np.array([len(rows) for rows, _ in found], dtype=np.int64)),
        {
            "row": np.concatenate([np.zeros(0, np.int64), *(rows for rows, _ in found)]),
            "score": np.concatenate([np.zeros(0), *(scores for _, scores in found)]),
        },
    )


def sparse_search_table(*, queries: pa.Table, corpus: Corpus, params: Params) -> StageOutput:
    """Searches every query under its groups and filters.

    Searches the normalised text: all log lines of a distinct query share it, while the raw text is that of
    whichever line came first. Their terms are the same.
    """
    hits = _search(queries, corpus, params)
    outcomes = np.where(hits.lengths > 0, "ok", "no_match" if params.enabled else "disabled")
    candidates = {
        "rank": (hits.positions + 1).astype(np.int32),
        "chunk_id": corpus.ids(hits.values["row"]),
        "score": hits.values["score"],
    }
    table = build_table(
        KeywordRanking,
        {
            "query_id": queries.column("query_id"),
            "candidates": Ragged(hits.offsets, candidates),
            "outcome": pa.array(outcomes.tolist(), pa.string()),
        },
    )
    count = int(hits.offsets[-1])
    account = Account(candidates_in=0, added={"found": count} if count else {}, removed={}, candidates_out=count)
    calls = {"keyword_search": search_outcomes(hits.lengths)} if params.enabled else {}
    return StageOutput(table, account, calls)


def _search(queries: pa.Table, corpus: Corpus, params: Params) -> Ragged:
    if not params.enabled:
        nothing = np.zeros(queries.num_rows + 1, dtype=np.int64)
        return Ragged(nothing, {"row": np.zeros(0, np.int64), "score": np.zeros(0)})
    texts = column(queries, "normalised_text").to_pylist()
    scopes = Scopes.of(queries)
    if params.engine == "rank-bm25":
        return reference_search(corpus, texts, scopes, params)
    return corpus.keyword_search(params.k1, params.b, params.epsilon).search(texts, scopes, params.depth)


def _outcome_and_list_agree(_inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    found = ragged(output, "candidates").lengths > 0
    said = np.array(column(output, "outcome").to_pylist(), dtype=object) == "ok"
    if np.array_equal(found, said):
        return None
    row = int(np.argmax(found != said))
    return f"row {row} has the outcome {output.column('outcome')[row]} and candidates: {bool(found[row])}"


STAGE = Stage(
    name="sparse_search",
    summary="Finds the best chunks of each query by BM25 Okapi, under its groups and filters.",
    owner="retrieval",
    reads={"queries": ("query_id", "normalised_text", "groups", "filters")},
    needs=("corpus",),
    writes=KeywordRanking,
    params=Params,
    run=sparse_search_table,
    success=(
        SAME_QUERIES,
        SuccessCheck("the outcome is ok where, and only where, candidates were found", _outcome_and_list_agree),
    ),
    on_partial_failure=(
        "A query without a match is a result (`no_match`). The search runs in memory, so nothing else fails for one "
        "query alone: a shard that fails writes nothing and is run again."
    ),
    known_failure=(
        "A query of stop words alone, or in another language than the corpus, ends as `no_match`; many of these "
        "at once mean that language or stop words of the tokeniser do not fit the log."
    ),
    roll_back="Rerun from sparse_search with the earlier settings; the tokeniser belongs to the corpus snapshot.",
)
