"""Evaluate: every ranking of a run against judgements, to see where quality is won or lost."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from checkpoints.store import Store
from contracts.errors import InputError
from contracts.manifest import RunPlan
from evaluation.measures import Qrels, context_measures, rank_measures, read_qrels
from flows.export import logged_ids, stage_tables

RANKINGS = ("oversample", "greedy_selection", "sparse_search", "rrf_merge", "blended_rerank", "context")


def load_qrels(path: Path) -> Qrels:
    """A TREC qrels file.

    Raises:
        InputError: no such file, or a line that is no judgement.
    """
    try:
        return read_qrels(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(str(path), "cannot be read", got=error.strerror, next_step="Check the path.") from error


def evaluate_run(store: Store, plan: RunPlan, qrels: Qrels) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """The measures of each ranking, and those of the context.

    Judgements name the ids of log lines; every judged line counts, whatever distinct query it became.

    Returns:
        Stage to measure to value, and context measure to value.
    """
    line_of = logged_ids(store, plan)
    rankings: dict[str, dict[str, float]] = {}
    for stage in RANKINGS:
        found: dict[str, list[str]] = {}
        for table in stage_tables(store, plan, stage):
            for row in table.select(["query_id", "candidates"]).to_pylist():
                chunks = [candidate["chunk_id"] for candidate in row["candidates"]]
                found.update(dict.fromkeys(line_of.get(row["query_id"], []), chunks))
        rankings[stage] = rank_measures(found, qrels)
    context = pa.concat_tables(stage_tables(store, plan, "context"))
    return rankings, context_measures(context)
