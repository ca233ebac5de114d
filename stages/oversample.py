"""oversample: dense search takes several times more candidates than will be picked."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from contracts.candidates import Candidates
from contracts.columns import Ragged, column
from contracts.errors import ContractError
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.corpus import Corpus
from corpus.scope import Scope, Scopes
from stages.stage import Stage, StageOutput, search_outcomes

FloatArray = np.ndarray[tuple[int, int], np.dtype[np.float32]]


class Params(BaseParams):
    """Settings of oversample; a query gets up to `k * oversampling` candidates.

    Attributes:
        k: how many of the candidates are meant to be picked later, >= 1. It only sets the scale here:
            what is picked is `greedy_selection.k`.
        oversampling: how many candidates for each pick, >= 1. At 1 there is nothing to choose from, and
            selection can only reorder; larger values find more variety farther from the query, and the
            distance matrix grows with their square.
    """

    k: Count = 10
    oversampling: Count = 3

    @property
    def depth(self) -> int:
        """N, the most candidates that a query can get."""
        return self.k * self.oversampling


def _refuse_hidden_chunks(found: Ragged, scopes: Scopes, query_ids: pa.Array, corpus: Corpus) -> None:
    """Looks up every found chunk in what its query may see, apart from the mask that the search used.

    Raises:
        ContractError: a query was given a chunk that its groups and filters hide from it.
    """
    rows = found.numpy("row")
    scope_of = scopes.codes[found.rows]
    for code, scope in enumerate(scopes.distinct):
        if scope == Scope() and not corpus.snapshot.access_control:
            continue
        hits = np.flatnonzero(scope_of == code)
        hidden = hits[~corpus.visible(scope)[rows[hits]]]
        if len(hidden):
            query = int(found.rows[hidden[0]])
            chunk_id = corpus.ids(rows[hidden[:1]])[0].as_py()
            raise ContractError(
                stage="oversample",
                column="candidates.chunk_id",
                row=query,
                value=chunk_id,
                want=f"a chunk that query {query_ids[query].as_py()} may see",
            )


def oversample_table(*, queries: pa.Table, corpus: Corpus, params: Params) -> StageOutput:
    """The `params.depth` nearest chunks of every query, among those with different texts that it may see.

    The search itself is `Corpus.dense_search`: groups and filters hold inside it, identical texts have
    been collapsed into one, ids of -1 are dropped, order is (-score, chunk id). Fewer eligible chunks
    than the depth give a shorter list, and none an empty one.

    Raises:
        ConfigurationError: a query has an embedding of another width than the corpus.
        ContractError: the search gave a query a chunk that it may not see.

    Source: the oversampling of Dartboard (Pickett et al. 2024, "Better RAG using Relevant Information
    Gain", arXiv 2407.12101, there called triage). Different: access groups and filters, one candidate a
    text, and ties by chunk id.
    """
    scopes = Scopes.of(queries)
    found = corpus.dense_search(corpus.query_vectors(queries), scopes, params.depth)
    query_ids = column(queries, "query_id")
    _refuse_hidden_chunks(found, scopes, query_ids, corpus)
    ranks = found.positions + 1
    candidates = {"rank": ranks, "chunk_id": corpus.ids(found.numpy("row")), "score": found.numpy("score")}
    table = build_table(Candidates, {"query_id": query_ids, "candidates": Ragged(found.offsets, candidates)})
    count = len(ranks)
    added = {"found": count} if count else {}
    account = Account(candidates_in=0, added=added, removed={}, candidates_out=count)
    return StageOutput(table, account, {"dense_search": search_outcomes(found.lengths)})


STAGE = Stage(
    name="oversample",
    summary="Finds the k x oversampling nearest different texts of each query, under its groups and filters; "
    "refuses to hand on a chunk that a query may not see.",
    owner="retrieval",
    reads={"queries": ("query_id", "embedding", "groups", "filters")},
    needs=("corpus",),
    writes=Candidates,
    params=Params,
    run=oversample_table,
    on_partial_failure="A shard fails whole, so no query loses candidates in silence; an embedding of another "
    "width stops it at once and needs a new embedding, not another try.",
    known_failure="A scope that sees fewer than k x oversampling texts gets a short list, down to an empty one: "
    "see `shortfall` in greedy_selection.",
    roll_back="Rerun from oversample with the earlier k and oversampling, or on the earlier corpus snapshot.",
)
