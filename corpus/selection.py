"""selection: which candidates of a query are taken: for its families, spread over documents, and never a copy."""

from __future__ import annotations

import numpy as np

from contracts.columns import Array, IntArray
from corpus.compiled import kernel

# Cosines that differ by less are equal but for the rounding of float32, as in distance_matrices.
ROUNDING = 1e-6
_FRESH, _NEAR_COPY, _SAME_TEXT = 0, 1, 2


@kernel
def _likeness(
    candidate: int, picks: Array, count: int, texts: Array, vectors: Array, places: Array, near_duplicate: float
) -> int:
    """What a candidate is beside the first `count` picks: fresh, a near copy, or the same text."""
    likeness = _FRESH
    for pick in picks[:count]:
        if texts[pick] == texts[candidate]:
            return _SAME_TEXT
        if near_duplicate <= 1.0 and likeness == _FRESH:
            cosine = 0.0
            for axis in range(vectors.shape[1]):
                cosine += np.float64(vectors[places[pick], axis]) * np.float64(vectors[places[candidate], axis])
            if cosine >= near_duplicate - ROUNDING:
                likeness = _NEAR_COPY
    return likeness


@kernel
def serve_families(
    offsets: Array,
    members: Array,
    fits: Array,
    required: Array,
    texts: Array,
    vectors: Array,
    places: Array,
    near_duplicate: float,
) -> Array:
    """The picks for the required families: their places in the selection from 1; 0 is not picked.

    For each family that no pick serves yet, its fittest candidate that is no near copy of a pick, else its
    fittest near copy; of equal ones the earlier. Never a text twice: a copy is no new evidence.

    Args:
        offsets: (queries + 1,) int64, the candidates of each query, best first.
        members: (candidates, families) bool, which of its query's required families each serves.
        fits: (candidates, families) float64, how well each would serve them.
        required: (queries,) int64, how many of the families count.
        texts: (candidates,) int64, equal for equal texts.
        vectors: (vectors, dimension) float32, of length 1.
        places: (candidates,) int64, the vector of each candidate.
        near_duplicate: cosine; above 1 nothing is a near copy and `vectors` are not looked at.

    Returns:
        (candidates,) int32.
    """
    ranks = np.zeros(len(texts), np.int32)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        picks, count = np.empty(required[query], np.int64), 0
        for family in range(required[query]):
            served = False
            for pick in picks[:count]:
                served |= members[pick, family]
            best, best_likeness = -1, _SAME_TEXT
            for candidate in range(start, end):
                if members[candidate, family] and not served:
                    likeness = _likeness(candidate, picks, count, texts, vectors, places, near_duplicate)
                    fitter = likeness == best_likeness and best >= 0 and fits[candidate, family] > fits[best, family]
                    if likeness < best_likeness or fitter:
                        best, best_likeness = candidate, likeness
            if best >= 0:
                picks[count] = best
                count += 1
                ranks[best] = count
    return ranks


@kernel
def _fill(
    order: Array,
    end: int,
    documents: Array,
    bound: int,
    texts: Array,
    vectors: Array,
    places: Array,
    near_duplicate: float,
    picks: Array,
    count: int,
) -> int:
    """Picks fresh candidates in an order until there are `end` picks; returns how many there are."""
    for candidate in order:
        if count >= end:
            break
        same_document = 0
        for pick in picks[:count]:
            same_document += documents[pick] == documents[candidate]
        # A picked candidate has the text of a pick: itself.
        if same_document < bound and (
            _likeness(candidate, picks, count, texts, vectors, places, near_duplicate) == _FRESH
        ):
            picks[count] = candidate
            count += 1
    return count


@kernel
def fill_selection(
    offsets: Array,
    ranks: Array,
    documents: Array,
    texts: Array,
    vectors: Array,
    places: Array,
    near_duplicate: float,
    top_k: int,
    max_per_document: Array,
    spread_from: Array,
    spread_order: Array,
) -> Array:
    """The whole selection of each query, at most `top_k`, as places from 1; 0 is not selected.

    1. The picks that are there keep their places.
    2. Up to the slot `spread_from` the others in order, without copies, near copies and what
       `max_per_document` holds back.
    3. From it on, in `spread_order`, the first of each document that has no pick.
    4. If slots are left, the others as in 2, then what only `max_per_document` held back, in order. Copies
       leave slots empty.

    Args:
        offsets: (queries + 1,) int64, the candidates of each query, best first.
        ranks: (candidates,) int32, the picks so far, at most `top_k` of a query.
        documents, texts: (candidates,) int64, equal for one document, equal for equal texts.
        vectors, places, near_duplicate: as `serve_families` takes them.
        top_k: slots, >= 1.
        max_per_document: (queries,) int64, >= 1; the picks so far count towards it.
        spread_from: (queries,) int64, >= 1; above `top_k` nothing is spread.
        spread_order: (candidates,) int64, the candidates of each query as places among all.

    Returns:
        (candidates,) int32.
    """
    filled = ranks.copy()
    picks = np.empty(top_k, np.int64)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        given = 0
        for candidate in range(start, end):
            if ranks[candidate]:
                picks[ranks[candidate] - 1] = candidate
                given += 1
        count, in_order, most = given, np.arange(start, end), int(max_per_document[query])
        spread = min(int(spread_from[query]) - 1, top_k)
        for order, until, bound in (
            (in_order, spread, most),
            (spread_order[start:end], top_k if spread < top_k else 0, 1),
            (in_order, top_k, most),
            (in_order, top_k, top_k),  # holds nothing back
        ):
            count = _fill(order, until, documents, bound, texts, vectors, places, near_duplicate, picks, count)
        for place in range(given, count):
            filled[picks[place]] = place + 1
    return filled


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
