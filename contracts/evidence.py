"""Evidence: the plan of families, their coverage, grades, and the cited context."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import Field, model_validator

from contracts.candidates import Rank
from contracts.params import Count, Params
from contracts.query import Pair, Text
from contracts.rules import Ranked, Rule, Sorted, Unique, UniqueWithin
from contracts.table import Int32, Row

Share = Annotated[float, Ge(0), Le(1)]
Grade = Literal["correct", "ambiguous", "incorrect"]


class Family(Params):
    """A kind of source that a question needs.

    A chunk belongs to it when `source` (an RE2 pattern, found anywhere in the chunk's source) and
    every equality of `metadata` hold; at least one of the two must be given. `authority` lists the
    tiers that may serve the family; None allows all.
    """

    name: Text
    source: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    rescue_query: Text
    wanted: Count = 1
    depth: Count = 20
    authority: Annotated[list[Annotated[int, Ge(-(2**31)), Lt(2**31)]], MinLen(1)] | None = None

    @model_validator(mode="after")
    def _recognisable(self) -> Self:
        if self.source is None and not self.metadata:
            raise ValueError("a family needs `source`, `metadata` or both")
        return self


class Shape(Params):
    """A kind of question: recognised when any RE2 pattern is found in its text, case ignored."""

    name: Text
    recognise: Annotated[list[str], MinLen(1)]
    families: Annotated[list[Family], MinLen(1)]

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [family.name for family in self.families]
        if len(set(names)) != len(names):
            raise ValueError(f"family names must differ within a shape, got {names}")
        return self


class EvidencePlan(Params):
    """Which families of sources each shape of question needs; the first shape that matches is taken."""

    name: Text
    version: Text
    shapes: list[Shape]

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        names = [shape.name for shape in self.shapes]
        if len(set(names)) != len(names):
            raise ValueError(f"shape names must differ, got {names}")
        return self


class RescueHit(Row):
    """A chunk that a rescue search found for a family; `score` is BM25 of the rescue query."""

    rank: Rank
    chunk_id: Text
    score: float


class RescueSearch(Row):
    """One rescue search: it depends on shape, family and scope alone, so that all shards share it."""

    shape: Text
    family: Text
    groups: list[str]
    filters: list[Pair]
    candidates: list[RescueHit]


class FamilyCoverage(Row):
    """How a required family of a query stands after rescue.

    `found` counts members among the fused candidates, `rescued` those that rescue appended.
    """

    family: Text
    wanted: Annotated[Int32, Ge(1)]
    found: Annotated[Int32, Ge(0)]
    rescued: Annotated[Int32, Ge(0)]


class RescuedCandidate(Row):
    """A candidate with its families; `score` is the fusion score, 0 when only rescue found it."""

    rank: Rank
    chunk_id: Text
    score: Annotated[float, Ge(0)]
    families: list[str]
    rescued: bool


class RescuedRanking(Row):
    """What family_rescue writes: the fused candidates in their order, then the rescued ones."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    shape: str | None
    coverage: list[FamilyCoverage]
    candidates: list[RescuedCandidate]


class RerankedCandidate(Row):
    """A candidate with the parts of its blended score.

    `score` = min(1, w1 cross_encoder + w2 retrieval + w3 lexical + exact_bonus); a null cross_encoder
    was not asked (no model, or beyond `cross_encoder_depth`). `selected_rank` is its place in the
    selection under coverage, null when not selected.
    """

    rank: Rank
    chunk_id: Text
    score: Share
    cross_encoder: Share | None
    retrieval: Share
    lexical: Share
    exact_bonus: Share
    families: list[str]
    rescued: bool
    selected_rank: Rank | None


class RerankedRanking(Row):
    """What blended_rerank writes: all candidates by falling score, ties by chunk id, and the selection.

    `required` names the families that the question needs; `slots` is how many passages may be selected.
    `max_per_document` and `near_duplicate` are the bounds of the selection as they were set, null for
    none: whoever fills a slot later takes no chunk of a document that has as many passages, and none
    whose cosine with a passage reaches it. `lexical_weight` is what word overlap weighs in the score, after
    rescaling: a passage found later, without fusion score and model, scores overlap times this weight.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
        Sorted("candidates", "score"),
    )

    query_id: Text
    rerank_status: Literal["cross_encoder", "no_cross_encoder", "disabled"]
    required: list[str]
    slots: Annotated[Int32, Ge(1)]
    max_per_document: Annotated[Int32, Ge(1)] | None
    near_duplicate: Annotated[float, Gt(0), Le(1)] | None
    lexical_weight: Share
    candidates: list[RerankedCandidate]


class GradedPassage(Row):
    """A graded passage; `score` is the grader's, `kept` says whether it stays for the context.

    `origin`: `selected` by blended_rerank, `next_ranked` behind the selection, or found by the
    `corrective` search.
    """

    rank: Rank
    chunk_id: Text
    score: Share
    grade: Grade
    kept: bool
    origin: Literal["selected", "next_ranked", "corrective"]
    families: list[str]


class GradedSelection(Row):
    """What crag_grading writes: every graded passage, kept or not, and the action before and after correction.

    `action_before` is over the selection, `action` over the passages that are kept: correct if any is,
    incorrect if all are or none is left, else ambiguous.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    action_before: Grade
    action: Grade
    corrective_query: str | None
    corrective_outcome: Literal["not_needed", "ok", "no_match", "disabled"]
    candidates: list[GradedPassage]


class ContextPassage(Row):
    """One cited passage: where it stands, and what every stage said of it.

    `span_start` and `span_end` are character offsets into the chunk's text; a null rank or score
    means that the stage did not see the passage.
    """

    rank: Rank
    chunk_id: Text
    source: Text
    document_id: Text
    title: str | None
    version: str | None
    authority_tier: int | None
    text: Text
    span_start: Annotated[Int32, Ge(0)]
    span_end: Annotated[Int32, Ge(1)]
    families: list[str]
    origin: Literal["selected", "next_ranked", "corrective"]
    grade: Grade
    restored: bool
    restored_because: str | None
    oversample_rank: Rank | None
    oversample_score: float | None
    greedy_selection_rank: Rank | None
    greedy_selection_score: float | None
    sparse_search_rank: Rank | None
    sparse_search_score: float | None
    rrf_merge_rank: Rank | None
    rrf_merge_score: float | None
    rescued: bool
    blended_rerank_rank: Rank | None
    blended_rerank_score: float | None
    crag_grading_rank: Rank
    crag_grading_score: Share


class Context(Row):
    """What context writes, and what users read: one query with its final passages.

    `evidence_family_recall` = covered / required families, null when none is required.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    text: Text
    shape: str | None
    action: Grade
    required: list[str]
    covered: list[str]
    missing: list[str]
    evidence_family_recall: Share | None
    tokens: Annotated[int, Ge(0)]
    candidates: list[ContextPassage]
