"""KeywordSearch: BM25 over a corpus under scopes, and the terms that a text shares with a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from contracts.columns import IntArray, Ragged, offsets_from_lengths, read_only
from corpus.bm25_top import bm25_top, ragged_hits
from corpus.compiled import kernel
from corpus.keyword_index import KeywordIndex
from corpus.scope import Scope, Scopes
from corpus.tokeniser import Tokeniser

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class KeywordSearch:
    """BM25 over a corpus.

    Attributes:
        index: the postings.
        tokeniser: the one that they were made with.
        eligible: gives (chunks,) bool for a scope.
        scores: (postings,) float64, what each posting adds.
    """

    index: KeywordIndex
    tokeniser: Tokeniser
    eligible: Callable[[Scope], Array]
    scores: Array

    def search(self, texts: Sequence[str], scopes: Scopes, depth: int) -> Ragged:
        """The `depth` best eligible chunks that share a term with each text, as lists of {row, score}.

        Order (-score, row), score float64; an empty list where no eligible chunk shares a term. `depth` may
        be any number >= 1: what is set aside for hits is bounded by what the texts can find at all.
        """
        terms = term_ids(self.index, self.tokeniser, texts)
        owners, rows, scores = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        for code, scope in enumerate(scopes.distinct):
            queries = np.flatnonzero(scopes.codes == code)
            if not len(queries):
                continue
            asked, eligible = _lists(terms, queries), self.eligible(scope)
            postings = np.bincount(asked.rows, weights=self.index.document_frequencies[asked.values], minlength=1)
            hits = ragged_hits(
                *bm25_top(
                    asked.offsets,
                    asked.values,
                    self.index.offsets,
                    self.index.rows,
                    self.scores,
                    eligible,
                    max(1, min(depth, int(np.count_nonzero(eligible)), int(postings.max()))),
                    len(self.index.lengths),
                )
            )
            owners.append(queries[hits.rows])
            rows.append(hits.values["row"])
            scores.append(hits.values["score"])
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        return Ragged(
            offsets_from_lengths(np.bincount(owner, minlength=len(texts))),
            {"row": np.concatenate(rows)[order], "score": np.concatenate(scores)[order]},
        )


def term_ids(index: KeywordIndex, tokeniser: Tokeniser, texts: Sequence[str]) -> Ragged:
    """The corpus terms of each text in order, repeats kept, as lists of term numbers."""
    lists = [index.term_ids(tokeniser.tokens(text)) for text in texts]
    lengths = np.array([len(one) for one in lists], dtype=np.int64)
    return Ragged(offsets_from_lengths(lengths), np.array([t for one in lists for t in one], dtype=np.int64))


def lexical_overlap(
    index: KeywordIndex, tokeniser: Tokeniser, texts: Sequence[str], queries: IntArray, rows: IntArray
) -> Array:
    """(pairs,) float64 in [0, 1]: the share of the distinct terms of texts[queries[i]] that chunk rows[i] has.

    Terms that no chunk has count too; 0 for a text without terms.
    """
    distinct = [sorted(set(tokeniser.tokens(text))) for text in texts]
    known = [index.term_ids(tokens) for tokens in distinct]
    offsets = offsets_from_lengths(np.array([len(one) for one in known], dtype=np.int64))
    terms = np.array([term for one in known for term in one], dtype=np.int64)
    arrays = (index.offsets, index.rows, offsets, terms, queries, rows)
    shared = _shared_terms(*(read_only(array) for array in arrays))
    totals = np.array([len(one) for one in distinct], dtype=np.float64)[queries]
    shares: Array = np.divide(shared, totals, out=np.zeros(len(rows)), where=totals > 0)
    return shares


def _lists(lists: Ragged, rows: IntArray) -> Ragged:
    """Some of the lists."""
    offsets = offsets_from_lengths(lists.lengths[rows])
    places = np.repeat(lists.offsets[rows] - offsets[:-1], lists.lengths[rows]) + np.arange(offsets[-1])
    return Ragged(offsets, lists.values[places])


@kernel
def _shared_terms(
    offsets: Array, chunks: Array, query_offsets: Array, query_terms: Array, queries: Array, rows: Array
) -> Array:
    """How many of the terms of queries[i] chunk rows[i] has: each looked up in the term's postings by bisection."""
    shared = np.zeros(len(rows), np.float64)
    for pair in range(len(rows)):
        for place in range(query_offsets[queries[pair]], query_offsets[queries[pair] + 1]):
            term = query_terms[place]
            low, high = offsets[term], offsets[term + 1]
            while low < high:
                middle = (low + high) // 2
                if chunks[middle] < rows[pair]:
                    low = middle + 1
                else:
                    high = middle
            if low < offsets[term + 1] and chunks[low] == rows[pair]:
                shared[pair] += 1.0
    return shared
