"""Evaluate: every ranking of a run against judgements, to see where quality is won or lost."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pyarrow as pa

from checkpoints.store import Store
from contracts.errors import InputError
from contracts.manifest import RunPlan
from evaluation.measures import Qrels, context_measures, rank_measures, read_qrels
from flows.export import read_logged_ids, stage_tables

RANKINGS = ("oversample", "greedy_selection", "sparse_search", "rrf_merge", "blended_rerank", "context")


def load_qrels(path: Path) -> Qrels:
    """A TREC qrels file.

    Raises:
        InputError: no such file, not in UTF-8, or a line that is no judgement.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(str(path), "cannot be read", got=error.strerror, next_step="Check the path.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            str(path), "is not in UTF-8", got=f"byte {error.object[error.start]:#04x} at {error.start}",
            next_step="Save the qrels file in UTF-8.",
        ) from error  # fmt: skip
    return read_qrels(text, str(path))


def evaluate_run(
    store: Store, plan: RunPlan, qrels: Qrels
) -> tuple[dict[str, dict[str, float]], dict[str, float | None]]:
    """The measures of each ranking, and those of the context.

    Judgements name the ids of log lines; every judged id counts, whatever distinct query it became. An id that the
    log repeats is that of its first line (`LoggedIds`).

    Returns:
        Stage to measure to value, and context measure to value.

    Raises:
        InputError: judgements of other queries than those of the run.
    """
    ids = read_logged_ids(store, plan)
    if not qrels.keys() & ids.query_of.keys():
        raise InputError(
            f"qrels for run {plan.run_id}", "judge no query of the run", got=_some(qrels), want=_some(ids.query_of),
            next_step="The first column must be the ids of the log lines (`query_id` of the log, else line-1 ...).",
        )  # fmt: skip
    rankings: dict[str, dict[str, float]] = {}
    for stage in RANKINGS:
        found: dict[str, list[str]] = {}
        for table in stage_tables(store, plan, stage):
            for row in table.select(["query_id", "candidates"]).to_pylist():
                chunks = [candidate["chunk_id"] for candidate in row["candidates"]]
                found.update(dict.fromkeys(ids.answered_by(row["query_id"]), chunks))
        rankings[stage] = rank_measures(found, qrels)
    context = pa.concat_tables(stage_tables(store, plan, "context"))
    return rankings, context_measures(context)


def _some(names: Iterable[str], most: int = 3) -> str:
    first = list(islice(names, most + 1))
    return ", ".join([*first[:most], *(["..."] if len(first) > most else [])]) or "none"
