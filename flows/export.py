"""Export: the results of a run as JSON lines, or any ranking of it as a TREC run file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from checkpoints.commit import read_table
from checkpoints.run import manifests, stage_entry
from checkpoints.store import Store
from contracts.errors import ConfigurationError, MissingArtifactError
from contracts.manifest import RunPlan


def stage_tables(store: Store, plan: RunPlan, stage: str) -> Iterator[pa.Table]:
    """The tables of a stage, shard by shard, each verified.

    Raises:
        ConfigurationError: no such stage.
        MissingArtifactError: a shard that was never committed.
    """
    entry = stage_entry(plan, stage)
    for part, manifest in enumerate(manifests(store, plan, entry)):
        if manifest is None:
            raise MissingArtifactError(
                f"run {plan.run_id}, stage {stage}", "is not finished", got=f"no part {part}",
                next_step=f"Run `dartflow resume {plan.run_id}`.",
            )  # fmt: skip
        yield read_table(store, manifest)


def logged_ids(store: Store, plan: RunPlan) -> dict[str, list[str]]:
    """Query id to the ids of its log lines, in the order of the log."""
    found: dict[str, list[str]] = defaultdict(list)
    for table in stage_tables(store, plan, "log_lines"):
        for line in table.select(["logged_id", "query_id"]).to_pylist():
            if line["query_id"] is not None:
                found[line["query_id"]].append(line["logged_id"])
    return found


def jsonl_lines(store: Store, plan: RunPlan, stage: str) -> Iterator[str]:
    """One JSON object a distinct query, with the ids of all its log lines."""
    ids = logged_ids(store, plan)
    for table in stage_tables(store, plan, stage):
        for row in table.to_pylist():
            yield json.dumps({"logged_ids": ids.get(row["query_id"], []), **row}, ensure_ascii=False) + "\n"


def trec_lines(store: Store, plan: RunPlan, stage: str) -> Iterator[str]:
    """A TREC run: one line a log line's id and passage; ids that the log repeats stand once.

    The score is 1 / rank: it falls strictly, so that every tool keeps dartflow's order.

    Raises:
        ConfigurationError: a stage without a ranking.
    """
    ids = logged_ids(store, plan)
    written: set[str] = set()
    for table in stage_tables(store, plan, stage):
        if not _is_ranking(table):
            raise ConfigurationError(
                f"export of {stage}", "is no ranking", want="a stage with candidates that carry a rank",
                next_step="Choose another --stage.",
            )  # fmt: skip
        for row in table.select(["query_id", "candidates"]).to_pylist():
            for logged_id in ids.get(row["query_id"], []):
                if logged_id not in written:
                    written.add(logged_id)
                    yield from _trec_rows(logged_id, row["candidates"], plan.run_id)


def _trec_rows(logged_id: str, candidates: list[dict[str, Any]], run_id: str) -> Iterator[str]:
    for candidate in candidates:
        rank = candidate["rank"]
        yield f"{_word(logged_id)} Q0 {_word(candidate['chunk_id'])} {rank} {1 / rank:.9f} {run_id}\n"


def _word(text: str) -> str:
    """TREC columns are split at white space, so an id must not have any."""
    return "_".join(text.split())


def _is_ranking(table: pa.Table) -> bool:
    if "candidates" not in table.column_names:
        return False
    kind = table.schema.field("candidates").type.value_type
    return pa.types.is_struct(kind) and {"rank", "chunk_id"} <= {kind.field(i).name for i in range(kind.num_fields)}
