"""What contracts and checkpoints cost, a run through the store against the same stages in memory.

`python -m bench.contract_cost`
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.results import Check, Claim, Comparison, claim_of, cores
from bench.stores import Prepared, forget, prepared, table_of, whole_run
from bench.terminal import run
from bench.timing import in_turn
from bench.topics import Sizes
from checkpoints.corpora import current_snapshot_id, load_snapshot
from contracts.manifest import RunPlan
from flows.executor import map_shards
from flows.fingerprint import params_of
from flows.planning import even_shard_size, open_query_log
from flows.resources import Resources
from flows.settings import Settings
from loading.query_log import embed_queries
from stages.pipeline import RUNS_ONCE, numbered_stages
from stages.stage import Stage

STORE, MEMORY = "run through the store", "stages in memory"
# Assignments by how many dense candidates they give, and what is wanted.
CANDIDATES = {30: ((), 1.15), 100: (("oversample.oversampling=10",), None)}


def in_memory(found: Prepared, queries: Path, settings: Settings) -> list[dict[str, pa.Table]]:
    """The tables of every shard, by stage: no checks, no files, the same threads.

    The log is read and the corpus opened as the run does it.
    """
    store = found.store
    snapshot = load_snapshot(store, current_snapshot_id(store))
    resources = Resources(store, settings, snapshot.snapshot_id)
    log = open_query_log(queries, settings, snapshot)
    size = even_shard_size(len(log.queries), settings.run.shard_size)
    table = embed_queries(log.queries, log.embeddings(np.arange(len(log.queries))), None)
    shards = [{"queries": table.slice(start, size)} for start in range(0, len(table), size)]
    for _, stage in numbered_stages():
        needs = resources.of(stage)
        if stage.name in RUNS_ONCE:
            everything = {name: pa.concat_tables([tables[name] for tables in shards]) for name in stage.reads}
            shared = stage.run(**everything, **needs, params=params_of(settings, stage)).table
            for tables in shards:
                tables[stage.name] = shared
        else:
            work = partial(_run_shard, shards, stage, needs, settings)
            map_shards(work, range(len(shards)), settings.executor, lambda _done: None)
    return shards


def _run_shard(
    shards: list[dict[str, pa.Table]], stage: Stage, needs: dict[str, object], settings: Settings, shard: int
) -> None:
    inputs = {name: shards[shard][name] for name in stage.reads}
    shards[shard][stage.name] = stage.run(**inputs, **needs, params=params_of(settings, stage)).table


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times both at 30 and at 100 candidates a query."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=10_000, queries=20_000)
    found, lines = prepared(work, sizes), 300 if small else 4_000
    queries = found.log_of(lines)
    result = Comparison(
        name="contract_cost",
        title="Contracts and checkpoints",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": lines, "threads": cores(),
            "settings": "the defaults, vectors given, no cross-encoder",
            "in memory": "the same stage functions over the same shards, without plan, checks and files",
        },
    )  # fmt: skip
    for candidates, (assignments, wanted) in CANDIDATES.items():
        claim, check = _measured(found, queries, assignments, candidates, rounds=1 if small else 5)
        result.claims.append(claim.model_copy(update={"wanted": wanted}))
        result.checks.append(check)
    return result


def _measured(
    found: Prepared, queries: Path, assignments: Sequence[str], candidates: int, rounds: int
) -> tuple[Claim, Check]:
    """Times both ways at one number of candidates, and holds their tables side by side."""
    settings, plans, tables = found.settings(*assignments), list[RunPlan](), list[dict[str, pa.Table]]()

    def through_store(_number: int) -> int:
        if plans:
            forget(found, plans.pop())
        plans.append(whole_run(found, queries, *assignments)[0])
        return plans[0].distinct_queries

    def memory(_number: int) -> int:
        tables[:] = in_memory(found, queries, settings)
        return plans[0].distinct_queries

    through_store(0)  # compiles
    times = in_turn({STORE: through_store, MEMORY: memory}, rounds)
    claim = claim_of(times, STORE, MEMORY, None, "at most", what=f"{candidates} candidates: ")
    check = _same_tables(found, plans[0], tables, candidates)
    forget(found, plans[0])
    return claim, check


def _same_tables(found: Prepared, plan: RunPlan, shards: list[dict[str, pa.Table]], candidates: int) -> Check:
    """Whether both ways give the same tables."""
    stages = [stage.name for _, stage in numbered_stages() if stage.name not in RUNS_ONCE]
    same = sum(
        table_of(found, plan, name).equals(pa.concat_tables([tables[name] for tables in shards])) for name in stages
    )
    what = f"{candidates} candidates: stages whose table in the store is the one in memory"
    return Check(what=what, share=same / len(stages), compared=len(stages))


if __name__ == "__main__":
    run(compare)
