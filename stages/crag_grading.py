"""crag_grading: grades the selected passages, lets incorrect ones leave, and corrects the selection once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Le
from pydantic import model_validator

from contracts.columns import Array, IntArray, Ragged, as_numpy, column, offsets_from_lengths, ragged, read_only
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan, GradedSelection
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus, KeywordSearch
from corpus.scope import Scopes
from corpus.tokeniser import words
from models.cross_encoder import CrossEncoder, probabilities
from models.grader import Grade, Grader, Pair, decided_grades, given_grades
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

# A grade is an int8 code, its place here: the strongest grade of a query is the largest code.
_GRADES = pa.array(["incorrect", "ambiguous", "correct"])
_INCORRECT, _CORRECT = 0, 2
_CODES: dict[Grade, int] = {"incorrect": 0, "ambiguous": 1, "correct": 2}
_GRADERS = pa.array(["score", "llm", "file"])
_SCORE, _LLM, _FILE = 0, 1, 2
_ORIGINS = pa.array(["selected", "next_ranked", "corrective"])
_SELECTED, _NEXT_RANKED, _CORRECTIVE = 0, 1, 2
_LEFT, _KEPT, _UNUSABLE, _USABLE = 0, 1, 2, 3
# Cosines that differ by less are equal but for the rounding of float32, as in blended_rerank.
_ROUNDING = 1e-6
_NO_BOUND = 2**31 - 1


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


@kernel
def _breaks_bound(
    option: int,
    kept: Array,
    documents: Array,
    rows: Array,
    vectors: Array,
    max_per_document: int,
    near_duplicate: float,
) -> bool:
    """Whether an option is of a document that has its passages already, or a near copy of a kept passage."""
    same_document = 0
    for passage in kept:
        same_document += documents[passage] == documents[option]
        if near_duplicate <= 1.0:
            cosine = 0.0
            for axis in range(vectors.shape[1]):
                cosine += np.float64(vectors[rows[passage], axis]) * np.float64(vectors[rows[option], axis])
            if cosine >= near_duplicate - _ROUNDING:
                return True
    return same_document >= max_per_document


@kernel
def fill_slots(
    offsets: Array,
    states: Array,
    texts: Array,
    documents: Array,
    rows: Array,
    vectors: Array,
    room: Array,
    limit: int,
    max_per_document: Array,
    near_duplicate: Array,
) -> Array:
    """Which options come up before their query has no free slot left: a usable one takes a slot, others none.

    Never comes up, and takes no slot: a text that has been seen, be it that of a passage that left; a chunk
    of a document that has `max_per_document` kept passages; a near copy of a kept passage. What fills a slot
    is kept for those after it. Unlike the selection, a fill breaks no bound for a family or an empty slot.

    Args:
        offsets: (queries + 1,) int64, of each query first the graded passages, then the options as they come up.
        states: (passages,) int64: a graded passage has left (0) or is kept (1), an option is unusable (2) or
            usable (3).
        texts: (passages,) int64 below their number, equal where query and text are equal.
        documents: (passages,) int64, equal for one document.
        rows: (passages,) int64, the vector of each.
        vectors: (chunks, dimension) float32, of length 1.
        room: (queries,) int64, free slots.
        limit: how many options of a query come up at the most.
        max_per_document: (queries,) int64, >= 1.
        near_duplicate: (queries,) float64, cosine; above 1 nothing is a near copy.

    Returns:
        (passages,) bool, false for the graded ones.
    """
    comes_up = np.zeros(len(rows), np.bool_)
    seen = np.zeros(len(rows), np.bool_)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        kept, count, free, left = np.empty(end - start, np.int64), 0, room[query], limit
        for place in range(start, end):
            if states[place] >= _UNUSABLE:
                if free <= 0 or left <= 0:
                    break
                if seen[texts[place]] or _breaks_bound(
                    place, kept[:count], documents, rows, vectors, max_per_document[query], near_duplicate[query]
                ):
                    continue
                comes_up[place] = True
                left -= 1
                free -= states[place] == _USABLE
            seen[texts[place]] = True
            if states[place] in (_KEPT, _USABLE):
                kept[count] = place
                count += 1
    return comes_up


def rewrite_queries(texts: Sequence[str], corpus: Corpus, terms: int) -> list[str]:
    """Cuts each query down to the words of its `terms` rarest distinct terms, rarest first, ties in query order.

    A term is as rare as few chunks of the corpus hold it; terms that none holds are dropped. Words
    come out case folded but not stemmed, so that a person can read them and a search tokenises them
    to the same terms again. A query of unknown terms alone becomes the empty text.
    """
    frequencies = corpus.keywords.document_frequencies
    terms_of: dict[str, list[int]] = {}
    rewritten = []
    for text in texts:
        word_of: dict[int, str] = {}
        for word in words(text):
            if word not in terms_of:
                terms_of[word] = corpus.keywords.term_ids(corpus.tokeniser.tokens(word))
            for term in terms_of[word]:
                word_of.setdefault(term, word)
        rarest = sorted(word_of, key=lambda term: int(frequencies[term]))[:terms]
        rewritten.append(" ".join(word_of[term] for term in rarest))
    return rewritten


@dataclass(frozen=True)
class _Passages:
    """Graded passages of a shard, laid end to end by query."""

    queries: IntArray
    rows: IntArray
    scores: Array
    grades: Array
    graders: Array
    kept: Array
    origins: Array
    families: pa.ListArray

    @classmethod
    def joined(cls, parts: Sequence[_Passages]) -> _Passages:
        """The passages of all parts, those of a query in the order of the parts."""
        order = np.argsort(np.concatenate([part.queries for part in parts]), kind="stable")
        numbers = {
            name: np.concatenate([getattr(part, name) for part in parts])[order]
            for name in ("queries", "rows", "scores", "grades", "graders", "kept", "origins")
        }
        lists = pa.concat_arrays([part.families.cast(pa.list_(pa.string())) for part in parts])
        return cls(**numbers, families=lists.take(pa.array(order, pa.int64())))

    def room(self, slots: Array) -> Array:
        """(queries,) int64: the slots that no kept passage takes."""
        return slots.astype(np.int64) - np.bincount(self.queries[self.kept], minlength=len(slots))


@dataclass(frozen=True)
class _Shard:
    """What every step of the grading looks at.

    `by_model` says for each query whether the cross-encoder took part in its ranking; `max_per_document`
    and `near_duplicate` are as `fill_slots` takes them.
    """

    query_ids: list[str]
    texts: list[str]
    scopes: Scopes
    shapes: pa.Array
    by_model: Array
    lexical_weight: Array
    slots: Array
    max_per_document: Array
    near_duplicate: Array
    ranking: Ragged
    rows: IntArray
    corpus: Corpus
    cross_encoder: CrossEncoder | None
    grader: Grader | None
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
        """Grades that cost nothing, and who gave each: people where they have decided, else the limits of this run.

        Returns:
            (passages,) int8 grades and (passages,) int8 graders.
        """
        grades = grade_scores(scores, self.params.lower, self.params.upper)
        graders = np.full(len(rows), _SCORE, dtype=np.int8)
        if self.grader is not None and self.params.enabled:
            for place, grade in enumerate(decided_grades(self.grader, *self.names(queries, rows))):
                if grade is not None:
                    grades[place], graders[place] = _CODES[grade], _FILE
        return grades, graders

    def ask_grader(self, queries: IntArray, rows: IntArray, wanted: Array, grades: Array, graders: Array) -> None:
        """Puts in the grader's grades for the wanted passages that nobody has decided, where it has a say: one call."""
        places = np.flatnonzero(wanted & (graders == _SCORE))
        if self.grader is None or not len(places) or not self.params.enabled:
            return
        query_ids, chunk_ids = self.names(queries[places], rows[places])
        asked = [self.texts[query] for query in queries[places]]
        texts = self.corpus.passage_texts(rows[places])
        pairs = [Pair(*parts) for parts in zip(query_ids, chunk_ids, asked, texts, strict=True)]
        for place, grade in zip(places, given_grades(self.grader, pairs), strict=True):
            if grade is not None:
                grades[place], graders[place] = _CODES[grade], _LLM

    def names(self, queries: IntArray, rows: IntArray) -> tuple[list[str], list[str]]:
        """The query ids and the chunk ids of passages."""
        return [self.query_ids[query] for query in queries], self.corpus.ids(rows).to_pylist()

    def coming_up(
        self, graded: _Passages, queries: IntArray, rows: IntArray, usable: Array, room: Array, limit: int = _NO_BOUND
    ) -> Array:
        """(options,) bool: the options that `fill_slots` lets come up behind the graded passages."""
        owners = np.concatenate([graded.queries, queries])
        order = np.argsort(owners, kind="stable")
        owners, chunks = owners[order], np.concatenate([graded.rows, rows])[order]
        states = np.concatenate([np.where(graded.kept, _KEPT, _LEFT), np.where(usable, _USABLE, _UNUSABLE)])
        texts = as_numpy(self.corpus.column("text_id"))
        keys = owners * (int(texts.max(initial=0)) + 1) + texts[chunks]
        comes_up = np.empty(len(order), dtype=bool)
        comes_up[order] = fill_slots(
            offsets_from_lengths(np.bincount(owners, minlength=len(self.texts))),
            states[order],
            np.unique(keys, return_inverse=True)[1],
            self.corpus.documents[chunks],
            chunks,
            read_only(self.corpus.embeddings),
            room,
            limit,
            self.max_per_document.astype(np.int64),
            self.near_duplicate.astype(np.float64),
        )
        return comes_up[len(graded.rows) :]

    def ranked(self, places: IntArray, scores: Array, grades: Array, graders: Array, origin: int) -> _Passages:
        """Some of the ranked candidates as graded passages; those that are not incorrect are kept."""
        families = self.ranking.values["families"].take(pa.array(places, pa.int64()))
        kept = (grades > _INCORRECT) | (not self.params.enabled)
        origins = np.full(len(places), origin)
        queries, rows = self.ranking.rows[places], self.rows[places]
        return _Passages(queries, rows, scores, grades, graders, kept, origins, families)


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
    shard = _Shard(
        query_ids=queries.column("query_id").to_pylist(),
        texts=queries.column("normalised_text").to_pylist(),
        scopes=Scopes.of(queries),
        shapes=column(family_rescue, "shape"),
        by_model=as_numpy(pc.equal(column(blended_rerank, "rerank_status"), "cross_encoder")),
        lexical_weight=as_numpy(column(blended_rerank, "lexical_weight")),
        slots=as_numpy(column(blended_rerank, "slots")),
        max_per_document=as_numpy(pc.fill_null(column(blended_rerank, "max_per_document"), _NO_BOUND)),
        near_duplicate=as_numpy(pc.fill_null(column(blended_rerank, "near_duplicate"), np.inf)),
        ranking=ranking,
        rows=corpus.rows(ranking.values["chunk_id"]),
        corpus=corpus,
        cross_encoder=cross_encoder,
        grader=grader,
        params=params,
    )
    count = len(queries)
    graded = _selected(shard)
    before = query_actions(graded.queries, graded.grades, count)
    texts: list[str | None] = [None] * count
    outcomes = ["not_needed" if params.enabled else "disabled"] * count
    if params.enabled:
        graded = _Passages.joined([graded, _next_ranked(shard, graded)])
        free = graded.room(shard.slots) > 0
        for query in np.flatnonzero((before < _CORRECT) & ~free):
            outcomes[query] = "no_room"
        asking = np.flatnonzero((before < _CORRECT) & free)
        rewritten = rewrite_queries([shard.texts[query] for query in asking], corpus, params.corrective_terms)
        hits = keyword_search.search(rewritten, shard.scopes.take(asking), params.corrective_depth)
        found = _corrective(shard, graded, asking[hits.rows], hits.values["row"], plan)
        graded = _Passages.joined([graded, found])
        for query, text, matches in zip(asking, rewritten, hits.lengths, strict=True):
            texts[query], outcomes[query] = text, "ok" if matches else "no_match"
    # What was seen but found no room helps nobody: the second action is over what stays.
    after = query_actions(graded.queries[graded.kept], graded.grades[graded.kept], count)
    table = build_table(
        GradedSelection,
        {
            "query_id": queries.column("query_id"),
            "action_before": _GRADES.take(pa.array(before)),
            "action": _GRADES.take(pa.array(after)),
            "corrective_query": texts,
            "corrective_outcome": outcomes,
            "candidates": _candidates(graded, count, corpus),
        },
    )
    searched = Counter(outcome for outcome in outcomes if outcome in {"ok", "no_match"})
    calls = {"corrective_search": searched} if searched else {}
    graded_by = Counter(_GRADERS.take(pa.array(graded.graders)).to_pylist()) if grader is not None else {}
    return StageOutput(table, _account(shard, graded), calls, graded_by)


def _selected(shard: _Shard) -> _Passages:
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
    shard.ask_grader(queries, rows, np.ones(len(rows), dtype=bool), grades, graders)
    return shard.ranked(chosen, scores, grades, graders, _SELECTED)


def _next_ranked(shard: _Shard, selected: _Passages) -> _Passages:
    """Candidates behind the selection, in rank order until the slots are full; only those with a known score."""
    scores = shard.known_scores()
    options = np.flatnonzero(~np.isnan(scores))
    queries, rows = shard.ranking.rows[options], shard.rows[options]
    grades, graders = shard.known_grades(queries, rows, scores[options])
    usable = grades > _INCORRECT
    considered = shard.coming_up(selected, queries, rows, usable, selected.room(shard.slots))
    shard.ask_grader(queries, rows, considered & usable, grades, graders)
    options = options[considered]
    return shard.ranked(options, scores[options], grades[considered], graders[considered], _NEXT_RANKED)


def _corrective(
    shard: _Shard, graded: _Passages, queries: IntArray, rows: IntArray, plan: EvidencePlan | None
) -> _Passages:
    """The first new hits of the corrective search; those not incorrect are kept while there is room.

    A hit that would break a bound beside what is kept already is not read; one that would beside an
    earlier hit has been read by then, and is graded but not kept.
    """
    unread = np.zeros(len(rows), dtype=bool)  # takes no slot yet
    room = np.ones(len(shard.texts), dtype=np.int64)
    new = shard.coming_up(graded, queries, rows, unread, room, min(shard.params.corrective_limit, _NO_BOUND))
    queries, rows = queries[new], rows[new]
    scores = shard.new_scores(queries, rows)
    grades, graders = shard.known_grades(queries, rows, scores)
    shard.ask_grader(queries, rows, grades > _INCORRECT, grades, graders)
    usable = grades > _INCORRECT
    kept = usable & shard.coming_up(graded, queries, rows, usable, graded.room(shard.slots))
    families = _families_by_plan(queries, rows, shard.shapes, plan, shard.corpus)
    return _Passages(queries, rows, scores, grades, graders, kept, np.full(len(rows), _CORRECTIVE), families)


def _families_by_plan(
    queries: IntArray, rows: IntArray, shapes: pa.Array, plan: EvidencePlan | None, corpus: Corpus
) -> pa.ListArray:
    """(passages,) lists of the families of each query's shape that each chunk may serve, in plan order."""
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


def _candidates(graded: _Passages, count: int, corpus: Corpus) -> Ragged:
    lists = Ragged(offsets_from_lengths(np.bincount(graded.queries, minlength=count)), graded.rows)
    values = {
        "rank": lists.positions + 1,
        "chunk_id": corpus.ids(graded.rows),
        "score": graded.scores,
        "grade": _GRADES.take(pa.array(graded.grades)),
        "graded_by": _GRADERS.take(pa.array(graded.graders)),
        "kept": graded.kept,
        "origin": _ORIGINS.take(pa.array(graded.origins)),
        "families": graded.families,
    }
    return Ragged(lists.offsets, values)


def _account(shard: _Shard, graded: _Passages) -> Account:
    # All but corrective hits come from the ranking; these are looked for among the candidates of their queries alone.
    hits, chunks = graded.origins == _CORRECTIVE, len(shard.corpus.chunks)
    searched = np.zeros(len(shard.texts), dtype=bool)
    searched[graded.queries[hits]] = True
    among = searched[shard.ranking.rows]
    keys = shard.ranking.rows[among] * chunks + shard.rows[among]
    ranked_hits = int(np.isin(graded.queries[hits] * chunks + graded.rows[hits], keys).sum())
    ranked = len(graded.rows) - int(hits.sum()) + ranked_hits
    added, removed = len(graded.rows) - ranked, len(shard.rows) - ranked
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
