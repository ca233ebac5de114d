"""neighbours: the chunks that stand before and behind a chunk in its document."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contracts.columns import IntArray, as_numpy
from corpus.corpus import Corpus


@dataclass(frozen=True)
class Neighbours:
    """Every document's chunks in their order.

    Attributes:
        order: (chunks,) int64, chunk rows by document, then chunk_index, then row.
        places: (chunks,) int64, the place of each row in `order`.
        documents, indices: (chunks,) int64, of each row; equal for one document.
    """

    order: IntArray
    places: IntArray
    documents: IntArray
    indices: IntArray

    @classmethod
    def of(cls, corpus: Corpus) -> Neighbours:
        """Sorts the chunks of a corpus."""
        documents = corpus.documents
        indices = as_numpy(corpus.column("chunk_index")).astype(np.int64)
        order = np.lexsort((indices, documents)).astype(np.int64)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return cls(order, places, documents, indices)

    def around(self, row: int, distance: int) -> list[int]:
        """The chunks of its document whose chunk_index differs by at most `distance`: nearest first, the next first."""
        place, near = int(self.places[row]), []
        for step in (place + sign * away for away in range(1, distance + 1) for sign in (1, -1)):
            if 0 <= step < len(self.order):
                other = int(self.order[step])
                same = self.documents[other] == self.documents[row]
                if same and abs(int(self.indices[other] - self.indices[row])) <= distance:
                    near.append(other)
        return near
