"""selection: which candidates are taken: for families, spread over documents, into free slots, and never a copy.

Kernels that call each other stand in this one file: compiled code is kept on disk by file, and would not notice a
change in another one.
"""

from __future__ import annotations

import numpy as np

from contracts.columns import Array
from corpus.compiled import kernel

# Stands for no bound where a number is asked for.
NO_BOUND = 2**31 - 1
# What `fill_slots` takes a passage for: a graded one that has left or is kept, or an option that may come up.
LEFT, KEPT, UNUSABLE, USABLE = 0, 1, 2, 3
# Cosines that differ by less are equal but for the rounding of float32, as in distance_matrices.
_ROUNDING = 1e-6
_FRESH, _NEAR_COPY, _SAME_TEXT = 0, 1, 2


@kernel
def near_copies(vectors: Array, one: int, other: int, near_duplicate: float) -> bool:
    """Whether two vectors are near copies: their cosine is at least `near_duplicate`, of which above 1 none is.

    Args:
        vectors: (vectors, dimension) float32, of length 1.
        one, other: places among the vectors.
        near_duplicate: cosine; above 1 `vectors` are not looked at.
    """
    if near_duplicate > 1.0:
        return False
    cosine = 0.0
    for axis in range(vectors.shape[1]):
        cosine += np.float64(vectors[one, axis]) * np.float64(vectors[other, axis])
    return cosine >= near_duplicate - _ROUNDING


@kernel
def _of_document(picks: Array, documents: Array, document: int) -> int:
    """How many of the picks are of a document."""
    count = 0
    for pick in picks:
        count += documents[pick] == document
    return count


@kernel
def _likeness(
    candidate: int, picks: Array, count: int, texts: Array, vectors: Array, places: Array, near_duplicate: float
) -> int:
    """What a candidate is beside the first `count` picks: fresh, a near copy, or the same text."""
    likeness = _FRESH
    for pick in picks[:count]:
        if texts[pick] == texts[candidate]:
            return _SAME_TEXT
        if likeness == _FRESH and near_copies(vectors, places[pick], places[candidate], near_duplicate):
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
        # A picked candidate has the text of a pick: itself.
        if _of_document(picks[:count], documents, documents[candidate]) < bound and (
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


@kernel
def _breaks_bound(
    option: int,
    kept: Array,
    documents: Array,
    rows: Array,
    vectors: Array,
    max_per_document: int,
    near_duplicate: float,
) -> bool:
    """Whether an option is of a document that has its passages already, or a near copy of a kept passage."""
    for passage in kept:
        if near_copies(vectors, rows[passage], rows[option], near_duplicate):
            return True
    return _of_document(kept, documents, documents[option]) >= max_per_document


@kernel
def fill_slots(
    offsets: Array,
    states: Array,
    texts: Array,
    documents: Array,
    rows: Array,
    vectors: Array,
    room: Array,
    limit: int,
    max_per_document: Array,
    near_duplicate: Array,
) -> Array:
    """Which options come up before their query has no free slot left: a usable one takes a slot, others none.

    Never comes up, and takes no slot: a text that has been seen, be it that of a passage that left; a chunk
    of a document that has `max_per_document` kept passages; a near copy of a kept passage. What fills a slot
    is kept for those after it. Unlike the selection, a fill breaks no bound for a family or an empty slot.

    Args:
        offsets: (queries + 1,) int64, of each query first the graded passages, then the options as they come up.
        states: (passages,) int64: a graded passage has LEFT or is KEPT, an option is UNUSABLE or USABLE.
        texts: (passages,) int64 below their number, equal where query and text are equal.
        documents: (passages,) int64, equal for one document.
        rows: (passages,) int64, the vector of each.
        vectors: (chunks, dimension) float32, of length 1.
        room: (queries,) int64, free slots.
        limit: how many options of a query come up at the most.
        max_per_document: (queries,) int64, >= 1.
        near_duplicate: (queries,) float64, cosine; above 1 nothing is a near copy.

    Returns:
        (passages,) bool, false for the graded ones.
    """
    comes_up = np.zeros(len(rows), np.bool_)
    seen = np.zeros(len(rows), np.bool_)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        kept, count, free, left = np.empty(end - start, np.int64), 0, room[query], limit
        for place in range(start, end):
            if states[place] >= UNUSABLE:
                if free <= 0 or left <= 0:
                    break
                if seen[texts[place]] or _breaks_bound(
                    place, kept[:count], documents, rows, vectors, max_per_document[query], near_duplicate[query]
                ):
                    continue
                comes_up[place] = True
                left -= 1
                free -= states[place] == USABLE
            seen[texts[place]] = True
            if states[place] in (KEPT, USABLE):
                kept[count] = place
                count += 1
    return comes_up
