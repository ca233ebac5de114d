"""KeywordIndex: the postings of a corpus, and BM25 Okapi search over them in bulk."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numba
import numpy as np

from contracts.columns import Array, IntArray, Ragged, offsets_from_lengths, read_only


@dataclass(frozen=True, eq=False)
class KeywordIndex:
    """Which chunk holds which term how often, term by term.

    Attributes:
        terms: (terms,) the vocabulary, sorted.
        offsets: (terms + 1,) int64; term t stands in the postings from offsets[t] up to offsets[t + 1].
        rows: (postings,) int32, the chunk of each posting, ascending within a term.
        frequencies: (postings,) int32, how often the term stands in the chunk, >= 1.
        lengths: (chunks,) int32, how many terms each chunk has, repeats counted.
    """

    terms: tuple[str, ...]
    offsets: IntArray
    rows: Array
    frequencies: Array
    lengths: Array

    @classmethod
    def build(cls, tokens: Iterable[Sequence[str]]) -> KeywordIndex:
        """Counts the tokens of every chunk, in chunk order; reads them once, so they may come from a generator."""
        met: dict[str, int] = {}
        numbers, sizes = array("q"), array("q")
        for chunk in tokens:
            numbers.extend([met.setdefault(token, len(met)) for token in chunk])
            sizes.append(len(chunk))
        terms = tuple(sorted(met))
        place = np.empty(len(terms), dtype=np.int64)
        place[[met[term] for term in terms]] = np.arange(len(terms))
        lengths = np.array(sizes, dtype=np.int64)
        chunks = max(len(lengths), 1)
        keys = place[np.array(numbers, dtype=np.int64)] * chunks + np.repeat(np.arange(len(lengths)), lengths)
        postings, frequencies = np.unique(keys, return_counts=True)
        return cls(
            terms=terms,
            offsets=offsets_from_lengths(np.bincount(postings // chunks, minlength=len(terms))),
            rows=(postings % chunks).astype(np.int32),
            frequencies=frequencies.astype(np.int32),
            lengths=lengths.astype(np.int32),
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {term: number for number, term in enumerate(self.terms)}

    def term_ids(self, tokens: Sequence[str]) -> list[int]:
        """The numbers of the tokens that the corpus has, in order, repeats kept."""
        return [self._places[token] for token in tokens if token in self._places]

    def token_bags(self) -> list[list[str]]:
        """The tokens of every chunk in chunk order, each as often as the chunk has it, sorted."""
        order = np.argsort(self.rows, kind="stable")
        numbers = np.repeat(self._term_of[order], self.frequencies[order])
        tokens = np.array(self.terms, dtype=object)[numbers].tolist()
        ends = offsets_from_lengths(self.lengths).tolist()
        return [tokens[start:end] for start, end in pairwise(ends)]

    @property
    def document_frequencies(self) -> IntArray:
        """(terms,) int64: how many chunks hold each term."""
        return np.diff(self.offsets)

    @property
    def _term_of(self) -> IntArray:
        """(postings,) int64: the term of each posting."""
        return np.repeat(np.arange(len(self.terms), dtype=np.int64), self.document_frequencies)

    def inverse_document_frequencies(self, epsilon: float) -> Array:
        """(terms,) float64: idf(t) = ln(N - n_t + 0.5) - ln(n_t + 0.5), and epsilon times the mean where negative.

        Logarithms come from `math.log` and the mean is summed term by term in the order in which the chunks
        bring the terms (within a chunk in the order of the vocabulary), as rank-bm25 does over `token_bags`:
        a mean near 0, where idfs cancel, would otherwise differ in more than its last bits.
        """
        if not self.terms:
            return np.zeros(0)
        distinct, place = np.unique(self.document_frequencies, return_inverse=True)
        count = len(self.lengths)
        idf = np.array([math.log(count - n + 0.5) - math.log(n + 0.5) for n in distinct.tolist()])[place]
        met = np.lexsort((np.arange(len(idf)), self.rows[self.offsets[:-1]]))
        mean = np.cumsum(idf[met])[-1] / len(idf)
        return np.where(idf < 0, epsilon * mean, idf)

    def okapi_scores(self, k1: float, b: float, epsilon: float) -> Array:
        """(postings,) float64: what each posting adds to a chunk's BM25 score.

        score = idf f (k1 + 1) / (f + k1 (1 - b + b length / mean length)), idf as above.

        Source: BM25Okapi of the package rank-bm25 0.2.2, operation by operation in the same order: over
        `token_bags` the sums agree to the last bit; over the tokens in their order of reading, terms whose
        idf is negative may differ in the last bits of the mean. The state is float64 throughout.
        """
        if not self.terms:
            return np.zeros(0)
        idf = self.inverse_document_frequencies(epsilon)
        lengths = self.lengths[self.rows].astype(np.float64)
        tf = self.frequencies.astype(np.float64)
        mean_length = int(self.lengths.sum(dtype=np.int64)) / len(self.lengths)
        scores: Array = idf[self._term_of] * (tf * (k1 + 1) / (tf + k1 * (1 - b + b * lengths / mean_length)))
        return scores


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
    arrays = [read_only(one) for one in (query_offsets, query_terms, offsets, rows, scores, eligible)]
    found: tuple[Array, Array, Array] = _bm25_top(*arrays, depth, chunks)
    return found


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
    touched = np.zeros(chunks, np.int64)
    for query in range(queries):
        matches = 0
        for place in range(query_offsets[query], query_offsets[query + 1]):
            term = query_terms[place]
            for posting in range(offsets[term], offsets[term + 1]):
                row = rows[posting]
                if not eligible[row]:
                    continue
                if not seen[row]:
                    seen[row] = True
                    touched[matches] = row
                    matches += 1
                sums[row] += scores[posting]
        counts[query] = _keep_best(touched[:matches], sums, top_rows[query], top_scores[query])
        for match in range(matches):
            sums[touched[match]] = 0.0
            seen[touched[match]] = False
    return counts, top_rows, top_scores


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _worse(score: float, row: int, other_score: float, other_row: int) -> bool:
    return score < other_score or (score == other_score and row > other_row)


def ragged_hits(counts: Array, rows: Array, scores: Array) -> Ragged:
    """(queries, depth) arrays of which the first counts[q] are set, as lists of {row, score}."""
    filled = np.arange(rows.shape[1]) < counts[:, None]
    return Ragged(offsets_from_lengths(counts), {"row": rows[filled], "score": scores[filled]})
