"""log_normal: distances become log densities of a normal distribution around distance 0."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import pyarrow as pa
from annotated_types import Ge

from contracts.candidates import LogProbabilities
from contracts.columns import Ragged, ragged
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import build_table
from stages.stage import Stage, StageOutput

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class Params(BaseParams):
    """Settings of log_normal.

    Attributes:
        sigma: width of the density in units of cosine distance, > 0 (at least 1e-100, whose square is a
            number). Towards 0 only the nearest
            neighbours of a candidate count and selection nears plain relevance with copies removed;
            large values make every distance look alike, so that picks cover the candidates whatever
            their relevance.
    """

    sigma: Annotated[float, Ge(1e-100)] = 0.1


def log_normal(distances: np.ndarray[tuple[int, ...], np.dtype[np.float32]], sigma: float) -> FloatArray:
    """The log density of each distance: l(d) = -ln(sigma) - 0.5 ln(2 pi) - d^2 / (2 sigma^2).

    This is the log of a *normal* density, not a log-normal distribution: the name is the pattern's own.
    Computed in float64 from float32 distances; d^2 / (2 sigma^2) reaches 80,000 at sigma 0.005, where
    float32 would round by 0.004.

    Args:
        distances: any shape, float32, cosine distance in [0, 2].
        sigma: > 0, in the unit of the distances.

    Returns:
        The same shape, float64.

    Source: Dartboard (Pickett et al. 2024, "Better RAG using Relevant Information Gain"), the Gaussian
    kernel of section 3; the constant terms are kept, although they change no pick.
    """
    densities = distances.astype(np.float64)
    densities *= densities
    densities /= 2 * sigma * sigma
    # -ln(sigma) - 0.5 ln(2 pi) - ..., in place: half the time of an expression with its temporary arrays.
    return np.subtract(-math.log(sigma) - 0.5 * math.log(2 * math.pi), densities, out=densities)


def log_normal_table(*, distance_matrices: pa.Table, params: Params) -> StageOutput:
    """Applies `log_normal` to the query and the document distances of every row."""
    queries = ragged(distance_matrices, "query_distances")
    documents = ragged(distance_matrices, "document_distances")
    table = build_table(
        LogProbabilities,
        {
            "query_id": distance_matrices.column("query_id"),
            "log_probability_at_zero": log_normal(np.zeros(len(distance_matrices), np.float32), params.sigma),
            "query_log_probabilities": Ragged(queries.offsets, log_normal(queries.numpy_values(), params.sigma)),
            "document_log_probabilities": Ragged(documents.offsets, log_normal(documents.numpy_values(), params.sigma)),
        },
    )
    count = int(queries.offsets[-1])
    return StageOutput(table, Account(candidates_in=count, added={}, removed={}, candidates_out=count))


STAGE = Stage(
    name="log_normal",
    summary="Turns distances into log densities of a normal distribution of width sigma.",
    owner="retrieval",
    reads={"distance_matrices": ("query_id", "query_distances", "document_distances")},
    writes=LogProbabilities,
    params=Params,
    run=log_normal_table,
    on_partial_failure="Pure arithmetic: a shard that fails is a defect; it fails whole and is run again.",
    known_failure="A sigma far below the typical distance makes every density tiny; picks stay right in log space.",
    roll_back="Rerun from log_normal with the earlier sigma.",
)
