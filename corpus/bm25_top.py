"""bm25_top: the best chunks of many queries by their postings, compiled."""

from __future__ import annotations

import numpy as np

from contracts.columns import Array, Ragged, offsets_from_lengths, read_only
from corpus.compiled import kernel


def bm25_top(
    query_offsets: Array,
    query_terms: Array,
    offsets: Array,
    rows: Array,
    scores: Array,
    eligible: Array,
    depth: int,
    chunks: int,
) -> tuple[Array, Array, Array]:
    """For each query the `depth` best eligible chunks that share a term with it, by (-score, row).

    A chunk matches when it shares a term, whatever the sign of its score. Scores are float64 sums in
    the order of the query's terms.

    Args:
        query_offsets, query_terms: (queries + 1,), (terms,) the term ids of each query, repeats count.
        offsets, rows, scores: the postings and what each adds.
        eligible: (chunks,) bool.
        depth: how many at the most, >= 1.
        chunks: size of the corpus.

    Returns:
        counts (queries,), and rows and scores (queries, depth), of which the first counts[q] are set.
    """
    queries, postings = (read_only(query_offsets), read_only(query_terms)), (read_only(offsets), read_only(rows))
    return _bm25_top(*queries, *postings, read_only(scores), read_only(eligible), depth, chunks)


@kernel
def _bm25_top(
    query_offsets: Array,
    query_terms: Array,
    offsets: Array,
    rows: Array,
    scores: Array,
    eligible: Array,
    depth: int,
    chunks: int,
) -> tuple[Array, Array, Array]:
    queries = len(query_offsets) - 1
    counts = np.zeros(queries, np.int64)
    top_rows = np.zeros((queries, depth), np.int64)
    top_scores = np.zeros((queries, depth), np.float64)
    sums = np.zeros(chunks, np.float64)
    seen = np.zeros(chunks, np.bool_)
    matches = np.zeros(chunks + 1, np.int64)
    for query in range(queries):
        terms = query_terms[query_offsets[query] : query_offsets[query + 1]]
        postings = 0
        for term in terms:
            postings += offsets[term + 1] - offsets[term]
        many = postings > chunks // 2
        if many:
            count = _match_many(terms, offsets, rows, scores, eligible, sums, seen, matches)
        else:
            count = _match_few(terms, offsets, rows, scores, eligible, sums, seen, matches)
        counts[query] = _keep_best(matches[:count], sums, top_rows[query], top_scores[query])
        if many:
            sums[:] = 0.0
            seen[:] = False
        else:
            for match in matches[:count]:
                sums[match] = 0.0
                seen[match] = False
    return counts, top_rows, top_scores


@kernel
def _match_few(
    terms: Array, offsets: Array, rows: Array, scores: Array, eligible: Array, sums: Array, seen: Array, matches: Array
) -> int:
    """Adds up the postings of the terms, noting each eligible chunk when it is first met; returns how many."""
    count = 0
    for term in terms:
        for posting in range(offsets[term], offsets[term + 1]):
            row = rows[posting]
            if not eligible[row]:
                continue
            if not seen[row]:
                seen[row] = True
                matches[count] = row
                count += 1
            sums[row] += scores[posting]
    return count


@kernel
def _match_many(
    terms: Array, offsets: Array, rows: Array, scores: Array, eligible: Array, sums: Array, seen: Array, matches: Array
) -> int:
    """The same for terms that most chunks have: without a branch in the sum, then one pass over all chunks."""
    for term in terms:
        for posting in range(offsets[term], offsets[term + 1]):
            row = rows[posting]
            sums[row] += scores[posting]
            seen[row] = True
    count = 0
    for row in range(len(sums)):
        matches[count] = row
        count += seen[row] and eligible[row]
    return count


@kernel
def _keep_best(found: Array, sums: Array, top_rows: Array, top_scores: Array) -> int:
    """Writes the best of the found rows by (-score, row), as many as fit, and returns how many.

    While rows come in, the arrays are a binary heap with the worst of the kept rows at its root. (numpy's
    sorts would do, but take numba three times as long to compile.)
    """
    kept = 0
    for row in found:
        score = sums[row]
        if kept < len(top_rows):
            place = kept
            kept += 1
            while place > 0 and _worse(score, row, top_scores[(place - 1) // 2], top_rows[(place - 1) // 2]):
                parent = (place - 1) // 2
                top_rows[place], top_scores[place] = top_rows[parent], top_scores[parent]
                place = parent
            top_rows[place], top_scores[place] = row, score
        elif _worse(top_scores[0], top_rows[0], score, row):
            _sink(row, score, top_rows, top_scores, kept)
    for last in range(kept - 1, 0, -1):
        row, score = top_rows[last], top_scores[last]
        top_rows[last], top_scores[last] = top_rows[0], top_scores[0]
        _sink(row, score, top_rows, top_scores, last)
    return kept


@kernel
def _sink(row: int, score: float, heap_rows: Array, heap_scores: Array, size: int) -> None:
    """Puts a row in the place of the root and lets it sink below everything worse."""
    place, child = 0, 1
    while child < size:
        right = child + 1
        if right < size and _worse(heap_scores[right], heap_rows[right], heap_scores[child], heap_rows[child]):
            child = right
        if not _worse(heap_scores[child], heap_rows[child], score, row):
            break
        heap_rows[place], heap_scores[place] = heap_rows[child], heap_scores[child]
        place, child = child, 2 * child + 1
    heap_rows[place], heap_scores[place] = row, score


@kernel
def _worse(score: float, row: int, other_score: float, other_row: int) -> bool:
    return score < other_score or (score == other_score and row > other_row)


def ragged_hits(counts: Array, rows: Array, scores: Array) -> Ragged:
    """(queries, depth) arrays of which the first counts[q] are set, as lists of {row, score}."""
    filled = np.arange(rows.shape[1]) < counts[:, None]
    return Ragged(offsets_from_lengths(counts), {"row": rows[filled], "score": scores[filled]})
