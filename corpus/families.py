"""families: which of the families of its query a chunk may serve, and how high their searches ranked it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import Array, IntArray, Ragged, as_numpy, offsets_from_lengths
from contracts.evidence import EvidencePlan
from corpus.corpus import Corpus


def families_by_plan(
    queries: IntArray, rows: IntArray, shapes: pa.Array, plan: EvidencePlan | None, corpus: Corpus
) -> pa.ListArray:
    """(passages,) lists of the families of each query's shape that each chunk may serve, in plan order.

    Args:
        queries, rows: (passages,) int64.
        shapes: (queries,) the name of each query's shape, null for none.
        plan: None has no families.
        corpus: has the chunks.
    """
    owners, names = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=object)]
    shape_of = shapes.take(pa.array(queries, pa.int64()))
    for shape in () if plan is None else plan.shapes:
        places = np.flatnonzero(as_numpy(pc.fill_null(pc.equal(shape_of, shape.name), False)))
        for family in shape.families if len(places) else ():
            owners.append(places[corpus.members(family)[rows[places]]])
            names.append(np.full(len(owners[-1]), family.name, dtype=object))
    passages = np.concatenate(owners)
    order = np.argsort(passages, kind="stable")
    offsets = offsets_from_lengths(np.bincount(passages, minlength=len(rows)))
    flat = pa.array(np.concatenate(names)[order], pa.string())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat)


def ranks_by_family(candidates: Ragged, required: Ragged) -> Array:
    """(candidates, most required families) int64: its rank in the search of each of its query's required families.

    0 where that search did not find it, -1 where it is no member of the family.

    Args:
        candidates: of each query, with the lists `families` and `family_ranks` of each candidate.
        required: of each query, with the `family`, in plan order.
    """
    names = pc.unique(required.values["family"])
    asked = required.rows * len(names) + as_numpy(pc.index_in(required.values["family"], value_set=names))
    lists = candidates.values["families"]
    owners = as_numpy(pc.list_parent_indices(lists))
    served = pc.index_in(pc.list_flatten(lists), value_set=names)
    keys = candidates.rows[owners] * len(names) + as_numpy(pc.fill_null(served, len(names)))
    order = np.argsort(asked)
    place = np.searchsorted(asked[order], keys)
    known = np.append(asked[order], -1)[place] == keys
    ranks = np.full((len(candidates.rows), int(required.lengths.max(initial=0))), -1, dtype=np.int64)
    found = as_numpy(pc.list_flatten(candidates.values["family_ranks"]))
    ranks[owners[known], required.positions[order[place[known]]]] = found[known]
    return ranks
