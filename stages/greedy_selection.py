"""greedy_selection: Dartboard picks candidates that are relevant and tell something new."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Le

from contracts.candidates import Selection
from contracts.columns import Array, Ragged, as_numpy, column, offsets_from_lengths, ragged
from contracts.manifest import Account
from contracts.params import Count
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.compiled import kernel, kernel_adding_in_any_order
from stages.stage import SAME_QUERIES, Stage, StageOutput, SuccessCheck

# A term this far (in log) below the largest one of a sum adds nothing to a float64: exp(-40) < 2^-53.
_NEGLIGIBLE = 40.0
# Below this part of a candidate's whole sum, and below this size, a gain is computed in log space.
_SOUND, _TINY = 1e-6, 1e-280
# Rounding of a log gain, relative to its size: within this an earlier gain is no bound for the present one.
_BOUND_SLACK = 1e-9


class Params(BaseParams):
    """Settings of greedy_selection.

    Attributes:
        k: how many candidates are picked, >= 1; it is how deep the diverse ranking goes into fusion.
        method: `dartboard`, or a baseline on the same candidates: `top_k` (relevance alone) or `mmr`.
        relevance_weight: >= 0. At 0 only the first pick looks at the query, and the others cover the
            candidates evenly; very large values give the order by relevance.
        diversity_weight: >= 0, and not monotone. At exactly 0 no later pick gains anything, and the
            order is by relevance. Just above 0 the picks differ most, and from there they differ less:
            very large values are the order by relevance again, with copies moved to the end. Measured
            on 300 questions to the Kubernetes documentation, 10 of 30 candidates at sigma 0.1: mean
            distance between picks 0.461 at 0, 0.490 at 0.001, 0.483 at 0.1, 0.468 at 1, 0.464 at 10,
            0.461 from 10,000 up. Weights and `log_normal.sigma` are not independent: a weight w turns
            its density into one of width sigma / sqrt(w).
        mmr_lambda: in [0, 1], for `mmr` alone: 1 is relevance alone, 0 looks only at the distance to
            what has been picked.
    """

    k: Count = 30
    method: Literal["dartboard", "top_k", "mmr"] = "dartboard"
    relevance_weight: Annotated[float, Ge(0)] = 1.0
    diversity_weight: Annotated[float, Ge(0)] = 1.0
    mmr_lambda: Annotated[float, Ge(0), Le(1)] = 0.5


@kernel
def _square(triangle: Array, count: int, diagonal: float, weight: float) -> Array:
    """(count, count) float64: weight times the full symmetric matrix of a lower triangle."""
    matrix = np.empty((count, count), np.float64)
    pair = 0
    for i in range(count):
        matrix[i, i] = weight * diagonal
        for j in range(i):
            matrix[i, j] = matrix[j, i] = weight * triangle[pair]
            pair += 1
    return matrix


@kernel
def _log_gain(relevance: Array, covered: Array, offered: Array) -> float:
    """The log of the sum over j with offered > covered of exp(relevance) * (exp(offered) - exp(covered)).

    Each term is taken as relevance + offered + ln(1 - exp(covered - offered)), so nothing under- or
    overflows; -inf where nothing is gained. With covered = -inf it is the whole objective.
    """
    largest, total = -np.inf, 0.0
    for j in range(len(offered)):
        rise = offered[j] - covered[j]
        # The logarithm that is still to come only lowers the term.
        if not rise > 0.0 or relevance[j] + offered[j] <= largest - _NEGLIGIBLE:
            continue
        term = relevance[j] + offered[j] + math.log(-math.expm1(-rise))
        if term > largest:
            total = total * math.exp(largest - term) + 1.0
            largest = term
        else:
            total += math.exp(term - largest)
    return largest + math.log(total) if total > 0.0 else -np.inf


@kernel_adding_in_any_order
def _gain(shares: Array, covered: Array, offered: Array) -> float:
    """The sum over j of shares[j] * (offered[j] - covered[j]) where offered is above covered."""
    total = 0.0
    for j in range(len(offered)):
        total += shares[j] * max(offered[j] - covered[j], 0.0)
    return total


@kernel
def _log_row(triangle: Array, place: int, diagonal: float, weight: float, row: Array) -> Array:
    """Writes row `place` of the symmetric matrix of a lower triangle, times a weight."""
    first = place * (place - 1) // 2
    for j in range(place):
        row[j] = weight * triangle[first + j]
    row[place] = weight * diagonal
    for j in range(place + 1, len(row)):
        row[j] = weight * triangle[j * (j - 1) // 2 + place]
    return row


@kernel
def _dartboard_of_query(
    log_densities: Array,
    triangle: Array,
    spread_triangle: Array,
    diagonal: float,
    relevance_weight: float,
    diversity_weight: float,
    picks: Array,
    log_gains: Array,
) -> None:
    """Picks for one query, as `dartboard` says; writes the first len(picks) of them, or as many as there are."""
    count = len(log_densities)
    spread = _square(spread_triangle, count, 1.0, 1.0)
    relevance = relevance_weight * log_densities
    highest = relevance.max()
    shares, log_scale = np.exp(relevance - highest), highest + diversity_weight * diagonal
    covered, log_covered = np.zeros(count), np.full(count, -np.inf)
    whole, bounds, row = np.empty(count), np.full(count, np.inf), np.empty(count)
    for c in range(count):
        whole[c] = _gain(shares, covered, spread[c])
    for step in range(min(len(picks), count)):
        leader = int(np.argmax(log_densities)) if step == 0 else _highest(bounds)
        best = leader
        # The leader comes first, since most others then cannot reach it; the first pick of all has no others.
        for turn in range(count + 1 if step else 1):
            c = leader if turn == 0 else turn - 1
            if turn and (
                c == leader or np.isnan(bounds[c]) or bounds[c] < bounds[best] - _BOUND_SLACK * (1 + abs(bounds[best]))
            ):
                continue
            gain = _gain(shares, covered, spread[c])
            if gain > _SOUND * whole[c] and gain > _TINY:
                bounds[c] = math.log(gain) + log_scale
            else:
                bounds[c] = _log_gain(relevance, log_covered, _log_row(triangle, c, diagonal, diversity_weight, row))
            if bounds[c] > bounds[best] or (
                bounds[c] == bounds[best]
                and (log_densities[c] > log_densities[best] or (log_densities[c] == log_densities[best] and c < best))
            ):
                best = c
        picks[step], log_gains[step] = best, bounds[best]
        bounds[best] = np.nan
        covered = np.maximum(covered, spread[best])
        log_covered = np.maximum(log_covered, _log_row(triangle, best, diagonal, diversity_weight, row))


@kernel
def _highest(bounds: Array) -> int:
    """The first candidate with the highest bound; NaN stands for one that is picked."""
    best = -1
    for c in range(len(bounds)):
        if not np.isnan(bounds[c]) and (best < 0 or bounds[c] > bounds[best]):
            best = c
    return best


def dartboard(
    offsets: Array,
    query_log_densities: Array,
    pair_offsets: Array,
    document_log_densities: Array,
    densities_at_zero: Array,
    k: int,
    relevance_weight: float,
    diversity_weight: float,
) -> tuple[Array, Array]:
    """Greedy search for the set of candidates that carries the most relevant information.

    The first pick is the candidate with the highest log density l(q, c). Then, until k are picked, it is
    the one that most raises logsumexp over j of (w_div * max over picked s of l(s, j) + w_rel * l(q, j)).

    Args:
        offsets: (queries + 1,) int64; query q has the candidates offsets[q] up to offsets[q + 1].
        query_log_densities: (candidates,) float64, l(q, c).
        pair_offsets: (queries + 1,) int64, where each query's lower triangle begins.
        document_log_densities: (pairs,) float64, l(c, c') as lower triangles without their diagonals.
        densities_at_zero: (queries,) float64, l(c, c), the log density at distance 0.
        k: picks a query, >= 1; a query with fewer candidates gives all of them.
        relevance_weight, diversity_weight: w_rel and w_div, >= 0.

    Returns:
        (queries, k) int64, the places of the picks among the query's candidates in the order of picking,
        -1 where there was none left; and (queries, k) float64, the log of what each pick added to the sum
        inside the logsumexp (for the first pick: the log of the sum itself), -inf where it added nothing.
        Ties of exactly equal gains: higher l(q, c), then the earlier candidate.

    Source: Dartboard (Pickett et al. 2024, "Better RAG using Relevant Information Gain", arXiv 2407.12101,
    algorithm 1), and the weights of the published pattern. Different: candidates are compared by what they
    add, and not by the new total. The picks are the same wherever the total is sound; where it has rounded
    the gain away (copies at sigma 0.05 and below) it no longer returns them in input order. A picked
    candidate is never taken again. Gains fall as picks grow, so most are bounded by earlier ones and not
    computed anew (Minoux 1978, "Accelerated greedy algorithms").

    Rounding: exp is monotone, so the maximum is taken after it, with one exp a pair, scaled to at most 1. A
    gain that is less than 1e-6 of what the candidate would add to nothing may have lost 1e-10 of itself to
    rounding, or all of it to underflow: it is computed in log space, where nothing is lost.
    """
    picks = np.full((len(offsets) - 1, k), -1, np.int64)
    log_gains = np.full(picks.shape, -np.inf, np.float64)
    spread = np.repeat(densities_at_zero, np.diff(pair_offsets))
    # exp(weight * (density - density at 0)), in place: fresh memory for each step takes as long as the steps.
    np.subtract(document_log_densities, spread, out=spread)
    spread *= diversity_weight
    np.exp(spread, out=spread)
    _dartboard(
        offsets, query_log_densities, pair_offsets, document_log_densities, spread, densities_at_zero,
        relevance_weight, diversity_weight, picks, log_gains,
    )  # fmt: skip
    return picks, log_gains


@kernel
def _dartboard(
    offsets: Array,
    query_log_densities: Array,
    pair_offsets: Array,
    document_log_densities: Array,
    spread: Array,
    densities_at_zero: Array,
    relevance_weight: float,
    diversity_weight: float,
    picks: Array,
    log_gains: Array,
) -> None:
    for query in range(len(offsets) - 1):
        start, end = offsets[query], offsets[query + 1]
        pairs = slice(pair_offsets[query], pair_offsets[query + 1])
        if end > start:
            _dartboard_of_query(
                query_log_densities[start:end],
                document_log_densities[pairs],
                spread[pairs],
                densities_at_zero[query],
                relevance_weight,
                diversity_weight,
                picks[query],
                log_gains[query],
            )


@kernel
def mmr(
    offsets: Array, query_distances: Array, pair_offsets: Array, document_distances: Array, k: int, mmr_lambda: float
) -> Array:
    """Maximal marginal relevance: lambda * cos(q, c) - (1 - lambda) * max over picked s of cos(c, s).

    Args:
        offsets, pair_offsets, k: as for `dartboard`.
        query_distances, document_distances: (candidates,) and (pairs,) float32, 1 - cos.
        mmr_lambda: in [0, 1]; at 1 the order is by relevance (the baseline `top_k`).

    Returns:
        (queries, k) int64 picks as `dartboard` gives them. The first is the nearest to the query. Ties:
        the nearer to the query, then the earlier candidate.

    Source: Carbonell and Goldstein 1998, "The Use of MMR, Diversity-Based Reranking for Reordering
    Documents and Producing Summaries".
    """
    queries = len(offsets) - 1
    picks = np.full((queries, k), -1, np.int64)
    for query in range(queries):
        similarity = 1.0 - query_distances[offsets[query] : offsets[query + 1]].astype(np.float64)
        count = len(similarity)
        triangle = document_distances[pair_offsets[query] : pair_offsets[query + 1]]
        distances = _square(triangle, count, 0.0, 1.0)
        closest = np.full(count, -np.inf)
        taken = np.zeros(count, np.bool_)
        for step in range(min(k, count)):
            if step == 0:
                best = int(np.argmax(similarity))
            else:
                best, highest = -1, -np.inf
                for c in range(count):
                    value = mmr_lambda * similarity[c] - (1.0 - mmr_lambda) * closest[c]
                    tie_won = value == highest and similarity[c] > similarity[best]
                    if not taken[c] and (best < 0 or value > highest or tie_won):
                        best, highest = c, value
            picks[query, step] = best
            taken[best] = True
            closest = np.maximum(closest, 1.0 - distances[best])
    return picks


@kernel
def log_gains_of(
    picks: Array,
    offsets: Array,
    query_log_densities: Array,
    pair_offsets: Array,
    document_log_densities: Array,
    densities_at_zero: Array,
    relevance_weight: float,
    diversity_weight: float,
) -> Array:
    """(queries, k) float64: what given picks add to the objective of `dartboard`, as it gives them.

    So the baselines are told on the same scale as Dartboard itself.
    """
    log_gains = np.full(picks.shape, -np.inf, np.float64)
    for query in range(len(picks)):
        relevance = relevance_weight * query_log_densities[offsets[query] : offsets[query + 1]]
        count = len(relevance)
        triangle = document_log_densities[pair_offsets[query] : pair_offsets[query + 1]]
        matrix = _square(triangle, count, densities_at_zero[query], diversity_weight)
        covered = np.full(count, -np.inf)
        for step in range(min(picks.shape[1], count)):
            offered = matrix[picks[query, step]]
            log_gains[query, step] = _log_gain(relevance, covered, offered)
            covered = np.maximum(covered, offered)
    return log_gains


def _select(log_normal: pa.Table, distance_matrices: pa.Table, params: Params) -> tuple[Array, Array]:
    """Picks and log gains by the method of the settings, as `dartboard` gives them."""
    near, far = ragged(distance_matrices, "query_distances"), ragged(distance_matrices, "document_distances")
    query_log_densities = ragged(log_normal, "query_log_probabilities").numpy_values()
    document_log_densities = ragged(log_normal, "document_log_probabilities").numpy_values()
    at_zero = as_numpy(column(log_normal, "log_probability_at_zero"))
    board = (near.offsets, query_log_densities, far.offsets, document_log_densities, at_zero)
    weights = (params.relevance_weight, params.diversity_weight)
    k = min(params.k, int(near.lengths.max(initial=0)))
    if params.method == "dartboard":
        picks, log_gains = dartboard(*board, k, *weights)
        return picks, log_gains
    mmr_lambda = params.mmr_lambda if params.method == "mmr" else 1.0
    picks = mmr(near.offsets, near.numpy_values(), far.offsets, far.numpy_values(), k, mmr_lambda)
    return picks, log_gains_of(picks, *board, *weights)


def greedy_selection_table(
    *, oversample: pa.Table, log_normal: pa.Table, distance_matrices: pa.Table, params: Params
) -> StageOutput:
    """Picks `params.k` candidates of every query, or all where there are fewer."""
    candidates = ragged(oversample, "candidates")
    picks, log_gains = _select(log_normal, distance_matrices, params)
    picked = picks >= 0
    places = (candidates.offsets[:-1, None] + picks)[picked]
    scores = log_gains[picked]
    counts = picked.sum(axis=1, dtype=np.int64)
    lists = Ragged(offsets_from_lengths(counts), None)
    picked_candidates = {
        "rank": lists.positions + 1,
        "chunk_id": candidates.values["chunk_id"].take(pa.array(places, pa.int64())),
        "score": pa.array(scores, pa.float64(), mask=np.isneginf(scores)),
    }
    table = build_table(
        Selection,
        {
            "query_id": oversample.column("query_id"),
            "candidates": Ragged(lists.offsets, picked_candidates),
            "shortfall": params.k - counts,
        },
    )
    found, kept = int(candidates.offsets[-1]), len(places)
    removed = {"not_picked": found - kept} if found > kept else {}
    return StageOutput(table, Account(candidates_in=found, added={}, removed=removed, candidates_out=kept))


def _foreign_pick(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    given, picked = ragged(inputs["oversample"], "candidates"), ragged(output, "candidates")
    ids = pc.unique(given.values["chunk_id"])

    def keys(lists: Ragged) -> Array:
        places = pc.fill_null(pc.index_in(lists.values["chunk_id"], value_set=ids), len(ids))
        return lists.rows * (len(ids) + 1) + as_numpy(places)

    foreign = np.flatnonzero(~np.isin(keys(picked), keys(given)))
    if not len(foreign):
        return None
    return f"row {picked.rows[foreign[0]]} picked {picked.values['chunk_id'][int(foreign[0])].as_py()}"


def _needless_shortfall(inputs: Mapping[str, pa.Table], output: pa.Table) -> str | None:
    given, picked = ragged(inputs["oversample"], "candidates").lengths, ragged(output, "candidates").lengths
    short = as_numpy(column(output, "shortfall"))
    wrong = np.flatnonzero((short > 0) & (picked < given))
    return f"row {wrong[0]} left {(given - picked)[wrong[0]]} candidates" if len(wrong) else None


STAGE = Stage(
    name="greedy_selection",
    summary="Picks k candidates that are relevant and not the same thing again (Dartboard, or a baseline).",
    owner="retrieval",
    reads={
        "oversample": ("query_id", "candidates.chunk_id"),
        "log_normal": (
            "query_id",
            "query_log_probabilities",
            "document_log_probabilities",
            "log_probability_at_zero",
        ),
        "distance_matrices": ("query_id", "query_distances", "document_distances"),
    },
    writes=Selection,
    params=Params,
    run=greedy_selection_table,
    success=(
        SAME_QUERIES,
        SuccessCheck("every pick is a candidate of its query", _foreign_pick),
        SuccessCheck("a shortfall only where every candidate was picked", _needless_shortfall),
    ),
    on_partial_failure="Pure arithmetic: a shard that fails is a defect; it fails whole and is run again.",
    known_failure="Without copies in the corpus, a sigma of 0.1 or below gives almost the order by relevance; "
    "picks with a null score added nothing, which is how copies look when there is nothing else.",
    roll_back="Rerun from greedy_selection with the earlier settings; method top_k is plain relevance.",
)
