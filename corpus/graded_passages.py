"""Graded passages: those of a shard, laid end to end by query, and which options come up behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from contracts.columns import Array, IntArray, as_numpy, offsets_from_lengths, read_only
from corpus.corpus import Corpus
from corpus.selection import KEPT, LEFT, NO_BOUND, UNUSABLE, USABLE, fill_slots


@dataclass(frozen=True)
class Bounds:
    """What no passage that fills a slot may break, as `fill_slots` takes it.

    Attributes:
        max_per_document: (queries,) int64, >= 1; `NO_BOUND` sets none.
        near_duplicate: (queries,) float64, cosine; above 1 nothing is a near copy.
    """

    max_per_document: Array
    near_duplicate: Array


@dataclass(frozen=True)
class GradedPassages:
    """Arrays of one entry a passage, those of a query together.

    Attributes:
        queries, rows: (passages,) int64, whose and which chunk each is.
        scores: (passages,) float64 in [0, 1].
        grades, graders: (passages,) int8, places in `GRADES` and `GRADERS` of corpus.grading.
        kept: (passages,) bool; the others have left.
        origins: (passages,) int64, how each came in.
        families: (passages,) lists of family names.
    """

    queries: IntArray
    rows: IntArray
    scores: Array
    grades: Array
    graders: Array
    kept: Array
    origins: Array
    families: pa.ListArray

    @classmethod
    def joined(cls, parts: Sequence[GradedPassages]) -> GradedPassages:
        """The passages of all parts, those of a query in the order of the parts."""
        order = np.argsort(np.concatenate([part.queries for part in parts]), kind="stable")
        numbers = {
            name: np.concatenate([getattr(part, name) for part in parts])[order]
            for name in ("queries", "rows", "scores", "grades", "graders", "kept", "origins")
        }
        lists = pa.concat_arrays([part.families.cast(pa.list_(pa.string())) for part in parts])
        return cls(**numbers, families=lists.take(pa.array(order, pa.int64())))

    def room(self, slots: Array) -> IntArray:
        """(queries,) int64: the slots that no kept passage takes."""
        return slots.astype(np.int64) - np.bincount(self.queries[self.kept], minlength=len(slots))

    def coming_up(
        self,
        queries: IntArray,
        rows: IntArray,
        usable: Array,
        room: IntArray,
        bounds: Bounds,
        corpus: Corpus,
        limit: int = NO_BOUND,
    ) -> Array:
        """(options,) bool: the options that `fill_slots` lets come up behind these passages.

        Args:
            queries, rows: (options,) int64, those of a query in the order in which they come up.
            usable: (options,) bool, which take a slot.
            room: (queries,) int64, free slots.
            bounds: of the queries.
            corpus: has the chunks.
            limit: how many options of a query come up at the most.
        """
        owners = np.concatenate([self.queries, queries])
        order = np.argsort(owners, kind="stable")
        owners, chunks = owners[order], np.concatenate([self.rows, rows])[order]
        states = np.concatenate([np.where(self.kept, KEPT, LEFT), np.where(usable, USABLE, UNUSABLE)])
        texts = as_numpy(corpus.column("text_id"))
        keys = owners * (int(texts.max(initial=0)) + 1) + texts[chunks]
        comes_up = np.empty(len(order), dtype=bool)
        comes_up[order] = fill_slots(
            offsets_from_lengths(np.bincount(owners, minlength=len(room))),
            states[order],
            np.unique(keys, return_inverse=True)[1],
            corpus.documents[chunks],
            chunks,
            read_only(corpus.embeddings),
            room,
            limit,
            bounds.max_per_document,
            bounds.near_duplicate,
        )
        return comes_up[len(self.rows) :]
