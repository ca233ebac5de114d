"""Processes that begin a run or go on with it, and kill themselves where they are told to.

Each is forked from a server that has imported the flows (`tests.crash.server`): as fresh as one from the command
line, and started in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import checkpoints.lease
import flows.engine
import flows.log_shards
from checkpoints.corpora import check_snapshot, corpus_pointer
from checkpoints.published import check_files, published_pointer, published_run
from checkpoints.run import load_plan
from checkpoints.store import Store
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import MissingArtifactError, StageError
from flows.engine import Session
from stages.pipeline import find_stage
from tests.crash.acts import ACTS, Scenario
from tests.crash.files import Orders, append_line
from tests.crash.inputs import poisoned_query

FAILING_STAGE = "blended_rerank"
POISONED_STAGE = "greedy_selection"  # which takes out one query as a dead letter
_LIMIT_SECONDS = 120

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.crash.server"])


@dataclass(frozen=True)
class Job:
    """One process: what it does on which store, and the folder of its notes."""

    scenario: Scenario
    store: Path
    notes: Path
    orders: Orders
    mischief: str | None = None

    @property
    def units(self) -> Path:
        """One line a unit of work that was begun: its stage, and its first query."""
        return self.notes / "units"

    def noted(self, name: str) -> Any:
        """`saw`, `end` or `error`: what the process found, left and died of; None when it had nothing to tell."""
        file = self.notes / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def note(self, name: str, value: object) -> None:
        """Leaves a note for `noted`."""
        (self.notes / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")


def start(job: Job) -> int:
    """Carries out a job in a fresh process; its exit status, below 0 the signal that killed it."""
    process = _PROCESSES.Process(target=_work, args=(job,), daemon=True)
    process.start()
    process.join(_LIMIT_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"not done after {_LIMIT_SECONDS} s")
    return process.exitcode


def _work(job: Job) -> None:
    """The whole of a process: looks at what it finds, and does its act."""
    try:
        job.note("saw", _look(job))
        _watch_units(job)
        _make_mischief(job)
        ACTS[job.scenario.act](job.scenario, job.store, job.orders)
        job.note("end", _look(job))
    except BaseException:  # noqa: BLE001 - whatever it is, the test tells it
        job.note("error", traceback.format_exc())
        raise SystemExit(1) from None


def _look(job: Job) -> dict[str, Any]:
    """What an operator sees: of the run its verdict and what verify finds, and what is current."""
    store = Store(str(job.store), create=False)
    seen: dict[str, Any] = {"verdict": None, "findings": {}, "current": current(store)}
    if job.scenario.plan is not None:
        try:
            plan = load_plan(store, job.scenario.plan.run_id)
        except MissingArtifactError:
            return seen
        seen |= {"verdict": verdict(store, plan).verdict, "findings": dict(verify(store, plan))}
    return seen


def current(store: Store) -> dict[str, str | None]:
    """The snapshot that runs use, and the run that consumers read, all of whose files are there."""
    snapshot, published = corpus_pointer(store).read(), published_pointer(store).read()
    if snapshot is not None:
        check_snapshot(store, snapshot.target)
    if published is not None:
        check_files(store, published_run(published))
    return {
        "corpora": None if snapshot is None else snapshot.target,
        "published": None if published is None else published.target,
    }


def _watch_units(job: Job) -> None:
    """Writes down every unit of work before it begins, where no kill can take it back; makes some fail."""
    embed_queries = flows.log_shards.embed_queries

    def watched(name: str) -> Any:
        stage = find_stage(name)

        def run(**given: Any) -> Any:
            tables = [table for table in given.values() if isinstance(table, pa.Table)]
            ids = next(table["query_id"] for table in tables if "query_id" in table.column_names).to_pylist()
            append_line(job.units, f"{name} {ids[0]}")
            if job.mischief == "fail" and name == FAILING_STAGE:
                raise StageError(f"stage {name}", "stopped", next_step="Resume the run.")
            if job.scenario.poisoned and name == POISONED_STAGE and poisoned_query() in ids:
                raise ArithmeticError(poisoned_query())
            return stage.run(**given)

        return dataclasses.replace(stage, run=run)

    def watched_embed(queries: pa.Table, *given: Any) -> pa.Table:
        append_line(job.units, f"queries {queries['query_id'][0]}")
        return embed_queries(queries, *given)

    flows.engine.find_stage = watched
    flows.log_shards.embed_queries = watched_embed


def _make_mischief(job: Job) -> None:
    """What is wrong with a process.

    `fail` stops the run in a stage (see `_watch_units`), so that a note of the failure is written; `beat` renews
    the lease all the time; `forget` computes again what is committed, as no process may.
    """
    if job.mischief == "beat":
        checkpoints.lease.HEARTBEAT_SECONDS = 0.005
    if job.mischief == "forget":
        Session._missing = lambda _, entry: list(entry.shards)  # type: ignore[method-assign]
