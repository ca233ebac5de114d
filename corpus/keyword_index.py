"""KeywordIndex: the postings of a corpus, and what each adds to a BM25 Okapi score."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from contracts.columns import Array, IntArray, offsets_from_lengths


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
