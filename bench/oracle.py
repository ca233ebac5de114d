"""Checks of a whole run: what it committed beside what the oracle gives for the same queries."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pyarrow as pa

from bench.reference import Array, best_by_bm25, follows_dartboard, follows_nearest, fused
from bench.results import Check
from bench.scripts import Script
from bench.stores import Prepared, table_of
from contracts.columns import ragged
from contracts.manifest import RunPlan


def run_checks(found: Prepared, plan: RunPlan, script: Script, okapi: Any, sampled: int) -> list[Check]:
    """The first queries of a run, stage by stage: candidates, picks, keyword hits and fused order."""
    queries = table_of(found, plan, "queries").slice(0, sampled)
    vectors = ragged(queries, "embedding").numpy_values().reshape(len(queries), -1)
    texts = queries.column("normalised_text").to_pylist()
    lists = {
        stage: _ids(table_of(found, plan, stage).slice(0, sampled))
        for stage in ("oversample", "greedy_selection", "sparse_search", "rrf_merge")
    }
    settings, place = script.settings, {name: row for row, name in enumerate(script.ids)}
    weights = [Fraction(weight) for weight in settings.rrf_merge.weights]
    right: dict[str, int] = dict.fromkeys(lists, 0)
    for query, text in enumerate(texts):
        dense, picked, words, merged = ([place[name] for name in lists[stage][query]] for stage in lists)
        right["oversample"] += follows_nearest(dense, vectors[query], script.embeddings, settings.oversample.depth)
        right["greedy_selection"] += _picks_follow(dense, picked, vectors[query], script)
        right["sparse_search"] += words == best_by_bm25(
            okapi, script.tokeniser.tokens(text), settings.sparse_search.depth
        )
        expected = fused([lists[stage][query] for stage in ("greedy_selection", "sparse_search")], weights,
                         settings.rrf_merge.rank_constant)  # fmt: skip
        right["rrf_merge"] += [script.ids[row] for row in merged] == expected[: settings.rrf_merge.limit]
    oracles = {
        "oversample": "all cosines in float64, up to 1e-6",
        "greedy_selection": "the reference loop, up to ties within 1e-9",
        "sparse_search": "rank-bm25, ties by id",
        "rrf_merge": "exact fractions, ties by id",
    }
    return [
        Check(what=f"{stage}: queries as by {oracle}", share=right[stage] / len(texts), compared=len(texts))
        for stage, oracle in oracles.items()
    ]


def _ids(table: pa.Table) -> list[list[str]]:
    return [[one["chunk_id"] for one in row] for row in table.column("candidates").to_pylist()]


def _picks_follow(dense: Sequence[int], picked: Sequence[int], vector: Array, script: Script) -> bool:
    """Whether the picks, as places among the candidates, are those of the loop."""
    places = [dense.index(row) for row in picked]
    return follows_dartboard(places, vector, script.embeddings[list(dense)], script.settings.log_normal.sigma)
