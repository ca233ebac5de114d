"""Candidates on their way from search to fusion; every list reads `rank`, `chunk_id`, `score`, ranks from 1."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from contracts.query import Text
from contracts.rules import Ranked, Rule, Sorted, Triangle, Unique, UniqueWithin
from contracts.table import Float32, Int32, Row

Rank = Annotated[Int32, Ge(1)]
Distance = Annotated[Float32, Ge(0), Le(2)]
Outcome = Literal["ok", "no_match", "failed", "disabled"]


class DenseCandidate(Row):
    """A chunk found by dense search; `score` is the cosine similarity."""

    rank: Rank
    chunk_id: Text
    score: Annotated[Float32, Ge(-1), Le(1)]


class Candidates(Row):
    """What oversample writes: the nearest chunks of each query, by falling similarity, ties by chunk id."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
        Sorted("candidates", "score"),
    )

    query_id: Text
    candidates: list[DenseCandidate]


class Distances(Row):
    """What distance_matrices writes, in the order of the candidates.

    `document_distances` is the lower triangle without its diagonal, row by row:
    d(1,0), d(2,0), d(2,1), d(3,0) ...
    """

    rules: ClassVar[tuple[Rule, ...]] = (Unique("query_id"), Triangle("query_distances", "document_distances"))

    query_id: Text
    query_distances: list[Distance]
    document_distances: list[Distance]


class LogProbabilities(Row):
    """What log_normal writes: log densities in the layout of `Distances`.

    `log_probability_at_zero` is the density at distance 0, of a candidate to itself: the diagonal that
    the triangle leaves out.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Triangle("query_log_probabilities", "document_log_probabilities"),
    )

    query_id: Text
    log_probability_at_zero: float
    query_log_probabilities: list[float]
    document_log_probabilities: list[float]


class Pick(Row):
    """A picked candidate; `score` is the log of what it added to the objective, null when it added nothing."""

    rank: Rank
    chunk_id: Text
    score: float | None


class Selection(Row):
    """What greedy_selection writes: the picks in order; `shortfall` is how many fewer than k there were."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    candidates: list[Pick]
    shortfall: Annotated[Int32, Ge(0)]


class KeywordCandidate(Row):
    """A chunk that shares a term with the query; `score` is BM25 and may be negative in a tiny corpus."""

    rank: Rank
    chunk_id: Text
    score: float


class KeywordRanking(Row):
    """What sparse_search writes, by falling score, ties by chunk id; `outcome` tells silence from failure."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
        Sorted("candidates", "score"),
    )

    query_id: Text
    candidates: list[KeywordCandidate]
    outcome: Outcome


class FusedCandidate(Row):
    """A fused candidate; `score` is the sum of its reciprocal ranks, a null rank added nothing."""

    rank: Rank
    chunk_id: Text
    score: Annotated[float, Gt(0)]
    greedy_selection_rank: Rank | None
    sparse_search_rank: Rank | None


class FusedRanking(Row):
    """What rrf_merge writes: one ranking of both lists, in exact order, ties by chunk id.

    `best_possible` is the score of a passage that stands first in every list that took part.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    candidates: list[FusedCandidate]
    best_possible: Annotated[float, Gt(0)]
    greedy_selection_outcome: Outcome
    sparse_search_outcome: Outcome
