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
GradedBy = Literal["score", "llm", "file"]


class Family(Params):
    """A kind of source that a question needs.

    A chunk belongs to it when `source` (an RE2 pattern, found anywhere in the chunk's source) and
    every equality of `metadata` hold; at least one of the two must be given. `authority` lists the
    tiers that may serve the family; None allows all. With `keep_together` the chunks that stand up to so
    many places before and behind the family's chosen one in its document (by chunk_index) are selected
    with it, the nearest first and what follows first, while there are slots; 0 draws in nothing.
    """

    name: Text
    source: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    rescue_query: Text
    wanted: Count = 1
    depth: Count = 20
    authority: Annotated[list[Annotated[int, Ge(-(2**31)), Lt(2**31)]], MinLen(1)] | None = None
    keep_together: Annotated[int, Ge(0), Le(100)] = 0

    @model_validator(mode="after")
    def _recognisable(self) -> Self:
        if self.source is None and not self.metadata:
            raise ValueError("a family needs `source`, `metadata` or both")
        return self


class Combination(Params):
    """Concepts of a shape that a question must touch, in any order: `at_least` so many; None wants all."""

    of: Annotated[list[Text], MinLen(1)]
    at_least: Count | None = None

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if len(set(self.of)) != len(self.of):
            raise ValueError(f"a combination names each concept once, got {self.of}")
        if self.at_least is not None and self.at_least > len(self.of):
            raise ValueError(f"at_least must not exceed the {len(self.of)} concepts, got {self.at_least}")
        return self


class Shape(Params):
    """A kind of question and the families it needs.

    It is recognised when one entry of `recognise` holds: an RE2 pattern that is found in the question, or a
    combination of `concepts`, each of them RE2 patterns of which one is found; case is ignored.
    `max_per_document` is that of blended_rerank for questions of this shape; None leaves it to the setting.
    """

    name: Text
    concepts: dict[Text, Annotated[list[Text], MinLen(1)]] = Field(default_factory=dict)
    recognise: Annotated[list[Text | Combination], MinLen(1)]
    families: Annotated[list[Family], MinLen(1)]
    max_per_document: Count | None = None

    @model_validator(mode="after")
    def _concepts_are_known(self) -> Self:
        named = [name for entry in self.recognise if isinstance(entry, Combination) for name in entry.of]
        unknown = [name for name in named if name not in self.concepts]
        if unknown:
            raise ValueError(f"recognise names concepts that the shape does not have: {unknown}")
        return self

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
    """How a required family of a query stands after rescue, and why.

    `found` counts members among the fused candidates, `rescued` those that rescue appended. `outcome`:
    `enough` were fused; `rescued` made up what lacked; `too_few`, since the rescue search found no more;
    `no_hit`, since it found none, although the query may see some; `no_chunk` that the query may see serves it.
    """

    family: Text
    wanted: Annotated[Int32, Ge(1)]
    found: Annotated[Int32, Ge(0)]
    rescued: Annotated[Int32, Ge(0)]
    outcome: Literal["enough", "rescued", "too_few", "no_hit", "no_chunk"]


class RescuedCandidate(Row):
    """A candidate with its families; `score` is the fusion score, 0 when only rescue found it.

    `family_ranks` are its ranks among what the rescue search of each of its `families` found, 0 where it did not.
    """

    rank: Rank
    chunk_id: Text
    score: Annotated[float, Ge(0)]
    families: list[str]
    family_ranks: list[Annotated[Int32, Ge(0)]]
    rescued: bool


class RescuedRanking(Row):
    """What family_rescue writes: the fused candidates in their order, then the rescued ones.

    `recognised_by` tells what of the shape's recognisers was found in the question, null without a shape.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Unique("query_id"),
        Ranked("candidates"),
        UniqueWithin("candidates", "chunk_id"),
    )

    query_id: Text
    shape: str | None
    recognised_by: str | None
    coverage: list[FamilyCoverage]
    candidates: list[RescuedCandidate]


class RerankedCandidate(Row):
    """A candidate with the parts of its blended score.

    `score` = min(1, w1 cross_encoder + w2 retrieval + w3 lexical + exact_bonus); a null cross_encoder
    was not asked (no model, or beyond `cross_encoder_depth`). `absolute_score` is what a grade is taken from,
    never stretched by `min_max`: the model's probability where a model takes part (null where it was not asked),
    else the blended score. `selected_rank` is its place in the selection under coverage, null when not selected.
    `drawn_in_by` names the chunk that a neighbour was drawn in with, null for the others; a neighbour that no
    ranking had is added to the candidates.
    """

    rank: Rank
    chunk_id: Text
    score: Share
    cross_encoder: Share | None
    retrieval: Share
    lexical: Share
    exact_bonus: Share
    absolute_score: Share | None
    families: list[str]
    rescued: bool
    selected_rank: Rank | None
    drawn_in_by: str | None


class RerankedRanking(Row):
    """What blended_rerank writes: all candidates by falling score, ties by chunk id, and the selection.

    `required` names the families that the question needs; `slots` is how many passages may be selected.
    `max_per_document` and `near_duplicate` are the bounds of the selection as they were set, null for
    none: whoever fills a slot later takes no chunk of a document that has as many passages, and none
    whose cosine with a passage reaches it. `spread` says whether the selection was spread over documents, since
    the best-ranked passage lacks too many of the query's terms; `max_per_document` is then 1. `lexical_weight` is
    what word overlap weighs in the score, after rescaling: a passage found later, without fusion score and model,
    scores overlap times this weight.
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
    spread: bool
    lexical_weight: Share
    candidates: list[RerankedCandidate]


class GradedPassage(Row):
    """A graded passage; `score` is the model's or the blended one, `kept` says whether it stays for the context.

    `graded_by` says where the grade comes from: the bands of the `score`, an `llm`, or a `file` of grades, such
    as people's decisions. `origin`: `selected` by blended_rerank, `next_ranked` behind the selection, or found by
    the `corrective` search.
    """

    rank: Rank
    chunk_id: Text
    score: Share
    grade: Grade
    graded_by: GradedBy
    kept: bool
    origin: Literal["selected", "next_ranked", "corrective"]
    families: list[str]


class GradedSelection(Row):
    """What crag_grading writes: every graded passage, kept or not, and the action before and after correction.

    `action_before` is over the selection, `action` over the passages that are kept: correct if any is,
    incorrect if all are or none is left, else ambiguous. `corrective_outcome` is `not_needed` where the first
    action is correct, and `no_room` where it is not but every slot is taken, so that no hit could come in.
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
    corrective_outcome: Literal["not_needed", "no_room", "ok", "no_match", "disabled"]
    candidates: list[GradedPassage]


class Span(Row):
    """A part of a chunk's text: its characters from `start` up to `end`."""

    start: Annotated[Int32, Ge(0)]
    end: Annotated[Int32, Ge(1)]


class ContextPassage(Row):
    """One cited passage: where it stands, and what every stage said of it.

    `text` is the `spans` of the chunk's text in their order, with a line break between them; there is one span
    unless strips were left out. `span_start` is where the first begins and `span_end` where the last ends. All
    are character offsets. A null rank or score means that the stage did not see the passage.
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
    spans: Annotated[list[Span], MinLen(1)]
    families: list[str]
    origin: Literal["selected", "next_ranked", "corrective"]
    grade: Grade
    graded_by: GradedBy
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
