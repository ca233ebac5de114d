"""blended_rerank: one absolute score for each candidate, and a selection that covers the required families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from contracts.columns import IntArray, Ragged, Values, as_numpy, column, offsets_from_lengths, ragged
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan, RerankedRanking, Shape, Share
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import Int32, build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus
from corpus.exact_tokens import exact_shares
from corpus.neighbours import Neighbours
from corpus.scope import Scopes
from corpus.selection import ROUNDING, document_support, fill_selection, serve_families
from models.cross_encoder import CrossEncoder, probabilities
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

Array = np.ndarray[Any, np.dtype[Any]]
# Sums of weights stay finite.
Weight = Annotated[float, Ge(0), Le(1e100)]

_NO_BOUND = 2**31 - 1
# Parts of a score that differ by less are equal but for rounding, and no spread for min-max.
_NO_SPREAD = 1e-12
# Of the reciprocal ranks that a document's candidates are summed by.
_SUPPORT_CONSTANT = 10
# Changes any score in [0, 1] by at least its last bit.
_STEP = 2.0**-52


class Params(BaseParams):
    """Settings of blended_rerank.

    Attributes:
        enabled: off, candidates keep the order of family_rescue and no model is asked; `score` is then
            the retrieval part (see `scores_in_order`), the others are null or 0. The selection under
            coverage stays.
        cross_encoder_weight, retrieval_weight, lexical_weight: shares of the three parts, >= 0 and not
            all 0; rescaled to sum to 1, without a cross-encoder those of the other two. At 0 a part is
            shown but does not count; the larger one is, the more the order follows that part alone.
        exact_token_bonus: what a passage gains that has every exact token of the query, and its share
            for one that has some; in [0, 1]. 0 switches it off; at 1 exact tokens decide alone.
        cross_encoder_depth: how many fused candidates of a query the model reads, besides every rescued
            one; >= 1. Small values save time and leave the rest to the other parts.
        top_k: slots of the selection, >= 1, at least the families that a question needs.
        max_per_document: chunks of one document in a selection, >= 1; 1 spreads it over as many
            documents as it has slots, None sets no bound. Families come before the bound and count
            towards it; slots that the bound leaves empty are filled in order without it. What
            crag_grading fills never breaks it. A shape of the evidence plan may have a bound of its own.
        family_fit: what a family's own search counts in the choice of the passage that serves it, >= 0: a
            candidate at its rank r is chosen as if its score were higher by this / r. At 0 the score alone
            decides, which asks how well a passage answers the whole question; large values take the first
            hit of the rescue query whatever the question says.
        spread_below: a question without required families whose best-ranked passage has a smaller share of
            its distinct terms than this (the lexical part) is spread over documents, since no passage
            answers it alone; in [0, 1]. 0 spreads none; 1 all but those with a passage that has every term.
        spread_from: the slot from which on a spread selection takes no document again, >= 1; those before
            are filled in order. At 1 it is one chunk a document; beyond top_k nothing is spread. Slots that
            stay empty are filled in order; what crag_grading fills is one chunk a document too.
        document_support: what it counts in the order of these slots that a passage's document has other
            candidates, >= 0: its score gains this times the sum of their 1 / (10 + rank) as a share of the
            query's highest. At 0 scores alone decide; large values take the documents found most often.
        near_duplicate: cosine in (0, 1] from which a passage is a copy of a picked one and is passed
            over, by crag_grading too; low values leave slots empty, 1 only drops equal embeddings, None
            switches it off.
        normalisation: `absolute` leaves the parts as they are, so that scores mean the same for every
            query; `min_max` stretches each part over the candidates of a query, so that they do not.
            Grades are taken from `absolute_score`, which is never stretched.
    """

    enabled: bool = True
    cross_encoder_weight: Weight = 0.4
    retrieval_weight: Weight = 0.3
    lexical_weight: Weight = 0.3
    exact_token_bonus: Share = 0.1
    cross_encoder_depth: Annotated[int, Ge(1)] = 20
    top_k: Annotated[Int32, Ge(1)] = 5
    max_per_document: Annotated[Int32, Ge(1)] | None = None
    family_fit: Weight = 0.5
    spread_below: Share = 0.7
    spread_from: Annotated[Int32, Ge(1)] = 3
    document_support: Weight = 0.8
    near_duplicate: Annotated[float, Gt(0), Le(1)] | None = None
    normalisation: Literal["absolute", "min_max"] = "absolute"

    @model_validator(mode="after")
    def _something_counts(self) -> Self:
        if not any(self.weights()):
            raise ValueError("one of cross_encoder_weight, retrieval_weight and lexical_weight must be above 0")
        return self

    def weights(self) -> tuple[float, float, float]:
        """The three weights as given: cross-encoder, retrieval, lexical."""
        return self.cross_encoder_weight, self.retrieval_weight, self.lexical_weight


def blend(cross_encoder: Array, retrieval: Array, lexical: Array, bonus: Array, weights: Array) -> Array:
    """(candidates,) float64: min(1, w1 cross_encoder + w2 retrieval + w3 lexical + bonus).

    Args:
        cross_encoder: (candidates,) float64 in [0, 1]; NaN was not asked and counts as 0.
        retrieval, lexical, bonus: (candidates,) float64 in [0, 1].
        weights: (3,) float64, sum 1.
    """
    asked = np.nan_to_num(cross_encoder, nan=0.0)
    total: Array = weights[0] * asked + weights[1] * retrieval + weights[2] * lexical + bonus
    return np.minimum(total, 1.0)


def min_max(part: Array, queries: IntArray, count: int) -> Array:
    """Stretches a part over [0, 1] within each query; NaN stays NaN and does not take part.

    Where all values of a query are equal, as for one candidate, there is nothing to stretch: they
    keep their absolute values.

    Args:
        part: (candidates,) float64.
        queries: (candidates,) int64, the query of each.
        count: how many queries there are.
    """
    lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
    there = ~np.isnan(part)
    np.minimum.at(lowest, queries[there], part[there])
    np.maximum.at(highest, queries[there], part[there])
    low, spread = lowest[queries], highest[queries] - lowest[queries]
    stretched: Array = np.divide(part - low, spread, out=part.copy(), where=there & (spread > _NO_SPREAD))
    return stretched


@kernel
def scores_in_order(offsets: Array, rows: Array, scores: Array) -> Array:
    """Scores in [0, 1] that keep each query's candidates in the order they stand in: (-score, row).

    A score that would break the order is raised to the next one, or just above it (2^-52), where the
    row alone would turn the two round; what rises above 1 is brought back down in the same way.

    Args:
        offsets, rows, scores: (queries + 1,), (candidates,), (candidates,), scores in [0, 1].
    """
    moved = scores.copy()
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        for place in range(end - 2, start - 1, -1):
            gap = _STEP if rows[place] > rows[place + 1] else 0.0
            moved[place] = max(moved[place], moved[place + 1] + gap)
        highest = 1.0
        for place in range(start, end):
            moved[place] = min(moved[place], highest)
            if place + 1 < end:
                highest = moved[place] - (_STEP if rows[place] > rows[place + 1] else 0.0)
    return moved


def _probabilities(
    queries: pa.Table, candidates: Ragged, asked: IntArray, corpus: Corpus, cross_encoder: CrossEncoder | None
) -> Array:
    """(candidates,) float64: sigmoid of the logits of the asked pairs, NaN for the others; one call for all."""
    result = np.full(len(candidates.values), np.nan)
    if cross_encoder is None or not len(asked):
        return result
    # The raw text is that of whichever line came first; the model reads what all lines of the query share.
    texts = column(queries, "normalised_text").take(pa.array(candidates.rows[asked], pa.int64())).to_pylist()
    result[asked] = probabilities(cross_encoder, texts, corpus.passage_texts(candidates.values[asked]))
    return result


def _rescaled_weights(params: Params, cross_encoder: CrossEncoder | None) -> Array:
    weights = np.array(params.weights())
    if cross_encoder is None:
        weights[0] = 0.0
    if not weights.any():
        raise ConfigurationError(
            "blended_rerank.cross_encoder_weight",
            "is the only weight above 0, but there is no cross-encoder",
            next_step="Configure a cross-encoder or raise retrieval_weight or lexical_weight.",
        )
    rescaled: Array = weights / weights.sum()
    return rescaled


def _parts(
    queries: pa.Table,
    candidates: Ragged,
    asked: IntArray,
    retrieval: Array,
    corpus: Corpus,
    cross_encoder: CrossEncoder | None,
    params: Params,
) -> dict[str, Array]:
    """The parts of each candidate's score, by the name of their column, not stretched."""
    rows, owners = candidates.values, candidates.rows
    parts = {
        "cross_encoder": np.full(len(rows), np.nan),
        "retrieval": retrieval,
        "lexical": np.zeros(len(rows)),
        "exact_bonus": np.zeros(len(rows)),
    }
    if not params.enabled:
        return parts
    parts["cross_encoder"] = _probabilities(queries, candidates, asked, corpus, cross_encoder)
    parts["lexical"] = corpus.lexical_overlap(queries.column("normalised_text").to_pylist(), owners, rows)
    if params.exact_token_bonus:
        shares = exact_shares(queries.column("text").to_pylist(), candidates, corpus)
        parts["exact_bonus"] = params.exact_token_bonus * shares
    return parts


@dataclass(frozen=True)
class _Candidates:
    """The candidates of a shard, laid end to end by query.

    Attributes:
        queries, rows: (candidates,) int64, whose and which chunk each is.
        parts: the parts of the score, each (candidates,) float64.
        rescued: (candidates,) bool.
        families: (candidates,) lists of family names.
        members: (candidates, most required families) int64, as `_members` gives them; nobody is picked for a
            family in the place of -1.
        gains: (candidates,) float64, what each counts for the other candidates of its document.
        picks: (candidates,) int32, the place in the selection so far, from 1; 0 is not picked.
        leads: (candidates,) int64, the row of the chunk that a neighbour was drawn in with, -1 for the others.
    """

    queries: IntArray
    rows: IntArray
    parts: Mapping[str, Array]
    rescued: Array
    families: pa.ListArray
    members: Array
    gains: Array
    picks: Array
    leads: IntArray

    def take(self, order: IntArray) -> _Candidates:
        """The candidates in another order."""
        arrays = {one.name: getattr(self, one.name)[order] for one in fields(self) if one.name not in _NESTED}
        families = self.families.take(pa.array(order, pa.int64()))
        return _Candidates(**arrays, parts={name: part[order] for name, part in self.parts.items()}, families=families)

    def joined(self, others: _Candidates) -> _Candidates:
        """Both, those of a query in this order."""
        arrays = {
            one.name: np.concatenate([getattr(self, one.name), getattr(others, one.name)])
            for one in fields(self)
            if one.name not in _NESTED
        }
        parts = {name: np.concatenate([part, others.parts[name]]) for name, part in self.parts.items()}
        families = pa.concat_arrays([self.families, others.families.cast(self.families.type)])
        return _Candidates(**arrays, parts=parts, families=families).take(
            np.argsort(arrays["queries"], kind="stable").astype(np.int64)
        )

    def offsets(self, count: int) -> IntArray:
        """(count + 1,) int64: where the candidates of each of `count` queries start."""
        return offsets_from_lengths(np.bincount(self.queries, minlength=count))

    def ranked(self, scoring: _Scoring) -> tuple[_Candidates, dict[str, Array]]:
        """The candidates best first, (-score, chunk id), and the columns of numbers in that order."""
        columns = scoring.columns(self)
        order = np.lexsort((self.rows, -columns["score"], self.queries)).astype(np.int64)
        return self.take(order), {name: values[order] for name, values in columns.items()}


_NESTED = ("parts", "families")


@dataclass(frozen=True)
class _Scoring:
    """How parts become scores.

    Attributes:
        queries: how many there are.
        weights: (3,) float64, sum 1; None keeps the order as it is, by the retrieval part.
        by_model: whether a cross-encoder takes part.
        stretch: whether the parts are stretched over the candidates of their query.
    """

    queries: int
    weights: Array | None
    by_model: bool
    stretch: bool

    @classmethod
    def of(cls, queries: pa.Table, cross_encoder: CrossEncoder | None, params: Params) -> _Scoring:
        weights = _rescaled_weights(params, cross_encoder) if params.enabled else None
        return cls(len(queries), weights, cross_encoder is not None, params.normalisation == "min_max")

    def columns(self, candidates: _Candidates) -> dict[str, Array]:
        """The parts as they are shown, `score` and `absolute_score`."""
        parts = dict(candidates.parts)
        if self.weights is None:
            score = scores_in_order(candidates.offsets(self.queries), candidates.rows, parts["retrieval"])
            return {**parts, "score": score, "absolute_score": score}
        score = _blended(parts, self.weights)
        absolute = parts["cross_encoder"] if self.by_model else score
        if self.stretch:
            for name in ("cross_encoder", "retrieval", "lexical"):
                parts[name] = min_max(parts[name], candidates.queries, self.queries)
            score = _blended(parts, self.weights)
        return {**parts, "score": score, "absolute_score": absolute}


def _members(candidates: Ragged, required: Ragged) -> Array:
    """(candidates, most required families) int64: its rank in the search of each of its query's required families.

    0 where that search did not find it, -1 where it is no member of the family.
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


def _blended(parts: Mapping[str, Array], weights: Array) -> Array:
    return blend(parts["cross_encoder"], parts["retrieval"], parts["lexical"], parts["exact_bonus"], weights)


def _alike(candidates: _Candidates, corpus: Corpus, params: Params) -> tuple[Array, Array, Array]:
    """What the kernels of the selection look at to find copies: texts, vectors and the vector of each candidate."""
    rows = candidates.rows
    vectors, places = np.zeros((1, 1), np.float32), np.zeros(len(rows), np.int64)
    if params.near_duplicate is not None:
        distinct, places = np.unique(rows, return_inverse=True)
        vectors = np.ascontiguousarray(corpus.embeddings[distinct])
    return as_numpy(corpus.column("text_id"))[rows], vectors, places


def _drawn_in(
    queries: pa.Table,
    candidates: _Candidates,
    shapes: Sequence[Shape | None],
    corpus: Corpus,
    params: Params,
) -> _Candidates:
    """The neighbours that come with the chunks picked for families, without the parts of their score.

    Only what the query may see and what serves the family itself comes, no text twice, and never a near
    copy; families in plan order, until the slots are taken.
    """
    found: list[tuple[int, int, int, int, list[str]]] = []
    scopes, neighbours = Scopes.of(queries), Neighbours.of(corpus)
    visible = [corpus.visible(scope) for scope in scopes.distinct]
    texts = as_numpy(corpus.column("text_id"))
    offsets = candidates.offsets(len(queries))
    for query, shape in enumerate(shapes):
        if shape is None:
            continue
        own = slice(offsets[query], offsets[query + 1])
        picks = candidates.picks[own]
        leads: list[int] = candidates.rows[own][np.argsort(picks, kind="stable")][np.sort(picks) > 0].tolist()
        taken = list(leads)
        for family in shape.families:
            serves = corpus.members(family) & visible[scopes.codes[query]]
            lead = next((row for row in leads if serves[row]), -1)
            for row in neighbours.around(lead, family.keep_together) if lead >= 0 else ():
                copy = texts[row] in texts[taken] or _near_copy(row, taken, corpus, params)
                if serves[row] and not copy and len(taken) < params.top_k:
                    taken.append(row)
                    names = [one.name for one in shape.families if corpus.members(one)[row]]
                    found.append((query, row, lead, len(taken), names))
    return _Candidates(
        queries=np.array([query for query, *_ in found], dtype=np.int64),
        rows=np.array([row for _, row, *_ in found], dtype=np.int64),
        parts={},  # those that are ranked have theirs
        rescued=np.zeros(len(found), dtype=bool),
        families=pa.array([names for *_, names in found], candidates.families.type),
        members=np.full((len(found), candidates.members.shape[1]), -1, dtype=np.int64),
        gains=np.zeros(len(found)),
        picks=np.array([place for *_, place, _ in found], dtype=np.int32),
        leads=np.array([lead for _, _, lead, *_ in found], dtype=np.int64),
    )


def _near_copy(row: int, taken: Sequence[int], corpus: Corpus, params: Params) -> bool:
    if params.near_duplicate is None:
        return False
    cosines = corpus.embeddings[list(taken)].astype(np.float64) @ corpus.embeddings[row].astype(np.float64)
    return bool((cosines >= params.near_duplicate - ROUNDING).any())


def _with_neighbours(
    candidates: _Candidates,
    queries: pa.Table,
    shapes: Sequence[Shape | None],
    corpus: Corpus,
    cross_encoder: CrossEncoder | None,
    params: Params,
) -> _Candidates:
    """The candidates with the neighbours that are drawn in: ranked ones are marked, others come behind the ranked."""
    together = [shape if shape and any(one.keep_together for one in shape.families) else None for shape in shapes]
    if not any(together):
        return candidates
    drawn = _drawn_in(queries, candidates, together, corpus, params)
    chunks = len(corpus.chunks)
    keys, ranked = drawn.queries * chunks + drawn.rows, candidates.queries * chunks + candidates.rows
    order = np.argsort(ranked)
    places = np.searchsorted(ranked[order], keys)
    there = np.append(ranked[order], -1)[places] == keys
    picks, leads = candidates.picks.copy(), candidates.leads.copy()
    picks[order[places[there]]], leads[order[places[there]]] = drawn.picks[there], drawn.leads[there]
    fresh = drawn.take(np.flatnonzero(~there))
    lists = Ragged(fresh.offsets(len(queries)), fresh.rows)
    nowhere = np.zeros(len(fresh.rows))
    parts = _parts(queries, lists, np.arange(len(fresh.rows)), nowhere, corpus, cross_encoder, params)
    return replace(candidates, picks=picks, leads=leads).joined(replace(fresh, parts=parts))


def blended_rerank_table(
    *,
    queries: pa.Table,
    rrf_merge: pa.Table,
    family_rescue: pa.Table,
    corpus: Corpus,
    cross_encoder: CrossEncoder | None,
    plan: EvidencePlan | None,
    params: Params,
) -> StageOutput:
    """Scores every candidate, orders them by (-score, chunk_id) and marks the selection.

    Under `min_max` the columns hold the stretched parts, so that `score` stays the sum of what is shown.

    Raises:
        ConfigurationError: a question needs more families than there are slots.
        ModelError: the cross-encoder did not give one finite logit a pair.
    """
    ranking, required = ragged(family_rescue, "candidates"), ragged(family_rescue, "coverage")
    _refuse_more_families_than_slots(required, family_rescue, params)
    by_name = {} if plan is None else {shape.name: shape for shape in plan.shapes}
    shapes = [None if name is None else by_name.get(name) for name in family_rescue.column("shape").to_pylist()]
    bounds = [params.max_per_document if shape is None else shape.max_per_document for shape in shapes]
    bounds = [params.max_per_document if bound is None else bound for bound in bounds]
    scoring = _Scoring.of(queries, cross_encoder, params)
    candidates, columns = _candidates(queries, rrf_merge, family_rescue, corpus, cross_encoder, params).ranked(scoring)
    ranks = candidates.members
    fits = columns["score"][:, np.newaxis] + np.where(ranks > 0, params.family_fit / np.maximum(ranks, 1), 0.0)
    offsets, likeness = candidates.offsets(len(queries)), _alike(candidates, corpus, params)
    nearness = params.near_duplicate or np.inf
    picks = serve_families(offsets, ranks >= 0, fits, required.lengths, *likeness, nearness)
    candidates = replace(candidates, picks=picks)
    with_neighbours = _with_neighbours(candidates, queries, shapes, corpus, cross_encoder, params)
    if with_neighbours is not candidates:
        candidates, columns = with_neighbours.ranked(scoring)
    lists = Ragged(candidates.offsets(len(queries)), candidates.rows)
    top_k = min(params.top_k, max(len(lists.values), 1))  # more slots than candidates stay empty
    spread = _to_spread(lists, candidates.parts["lexical"], params) & (required.lengths == 0)
    selected = fill_selection(
        lists.offsets,
        candidates.picks,
        corpus.documents[lists.values],
        *_alike(candidates, corpus, params),
        nearness,
        top_k,
        np.array([_NO_BOUND if bound is None else bound for bound in bounds], dtype=np.int64),
        np.where(spread, params.spread_from, top_k + 1),
        _spread_order(candidates, spread, columns["score"], corpus, params),
    )
    values: dict[str, Values] = {
        **columns,
        **{name: pa.array(columns[name], mask=np.isnan(columns[name])) for name in ("cross_encoder", "absolute_score")},
        "rank": lists.positions + 1,
        "chunk_id": corpus.ids(lists.values),
        "families": candidates.families,
        "rescued": candidates.rescued,
        "selected_rank": pa.array(selected, pa.int32(), mask=selected == 0),
        "drawn_in_by": corpus.column("chunk_id").take(
            pa.array(candidates.leads, pa.int64(), mask=candidates.leads < 0)
        ),
    }
    with_model = "no_cross_encoder" if cross_encoder is None else "cross_encoder"
    table = build_table(
        RerankedRanking,
        {
            "query_id": queries.column("query_id"),
            "rerank_status": [with_model if params.enabled else "disabled"] * len(queries),
            "required": Ragged(required.offsets, required.values["family"]),
            "slots": np.full(len(queries), params.top_k),
            "max_per_document": [1 if one else bound for one, bound in zip(spread, bounds, strict=True)],
            "spread": spread,
            "near_duplicate": [params.near_duplicate] * len(queries),
            "lexical_weight": np.full(len(queries), 0.0 if scoring.weights is None else scoring.weights[2]),
            "candidates": Ragged(lists.offsets, values),
        },
    )
    before, after = len(ranking.rows), len(lists.values)
    added = {"drawn_in": after - before} if after > before else {}
    return StageOutput(table, Account(candidates_in=before, added=added, removed={}, candidates_out=after))


def _to_spread(lists: Ragged, lexical: Array, params: Params) -> Array:
    """(queries,) bool: whose selection is spread, since their best-ranked passage lacks too many of their terms."""
    best = np.append(lexical, 1.0)[lists.offsets[:-1]]
    spread: Array = (best < params.spread_below) & (lists.lengths > 0) & params.enabled
    return spread


def _spread_order(candidates: _Candidates, spread: Array, scores: Array, corpus: Corpus, params: Params) -> IntArray:
    """(candidates,) int64: places, those of a query that is spread by score and what their documents support."""
    order = np.arange(len(candidates.rows), dtype=np.int64)
    places = np.flatnonzero(spread[candidates.queries])
    queries, rows = candidates.queries[places], candidates.rows[places]
    support = document_support(queries, corpus.documents[rows], candidates.gains[places])
    order[places] = places[np.lexsort((rows, -(scores[places] + params.document_support * support), queries))]
    return order


def _candidates(
    queries: pa.Table,
    rrf_merge: pa.Table,
    family_rescue: pa.Table,
    corpus: Corpus,
    cross_encoder: CrossEncoder | None,
    params: Params,
) -> _Candidates:
    """The candidates of family_rescue, in their order, with the parts of their score."""
    ranking = ragged(family_rescue, "candidates")
    candidates = Ragged(ranking.offsets, corpus.rows(ranking.values["chunk_id"]))
    rescued = ranking.numpy("rescued").astype(bool)
    # Rounding of the fused sum may carry a first place in every list a bit above the best possible score.
    retrieval = np.minimum(ranking.numpy("score") / as_numpy(rrf_merge.column("best_possible"))[ranking.rows], 1.0)
    asked = np.flatnonzero((ranking.positions < params.cross_encoder_depth) | rescued)
    gains = np.where(rescued, 0.0, 1.0 / (_SUPPORT_CONSTANT + 1 + ranking.positions))
    return _Candidates(
        queries=candidates.rows,
        rows=candidates.values,
        parts=_parts(queries, candidates, asked, retrieval, corpus, cross_encoder, params),
        rescued=rescued,
        families=ranking.values["families"],
        members=_members(ranking, ragged(family_rescue, "coverage")),
        gains=gains,
        picks=np.zeros(len(rescued), dtype=np.int32),
        leads=np.full(len(rescued), -1, dtype=np.int64),
    )


def _refuse_more_families_than_slots(required: Ragged, family_rescue: pa.Table, params: Params) -> None:
    most = int(required.lengths.max(initial=0))
    if most <= params.top_k:
        return
    shape = family_rescue.column("shape")[int(np.argmax(required.lengths))].as_py()
    raise ConfigurationError(
        "blended_rerank.top_k",
        f"has fewer slots than the shape {shape} has required families",
        got=params.top_k,
        want=f">= {most}",
        next_step="Raise top_k, or take families out of the shape in the evidence plan.",
    )


def _other_candidates(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    before, after = ragged(inputs["family_rescue"], "candidates"), ragged(output, "candidates")
    ids = pa.chunked_array([before.values["chunk_id"], after.values["chunk_id"]]).combine_chunks().dictionary_encode()
    keys = np.concatenate([before.rows, after.rows]) * len(ids.dictionary) + as_numpy(ids.indices)
    given, there = keys[: len(before.rows)], keys[len(before.rows) :]
    if np.array_equal(np.sort(given), np.sort(there)):
        return None  # a set operation costs three times as much as a sort
    if not np.isin(given, there).all():
        return "candidates went"
    drawn_in = as_numpy(after.values["drawn_in_by"].is_valid())
    return None if drawn_in[~np.isin(there, given)].all() else "candidates came"


def _more_than_slots(_: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    lists = ragged(output, "candidates")
    taken = np.bincount(lists.rows[as_numpy(lists.values["selected_rank"].is_valid())], minlength=len(output))
    return None if (taken <= as_numpy(output.column("slots"))).all() else "more passages are selected than slots"


STAGE = Stage(
    name="blended_rerank",
    summary="Scores every candidate on one absolute scale and selects the best under coverage of the families.",
    owner="ranking",
    reads={
        "queries": ("query_id", "text", "normalised_text", "groups", "filters"),
        "rrf_merge": ("query_id", "best_possible"),
        "family_rescue": ("query_id", "shape", "coverage.family", "candidates"),
    },
    writes=RerankedRanking,
    params=Params,
    run=blended_rerank_table,
    needs=("corpus", "cross_encoder", "plan"),
    success=(
        SAME_QUERIES,
        SuccessCheck("every candidate of family_rescue, and besides only what is drawn in", _other_candidates),
        SuccessCheck("at most `slots` selected passages a query", _more_than_slots),
    ),
    on_partial_failure="A cross-encoder that fails fails the shard: it is run again, never ranked without the model.",
    known_failure="A cross-encoder of another language than the corpus gives every passage nearly the same score.",
    roll_back="Set blended_rerank.enabled to false, or restore the earlier weights, and rerun from blended_rerank.",
)
