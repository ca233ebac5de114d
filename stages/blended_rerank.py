"""blended_rerank: one absolute score for each candidate, and a selection that covers the required families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Gt, Le
from pydantic import model_validator

from contracts.columns import IntArray, Ragged, Values, as_numpy, column, offsets_from_lengths, ragged
from contracts.errors import ConfigurationError
from contracts.evidence import RerankedRanking, Share
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import Int32, build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus
from corpus.exact_tokens import exact_shares
from models.cross_encoder import CrossEncoder, probabilities
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

Array = np.ndarray[Any, np.dtype[Any]]
# Sums of weights stay finite.
Weight = Annotated[float, Ge(0), Le(1e100)]

# Cosines that differ by less are equal but for the rounding of float32, as in distance_matrices.
_ROUNDING = 1e-6
# Parts of a score that differ by less are equal but for rounding, and no spread for min-max.
_NO_SPREAD = 1e-12
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
            crag_grading fills never breaks it.
        near_duplicate: cosine in (0, 1] from which a passage is a copy of a picked one and is passed
            over, by crag_grading too; low values leave slots empty, 1 only drops equal embeddings, None
            switches it off.
        normalisation: `absolute` leaves the parts as they are, so that scores mean the same for every
            query; `min_max` stretches each part over the candidates of a query, so that they do not,
            and a grade taken from them is relative too.
    """

    enabled: bool = True
    cross_encoder_weight: Weight = 0.4
    retrieval_weight: Weight = 0.3
    lexical_weight: Weight = 0.3
    exact_token_bonus: Share = 0.1
    cross_encoder_depth: Annotated[int, Ge(1)] = 20
    top_k: Annotated[Int32, Ge(1)] = 5
    max_per_document: Annotated[Int32, Ge(1)] | None = None
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


_FRESH, _NEAR_COPY, _SAME_TEXT = 0, 1, 2


@kernel
def _likeness(
    candidate: int, picks: Array, count: int, texts: Array, vectors: Array, places: Array, near_duplicate: float
) -> int:
    """What a candidate is beside the first `count` picks: fresh, a near copy, or the same text."""
    likeness = _FRESH
    for pick in picks[:count]:
        if texts[pick] == texts[candidate]:
            return _SAME_TEXT
        if near_duplicate <= 1.0 and likeness == _FRESH:
            cosine = 0.0
            for axis in range(vectors.shape[1]):
                cosine += np.float64(vectors[places[pick], axis]) * np.float64(vectors[places[candidate], axis])
            if cosine >= near_duplicate - _ROUNDING:
                likeness = _NEAR_COPY
    return likeness


@kernel
def _serve_families(
    start: int,
    end: int,
    families: int,
    members: Array,
    texts: Array,
    vectors: Array,
    places: Array,
    near_duplicate: float,
    picks: Array,
) -> int:
    """Picks for each family that no pick serves yet; returns how many picks there are."""
    count = 0
    for family in range(families):
        served = False
        for pick in picks[:count]:
            served |= members[pick, family]
        best, best_likeness = -1, _FRESH if served else _SAME_TEXT
        for candidate in range(start, end):
            if best_likeness == _FRESH:
                break
            if members[candidate, family]:
                likeness = _likeness(candidate, picks, count, texts, vectors, places, near_duplicate)
                if likeness < best_likeness:
                    best, best_likeness = candidate, likeness
        if best >= 0:
            picks[count] = best
            count += 1
    return count


@kernel
def _fill(
    start: int,
    end: int,
    documents: Array,
    max_per_document: int,
    texts: Array,
    vectors: Array,
    places: Array,
    near_duplicate: float,
    picks: Array,
    count: int,
) -> int:
    """Picks fresh candidates in order until the slots are full; returns how many picks there are."""
    for candidate in range(start, end):
        if count == len(picks):
            break
        same_document = 0
        for pick in picks[:count]:
            same_document += documents[pick] == documents[candidate]
        # A picked candidate has the text of a pick: itself.
        if same_document < max_per_document and (
            _likeness(candidate, picks, count, texts, vectors, places, near_duplicate) == _FRESH
        ):
            picks[count] = candidate
            count += 1
    return count


@kernel
def select_under_coverage(
    offsets: Array,
    members: Array,
    required: Array,
    documents: Array,
    texts: Array,
    vectors: Array,
    places: Array,
    top_k: int,
    max_per_document: int,
    near_duplicate: float,
) -> Array:
    """The place of each candidate in its query's selection of at most `top_k`, from 1; 0 is not selected.

    1. For each required family that no pick serves yet, its first candidate that is no near copy of a
       pick, else its first near copy. Never a text twice: a copy is no new evidence.
    2. The others in order, without copies, near copies and what `max_per_document` holds back.
    3. If slots are left, what only `max_per_document` held back, in order. Copies leave slots empty.

    Args:
        offsets: (queries + 1,) int64, the candidates of each query, best first.
        members: (candidates, families) bool, which of its query's required families each serves.
        required: (queries,) int64, how many of the families count, <= top_k.
        documents, texts: (candidates,) int64, equal for one document, equal for equal texts.
        vectors: (vectors, dimension) float32, of length 1.
        places: (candidates,) int64, the vector of each candidate.
        top_k: slots, >= 1.
        max_per_document: >= 1; picks for families count towards it but are not held back.
        near_duplicate: cosine; above 1 nothing is a near copy and `vectors` are not looked at.
    """
    ranks = np.zeros(len(texts), np.int32)
    picks = np.zeros(top_k, np.int64)
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        count = _serve_families(start, end, required[query], members, texts, vectors, places, near_duplicate, picks)
        for bound in (max_per_document, top_k):  # the last holds nothing back
            count = _fill(start, end, documents, bound, texts, vectors, places, near_duplicate, picks, count)
        for place in range(count):
            ranks[picks[place]] = place + 1
    return ranks


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
    """The parts of each candidate's score and the score, by the name of their column."""
    rows, owners = candidates.values, candidates.rows
    parts = {
        "cross_encoder": np.full(len(rows), np.nan),
        "retrieval": retrieval,
        "lexical": np.zeros(len(rows)),
        "exact_bonus": np.zeros(len(rows)),
    }
    if not params.enabled:
        return {**parts, "score": scores_in_order(candidates.offsets, rows, retrieval)}
    weights = _rescaled_weights(params, cross_encoder)
    parts["cross_encoder"] = _probabilities(queries, candidates, asked, corpus, cross_encoder)
    parts["lexical"] = corpus.lexical_overlap(queries.column("normalised_text").to_pylist(), owners, rows)
    if params.exact_token_bonus:
        shares = exact_shares(queries.column("text").to_pylist(), candidates, corpus)
        parts["exact_bonus"] = params.exact_token_bonus * shares
    if params.normalisation == "min_max":
        for name in ("cross_encoder", "retrieval", "lexical"):
            parts[name] = min_max(parts[name], owners, len(queries))
    score = blend(parts["cross_encoder"], parts["retrieval"], parts["lexical"], parts["exact_bonus"], weights)
    return {**parts, "score": score}


def _members(candidates: Ragged, required: Ragged) -> Array:
    """(candidates, most required families) bool: which of its query's required families each candidate serves."""
    names = pc.unique(required.values["family"])
    asked = required.rows * len(names) + as_numpy(pc.index_in(required.values["family"], value_set=names))
    lists = candidates.values["families"]
    owners = as_numpy(pc.list_parent_indices(lists))
    served = pc.index_in(pc.list_flatten(lists), value_set=names)
    keys = candidates.rows[owners] * len(names) + as_numpy(pc.fill_null(served, len(names)))
    order = np.argsort(asked)
    place = np.searchsorted(asked[order], keys)
    known = np.append(asked[order], -1)[place] == keys
    members = np.zeros((len(candidates.rows), int(required.lengths.max(initial=0))), dtype=bool)
    members[owners[known], required.positions[order[place[known]]]] = True
    return members


def _selected(
    offsets: IntArray, rows: IntArray, members: Array, required: IntArray, corpus: Corpus, params: Params
) -> pa.Array:
    """`selected_rank` of candidates in their final order, null where not selected."""
    vectors, places = np.zeros((1, 1), np.float32), np.zeros(len(rows), np.int64)
    if params.near_duplicate is not None:
        distinct, places = np.unique(rows, return_inverse=True)
        vectors = np.ascontiguousarray(corpus.embeddings[distinct])
    documents = corpus.column("document_id").take(pa.array(rows, pa.int64())).dictionary_encode()
    # More slots than candidates stay empty, and the kernel sets aside room for every slot.
    top_k = min(params.top_k, max(len(rows), 1))
    ranks = select_under_coverage(
        offsets,
        members,
        required,
        as_numpy(documents.indices).astype(np.int64),
        as_numpy(corpus.column("text_id"))[rows],
        vectors,
        places,
        top_k,
        params.max_per_document or top_k,
        params.near_duplicate or np.inf,
    )
    return pa.array(ranks, pa.int32(), mask=ranks == 0)


def blended_rerank_table(
    *,
    queries: pa.Table,
    rrf_merge: pa.Table,
    family_rescue: pa.Table,
    corpus: Corpus,
    cross_encoder: CrossEncoder | None,
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
    candidates = Ragged(ranking.offsets, corpus.rows(ranking.values["chunk_id"]))
    rescued = ranking.numpy("rescued")
    # Rounding of the fused sum may carry a first place in every list a bit above the best possible score.
    retrieval = np.minimum(ranking.numpy("score") / as_numpy(rrf_merge.column("best_possible"))[ranking.rows], 1.0)
    asked = np.flatnonzero((ranking.positions < params.cross_encoder_depth) | rescued)
    parts = _parts(queries, candidates, asked, retrieval, corpus, cross_encoder, params)
    order = np.lexsort((candidates.values, -parts["score"], candidates.rows))
    rows = candidates.values[order]
    members = _members(ranking, required)[order]
    families = ranking.values["families"].take(pa.array(order, pa.int64()))
    values: dict[str, Values] = {name: part[order] for name, part in parts.items()}
    values |= {
        "rank": ranking.positions + 1,
        "chunk_id": corpus.ids(rows),
        "cross_encoder": pa.array(values["cross_encoder"], mask=np.isnan(values["cross_encoder"])),
        "families": Ragged(offsets_from_lengths(as_numpy(pc.list_value_length(families))), pc.list_flatten(families)),
        "rescued": rescued[order],
        "selected_rank": _selected(ranking.offsets, rows, members, required.lengths, corpus, params),
    }
    with_model = "no_cross_encoder" if cross_encoder is None else "cross_encoder"
    table = build_table(
        RerankedRanking,
        {
            "query_id": queries.column("query_id"),
            "rerank_status": [with_model if params.enabled else "disabled"] * len(queries),
            "required": Ragged(required.offsets, required.values["family"]),
            "slots": np.full(len(queries), params.top_k),
            "max_per_document": [params.max_per_document] * len(queries),
            "near_duplicate": [params.near_duplicate] * len(queries),
            "lexical_weight": np.full(
                len(queries), _rescaled_weights(params, cross_encoder)[2] if params.enabled else 0.0
            ),
            "candidates": Ragged(ranking.offsets, values),
        },
    )
    count = len(rows)
    return StageOutput(table, Account(candidates_in=count, added={}, removed={}, candidates_out=count))


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
    return None if np.array_equal(before.offsets, after.offsets) else "candidates came or went"


def _more_than_slots(_: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    lists = ragged(output, "candidates")
    taken = np.bincount(lists.rows[as_numpy(lists.values["selected_rank"].is_valid())], minlength=len(output))
    return None if (taken <= as_numpy(output.column("slots"))).all() else "more passages are selected than slots"


STAGE = Stage(
    name="blended_rerank",
    summary="Scores every candidate on one absolute scale and selects the best under coverage of the families.",
    owner="ranking",
    reads={
        "queries": ("query_id", "text", "normalised_text"),
        "rrf_merge": ("query_id", "best_possible"),
        "family_rescue": ("query_id", "shape", "coverage.family", "candidates"),
    },
    writes=RerankedRanking,
    params=Params,
    run=blended_rerank_table,
    needs=("corpus", "cross_encoder"),
    success=(
        SAME_QUERIES,
        SuccessCheck("every candidate of family_rescue, and no other", _other_candidates),
        SuccessCheck("at most `slots` selected passages a query", _more_than_slots),
    ),
    on_partial_failure="A cross-encoder that fails fails the shard: it is run again, never ranked without the model.",
    known_failure="A cross-encoder of another language than the corpus gives every passage nearly the same score.",
    roll_back="Set blended_rerank.enabled to false, or restore the earlier weights, and rerun from blended_rerank.",
)
