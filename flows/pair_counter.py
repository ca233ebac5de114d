"""PairCounter: what a run would ask its cross-encoder, counted without asking it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from threading import Lock

import numpy as np

from checkpoints.pair_scores import PairScores
from models.cross_encoder import Logits, pair_key

# Pairs that are kept aside with their texts, so that a real model can be timed on them.
_DRAWN = 44


class PairCounter:
    """Stands in for the cross-encoder: counts the pairs that it would read, and gives kept scores or made-up ones.

    A made-up probability lies between the limits of grading, so that every passage by it is ambiguous and stays.
    It is drawn from the pair's key, so that equal pairs have equal scores. Safe for threads.

    Args:
        model_id: of the cross-encoder.
        kept: the scores that are kept; none is added.
        lower, upper: the limits of grading.
    """

    def __init__(self, model_id: str, kept: PairScores, lower: float, upper: float) -> None:
        self.model_id = model_id
        self.stage = ""  # who asks; stages run one after the other
        self._kept = kept
        self._limits = (lower, upper) if lower < upper else (0.0, upper)
        self._lock = Lock()
        self.forget()

    def forget(self) -> None:
        """Counts from 0 again."""
        self.pairs, self.kept_pairs = Counter[str](), Counter[str]()
        self._seen: set[bytes] = set()
        self._drawn: list[tuple[bytes, tuple[str, str]]] = []

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits."""
        texts = list(zip(queries, passages, strict=True))
        keys = [pair_key(self.model_id, *pair) for pair in texts]
        kept = self._kept.get(keys)
        unknown = np.isnan(kept)
        with self._lock:
            fresh = {key: place for place, key in enumerate(keys) if key not in self._seen}
            to_read = [(key, texts[place]) for key, place in fresh.items() if unknown[place]]
            self._seen |= fresh.keys()
            self.pairs[self.stage] += len(fresh)
            self.kept_pairs[self.stage] += len(fresh) - len(to_read)
            # Keys are hashes: those with the smallest are a fair draw, and the same one every time.
            self._drawn = heapq.nsmallest(_DRAWN, [*self._drawn, *to_read])
        return np.where(unknown, self._made_up(keys), kept).astype(np.float32)

    def _made_up(self, keys: Sequence[bytes]) -> Logits:
        drawn = np.frombuffer(b"".join(key[:4] for key in keys), dtype="<u4") / 2**32
        low, high = self._limits
        chances = np.clip(low + (high - low) * (0.01 + 0.98 * drawn), 1e-6, 1 - 1e-6)
        return np.log(chances / (1 - chances)).astype(np.float32)

    @property
    def drawn(self) -> list[tuple[str, str]]:
        """Some of the pairs that are to be read."""
        return [texts for _, texts in self._drawn]
