"""neighbours: the chunks that stand before and behind a chunk in its document, and which of them it draws in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from contracts.columns import Array, IntArray, as_numpy, read_only
from contracts.evidence import Shape
from corpus.candidates import Candidates
from corpus.corpus import Corpus
from corpus.scope import Scopes
from corpus.selection import near_copies


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


def draw_in(
    candidates: Candidates,
    queries: pa.Table,
    shapes: Sequence[Shape | None],
    corpus: Corpus,
    slots: int,
    near_duplicate: float | None,
) -> tuple[Candidates, Candidates]:
    """Draws in the neighbours of the chunks that are picked for families.

    Args:
        candidates: `picks` are those for families.
        queries: with `groups` and `filters`.
        shapes: that of each query; None draws in nothing.
        corpus: has the chunks.
        slots: of a selection, the picks included.
        near_duplicate: cosine; None for no near copies.

    Returns:
        The candidates, marked by `picks` and `leads` where they are drawn in; and the neighbours that were no
        candidates, as such but without `parts`.
    """
    drawn = _drawn_in(candidates, queries, shapes, corpus, slots, near_duplicate or np.inf)
    chunks = len(corpus.chunks)
    keys, ranked = drawn.queries * chunks + drawn.rows, candidates.queries * chunks + candidates.rows
    order = np.argsort(ranked)
    places = np.searchsorted(ranked[order], keys)
    there = np.append(ranked[order], -1)[places] == keys
    picks, leads = candidates.picks.copy(), candidates.leads.copy()
    picks[order[places[there]]], leads[order[places[there]]] = drawn.picks[there], drawn.leads[there]
    return replace(candidates, picks=picks, leads=leads), drawn.take(np.flatnonzero(~there))


def _drawn_in(
    candidates: Candidates,
    queries: pa.Table,
    shapes: Sequence[Shape | None],
    corpus: Corpus,
    slots: int,
    near_duplicate: float,
) -> Candidates:
    """All that is drawn in, whether it is a candidate already or not."""
    scopes, neighbours = Scopes.of(queries), Neighbours.of(corpus)
    visible = [corpus.visible(scope) for scope in scopes.distinct]
    offsets = candidates.offsets(len(queries))
    found: list[tuple[int, int, int, int, list[str]]] = []
    for query, shape in enumerate(shapes):
        if shape is None:
            continue
        own = slice(offsets[query], offsets[query + 1])
        picks = candidates.picks[own]
        leads: list[int] = candidates.rows[own][np.argsort(picks, kind="stable")][np.sort(picks) > 0].tolist()
        seen = visible[scopes.codes[query]]
        drawn = _around_leads(leads, shape, seen, neighbours, corpus, slots, near_duplicate)
        for place, (row, lead) in enumerate(drawn, start=len(leads) + 1):
            names = [one.name for one in shape.families if corpus.members(one)[row]]
            found.append((query, row, lead, place, names))
    return Candidates(
        queries=np.array([query for query, *_ in found], dtype=np.int64),
        rows=np.array([row for _, row, *_ in found], dtype=np.int64),
        parts={},  # those that are ranked have theirs
        rescued=np.zeros(len(found), dtype=bool),
        families=pa.array([names for *_, names in found], candidates.families.type),
        family_ranks=np.full((len(found), candidates.family_ranks.shape[1]), -1, dtype=np.int64),
        gains=np.zeros(len(found)),
        picks=np.array([place for *_, place, _ in found], dtype=np.int32),
        leads=np.array([lead for _, _, lead, *_ in found], dtype=np.int64),
    )


def _around_leads(
    leads: Sequence[int],
    shape: Shape,
    visible: Array,
    neighbours: Neighbours,
    corpus: Corpus,
    slots: int,
    near_duplicate: float,
) -> Iterator[tuple[int, int]]:
    """What one query draws in, each with the chunk that it comes with: families in plan order, until slots are taken.

    Only what the query may see and what serves the family itself comes, no text twice, and never a near copy.
    """
    taken, texts, vectors = list(leads), as_numpy(corpus.column("text_id")), read_only(corpus.embeddings)
    for family in shape.families:
        serves = corpus.members(family) & visible
        lead = next((row for row in leads if serves[row]), -1)
        for row in neighbours.around(lead, family.keep_together) if lead >= 0 else ():
            may_come = len(taken) < slots and serves[row] and texts[row] not in texts[taken]
            if may_come and not any(near_copies(vectors, one, row, near_duplicate) for one in taken):
                taken.append(row)
                yield row, lead
