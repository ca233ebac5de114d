"""family_rescue: a question that needs certain kinds of source gets candidates of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.columns import IntArray, Ragged, as_numpy, offsets_from_lengths, ragged
from contracts.errors import ContractError
from contracts.evidence import EvidencePlan, Family, RescuedRanking, RescueSearch, Shape
from contracts.manifest import Account
from contracts.params import Params as BaseParams
from contracts.table import build_table
from corpus.compiled import kernel
from corpus.corpus import Corpus, KeywordSearch
from corpus.recognition import recognise
from corpus.scope import Scope, Scopes
from stages.stage import Stage, StageOutput, search_outcomes

Array = np.ndarray[Any, np.dtype[Any]]


class Params(BaseParams):
    """Settings of family_rescue.

    Attributes:
        enabled: off, every query passes through untouched, with no shape and no required families.
        plan: path of the evidence plan; None means that no question has a shape. The plan reaches the
            stage loaded and checked, and its content, not its path, decides what is computed again.
    """

    enabled: bool = True
    plan: str | None = None


@kernel
def _holds(texts: Array, member: Array, rows: Array, start: int, end: int, text: int) -> bool:
    """Whether one of rows[start:end] is a member and has the text."""
    held = rows[start:end]
    return bool((member[held] & (texts[held] == text)).any())


@kernel
def rescue_missing(
    offsets: Array,
    rows: Array,
    demand_offsets: Array,
    demand_families: Array,
    demand_searches: Array,
    wanted: Array,
    members: Array,
    hit_offsets: Array,
    hit_rows: Array,
    texts: Array,
) -> tuple[Array, Array, Array, Array]:
    """For each query, what its required families lack and the rescue searches found.

    Demands are met in plan order; a chunk rescued for one family counts for every other that it is a
    member of. A hit whose text another member among the candidates has already is passed over; a
    candidate with its text that is no member does not stand in the way, since it cannot be cited for the family.

    Args:
        offsets, rows: (queries + 1,), (candidates,) int64, the fused candidates of each query.
        demand_offsets: (queries + 1,) int64, the required families of each query, in plan order.
        demand_families, demand_searches: (demands,) int64, row of `members` and list of hits of each.
        wanted: (demands,) int64, members that each asks for.
        members: (families, chunks) bool.
        hit_offsets, hit_rows: (searches + 1,), (hits,) int64, the hits of each search, best first,
            all of them members of their family and eligible for the query.
        texts: (chunks,) int64, equal for equal texts.

    Returns:
        counts (queries,) of rescued rows, the rescued rows (sum of counts,), and for each demand how
        many fused and how many rescued candidates are members, all int64.
    """
    capacity = 0
    for demand in range(len(wanted)):
        search = demand_searches[demand]
        capacity += min(wanted[demand], hit_offsets[search + 1] - hit_offsets[search])
    counts = np.zeros(len(offsets) - 1, np.int64)
    added = np.zeros(capacity, np.int64)
    found, rescued = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
    total = 0
    for query in range(len(counts)):
        first, start, end = total, offsets[query], offsets[query + 1]
        for demand in range(demand_offsets[query], demand_offsets[query + 1]):
            member = members[demand_families[demand]]
            search = demand_searches[demand]
            found[demand] = member[rows[start:end]].sum()
            have = found[demand] + member[added[first:total]].sum()
            for place in range(hit_offsets[search], hit_offsets[search + 1]):
                if have >= wanted[demand]:
                    break
                text = texts[hit_rows[place]]
                if not _holds(texts, member, rows, start, end, text) and (
                    not _holds(texts, member, added, first, total, text)
                ):
                    added[total] = hit_rows[place]
                    total += 1
                    have += 1
        for demand in range(demand_offsets[query], demand_offsets[query + 1]):
            rescued[demand] = members[demand_families[demand]][added[first:total]].sum()
        counts[query] = total - first
    return counts, added[:total], found, rescued


@dataclass(frozen=True)
class _Demands:
    """The required families of the queries of one table.

    Attributes:
        shapes: (queries,) int64, the place of each query's shape in `plan`, -1 for none.
        reasons: for each query by what its shape was recognised.
        lists: for each query its required families, as places in `families`, in plan order.
        families: every family of the plan with its shape, in plan order.
        scopes: of the queries.
    """

    plan: Sequence[Shape]
    shapes: IntArray
    reasons: Sequence[str | None]
    lists: Ragged
    families: Sequence[tuple[Shape, Family]]
    scopes: Scopes

    @classmethod
    def of(cls, queries: pa.Table, plan: EvidencePlan | None, params: Params) -> _Demands:
        shapes = plan.shapes if plan is not None and params.enabled else []
        found, reasons = recognise(queries.column("normalised_text").to_pylist(), shapes)
        codes = np.array(found, dtype=np.int64)
        starts = offsets_from_lengths(np.array([len(shape.families) for shape in shapes], dtype=np.int64))
        lengths = np.append(np.diff(starts), 0)[codes]  # the appended 0 is what code -1 takes
        bare = Ragged(offsets_from_lengths(lengths), None)
        lists = Ragged(bare.offsets, starts[codes][bare.rows] + bare.positions)
        families = [(shape, family) for shape in shapes for family in shape.families]
        return cls(shapes, codes, reasons, lists, families, Scopes.of(queries))

    def names(self, places: IntArray) -> pa.Array:
        """Places in `families` to names."""
        return pa.array([family.name for _, family in self.families], pa.string()).take(pa.array(places, pa.int64()))

    def shape_names(self) -> pa.Array:
        """The shape of each query, null for none."""
        names = pa.array([shape.name for shape in self.plan], pa.string())
        return names.take(pa.array(self.shapes, pa.int64(), mask=self.shapes < 0))


def own_copies(rows: IntArray, family: Family, scope: Scope, corpus: Corpus) -> IntArray:
    """(hits,) int64: hits as members of a family: itself, else the visible member with its text, else -1.

    Searches show one chunk for all that have its text, and it may lie outside the family: then the family's
    own copy counts, the one of the highest authority (lowest tier, null last), then the lowest chunk id.
    """
    member = corpus.members(family)
    if not corpus.collapse_identical_texts:  # every copy is a hit of its own
        return np.where(member[rows], rows, -1)
    texts, tiers = as_numpy(corpus.column("text_id")), as_numpy(corpus.column("authority_tier").cast(pa.float64()))
    outside = ~member[rows]
    copies = np.flatnonzero(member & corpus.visible(scope) & np.isin(texts, texts[rows[outside]]))
    copies = copies[np.lexsort((copies, tiers[copies], texts[copies]))]  # a null tier is NaN, which comes last
    place = np.searchsorted(texts[copies], texts[rows])
    found = np.append(copies, -1)[place]
    there = np.append(texts[copies], -1)[place] == texts[rows]
    own: IntArray = np.where(member[rows], rows, np.where(there, found, -1))
    return own


def family_searches_table(
    *, queries: pa.Table, corpus: Corpus, keyword_search: KeywordSearch, plan: EvidencePlan | None, params: Params
) -> StageOutput:
    """Runs every rescue search once for each shape that occurs, each scope of its queries and each family.

    Rows in this order: shape in plan order, scope, family in plan order. All families of a shape and a
    scope are searched in one call; cutting the deepest list gives the shorter ones, since the order is total.
    """
    demands = _Demands.of(queries, plan, params)
    searches: list[tuple[Shape, Family, Scope]] = []
    rows, scores = [], [np.zeros(0)]
    for code, shape in enumerate(demands.plan):
        for scope_code in np.unique(demands.scopes.codes[demands.shapes == code]):
            scope = demands.scopes.distinct[scope_code]
            depth = max(family.depth for family in shape.families)
            questions = [family.rescue_query for family in shape.families]
            hits = keyword_search.search(questions, Scopes.single(scope, len(questions)), depth)
            for place, family in enumerate(shape.families):
                hit = slice(hits.offsets[place], min(hits.offsets[place] + family.depth, hits.offsets[place + 1]))
                own = own_copies(hits.values["row"][hit], family, scope, corpus)
                searches.append((shape, family, scope))
                rows.append(own[own >= 0])
                scores.append(hits.values["score"][hit][own >= 0])
    found = _end_to_end(rows)
    values = {
        "rank": found.positions + 1,
        "chunk_id": corpus.ids(found.values),
        "score": np.concatenate(scores),
    }
    table = build_table(
        RescueSearch,
        {
            "shape": [shape.name for shape, _, _ in searches],
            "family": [family.name for _, family, _ in searches],
            "groups": [list(scope.groups) for *_, scope in searches],
            "filters": [[{"key": key, "value": value} for key, value in scope.filters] for *_, scope in searches],
            "candidates": Ragged(found.offsets, values),
        },
    )
    count = len(found.values)
    added = {"found": count} if count else {}
    account = Account(candidates_in=0, added=added, removed={}, candidates_out=count)
    return StageOutput(table, account, {"rescue_search": search_outcomes(found.lengths)})


def _hits(searches: pa.Table, demands: _Demands, corpus: Corpus) -> tuple[Ragged, IntArray, IntArray]:
    """The hits of each (family, scope) as chunk rows, best first, and for each demand which list is its own.

    Membership and scope are looked up once more, so that no table however made lets a passage cross.

    Returns:
        The lists, the list of each demand, and for each list how many chunks the scope may see that serve
        its family.

    Raises:
        ContractError: a search is missing; that is not the same as a search without hits.
    """
    scopes = demands.scopes.distinct
    keys, lists = np.unique(
        demands.lists.values * max(len(scopes), 1) + demands.scopes.codes[demands.lists.rows], return_inverse=True
    )
    columns = (searches.column(name).to_pylist() for name in ("shape", "family", "groups", "filters"))
    places = {
        (shape, family, Scope(tuple(groups), tuple((pair["key"], pair["value"]) for pair in filters))): place
        for place, (shape, family, groups, filters) in enumerate(zip(*columns, strict=True))
    }
    found = ragged(searches, "candidates")
    found_rows = corpus.rows(found.values["chunk_id"])
    hits, serve = [], []
    for key in keys:
        (shape, family), scope = demands.families[key // len(scopes)], scopes[key % len(scopes)]
        place = places.get((shape.name, family.name, scope))
        if place is None:
            raise ContractError(
                stage="family_rescue",
                column="family_searches.family",
                row=None,
                value=(shape.name, family.name, scope),
                want="one search for every shape, family and scope of the queries",
            )
        rows = found_rows[found.offsets[place] : found.offsets[place + 1]]
        serving = corpus.members(family) & corpus.visible(scope)
        hits.append(rows[serving[rows]])
        serve.append(int(serving.sum()))
    return _end_to_end(hits), lists, np.array(serve, dtype=np.int64)


def _end_to_end(lists: Sequence[Array]) -> Ragged:
    """Lists of chunk rows as `Ragged`."""
    lengths = np.array([len(one) for one in lists], dtype=np.int64)
    return Ragged(offsets_from_lengths(lengths), np.concatenate([np.zeros(0, dtype=np.int64), *lists]))


def _memberships(demands: _Demands, corpus: Corpus) -> tuple[Array, IntArray]:
    """(families, chunks) bool, who serves the families that are asked for; and for each demand its row there."""
    places, member_rows = np.unique(demands.lists.values, return_inverse=True)
    members = np.zeros((len(places), len(corpus.chunks)), dtype=bool)
    for row, place in enumerate(places):
        members[row] = corpus.members(demands.families[place][1])
    return members, member_rows


def _append(fused: Ragged, counts: Array, rows: IntArray, added: IntArray) -> tuple[Ragged, Array, Array]:
    """The candidates of each query with the rescued behind them: rows as lists, fusion score, rescued or not."""
    offsets = offsets_from_lengths(fused.lengths + counts)
    rescued = np.ones(int(offsets[-1]), dtype=bool)
    rescued[offsets[:-1][fused.rows] + fused.positions] = False
    together, scores = np.zeros(len(rescued), dtype=np.int64), np.zeros(len(rescued))
    together[~rescued], together[rescued] = rows, added
    scores[~rescued] = fused.numpy("score")
    return Ragged(offsets, together), scores, rescued


def _families(
    candidates: Ragged, demands: _Demands, members: Array, member_rows: IntArray, hits: Ragged, lists: IntArray
) -> dict[str, Ragged]:
    """The required families that each candidate is a member of, in plan order, and its ranks in their searches."""
    lengths = demands.lists.lengths[candidates.rows]
    pairs = Ragged(offsets_from_lengths(lengths), None)
    demand = demands.lists.offsets[candidates.rows][pairs.rows] + pairs.positions
    belongs = members[member_rows[demand], candidates.values[pairs.rows]]
    counts = np.bincount(pairs.rows[belongs], minlength=len(lengths))
    offsets, demand, rows = offsets_from_lengths(counts), demand[belongs], candidates.values[pairs.rows[belongs]]
    chunks = members.shape[1]
    found = hits.rows * chunks + hits.values
    order = np.argsort(found)
    wanted = lists[demand] * chunks + rows
    places = np.searchsorted(found[order], wanted)
    there = np.append(found[order], -1)[places] == wanted
    ranks = np.where(there, np.append(hits.positions[order] + 1, 0)[places], 0)
    return {
        "families": Ragged(offsets, demands.names(demands.lists.values[demand])),
        "family_ranks": Ragged(offsets, ranks),
    }


def family_rescue_table(
    *,
    queries: pa.Table,
    rrf_merge: pa.Table,
    family_searches: pa.Table,
    corpus: Corpus,
    plan: EvidencePlan | None,
    params: Params,
) -> StageOutput:
    """Names each query's shape, counts its families among the fused candidates and appends what they lack.

    Coverage: `found` + `rescued` are the members among the candidates; a chunk rescued for one family
    counts for every required family that it is a member of.
    """
    demands = _Demands.of(queries, plan, params)
    fused = ragged(rrf_merge, "candidates")
    rows = corpus.rows(fused.values["chunk_id"])
    hits, lists, serve = _hits(family_searches, demands, corpus)
    members, member_rows = _memberships(demands, corpus)
    wanted = np.array([family.wanted for _, family in demands.families], dtype=np.int64)[demands.lists.values]
    counts, added, found, rescued = rescue_missing(
        fused.offsets,
        rows,
        demands.lists.offsets,
        member_rows,
        lists,
        wanted,
        members,
        hits.offsets,
        hits.values,
        as_numpy(corpus.column("text_id")),
    )
    candidates, scores, is_rescued = _append(fused, counts, rows, added)
    names = demands.names(demands.lists.values)
    outcome = np.select(
        [found >= wanted, found + rescued >= wanted, found + rescued > 0, serve[lists] > 0],
        ["enough", "rescued", "too_few", "no_hit"],
        "no_chunk",
    )
    coverage = {"family": names, "wanted": wanted, "found": found, "rescued": rescued, "outcome": outcome.tolist()}
    values = {
        "rank": candidates.positions + 1,
        "chunk_id": corpus.ids(candidates.values),
        "score": scores,
        **_families(candidates, demands, members, member_rows, hits, lists),
        "rescued": is_rescued,
    }
    table = build_table(
        RescuedRanking,
        {
            "query_id": queries.column("query_id"),
            "shape": demands.shape_names(),
            "recognised_by": demands.reasons,
            "coverage": Ragged(demands.lists.offsets, coverage),
            "candidates": Ragged(candidates.offsets, values),
        },
    )
    reasons = {"rescued": len(added)} if len(added) else {}
    account = Account(candidates_in=len(rows), added=reasons, removed={}, candidates_out=len(scores))
    return StageOutput(table, account)


SHARED = Stage(
    name="family_searches",
    summary="Runs every rescue search once for each shape, family and scope that the queries have.",
    owner="evidence",
    reads={"queries": ("query_id", "normalised_text", "groups", "filters")},
    writes=RescueSearch,
    params=Params,
    run=family_searches_table,
    needs=("corpus", "keyword_search", "plan"),
    success=(),
    on_partial_failure="Small and shared: it fails whole, before any shard of family_rescue starts, and is run again.",
    known_failure="A rescue query whose best `depth` hits hold no member finds nothing; the family stays uncovered.",
    roll_back="Restore the earlier evidence plan and rerun from family_rescue.",
)

STAGE = Stage(
    name="family_rescue",
    summary="Recognises what kinds of source a question needs and appends candidates of the kinds it lacks.",
    owner="evidence",
    reads={
        "queries": ("query_id", "normalised_text", "groups", "filters"),
        "rrf_merge": ("query_id", "candidates.chunk_id", "candidates.score"),
        "family_searches": ("shape", "family", "groups", "filters", "candidates"),
    },
    writes=RescuedRanking,
    params=Params,
    run=family_rescue_table,
    needs=("corpus", "plan"),
    on_partial_failure="A shard fails whole and is run again; a family that nothing serves is recorded as coverage.",
    known_failure=(
        "A question in other words than the plan's recognisers is of no shape: `dartflow plan check --queries` and "
        "`plan explain` show what is recognised, and by what."
    ),
    roll_back="Set family_rescue.enabled to false, or restore the earlier plan, and rerun from family_rescue.",
    shared=SHARED,
)
