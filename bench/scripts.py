"""Scripts as one would write them by hand from libraries: FAISS, a BM25 package, fusion in a dictionary, and the loop.

They end with the fused list, where dartflow goes on to families, blended scores, grades and cited contexts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from rank_bm25 import BM25Okapi

from bench.reference import Array, best_by_bm25, dartboard
from bench.results import cores, peer
from corpus.tokeniser import Tokeniser, TokeniserParams
from flows.settings import Settings

# Gives the rows of the best chunks for some texts.
KeywordRetriever = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class Script:
    """A corpus in the hands of a script, with the settings of the run that it is compared with.

    Attributes:
        ids: of the chunks.
        tokens: of each chunk.
        embeddings: (chunks, dimension) float32 rows of length 1.
        index: FAISS, exact.
        tokeniser: dartflow's, so that both search for the same terms.
        settings: of the run.
    """

    ids: list[str]
    tokens: list[list[str]]
    embeddings: Array
    index: Any
    tokeniser: Tokeniser
    settings: Settings

    @classmethod
    def over(cls, ids: list[str], texts: Sequence[str], embeddings: Array, settings: Settings) -> Script:
        """Tokenises and indexes a corpus; texts are what retrievers read of a chunk."""
        tokeniser = Tokeniser(TokeniserParams())
        index = faiss.IndexFlatIP(embeddings.shape[1])
        index.add(embeddings)
        return cls(ids, [tokeniser.tokens(text) for text in texts], embeddings, index, tokeniser, settings)

    def rank_bm25(self) -> tuple[BM25Okapi, KeywordRetriever]:
        """rank-bm25 over the chunks, and the search in it."""
        okapi, depth = BM25Okapi(self.tokens), self.settings.sparse_search.depth
        return okapi, lambda texts: [best_by_bm25(okapi, self.tokeniser.tokens(text), depth) for text in texts]

    def bm25s(self) -> KeywordRetriever | None:
        """bm25s over the chunks with its numba backend; None where it is not installed."""
        module, depth = peer("bm25s"), self.settings.sparse_search.depth
        if module is None:
            return None
        engine = module.BM25(k1=1.5, b=0.75, method="robertson", backend="numba")
        engine.index(self.tokens, show_progress=False)

        def search(texts: Sequence[str]) -> list[list[int]]:
            tokens = [self.tokeniser.tokens(text) for text in texts]
            threads = min(cores(), len(texts))
            rows, scores = engine.retrieve(tokens, k=depth, show_progress=False, n_threads=threads)
            return [one[score > 0].tolist() for one, score in zip(rows, scores, strict=True)]

        return search

    def query_by_query(self, texts: Sequence[str], vectors: Array, keywords: KeywordRetriever) -> list[list[str]]:
        """Each query through everything before the next."""
        return [
            self.batch([text], vector[None], keywords)[0] for text, vector in zip(texts, vectors, strict=True)
        ]  # fmt: skip

    def batch(self, texts: Sequence[str], vectors: Array, keywords: KeywordRetriever) -> list[list[str]]:
        """Both searches in one call each, then selection and fusion query by query."""
        _, dense = self.index.search(np.ascontiguousarray(vectors), self.settings.oversample.depth)
        sigma, k = self.settings.log_normal.sigma, self.settings.greedy_selection.k
        found = []
        for vector, rows, words in zip(vectors, dense, keywords(texts), strict=True):
            picks = rows[dartboard(vector, self.embeddings[rows], k, sigma)]
            found.append(self.fuse(picks.tolist(), words))
        return found

    def fuse(self, picks: Sequence[int], words: Sequence[int]) -> list[str]:
        """Weighted reciprocal ranks in a dictionary, in floats."""
        merge, scores = self.settings.rrf_merge, defaultdict[int, float](float)
        for rows, weight in zip((picks, words), merge.weights, strict=True):
            for rank, row in enumerate(rows, start=1):
                scores[row] += weight / (merge.rank_constant + rank)
        return [self.ids[row] for row in sorted(scores, key=lambda row: (-scores[row], row))[: merge.limit]]
