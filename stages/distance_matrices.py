"""distance_matrices: how far the candidates of a query lie from it and from each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from contracts.candidates import Distances
from contracts.columns import Array, IntArray, Ragged, offsets_from_lengths, ragged
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

# Vectors of equal texts differ in their last bits, and float32 lengths differ from 1 by up to 1e-7:
# a distance below this is rounding, and counts as none.
_ROUNDING = 1e-6


class Params(BaseParams):
    """distance_matrices has no settings: cosine distance needs none."""


# Rows of one matrix product. More would compute more of the half that is not kept, fewer would feed the
# processor worse: 16 is best for 30 candidates, and within a tenth of the best for 15 and 100.
_BLOCK = 16


@kernel
def _distance(cosine: float) -> float:
    """1 - cos in [0, 2], rounding taken off."""
    distance = 1.0 - cosine
    return 0.0 if distance < _ROUNDING else min(distance, 2.0)


@kernel
def cosine_distances(vectors: Array, offsets: Array, rows: Array, embeddings: Array) -> tuple[Array, Array]:
    """Cosine distances of every query to its candidates, and of its candidates to each other.

    The vectors of one query are multiplied in blocks of rows, in float64 by BLAS: products of two float32 are
    exact there. A distance depends on the vectors of its own query alone, not on the shard or the number of
    shards at work. The order of a sum follows the processor, so another kind of it may differ in the last
    bits of float64, which the rounding to float32 hides all but about once in a hundred million distances.

    Args:
        vectors: (queries, dimension) float32, rows of length 1.
        offsets: (queries + 1,) int64; query q has the candidates rows[offsets[q]:offsets[q + 1]].
        rows: (candidates,) int64, rows of `embeddings`.
        embeddings: (chunks, dimension) float32, rows of length 1.

    Returns:
        Both float32 in [0, 2], below 1e-6 set to 0: (candidates,) distances to the query, and, query by
        query, the lower triangles without their diagonals: d(1,0), d(2,0), d(2,1), d(3,0) ...

    Source: the distances of Dartboard (Pickett et al. 2024, "Better RAG using Relevant Information Gain",
    arXiv 2407.12101). Different: half of the symmetric matrix, and rounding is not a distance. At sigma
    0.005, noise of 1e-7 between exact copies would outweigh every true gain.
    """
    queries, dimension = vectors.shape
    pairs, most = 0, 0
    for query in range(queries):
        count = offsets[query + 1] - offsets[query]
        pairs += count * (count - 1) // 2
        most = max(most, count)
    to_query = np.empty(len(rows), np.float32)
    to_each_other = np.empty(pairs, np.float32)
    gathered = np.empty((most + 1, dimension), np.float64)  # the query in row 0, then its candidates
    pair = 0
    for query in range(queries):
        start, count = offsets[query], offsets[query + 1] - offsets[query]
        for axis in range(dimension):  # an assignment of whole rows would cost as much as the product
            gathered[0, axis] = vectors[query, axis]
        for i in range(count):
            row = rows[start + i]
            for axis in range(dimension):
                gathered[i + 1, axis] = embeddings[row, axis]
        for first in range(0, count + 1, _BLOCK):
            last = min(first + _BLOCK, count + 1)
            cosines = np.dot(gathered[first:last], gathered[:last].T)
            for i in range(max(first, 1), last):
                to_query[start + i - 1] = _distance(cosines[i - first, 0])
                for j in range(1, i):
                    to_each_other[pair] = _distance(cosines[i - first, j])
                    pair += 1
    return to_query, to_each_other


def _triangle_offsets(candidates: Ragged) -> IntArray:
    """(queries + 1,) int64: where the lower triangle of each query's candidates begins."""
    return offsets_from_lengths(candidates.lengths * (candidates.lengths - 1) // 2)


def distance_matrices_table(*, queries: pa.Table, oversample: pa.Table, corpus: Corpus, params: Params) -> StageOutput:
    """Applies `cosine_distances` to the candidates of every query.

    Raises:
        ConfigurationError: a query has an embedding of another width than the corpus.
        MissingArtifactError: a candidate that the corpus snapshot does not hold.
    """
    del params  # there are none, and every stage is called alike
    candidates = ragged(oversample, "candidates")
    rows = corpus.rows(candidates.values["chunk_id"])
    to_query, to_each_other = cosine_distances(
        corpus.query_vectors(queries), candidates.offsets, rows, corpus.embeddings
    )
    table = build_table(
        Distances,
        {
            "query_id": oversample.column("query_id"),
            "query_distances": Ragged(candidates.offsets, to_query),
            "document_distances": Ragged(_triangle_offsets(candidates), to_each_other),
        },
    )
    return StageOutput(table, Account(candidates_in=len(rows), added={}, removed={}, candidates_out=len(rows)))


def _other_counts(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    want, got = ragged(inputs["oversample"], "candidates").lengths, ragged(output, "query_distances").lengths
    if np.array_equal(want, got):
        return None
    row = int(np.argmax(want != got))
    return f"row {row} has {got[row]} distances for {want[row]} candidates"


STAGE = Stage(
    name="distance_matrices",
    summary="Measures cosine distances between each query and its candidates, and among the candidates.",
    owner="retrieval",
    reads={"queries": ("query_id", "embedding"), "oversample": ("query_id", "candidates.chunk_id")},
    needs=("corpus",),
    writes=Distances,
    params=Params,
    run=distance_matrices_table,
    success=(SAME_QUERIES, SuccessCheck("one query distance for each candidate", _other_counts)),
    on_partial_failure="Pure arithmetic on the corpus snapshot: a shard fails whole and is run again once the "
    "snapshot can be read.",
    known_failure="Different texts whose embeddings are equal (an embedder that cuts long texts off) come out at "
    "distance 0, and selection takes them for copies.",
    roll_back="Rerun from oversample on the earlier corpus snapshot; this stage has no setting of its own.",
)
