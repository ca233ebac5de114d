"""candidates: the candidates of a shard while they are scored and selected, laid end to end by query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import pyarrow as pa

from contracts.columns import Array, IntArray, as_numpy, offsets_from_lengths
from corpus.corpus import Corpus

_NESTED = ("parts", "families")


@dataclass(frozen=True)
class Candidates:
    """Arrays of one entry a candidate, those of a query together.

    Attributes:
        queries, rows: (candidates,) int64, whose and which chunk each is.
        parts: the parts of the score, each (candidates,) float64.
        rescued: (candidates,) bool.
        families: (candidates,) lists of family names.
        family_ranks: (candidates, most required families) int64, as `ranks_by_family` gives them; nobody is picked
            for a family in the place of -1.
        gains: (candidates,) float64, what each counts for the other candidates of its document.
        picks: (candidates,) int32, the place in the selection so far, from 1; 0 is not picked.
        leads: (candidates,) int64, the row of the chunk that a neighbour was drawn in with, -1 for the others.
    """

    queries: IntArray
    rows: IntArray
    parts: Mapping[str, Array]
    rescued: Array
    families: pa.ListArray
    family_ranks: Array
    gains: Array
    picks: Array
    leads: IntArray

    def take(self, order: IntArray) -> Candidates:
        """The candidates in another order, or some of them."""
        arrays = {one.name: getattr(self, one.name)[order] for one in fields(self) if one.name not in _NESTED}
        families = self.families.take(pa.array(order, pa.int64()))
        return Candidates(**arrays, parts={name: part[order] for name, part in self.parts.items()}, families=families)

    def joined(self, others: Candidates) -> Candidates:
        """Both, those of a query in this order."""
        arrays = {
            one.name: np.concatenate([getattr(self, one.name), getattr(others, one.name)])
            for one in fields(self)
            if one.name not in _NESTED
        }
        parts = {name: np.concatenate([part, others.parts[name]]) for name, part in self.parts.items()}
        families = pa.concat_arrays([self.families, others.families.cast(self.families.type)])
        return Candidates(**arrays, parts=parts, families=families).take(
            np.argsort(arrays["queries"], kind="stable").astype(np.int64)
        )

    def offsets(self, count: int) -> IntArray:
        """(count + 1,) int64: where the candidates of each of `count` queries start."""
        return offsets_from_lengths(np.bincount(self.queries, minlength=count))

    def likeness(self, corpus: Corpus, near_duplicate: float | None) -> tuple[Array, Array, Array, float]:
        """What the kernels of the selection look at to find copies: texts, vectors, places, and the cosine itself.

        Args:
            corpus: has the texts and the vectors.
            near_duplicate: cosine; None for no near copies, and no vector is read.
        """
        vectors, places = np.zeros((1, 1), np.float32), np.zeros(len(self.rows), np.int64)
        if near_duplicate is not None:
            distinct, places = np.unique(self.rows, return_inverse=True)
            vectors = np.ascontiguousarray(corpus.embeddings[distinct])
        return as_numpy(corpus.column("text_id"))[self.rows], vectors, places, near_duplicate or np.inf
