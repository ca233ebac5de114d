"""crag_grading: grades the selected passages, lets incorrect ones leave, and corrects the selection once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Le
from pydantic import model_validator

from contracts.columns import Array, IntArray, Ragged, as_numpy, column, offsets_from_lengths, ragged
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan, GradedSelection
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.corpus import Corpus, KeywordSearch
from corpus.families import families_by_plan
from corpus.graded_passages import Bounds, GradedPassages
from corpus.grading import CORRECT, GRADERS, GRADES, INCORRECT, PassageGrader
from corpus.query_rewriting import rewrite_queries
from corpus.scope import Scopes
from corpus.selection import NO_BOUND
from models.cross_encoder import CrossEncoder, probabilities
from models.grader import Grader
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

_ORIGINS = np.array(["selected", "next_ranked", "corrective"])
_SELECTED, _NEXT_RANKED, _CORRECTIVE = 0, 1, 2


class Params(BaseParams):
    """Settings of crag_grading.

    Attributes:
        enabled: False is a stated pass-through: every selected passage is graded by its score and kept, no
            grader is asked, nothing is filled in or searched, and `corrective_outcome` reads `disabled`.
        upper: a passage is correct from this score on, in [lower, 1]. At `lower` nothing is ambiguous;
            at 1 next to nothing is correct, so that nearly every query is searched again.
        lower: a passage is incorrect below this score, in [0, upper]. At 0 no passage ever leaves; at
            `upper` every passage that is not correct leaves. Beyond the selection no grader is asked of
            one that is incorrect by its score.
        corrective_depth: how many hits the corrective search looks at, >= 1. At 1 its best hit alone;
            deeper reaches past hits that have been considered already.
        corrective_terms: how many of its rarest terms the rewritten query keeps, >= 1. At 1 the rarest
            term alone; at the length of the query only terms unknown to the corpus are dropped.
        corrective_limit: how many new hits of the corrective search are graded, >= 1: each costs a call
            of the cross-encoder, and one of the grader if its score lets it pass. Hits beyond
            `corrective_depth` never are.
    """

    enabled: bool = True
    upper: Annotated[float, Ge(0), Le(1)] = 0.9
    lower: Annotated[float, Ge(0), Le(1)] = 0.01
    corrective_depth: Count = 50
    corrective_terms: Count = 6
    corrective_limit: Count = 5

    @model_validator(mode="after")
    def _lower_first(self) -> Self:
        if self.lower > self.upper:
            raise ValueError(f"lower must not exceed upper, got lower {self.lower} and upper {self.upper}")
        return self


def grade_scores(scores: Array, lower: float, upper: float) -> Array:
    """Grades scores: 2 (correct) from `upper` on, 0 (incorrect) below `lower`, else 1 (ambiguous).

    Args:
        scores: (passages,) float64 in [0, 1]; NaN (not known) reads as 0.
        lower: <= upper.
        upper: in [lower, 1].

    Returns:
        (passages,) int8.

    Source: CRAG (Yan et al. 2024, "Corrective Retrieval Augmented Generation"), section 4.3. There a
    T5 evaluator scores in [-1, 1]; here the score is whatever the grader gives in [0, 1].
    """
    return (scores >= lower).astype(np.int8) + (scores >= upper).astype(np.int8)


def query_actions(queries: IntArray, grades: Array, count: int) -> Array:
    """The action of each of `count` queries: correct if any passage is, incorrect if all are or there is none.

    Args:
        queries: (passages,) int64, the query of each passage.
        grades: (passages,) int8 as `grade_scores` gives them.
        count: number of queries.

    Returns:
        (count,) int8: the strongest grade of each query.
    """
    actions = np.zeros(count, dtype=np.int8)
    np.maximum.at(actions, queries, grades)
    return actions


@dataclass(frozen=True)
class _Shard:
    """What every step of the grading looks at.

    `by_model` says for each query whether the cross-encoder took part in its ranking; `bounds` are those of its
    selection.
    """

    texts: list[str]
    scopes: Scopes
    shapes: pa.Array
    by_model: Array
    lexical_weight: Array
    slots: Array
    bounds: Bounds
    ranking: Ragged
    rows: IntArray
    corpus: Corpus
    cross_encoder: CrossEncoder | None
    grader: PassageGrader
    params: Params

    def known_scores(self) -> Array:
        """(candidates,) float64: the score that blended_rerank leaves, NaN where the model was not asked."""
        return self.ranking.numpy("absolute_score")

    def new_scores(self, queries: IntArray, rows: IntArray) -> Array:
        """(pairs,) float64 in [0, 1]: the model's in one batch call, or the blended score without fusion.

        Where the model took no part the blended score of a passage that no ranking had is its word overlap
        times the weight of that part, on the scale of the ranked ones.
        """
        scores = np.empty(len(rows))
        for_model = self.by_model[queries]
        if for_model.any():
            if self.cross_encoder is None:
                raise ConfigurationError(
                    "stage crag_grading",
                    "has no cross-encoder for passages that blended_rerank ranked with one",
                    next_step="Configure the cross-encoder of the run, or rerun from blended_rerank without one.",
                )
            asked = [self.texts[query] for query in queries[for_model]]
            scores[for_model] = probabilities(self.cross_encoder, asked, self.corpus.passage_texts(rows[for_model]))
        if not for_model.all():
            distinct, places = np.unique(queries[~for_model], return_inverse=True)
            texts = [self.texts[query] for query in distinct]
            overlap = self.corpus.lexical_overlap(texts, places, rows[~for_model])
            scores[~for_model] = self.lexical_weight[queries[~for_model]] * overlap
        return scores

    def known_grades(self, queries: IntArray, rows: IntArray, scores: Array) -> tuple[Array, Array]:
        """Grades that cost nothing, and who gave each: people where they have decided, else the limits of this run."""
        return self.grader.decided(queries, rows, grade_scores(scores, self.params.lower, self.params.upper))

    def ranked(self, places: IntArray, scores: Array, grades: Array, graders: Array, origin: int) -> GradedPassages:
        """Some of the ranked candidates as graded passages; those that are not incorrect are kept."""
        families = self.ranking.values["families"].take(pa.array(places, pa.int64()))
        kept = (grades > INCORRECT) | (not self.params.enabled)
        origins = np.full(len(places), origin)
        queries, rows = self.ranking.rows[places], self.rows[places]
        return GradedPassages(queries, rows, scores, grades, graders, kept, origins, families)


def crag_grading_table(
    *,
    queries: pa.Table,
    family_rescue: pa.Table,
    blended_rerank: pa.Table,
    corpus: Corpus,
    keyword_search: KeywordSearch,
    cross_encoder: CrossEncoder | None,
    grader: Grader | None,
    plan: EvidencePlan | None,
    params: Params,
) -> StageOutput:
    """Grades the selection, fills the slots of incorrect passages, and searches once where nothing is correct.

    A grade is people's where they have decided, else the grader's where it was asked and has a say, else that of
    the score. The grader is asked at most three times a shard: of the selection, of the next-ranked candidates
    that come up for a free slot by their score, and of the corrective hits that pass by theirs. A slot whose
    candidate it refuses stays free for the hits; what it was asked of stays as it answered, so that nothing is
    asked in a circle. No grade is made up for an answer that did not come: its error stops the shard.

    Only queries with a free slot are searched again: a hit could not come in anywhere else.

    A fill never breaks `max_per_document` or `near_duplicate` of blended_rerank, not even where a slot stays
    empty for it. Kept passages count, in the order in which they came; an incorrect one that left does not,
    but its text stays out.

    A candidate that only the corrective search reached counts as added, one that was ranked and comes
    back through it does not.
    """
    ranking = ragged(blended_rerank, "candidates")
    query_texts = queries.column("normalised_text").to_pylist()
    shard = _Shard(
        texts=query_texts,
        scopes=Scopes.of(queries),
        shapes=column(family_rescue, "shape"),
        by_model=as_numpy(pc.equal(column(blended_rerank, "rerank_status"), "cross_encoder")),
        lexical_weight=as_numpy(column(blended_rerank, "lexical_weight")),
        slots=as_numpy(column(blended_rerank, "slots")),
        bounds=Bounds(
            as_numpy(pc.fill_null(column(blended_rerank, "max_per_document"), NO_BOUND)).astype(np.int64),
            as_numpy(pc.fill_null(column(blended_rerank, "near_duplicate"), np.inf)).astype(np.float64),
        ),
        ranking=ranking,
        rows=corpus.rows(ranking.values["chunk_id"]),
        corpus=corpus,
        cross_encoder=cross_encoder,
        grader=PassageGrader(
            grader=grader if params.enabled else None,
            query_ids=queries.column("query_id").to_pylist(),
            texts=query_texts,
            corpus=corpus,
        ),
        params=params,
    )
    count = len(queries)
    graded = _selected(shard)
    before = query_actions(graded.queries, graded.grades, count)
    if params.enabled:
        graded, texts, outcomes = _corrected(shard, graded, before, keyword_search, plan)
    else:
        texts, outcomes = [None] * count, ["disabled"] * count
    # What was seen but found no room helps nobody: the second action is over what stays.
    after = query_actions(graded.queries[graded.kept], graded.grades[graded.kept], count)
    table = build_table(
        GradedSelection,
        {
            "query_id": queries.column("query_id"),
            "action_before": GRADES[before],
            "action": GRADES[after],
            "corrective_query": texts,
            "corrective_outcome": outcomes,
            "candidates": _candidates(graded, count, corpus),
        },
    )
    searched = Counter(outcome for outcome in outcomes if outcome in {"ok", "no_match"})
    calls = {"corrective_search": searched} if searched else {}
    graded_by = Counter(GRADERS[graded.graders].tolist()) if grader is not None else {}
    return StageOutput(table, _account(shard, graded), calls, graded_by)


def _selected(shard: _Shard) -> GradedPassages:
    """The selection in its order; a passage that the model was not asked about is sent to it now.

    All of it goes to the grader, whatever its score.
    """
    places = as_numpy(pc.fill_null(shard.ranking.values["selected_rank"], 0))
    order = np.lexsort((places, shard.ranking.rows))
    chosen = order[places[order] > 0]
    scores = shard.known_scores()[chosen]
    unknown = np.isnan(scores)
    scores[unknown] = shard.new_scores(shard.ranking.rows[chosen[unknown]], shard.rows[chosen[unknown]])
    queries, rows = shard.ranking.rows[chosen], shard.rows[chosen]
    grades, graders = shard.known_grades(queries, rows, scores)
    shard.grader.ask(queries, rows, np.ones(len(rows), dtype=bool), grades, graders)
    return shard.ranked(chosen, scores, grades, graders, _SELECTED)


def _corrected(
    shard: _Shard, graded: GradedPassages, before: Array, keyword_search: KeywordSearch, plan: EvidencePlan | None
) -> tuple[GradedPassages, list[str | None], list[str]]:
    """The passages with what fills free slots, and of each query the corrective query and how its search ended."""
    graded = GradedPassages.joined([graded, _next_ranked(shard, graded)])
    texts: list[str | None] = [None] * len(shard.texts)
    outcomes = ["not_needed"] * len(shard.texts)
    free = graded.room(shard.slots) > 0
    for query in np.flatnonzero((before < CORRECT) & ~free):
        outcomes[query] = "no_room"
    asking, params = np.flatnonzero((before < CORRECT) & free), shard.params
    rewritten = rewrite_queries([shard.texts[query] for query in asking], shard.corpus, params.corrective_terms)
    hits = keyword_search.search(rewritten, shard.scopes.take(asking), params.corrective_depth)
    found = _corrective(shard, graded, asking[hits.rows], hits.values["row"], plan)
    for query, text, matches in zip(asking, rewritten, hits.lengths, strict=True):
        texts[query], outcomes[query] = text, "ok" if matches else "no_match"
    return GradedPassages.joined([graded, found]), texts, outcomes


def _next_ranked(shard: _Shard, selected: GradedPassages) -> GradedPassages:
    """Candidates behind the selection, in rank order until the slots are full; only those with a known score."""
    scores = shard.known_scores()
    options = np.flatnonzero(~np.isnan(scores))
    queries, rows = shard.ranking.rows[options], shard.rows[options]
    grades, graders = shard.known_grades(queries, rows, scores[options])
    usable = grades > INCORRECT
    room = selected.room(shard.slots)
    considered = selected.coming_up(queries, rows, usable, room, shard.bounds, shard.corpus)
    shard.grader.ask(queries, rows, considered & usable, grades, graders)
    options = options[considered]
    return shard.ranked(options, scores[options], grades[considered], graders[considered], _NEXT_RANKED)


def _corrective(
    shard: _Shard, graded: GradedPassages, queries: IntArray, rows: IntArray, plan: EvidencePlan | None
) -> GradedPassages:
    """The first new hits of the corrective search; those not incorrect are kept while there is room.

    A hit that would break a bound beside what is kept already is not read; one that would beside an
    earlier hit has been read by then, and is graded but not kept.
    """
    unread = np.zeros(len(rows), dtype=bool)  # takes no slot yet
    room = np.ones(len(shard.texts), dtype=np.int64)
    limit = min(shard.params.corrective_limit, NO_BOUND)
    new = graded.coming_up(queries, rows, unread, room, shard.bounds, shard.corpus, limit)
    queries, rows = queries[new], rows[new]
    scores = shard.new_scores(queries, rows)
    grades, graders = shard.known_grades(queries, rows, scores)
    shard.grader.ask(queries, rows, grades > INCORRECT, grades, graders)
    usable = grades > INCORRECT
    room = graded.room(shard.slots)
    kept = usable & graded.coming_up(queries, rows, usable, room, shard.bounds, shard.corpus)
    families = families_by_plan(queries, rows, shard.shapes, plan, shard.corpus)
    return GradedPassages(queries, rows, scores, grades, graders, kept, np.full(len(rows), _CORRECTIVE), families)


def _candidates(graded: GradedPassages, count: int, corpus: Corpus) -> Ragged:
    lists = Ragged(offsets_from_lengths(np.bincount(graded.queries, minlength=count)), graded.rows)
    values = {
        "rank": lists.positions + 1,
        "chunk_id": corpus.ids(graded.rows),
        "score": graded.scores,
        "grade": GRADES[graded.grades],
        "graded_by": GRADERS[graded.graders],
        "kept": graded.kept,
        "origin": _ORIGINS[graded.origins],
        "families": graded.families,
    }
    return Ragged(lists.offsets, values)


def _account(shard: _Shard, graded: GradedPassages) -> Account:
    # All but corrective hits come from the ranking; these are looked for among the candidates of their queries alone.
    hits, chunks = graded.origins == _CORRECTIVE, len(shard.corpus.chunks)
    searched = np.zeros(len(shard.texts), dtype=bool)
    searched[graded.queries[hits]] = True
    among = searched[shard.ranking.rows]
    keys = shard.ranking.rows[among] * chunks + shard.rows[among]
    added = int(np.isin(graded.queries[hits] * chunks + graded.rows[hits], keys, invert=True).sum())
    removed = len(shard.rows) + added - len(graded.rows)
    return Account(
        candidates_in=len(shard.rows),
        added={"corrective": added} if added else {},
        removed={"not_selected": removed} if removed else {},
        candidates_out=len(graded.rows),
    )


def _over_full(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    """The success check: which query keeps more passages than it has slots."""
    lists = ragged(output, "candidates")
    kept = np.bincount(lists.rows[lists.numpy("kept").astype(bool)], minlength=len(output))
    over = np.flatnonzero(kept > as_numpy(column(inputs["blended_rerank"], "slots")))
    if not len(over):
        return None
    return f"query {output.column('query_id')[int(over[0])].as_py()} keeps {kept[over[0]]} passages"


STAGE = Stage(
    name="crag_grading",
    summary="Grades the selected passages, fills the slots of incorrect ones, and searches once where none is correct.",
    owner="answer quality",
    reads={
        "queries": ("query_id", "normalised_text", "groups", "filters"),
        "family_rescue": ("query_id", "shape"),
        "blended_rerank": (
            "query_id",
            "rerank_status",
            "slots",
            "max_per_document",
            "near_duplicate",
            "lexical_weight",
            "candidates.chunk_id",
            "candidates.absolute_score",
            "candidates.families",
            "candidates.selected_rank",
        ),
    },
    writes=GradedSelection,
    params=Params,
    run=crag_grading_table,
    needs=("corpus", "keyword_search", "cross_encoder", "grader", "plan"),
    success=(SAME_QUERIES, SuccessCheck("no query keeps more passages than it has slots", _over_full)),
    on_partial_failure=(
        "A cross-encoder or grader that fails, fails the shard: a passage is never called incorrect because nobody "
        "read it, nor correct. Other shards stand, and the failed one is run again; a query whose passage the grader "
        "cannot grade becomes a dead letter."
    ),
    known_failure=(
        "A model of one language gives passages of another low scores: whole languages turn up as `incorrect` with "
        "`corrective_outcome` ok; lower `lower`, or grade without a cross-encoder."
    ),
    roll_back="Rerun from crag_grading with the earlier limits, or with crag_grading.enabled=false to keep all.",
)
