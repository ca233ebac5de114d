"""rrf_merge: reciprocal rank fusion of the diverse and the keyword ranking, in exact order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Le
from pydantic import model_validator

from contracts.candidates import FusedRanking
from contracts.columns import Array, IntArray, Ragged, as_numpy, column, first_repeat, offsets_from_lengths, ragged
from contracts.errors import ConfigurationError, ContractError, StageError
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

_SOURCES = ("greedy_selection", "sparse_search")
# Float sums of a few terms are right to about 1e-15: scores further apart than this are in their exact order.
_ROUNDING = 1e-12
# Within these no score overflows or vanishes.
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-100, 1e100
_LARGEST_CONSTANT = 10**9
_AN_ID = "a string that is not empty"

Weight = Annotated[float, Ge(0), Le(_LARGEST_WEIGHT)]


class Params(BaseParams):
    """Settings of rrf_merge.

    Attributes:
        greedy_selection_weight: weight of the diverse ranking, 0 or from 1e-100 to 1e100. At 0 it takes no
            part; far above the other weight the fused order is this list's, with the other list behind it.
        sparse_search_weight: the same for the keyword ranking. Only the ratio of the two changes the order.
        rank_constant: added to every rank, from 1 to 1e9. Small lets the first ranks decide; large makes ranks
            count alike, so that standing in both lists counts most.
        rank_window: how deep each list is taken in, >= 1. Small drops what only one list found deep down.
        limit: how many fused candidates come out for each query, >= 1.
    """

    greedy_selection_weight: Weight = 0.4
    sparse_search_weight: Weight = 1.0
    rank_constant: Annotated[int, Ge(1), Le(_LARGEST_CONSTANT)] = 5
    rank_window: Count = 100
    limit: Count = 100

    @model_validator(mode="after")
    def _some_list_takes_part(self) -> Params:
        for name, weight in zip(_SOURCES, self.weights, strict=True):
            if 0 < weight < _LEAST_WEIGHT:
                raise ValueError(f"{name}_weight: want 0 or at least {_LEAST_WEIGHT}, got {weight}")
        if not any(self.weights):
            raise ValueError("greedy_selection_weight, sparse_search_weight: both are 0, want one above 0")
        return self

    @property
    def weights(self) -> tuple[float, float]:
        """The weights in the order of the lists."""
        return self.greedy_selection_weight, self.sparse_search_weight


def reciprocal_rank_fusion(
    queries: IntArray, ids: IntArray, ranks: Array, weights: Sequence[float], rank_constant: int
) -> tuple[IntArray, Array]:
    """Scores the candidates of many queries at once and puts them in exact order.

    score = sum over the lists that hold the candidate of weight / (rank_constant + rank), in float64 and in
    the order of the lists. Where float scores are within rounding of each other (neighbours at most 1e-12
    apart, relatively), the candidates are compared as exact fractions of the weights and ranks, and show the
    float nearest to that fraction. So neither order nor ties depend on the order of summation.

    Args:
        queries: (candidates,) int64, the query of each candidate.
        ids: (candidates,) int64, ascending as the chunk ids ascend; once in a query.
        ranks: (candidates, lists) int64 from 1, and 0 where the list does not hold the candidate.
        weights: one for each list; a list of weight 0 comes with ranks of 0 alone.
        rank_constant: >= 1.

    Returns:
        order (candidates,) by (query, -exact score, id), and scores (candidates,) float64 in that order.

    Source: Cormack, Clarke and Buettcher 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual
    rank learning methods", with its constant 60. What differs: the weights, and exact ties.
    """
    scores = np.zeros(len(ids))
    for place, weight in enumerate(weights):
        held = ranks[:, place] > 0
        scores += np.where(held, weight / (rank_constant + ranks[:, place]), 0.0)
    order = np.lexsort((ids, -scores, queries))
    return _settle_near_ties(order, scores, queries, ids, ranks, weights, rank_constant)


def _settle_near_ties(
    order: IntArray,
    scores: Array,
    queries: IntArray,
    ids: IntArray,
    ranks: Array,
    weights: Sequence[float],
    rank_constant: int,
) -> tuple[IntArray, Array]:
    """Orders each chain of neighbours that rounding cannot tell apart by their exact scores, then by id."""
    ordered = scores[order]
    near = (np.diff(queries[order]) == 0) & (ordered[:-1] - ordered[1:] <= _ROUNDING * ordered[:-1])
    chained = np.zeros(len(order), dtype=bool)
    chained[:-1] |= near
    chained[1:] |= near
    members = order[chained]
    if not len(members):
        return order, ordered
    chain = np.concatenate(([0], np.cumsum(~near)))[chained]
    # Few distinct ranks make many candidates: each exact sum is done once.
    distinct, vector = np.unique(ranks[members], axis=0, return_inverse=True)
    exact = [_exact_score(row, weights, rank_constant) for row in distinct.tolist()]
    place = {score: number for number, score in enumerate(sorted(set(exact), reverse=True))}
    vector = vector.reshape(-1)
    by_score = np.array([place[score] for score in exact])[vector]
    settled = np.lexsort((ids[members], by_score, chain))
    order, ordered = order.copy(), ordered.copy()
    order[chained] = members[settled]
    ordered[chained] = np.array([float(score) for score in exact])[vector[settled]]
    return order, ordered


def _exact_score(ranks: Sequence[int], weights: Sequence[float], rank_constant: int) -> Fraction:
    shares = (Fraction(weight) / (rank_constant + rank) for weight, rank in zip(weights, ranks, strict=True) if rank)
    return sum(shares, Fraction(0))


def fuse(
    rankings: Sequence[Sequence[str]], weights: Sequence[float] | None = None, rank_constant: int = 60
) -> list[tuple[str, float]]:
    """Fuses any number of rankings of one query: ids with their scores, best first, ties by ascending id.

    Args:
        rankings: each the ids of one list, best first; an empty list is fine.
        weights: one for each ranking, 0 or from 1e-100 to 1e100; at 0 a list takes no part. All 1 when None.
        rank_constant: from 1 to 1e9.

    Raises:
        ContractError: an id that is no string, is empty, or stands twice in one ranking.
        ConfigurationError: weights or a rank constant that make no score.

    Source: as `reciprocal_rank_fusion`, which it calls.
    """
    weights = [1.0] * len(rankings) if weights is None else weights
    _check_settings(len(rankings), weights, rank_constant)
    flat = [(number, place, name) for number, ranking in enumerate(rankings) for place, name in enumerate(ranking)]
    for number, place, name in flat:
        if not isinstance(name, str) or not name:
            raise _refused(f"rankings[{number}]", place, name, _AN_ID)
    names = sorted({name for _, _, name in flat})
    code = {name: number for number, name in enumerate(names)}
    columns = np.array([(0, code[name], number, place + 1) for number, place, name in flat], np.int64).reshape(-1, 4)
    entries = _Entries(*columns.T)
    repeat = entries.first_repeat()
    if repeat is not None:
        number, place, name = flat[repeat]
        raise _refused(f"rankings[{number}]", place, name, "each id once in a list")
    queries, ids, ranks = _join(entries.take(np.asarray(weights)[entries.lists] > 0), len(weights))
    order, scores = reciprocal_rank_fusion(queries, ids, ranks, weights, rank_constant)
    return [(names[number], score) for number, score in zip(ids[order].tolist(), scores.tolist(), strict=True)]


def _check_settings(lists: int, weights: Sequence[float], rank_constant: int) -> None:
    integer = isinstance(rank_constant, int) and not isinstance(rank_constant, bool)
    if not integer or not 1 <= rank_constant <= _LARGEST_CONSTANT:
        want = f"an integer from 1 to {_LARGEST_CONSTANT}"
        raise _unusable("rank_constant", repr(rank_constant), want, "The usual constant is 60.")
    usable = all(weight == 0 or _LEAST_WEIGHT <= weight <= _LARGEST_WEIGHT for weight in weights)
    if len(weights) != lists or not usable or (lists and not any(weights)):
        want = f"{lists} numbers, each 0 or from {_LEAST_WEIGHT} to {_LARGEST_WEIGHT}, and one above 0"
        raise _unusable("weights", list(weights), want, "Give each list one weight.")


def _unusable(where: str, got: object, want: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(where, "cannot be used for fusion", got=got, want=want, next_step=next_step)


def _refused(where: str, row: int | None, value: object, want: str) -> ContractError:
    return ContractError(stage="rrf_merge", column=where, row=row, value=value, want=want)


@dataclass(frozen=True, eq=False)
class _Entries:
    """The entries of all lists and queries, list by list: (entries,) int64 each, ids as ascending numbers."""

    queries: IntArray
    ids: IntArray
    lists: IntArray
    ranks: IntArray

    def take(self, kept: Array) -> _Entries:
        """The entries that a (entries,) bool mask keeps."""
        return _Entries(self.queries[kept], self.ids[kept], self.lists[kept], self.ranks[kept])

    def first_repeat(self) -> int | None:
        """The first entry whose id stood before in its list, or None."""
        height, width = int(self.queries.max(initial=0)) + 1, int(self.ids.max(initial=0)) + 1
        return first_repeat((self.lists * height + self.queries) * width + self.ids)


def _join(entries: _Entries, lists: int) -> tuple[IntArray, IntArray, Array]:
    """Entries as candidates by (query, id): queries and ids (candidates,), ranks (candidates, lists), 0 for none."""
    width = int(entries.ids.max(initial=0)) + 1
    candidates, place = np.unique(entries.queries * width + entries.ids, return_inverse=True)
    ranks = np.zeros((len(candidates), lists), dtype=np.int64)
    ranks[place, entries.lists] = entries.ranks
    return candidates // width, candidates % width, ranks


def rrf_merge_table(*, greedy_selection: pa.Table, sparse_search: pa.Table, params: Params) -> StageOutput:
    """Fuses the two lists of every query.

    Raises:
        ContractError: tables of different queries, an id twice in a list, a null or empty id, or candidates
            beside an outcome other than `ok`.
        StageError: a list that takes part has the outcome `failed`.
        ConfigurationError: a query for which no list takes part.
    """
    query_ids = column(greedy_selection, "query_id")
    if not query_ids.equals(column(sparse_search, "query_id")):
        raise _refused("sparse_search.query_id", None, "other queries", "those of greedy_selection in their order")
    lists = (ragged(greedy_selection, "candidates"), ragged(sparse_search, "candidates"))
    outcomes = (
        np.where(lists[0].lengths > 0, "ok", "no_match").astype(object),
        np.array(column(sparse_search, "outcome").to_pylist(), dtype=object),
    )
    best_possible = _best_possible(query_ids, lists, outcomes, params)
    entries, chunk_ids = _entries(lists)
    weighted = np.array(params.weights)[entries.lists] > 0
    taken = weighted & (entries.ranks <= params.rank_window)
    queries, ids, ranks = _join(entries.take(taken), len(lists))
    order, scores = reciprocal_rank_fusion(queries, ids, ranks, params.weights, params.rank_constant)
    fused = Ragged(offsets_from_lengths(np.bincount(queries, minlength=len(query_ids))), order)
    kept = fused.positions < params.limit
    order = order[kept]
    candidates = {
        "rank": (fused.positions[kept] + 1).astype(np.int32),
        "chunk_id": chunk_ids.take(pa.array(ids[order])),
        # Settled to its exact value, a score can lie one rounding above the float sum that is the best possible.
        "score": np.minimum(scores[kept], best_possible[queries[order]]),
        "greedy_selection_rank": _nullable(ranks[order, 0]),
        "sparse_search_rank": _nullable(ranks[order, 1]),
    }
    removed = {
        "weight_zero": int((~weighted).sum()),
        "beyond_window": int((weighted & ~taken).sum()),
        "merged": int(taken.sum()) - len(ids),
        "beyond_limit": len(ids) - len(order),
    }
    table = build_table(
        FusedRanking,
        {
            "query_id": query_ids,
            "candidates": Ragged(offsets_from_lengths(np.minimum(fused.lengths, params.limit)), candidates),
            "best_possible": best_possible,
            "greedy_selection_outcome": pa.array(outcomes[0], pa.string()),
            "sparse_search_outcome": pa.array(outcomes[1], pa.string()),
        },
    )
    removed = {reason: count for reason, count in removed.items() if count}
    return StageOutput(table, Account(candidates_in=len(taken), added={}, removed=removed, candidates_out=len(order)))


def _nullable(ranks: Array) -> pa.Array:
    return pa.array(ranks.astype(np.int32), mask=ranks == 0)


def _best_possible(query_ids: pa.Array, lists: Sequence[Ragged], outcomes: Sequence[Array], params: Params) -> Array:
    """(queries,) float64: the score of a passage that stands first in every list that takes part."""
    best = np.zeros(len(query_ids))
    for name, one, outcome, weight in zip(_SOURCES, lists, outcomes, params.weights, strict=True):
        failed = np.flatnonzero(outcome == "failed")
        if weight and len(failed):
            raise StageError(
                f"rrf_merge, {name} of query {query_ids[int(failed[0])]}",
                "the retriever failed, and a failed list is not an empty one",
                got=f"the outcome failed for {len(failed)} of {len(outcome)} queries",
                want="ok, no_match or disabled",
                next_step=f"Rerun from {name}, or give it the weight 0.",
            )
        unexpected = (outcome != "ok") & (one.lengths > 0)
        if unexpected.any():
            row = int(np.argmax(unexpected))
            raise _refused(f"{name}.outcome", row, outcome[row], "ok where there are candidates")
        best += np.where(outcome == "disabled", 0.0, weight / (params.rank_constant + 1))
    if not best.all():
        got = f"sparse_search disabled and greedy_selection_weight {params.greedy_selection_weight}"
        raise _unusable("rrf_merge", got, "one list that is enabled and has a weight above 0", "Change either setting.")
    return best


def _entries(lists: Sequence[Ragged]) -> tuple[_Entries, pa.Array]:
    """The entries of the lists, and the chunk ids in ascending order, by their numbers."""
    values = [one.values["chunk_id"] for one in lists]
    paths = [f"{name}.candidates.chunk_id" for name in _SOURCES]
    for path, one, names in zip(paths, lists, values, strict=True):
        if not pa.types.is_string(names.type):
            raise _refused(path, None, str(names.type), _AN_ID)
        empty = as_numpy(pc.fill_null(pc.equal(names, ""), True))
        if empty.any():
            first = int(np.argmax(empty))
            raise _refused(path, int(one.rows[first]), names[first].as_py(), _AN_ID)
    encoded = pa.concat_arrays(values).dictionary_encode()
    ascending = as_numpy(pc.array_sort_indices(encoded.dictionary))
    entries = _Entries(
        queries=np.concatenate([one.rows for one in lists]),
        ids=np.argsort(ascending)[as_numpy(encoded.indices)],
        lists=np.repeat(np.arange(len(lists)), [len(names) for names in values]),
        ranks=np.concatenate([one.numpy("rank").astype(np.int64) for one in lists]),
    )
    repeat = entries.first_repeat()
    if repeat is not None:
        path, name = paths[entries.lists[repeat]], encoded[repeat].as_py()
        raise _refused(path, int(entries.queries[repeat]), name, "each id once in a list")
    return entries, encoded.dictionary.take(pa.array(ascending))


def _scores_fall(_inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    lists = ragged(output, "candidates")
    scores = lists.numpy("score")
    wrong = scores > as_numpy(column(output, "best_possible"))[lists.rows]
    wrong[1:] |= (lists.positions[1:] > 0) & (scores[1:] > scores[:-1])
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    return f"row {lists.rows[first]}, rank {lists.positions[first] + 1} has the score {scores[first]}"


STAGE = Stage(
    name="rrf_merge",
    summary="Fuses the diverse and the keyword ranking by weighted reciprocal ranks, in exact order.",
    owner="retrieval",
    reads={
        "greedy_selection": ("query_id", "candidates.rank", "candidates.chunk_id"),
        "sparse_search": ("query_id", "outcome", "candidates.rank", "candidates.chunk_id"),
    },
    writes=FusedRanking,
    params=Params,
    run=rrf_merge_table,
    success=(
        SAME_QUERIES,
        SuccessCheck("scores never rise within a list, and none is above the best possible", _scores_fall),
    ),
    on_partial_failure=(
        "An empty list is fused as it is. One `failed` list stops its shard, which writes nothing and is run again "
        "after the retriever: a fusion of half the evidence would look like a result."
    ),
    known_failure=(
        "A weak list at full weight pulls the fused ranking below its better input: `dartflow evaluate` shows "
        "rrf_merge under sparse_search. Lower that list's weight."
    ),
    roll_back="Rerun from rrf_merge with the earlier weights; both lists are reused.",
)
