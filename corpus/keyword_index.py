"""KeywordIndex: the postings of a corpus, and BM25 Okapi search over them in bulk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np

from contracts.columns import IntArray, Ragged, offsets_from_lengths

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class KeywordIndex:
    """Which chunk holds which term how often, term by term.

    Attributes:
        terms: (terms,) the vocabulary, sorted.
        offsets: (terms + 1,) int64; term t stands in the postings from offsets[t] up to offsets[t + 1].
        rows: (postings,) int32, the chunk of each posting, ascending within a term.
        frequencies: (postings,) int32, how often the term stands in the chunk, >= 1.
        lengths: (chunks,) int32, how many terms each chunk has.
    """

    terms: tuple[str, ...]
    offsets: IntArray
    rows: Array
    frequencies: Array
    lengths: Array

    @classmethod
    def build(cls, tokens: Sequence[Sequence[str]]) -> KeywordIndex:
        """Counts the tokens of every chunk, in chunk order."""
        terms = tuple(sorted({token for chunk in tokens for token in chunk}))
        place = {term: number for number, term in enumerate(terms)}
        lengths = np.array([len(chunk) for chunk in tokens], dtype=np.int32)
        flat = np.array([place[token] for chunk in tokens for token in chunk], dtype=np.int64)
        keys = flat * max(len(tokens), 1) + np.repeat(np.arange(len(tokens)), lengths)
        postings, frequencies = np.unique(keys, return_counts=True)
        term_of = postings // max(len(tokens), 1)
        return cls(
            terms=terms,
            offsets=offsets_from_lengths(np.bincount(term_of, minlength=len(terms))),
            rows=(postings % max(len(tokens), 1)).astype(np.int32),
            frequencies=frequencies.astype(np.int32),
            lengths=lengths,
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {term: number for number, term in enumerate(self.terms)}

    def term_ids(self, tokens: Sequence[str]) -> list[int]:
        """The numbers of the tokens that the corpus has, in order, repeats kept."""
        return [self._places[token] for token in tokens if token in self._places]

    @property
    def document_frequencies(self) -> IntArray:
        """(terms,) int64: how many chunks hold each term."""
        return np.diff(self.offsets)

    def okapi_scores(self, k1: float, b: float, epsilon: float) -> Array:
        """(postings,) float64: what each posting adds to a chunk's BM25 score.

        idf(t) = ln((N - n_t + 0.5) / (n_t + 0.5)), and epsilon times the mean idf where that is negative;
        score = idf f (k1 + 1) / (f + k1 (1 - b + b length / mean length)).

        Source: BM25Okapi of the package rank-bm25 0.2.2, operation by operation in the same order, so
        that sums agree to the last bit or close to it.
        """
        if not self.terms:
            return np.zeros(0)
        count = len(self.lengths)
        frequencies = self.document_frequencies
        idf = np.log(count - frequencies + 0.5) - np.log(frequencies + 0.5)
        idf = np.where(idf < 0, epsilon * (idf.sum() / len(idf)), idf)
        lengths = self.lengths[self.rows]
        tf = self.frequencies.astype(np.float64)
        mean_length = self.lengths.sum() / count
        term_of = np.repeat(np.arange(len(self.terms)), frequencies)
        scores: Array = idf[term_of] * (tf * (k1 + 1) / (tf + k1 * (1 - b + b * lengths / mean_length)))
        return scores


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
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
        found = touched[:matches].copy()
        kept = min(matches, depth)
        if matches > depth:
            # Cut below the depth-th best score first; ties at the cut are settled by the full sort.
            values = sums[found]
            found = found[values >= np.partition(values, matches - depth)[matches - depth]]
        found.sort()
        order = np.argsort(-sums[found], kind="mergesort")
        for rank in range(kept):
            top_rows[query, rank] = found[order[rank]]
            top_scores[query, rank] = sums[found[order[rank]]]
        counts[query] = kept
        for match in range(matches):
            sums[touched[match]] = 0.0
            seen[touched[match]] = False
    return counts, top_rows, top_scores


def ragged_hits(counts: Array, rows: Array, scores: Array) -> Ragged:
    """(queries, depth) arrays of which the first counts[q] are set, as lists of {row, score}."""
    filled = np.arange(rows.shape[1]) < counts[:, None]
    return Ragged(offsets_from_lengths(counts), {"row": rows[filled], "score": scores[filled]})
