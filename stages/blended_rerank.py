"""blended_rerank: one absolute score for each candidate, and a selection that covers the required families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

import numpy as np
import pyarrow as pa
from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from contracts.columns import Array, IntArray, Ragged, Values, as_numpy, column, ragged
from contracts.errors import ConfigurationError
from contracts.evidence import EvidencePlan, RerankedRanking, Shape, Share
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import Int32, build_table
from corpus.candidates import Candidates
from corpus.corpus import Corpus
from corpus.exact_tokens import exact_shares
from corpus.families import ranks_by_family
from corpus.neighbours import draw_in
from corpus.scores import document_support, min_max, scores_in_order
from corpus.selection import NO_BOUND, fill_selection, serve_families
from models.cross_encoder import CrossEncoder, probabilities
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

# Sums of weights stay finite.
Weight = Annotated[float, Ge(0), Le(1e100)]

# Of the reciprocal ranks that a document's candidates are summed by.
_SUPPORT_CONSTANT = 10


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


def blend(cross_encoder: Array, retrieval: Array, lexical: Array, exact_bonus: Array, weights: Array) -> Array:
    """(candidates,) float64: min(1, w1 cross_encoder + w2 retrieval + w3 lexical + exact_bonus).

    Args:
        cross_encoder: (candidates,) float64 in [0, 1]; NaN was not asked and counts as 0.
        retrieval, lexical, exact_bonus: (candidates,) float64 in [0, 1].
        weights: (3,) float64, sum 1.
    """
    asked = np.nan_to_num(cross_encoder, nan=0.0)
    total: Array = weights[0] * asked + weights[1] * retrieval + weights[2] * lexical + exact_bonus
    return np.minimum(total, 1.0)


@dataclass(frozen=True)
class _Shard:
    """What every step of the reranking looks at.

    `weights` are (3,) float64, sum 1; None keeps the order as it is, by the retrieval part.
    """

    queries: pa.Table
    corpus: Corpus
    cross_encoder: CrossEncoder | None
    params: Params
    weights: Array | None

    def parts(self, candidates: Ragged, asked: IntArray, retrieval: Array) -> dict[str, Array]:
        """The parts of each candidate's score, by the name of their column, not stretched."""
        rows, owners = candidates.values, candidates.rows
        parts = {
            "cross_encoder": np.full(len(rows), np.nan),
            "retrieval": retrieval,
            "lexical": np.zeros(len(rows)),
            "exact_bonus": np.zeros(len(rows)),
        }
        if not self.params.enabled:
            return parts
        # The raw text is that of whichever line came first; the model reads what all lines of the query share.
        texts = column(self.queries, "normalised_text")
        if self.cross_encoder is not None and len(asked):
            read = texts.take(pa.array(owners[asked], pa.int64())).to_pylist()
            passages = self.corpus.passage_texts(rows[asked])
            parts["cross_encoder"][asked] = probabilities(self.cross_encoder, read, passages)
        parts["lexical"] = self.corpus.lexical_overlap(texts.to_pylist(), owners, rows)
        if self.params.exact_token_bonus:
            shares = exact_shares(self.queries.column("text").to_pylist(), candidates, self.corpus)
            parts["exact_bonus"] = self.params.exact_token_bonus * shares
        return parts

    def columns(self, candidates: Candidates) -> dict[str, Array]:
        """The parts as they are shown, `score` and `absolute_score`."""
        count, parts = len(self.queries), dict(candidates.parts)
        if self.weights is None:
            score = scores_in_order(candidates.offsets(count), candidates.rows, parts["retrieval"])
            return {**parts, "score": score, "absolute_score": score}
        score = blend(**parts, weights=self.weights)
        absolute = score if self.cross_encoder is None else parts["cross_encoder"]
        if self.params.normalisation == "min_max":
            for name in ("cross_encoder", "retrieval", "lexical"):
                parts[name] = min_max(parts[name], candidates.queries, count)
            score = blend(**parts, weights=self.weights)
        return {**parts, "score": score, "absolute_score": absolute}

    def ranked(self, candidates: Candidates) -> tuple[Candidates, dict[str, Array]]:
        """The candidates best first, (-score, chunk id), and the columns of numbers in that order."""
        columns = self.columns(candidates)
        order = np.lexsort((candidates.rows, -columns["score"], candidates.queries)).astype(np.int64)
        return candidates.take(order), {name: values[order] for name, values in columns.items()}


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
    required = ragged(family_rescue, "coverage")
    _refuse_more_families_than_slots(required, family_rescue, params)
    by_name = {} if plan is None else {shape.name: shape for shape in plan.shapes}
    shapes = [None if name is None else by_name.get(name) for name in family_rescue.column("shape").to_pylist()]
    weights = _rescaled_weights(params, cross_encoder) if params.enabled else None
    shard = _Shard(queries, corpus, cross_encoder, params, weights)
    given = _candidates(rrf_merge, family_rescue, shard)
    candidates, columns = shard.ranked(given)
    candidates = replace(candidates, picks=_for_families(candidates, columns["score"], required.lengths, shard))
    together = [shape if shape and any(one.keep_together for one in shape.families) else None for shape in shapes]
    if any(together):
        candidates, columns = shard.ranked(_with_neighbours(candidates, together, shard))
    bounds = [None if shape is None else shape.max_per_document for shape in shapes]
    bounds = [params.max_per_document if bound is None else bound for bound in bounds]
    spread = _to_spread(candidates, shard) & (required.lengths == 0)
    selected = _selected(candidates, columns["score"], bounds, spread, shard)
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
            "lexical_weight": np.full(len(queries), 0.0 if weights is None else weights[2]),
            "candidates": _candidate_lists(candidates, columns, selected, shard),
        },
    )
    before, after = len(given.rows), len(candidates.rows)
    added = {"drawn_in": after - before} if after > before else {}
    return StageOutput(table, Account(candidates_in=before, added=added, removed={}, candidates_out=after))


def _candidates(rrf_merge: pa.Table, family_rescue: pa.Table, shard: _Shard) -> Candidates:
    """The candidates of family_rescue, in their order, with the parts of their score."""
    ranking = ragged(family_rescue, "candidates")
    candidates = Ragged(ranking.offsets, shard.corpus.rows(ranking.values["chunk_id"]))
    rescued = ranking.numpy("rescued").astype(bool)
    # Rounding of the fused sum may carry a first place in every list a bit above the best possible score.
    retrieval = np.minimum(ranking.numpy("score") / as_numpy(rrf_merge.column("best_possible"))[ranking.rows], 1.0)
    asked = np.flatnonzero((ranking.positions < shard.params.cross_encoder_depth) | rescued)
    return Candidates(
        queries=candidates.rows,
        rows=candidates.values,
        parts=shard.parts(candidates, asked, retrieval),
        rescued=rescued,
        families=ranking.values["families"],
        family_ranks=ranks_by_family(ranking, ragged(family_rescue, "coverage")),
        gains=np.where(rescued, 0.0, 1.0 / (_SUPPORT_CONSTANT + 1 + ranking.positions)),
        picks=np.zeros(len(rescued), dtype=np.int32),
        leads=np.full(len(rescued), -1, dtype=np.int64),
    )


def _for_families(candidates: Candidates, scores: Array, required: IntArray, shard: _Shard) -> Array:
    """(candidates,) int32: the picks for the required families, as `serve_families` gives them."""
    ranks, params = candidates.family_ranks, shard.params
    fits = scores[:, np.newaxis] + np.where(ranks > 0, params.family_fit / np.maximum(ranks, 1), 0.0)
    offsets = candidates.offsets(len(shard.queries))
    likeness = candidates.likeness(shard.corpus, params.near_duplicate)
    return serve_families(offsets, ranks >= 0, fits, required, *likeness)


def _with_neighbours(candidates: Candidates, shapes: Sequence[Shape | None], shard: _Shard) -> Candidates:
    """The candidates with the neighbours that are drawn in: ranked ones are marked, others come behind the ranked."""
    queries, params = shard.queries, shard.params
    marked, fresh = draw_in(candidates, queries, shapes, shard.corpus, params.top_k, params.near_duplicate)
    lists = Ragged(fresh.offsets(len(queries)), fresh.rows)
    parts = shard.parts(lists, np.arange(len(fresh.rows)), np.zeros(len(fresh.rows)))
    return marked.joined(replace(fresh, parts=parts))


def _to_spread(candidates: Candidates, shard: _Shard) -> Array:
    """(queries,) bool: whose selection is spread, since their best-ranked passage lacks too many of their terms."""
    offsets = candidates.offsets(len(shard.queries))
    best = np.append(candidates.parts["lexical"], 1.0)[offsets[:-1]]
    spread: Array = (best < shard.params.spread_below) & (np.diff(offsets) > 0) & shard.params.enabled
    return spread


def _selected(
    candidates: Candidates, scores: Array, bounds: Sequence[int | None], spread: Array, shard: _Shard
) -> Array:
    """(candidates,) int32: the place of each in the selection, as `fill_selection` gives it."""
    params, documents = shard.params, shard.corpus.documents[candidates.rows]
    top_k = min(params.top_k, max(len(documents), 1))  # more slots than candidates stay empty
    # Those of a query that is spread come by score and what their documents support; no other order is looked at.
    order, places = np.arange(len(documents)), np.flatnonzero(spread[candidates.queries])
    queries, rows = candidates.queries[places], candidates.rows[places]
    support = document_support(queries, documents[places], candidates.gains[places])
    order[places] = places[np.lexsort((rows, -(scores[places] + params.document_support * support), queries))]
    return fill_selection(
        candidates.offsets(len(shard.queries)),
        candidates.picks,
        documents,
        *candidates.likeness(shard.corpus, params.near_duplicate),
        top_k,
        np.array([NO_BOUND if bound is None else bound for bound in bounds], dtype=np.int64),
        np.where(spread, params.spread_from, top_k + 1),
        order,
    )


def _candidate_lists(candidates: Candidates, columns: Mapping[str, Array], selected: Array, shard: _Shard) -> Ragged:
    corpus, offsets = shard.corpus, candidates.offsets(len(shard.queries))
    values: dict[str, Values] = {
        **columns,
        **{name: pa.array(columns[name], mask=np.isnan(columns[name])) for name in ("cross_encoder", "absolute_score")},
        "rank": Ragged(offsets, candidates.rows).positions + 1,
        "chunk_id": corpus.ids(candidates.rows),
        "families": candidates.families,
        "rescued": candidates.rescued,
        "selected_rank": pa.array(selected, pa.int32(), mask=selected == 0),
        "drawn_in_by": corpus.column("chunk_id").take(
            pa.array(candidates.leads, pa.int64(), mask=candidates.leads < 0)
        ),
    }
    return Ragged(offsets, values)


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
