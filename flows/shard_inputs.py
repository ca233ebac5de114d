"""Shard inputs: the tables that one shard of a stage reads, and the queries that go through it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.commit import read_table
from checkpoints.manifests import read_manifest
from checkpoints.run import replay_of, stage_entries, stage_names
from checkpoints.store import Store
from contracts.errors import CheckpointError
from contracts.manifest import Manifest, Replay, RunPlan
from stages.pipeline import PIPELINE, RUNS_ONCE
from stages.stage import Stage


@dataclass(frozen=True)
class ShardInputs:
    """What one shard of a stage starts from.

    Attributes:
        tables: the read tables by name, with the columns that the stage reads; those with rows of queries hold
            the same queries in the same order.
        query_ids: these queries.
        lineage: for each read table the logical digests of the artifacts it comes from.
        left_out: the queries of the shard that earlier stages took out, sorted.
    """

    tables: Mapping[str, pa.Table]
    query_ids: list[str]
    lineage: Mapping[str, list[str]]
    left_out: list[str]

    def of(self, query_ids: Sequence[str]) -> dict[str, pa.Table]:
        """The tables with the rows of some of the queries, in the order of the shard."""
        if len(query_ids) == len(self.query_ids):
            return dict(self.tables)
        return {name: _rows(table, query_ids) for name, table in self.tables.items()}


def shard_inputs(store: Store, plan: RunPlan, stage: Stage, part: int, dead: Collection[str]) -> ShardInputs:
    """Reads what a shard of a stage needs, each artifact verified.

    A shard that replays queries reads them, for the stages before the one that failed, from the shards
    that these queries were taken out of.

    Args:
        store: of the run.
        plan: of the run.
        stage: the stage; one that runs once reads all shards.
        part: the number of the shard.
        dead: queries of this shard that earlier stages took out.

    Raises:
        CheckpointError: an artifact that is not committed, or not what was committed.
    """
    sources = {name: _manifests(store, plan, stage, name, part) for name in stage.reads}
    tables = {
        name: pa.concat_tables([read_table(store, manifest, stage.reads[name]) for manifest in found])
        for name, found in sources.items()
    }
    replay = replay_of(plan, part)
    named = [table for table in tables.values() if "query_id" in table.column_names]
    if replay is not None:
        query_ids = [query.query_id for query in replay.queries if query.query_id not in dead]
    else:
        # Any read table has them all, but for those taken out between it and this stage.
        present = named[0].column("query_id").to_pylist() if named else []
        query_ids = [query_id for query_id in present if query_id not in dead]
    if replay is not None or dead:
        tables = {name: _rows(table, query_ids) for name, table in tables.items()}
    lineage = {name: [manifest.logical_digest for manifest in found] for name, found in sources.items()}
    return ShardInputs(tables, query_ids, lineage, sorted(dead))


def passes(plan: RunPlan, replay: Replay, stage: str) -> bool:
    """Whether replayed queries go through a stage: from the one that took them out, with what it shares, onwards."""
    order = stage_names(plan).index
    served = next((one.name for one in PIPELINE if one.shared is not None and one.shared.name == stage), stage)
    return order(replay.from_stage) <= order(served)


def query_rows(store: Store, plan: RunPlan, part: int, query_ids: Sequence[str]) -> pa.Table:
    """The rows of `queries` that some queries of a shard have, in the order given."""
    found = [_committed(store, plan, "queries", one) for one in sorted(_parts_holding(plan, "queries", part))]
    return _rows(pa.concat_tables([read_table(store, manifest) for manifest in found]), query_ids)


def _rows(table: pa.Table, query_ids: Sequence[str]) -> pa.Table:
    """The rows of some queries in their order; a table without queries as it is."""
    if "query_id" not in table.column_names:
        return table
    places = pc.index_in(pa.array(query_ids, pa.string()), table.column("query_id").combine_chunks())
    if places.null_count:
        raise CheckpointError(
            "shard inputs", "an artifact lacks queries that others have", got=f"{places.null_count} missing",
            next_step="Run `dartflow verify RUN`.",
        )  # fmt: skip
    return table.take(places)


def _manifests(store: Store, plan: RunPlan, stage: Stage, name: str, part: int) -> list[Manifest]:
    """The committed artifacts that hold what a shard of `stage` reads of the stage `name`."""
    if stage.name in RUNS_ONCE and replay_of(plan, part) is None:
        parts = [one for entry in stage_entries(plan, name)[:1] for one in entry.shards]
    else:
        parts = sorted(_parts_holding(plan, name, part))
    return [_committed(store, plan, name, one) for one in parts]


def _parts_holding(plan: RunPlan, name: str, part: int) -> set[int]:
    """The parts of a stage that hold the rows of a shard: its own, or those its replayed queries come from."""
    replay = replay_of(plan, part)
    if replay is None:
        return {0} if name in RUNS_ONCE else {part}
    if passes(plan, replay, name):
        return {part}
    return {one for query in replay.queries for one in _parts_holding(plan, name, query.shard)}


def _committed(store: Store, plan: RunPlan, name: str, part: int) -> Manifest:
    entry = next(entry for entry in stage_entries(plan, name) if part in entry.shards)
    manifest = read_manifest(store, plan, entry, part)
    if manifest is None:
        raise CheckpointError(
            f"run {plan.run_id}", "misses an artifact that it needs", got=f"{name}, part {part}",
            next_step=f"Run `dartflow resume {plan.run_id}`.",
        )  # fmt: skip
    return manifest
