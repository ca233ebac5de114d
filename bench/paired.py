"""Paired comparison of two rankings of the same judged queries, by bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ir_measures
import numpy as np

from bench.reference import Array
from evaluation.measures import Qrels

_DRAWS = 10_000
_SEED = 20240607

Rankings = Mapping[str, Sequence[str]]


def by_query(rankings: Rankings, qrels: Qrels, measure: str) -> Array:
    """(judged queries,) float64 in the order of the judgements: a measure of each; 0 for one without a ranking."""
    run = {
        query: {chunk: 1.0 / rank for rank, chunk in enumerate(chunks, start=1)} for query, chunks in rankings.items()
    }
    parsed = ir_measures.parse_measure(measure)
    judged = {query: dict(chunks) for query, chunks in qrels.items()}
    found = {one.query_id: one.value for one in ir_measures.iter_calc([parsed], judged, run)}
    return np.array([found.get(query, 0.0) for query in qrels])


def difference(ours: Array, theirs: Array) -> tuple[float, float, float]:
    """The mean paired difference and its 95 % interval: percentiles over 10,000 draws of the queries."""
    paired = ours - theirs
    draws = np.random.default_rng(_SEED).integers(len(paired), size=(_DRAWS, len(paired)))
    low, high = np.percentile(paired[draws].mean(axis=1), [2.5, 97.5])
    return float(paired.mean()), float(low), float(high)
