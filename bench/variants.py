"""Variants: one log run under several settings, each a rerun that computes only what its settings touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.paired import Rankings
from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.store import Store
from contracts.manifest import RunPlan
from evaluation.measures import Qrels
from flows.engine import Session
from flows.export import read_logged_ids, stage_tables
from flows.planning import new_run_id, plan_rerun, plan_run
from flows.progress_bars import progress_bars
from flows.settings import Settings, load_settings, validated


def judged_log(queries: Path, qrels: Qrels, out: Path) -> Path:
    """Writes the judged queries as a query log, with all columns that the file has."""
    table = pq.read_table(queries)
    out.parent.mkdir(parents=True, exist_ok=True)
    kept = pc.is_in(table["query_id"], value_set=pa.array(list(qrels), table["query_id"].type))
    pq.write_table(table.filter(kept), out)
    return out


class Variants:
    """A first run of a log, and reruns of it.

    Args:
        settings: of the first run; its store has the corpus as the current one.
        log: a query log with ids.
    """

    def __init__(self, settings: Settings, log: Path) -> None:
        self._store = Store(settings.store)
        self.first = plan_run(self._store, settings, log, new_run_id(), current_snapshot_id(self._store))
        self._execute(self.first)

    def rerun(self, *assignments: str) -> RunPlan:
        """The run again under other settings; the first run itself without any."""
        if not assignments:
            return self.first
        settings = load_settings(environment={}, assignments=assignments, base=self.first.settings)
        plan = plan_rerun(self._store, self.first, settings, from_stage=None, run_id=new_run_id())
        self._execute(plan)
        return plan

    def _execute(self, plan: RunPlan) -> None:
        create_run(self._store, plan)
        with progress_bars() as report:
            verdict = Session(self._store, plan, validated(plan.settings), report).execute()
        if verdict.verdict != "complete":
            raise RuntimeError(f"run {plan.run_id} is {verdict.verdict}: its figures would be of other queries")

    def rankings(self, plan: RunPlan, stage: str) -> Rankings:
        """Logged query id to chunk ids, best first."""
        ids = read_logged_ids(self._store, plan)
        found: dict[str, list[str]] = {}
        rows: list[dict[str, Any]] = pa.concat_tables(
            table.select(["query_id", "candidates"]) for table in stage_tables(self._store, plan, stage)
        ).to_pylist()
        for row in rows:
            chunks = [candidate["chunk_id"] for candidate in row["candidates"]]
            found |= dict.fromkeys(ids.answered_by(row["query_id"]), chunks)
        return found
