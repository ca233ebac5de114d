"""Reciprocal rank fusion of two lists of 100, from table to table: dartflow against ranx: `python -m bench.fusion`."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.reference import fused
from bench.results import Check, Comparison, claim_of, cores, peer
from bench.terminal import run
from bench.timing import Work, in_turn
from contracts.candidates import KeywordRanking, Selection
from contracts.columns import Ragged
from contracts.table import build_table
from flows.executor import map_shards
from flows.settings import ExecutorParams, RunParams
from stages.rrf_merge import Params, rrf_merge_table

LENGTH, POOL = 100, 160
CONSTANT = 60
PARAMS = Params(greedy_selection_weight=1.0, sparse_search_weight=1.0, rank_constant=CONSTANT, limit=2 * LENGTH)

Lists = list[tuple[list[str], list[str]]]


def made_lists(queries: int) -> Lists:
    """Two rankings of 100 a query out of 160 ids, so that most ids stand in both and many scores are equal."""
    random = np.random.default_rng(11)
    names = np.array([f"c-{number:06d}" for number in range(100_000)], dtype=object)
    lists = []
    for _ in range(queries):
        pool = names[random.integers(len(names) - POOL) + np.arange(POOL)]
        first, second = (pool[random.permutation(POOL)[:LENGTH]].tolist() for _ in range(2))
        lists.append((first, second))
    return lists


def tables(lists: Lists) -> list[tuple[pa.Table, pa.Table]]:
    """The rankings as the stages before fusion leave them, a pair of tables a shard."""
    size = RunParams().shard_size
    return [
        (_table(Selection, lists[start : start + size], 0), _table(KeywordRanking, lists[start : start + size], 1))
        for start in range(0, len(lists), size)
    ]


def _table(model: Any, lists: Lists, place: int) -> pa.Table:
    count = len(lists)
    ids = pa.array([name for pair in lists for name in pair[place]])
    candidates = {
        "rank": np.tile(np.arange(1, LENGTH + 1, dtype=np.int32), count),
        "chunk_id": ids,
        "score": np.tile(np.arange(LENGTH, 0, -1, dtype=np.float64), count),
    }
    columns = {
        "query_id": [f"q-{number}" for number in range(count)],
        "candidates": Ragged(np.arange(count + 1, dtype=np.int64) * LENGTH, candidates),
        "shortfall": np.zeros(count, np.int32),
        "outcome": ["ok"] * count,
    }
    return build_table(model, {name: columns[name] for name in model.model_fields})


def sides(lists: Lists, out: list[pa.Table]) -> dict[str, Work]:
    """Both, each from its own form of two rankings to its own form of the fused one; what compiles has done so."""
    shards = tables(lists)
    out[:] = [None] * len(shards)

    def work(shard: int) -> None:
        dense, keyword = shards[shard]
        out[shard] = rrf_merge_table(greedy_selection=dense, sparse_search=keyword, params=PARAMS).table

    def dartflow(_number: int) -> int:
        map_shards(work, range(len(shards)), ExecutorParams(), lambda _done: None)
        return len(lists)

    def fuse(_number: int) -> int:
        ranx.fuse(runs=runs, norm=None, method="rrf", params={"k": CONSTANT})
        return len(lists)

    dartflow(0)
    found: dict[str, Work] = {"dartflow": dartflow}
    ranx = peer("ranx")
    if ranx is not None:
        runs = [_ranx_run(ranx, lists, place) for place in (0, 1)]
        fuse(0)
        found["ranx"] = fuse
    return found


def compare(small: bool, _work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times both."""
    lists, out = made_lists(600 if small else 10_000), list[pa.Table]()
    times = in_turn(sides(lists, out), rounds=2 if small else 7)
    compared, found = range(0, len(lists), 10), pa.concat_tables(out).column("candidates")
    same = sum(
        [one["chunk_id"] for one in found[query].as_py()] == fused(lists[query], [Fraction(1), Fraction(1)], CONSTANT)
        for query in compared
    )
    return Comparison(
        name="fusion",
        title="Reciprocal rank fusion of two lists of 100",
        settings={
            "queries a turn": len(lists), "ids a query": f"two lists of {LENGTH} out of {POOL}",
            "rank constant": CONSTANT, "threads": cores(),
            "scores": "float64, near ties as exact fractions; ranx float64",
        },
        claims=[claim_of(times, "ranx", "dartflow", 2, package="ranx")],
        checks=[Check(what="queries whose order is that of exact fractions, ties by id",
                      share=same / len(compared), compared=len(compared))],
    )  # fmt: skip


def _ranx_run(ranx: Any, lists: Lists, place: int) -> Any:
    """A ranking as ranx holds it: ids with scores that fall."""
    return ranx.Run({
        f"q-{number}": {name: float(LENGTH - rank) for rank, name in enumerate(pair[place])}
        for number, pair in enumerate(lists)
    })  # fmt: skip


if __name__ == "__main__":
    run(compare)
