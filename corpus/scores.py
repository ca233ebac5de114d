"""scores: stretched over the candidates of a query, kept in a given order, and what documents add to them."""

from __future__ import annotations

import numpy as np

from contracts.columns import Array, IntArray
from corpus.compiled import kernel

# Parts of a score that differ by less are equal but for rounding, and no spread for min-max.
_NO_SPREAD = 1e-12
# Changes any score in [0, 1] by at least its last bit.
_STEP = 2.0**-52


def min_max(part: Array, queries: IntArray, count: int) -> Array:
    """Stretches a part over [0, 1] within each query; NaN stays NaN and does not take part.

    Where all values of a query are equal, as for one candidate, there is nothing to stretch: they
    keep their absolute values.

    Args:
        part: (candidates,) float64.
        queries: (candidates,) int64, the query of each.
        count: how many queries there are.
    """
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    there = ~np.isnan(part)
    np.minimum.at(lowest, queries[there], part[there])
    np.maximum.at(highest, queries[there], part[there])
    low, spread = lowest[queries], highest[queries] - lowest[queries]
    stretched: Array = np.divide(part - low, spread, out=part.copy(), where=there & (spread > _NO_SPREAD))
    return stretched


@kernel
def scores_in_order(offsets: Array, rows: Array, scores: Array) -> Array:
    """Scores in [0, 1] that keep each query's candidates in the order they stand in: (-score, row).

    A score that would break the order is raised to the next one, or just above it (2^-52), where the
    row alone would turn the two round; what rises above 1 is brought back down in the same way.

    Args:
        offsets, rows, scores: (queries + 1,), (candidates,), (candidates,), scores in [0, 1].
    """
    moved = scores.copy()
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        for place in range(end - 2, start - 1, -1):
            gap = _STEP if rows[place] > rows[place + 1] else 0.0
            moved[place] = max(moved[place], moved[place + 1] + gap)
        highest = 1.0
        for place in range(start, end):
            moved[place] = min(moved[place], highest)
            if place + 1 < end:
                highest = moved[place] - (_STEP if rows[place] > rows[place + 1] else 0.0)
    return moved


def document_support(queries: IntArray, documents: IntArray, gains: Array) -> Array:
    """What the other candidates of each one's document gain, as a share of the highest of its query; 0 for none.

    Args:
        queries: (candidates,) int64, ascending, the query of each.
        documents: (candidates,) int64, >= 0, equal for one document.
        gains: (candidates,) float64, >= 0.
    """
    _, groups = np.unique(queries * (documents.max(initial=0) + 1) + documents, return_inverse=True)
    # Counted, not told from rounding: an only candidate has no support.
    others = np.bincount(groups)[groups] > 1
    support = np.where(others, np.maximum(np.bincount(groups, weights=gains)[groups] - gains, 0.0), 0.0)
    highest = np.zeros(int(queries.max(initial=0)) + 1)
    np.maximum.at(highest, queries, support)
    share: Array = np.divide(support, highest[queries], out=np.zeros(len(gains)), where=highest[queries] > 0)
    return share
