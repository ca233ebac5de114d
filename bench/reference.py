"""The oracle: every step as its definition says, one query at a time, in plain Python and float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import logsumexp

Array = np.ndarray[Any, np.dtype[Any]]

TIE = 1e-9
ROUNDING = 1e-6


def densities(distances: Array, sigma: float) -> Array:
    """Log densities of a normal distribution around distance 0."""
    constant = -math.log(sigma) - 0.5 * math.log(2 * math.pi)
    found: Array = constant - distances**2 / (2 * sigma**2)
    return found


def board(query: Array, candidates: Array, sigma: float) -> tuple[Array, Array]:
    """Log densities of the candidates around the query, and around each other, in float64."""
    vectors = candidates.astype(np.float64)
    to_query = np.clip(1 - vectors @ query.astype(np.float64), 0, 2)
    to_each_other = np.clip(1 - vectors @ vectors.T, 0, 2)
    return densities(to_query, sigma), densities(to_each_other, sigma)


def dartboard(query: Array, candidates: Array, k: int, sigma: float) -> list[int]:
    """The loop as it is published: the highest `logsumexp` of everything, again for every pick.

    Source: Dartboard (Pickett et al. 2024, arXiv 2407.12101, algorithm 1).
    """
    to_query, to_each_other = board(query, candidates, sigma)
    picks = [int(np.argmax(to_query))]
    highest = to_each_other[picks[0]]
    while len(picks) < min(k, len(candidates)):
        with_each = np.maximum(highest, to_each_other)
        totals = logsumexp(with_each + to_query, axis=1)
        totals[picks] = -np.inf
        picks.append(int(np.argmax(totals)))
        highest = with_each[picks[-1]]
    return picks


def follows_dartboard(picks: Sequence[int], query: Array, candidates: Array, sigma: float) -> bool:
    """Whether each pick is what the loop would take next after those before it, or ties with it within 1e-9."""
    to_query, to_each_other = board(query, candidates, sigma)
    if len(set(picks)) < len(picks) or to_query[picks[0]] < to_query.max() - TIE:
        return False
    highest = to_each_other[picks[0]]
    for place in range(1, len(picks)):
        totals = logsumexp(np.maximum(highest, to_each_other) + to_query, axis=1)
        totals[list(picks[:place])] = -np.inf
        if totals[picks[place]] < totals.max() - TIE:
            return False
        highest = np.maximum(highest, to_each_other[picks[place]])
    return True


def follows_nearest(rows: Sequence[int], query: Array, embeddings: Array, depth: int) -> bool:
    """Whether rows are the `depth` highest cosines in their order, up to the rounding of vectors to float32."""
    cosines = embeddings.astype(np.float64) @ query.astype(np.float64)
    found = cosines[list(rows)]
    last = np.sort(cosines)[-min(depth, len(cosines))]
    whole = len(set(rows)) == len(rows) == min(depth, len(cosines))
    return bool(whole and (np.diff(found) <= ROUNDING).all() and found.min() >= last - ROUNDING)


def best_by_bm25(okapi: Any, tokens: Sequence[str], depth: int) -> list[int]:
    """The rows of the `depth` highest scores of `rank_bm25.BM25Okapi` above 0, ties by row."""
    scores = okapi.get_scores(list(tokens))
    best: list[int] = np.lexsort((np.arange(len(scores)), -scores))[:depth].tolist()
    return [row for row in best if scores[row] > 0]


def fused(lists: Sequence[Sequence[str]], weights: Sequence[Fraction], constant: int) -> list[str]:
    """Ids by reciprocal rank fusion in exact fractions, ties by id."""
    scores: dict[str, Fraction] = {}
    for ids, weight in zip(lists, weights, strict=True):
        for rank, name in enumerate(ids, start=1):
            scores[name] = scores.get(name, Fraction(0)) + weight / (constant + rank)
    return sorted(scores, key=lambda name: (-scores[name], name))
