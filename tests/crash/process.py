"""Processes that begin a run or go on with it, and kill themselves where they are told to.

Each is forked from a server that has imported the flows (`tests.crash.server`): as fresh as one from the command
line, and started in milliseconds.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import checkpoints.lease
import flows.engine
import flows.snapshots
from checkpoints.corpora import check_snapshot, corpus_pointer
from checkpoints.gc import collect
from checkpoints.published import check_files, published_pointer, published_run, roll_back
from checkpoints.run import create_run, load_plan
from checkpoints.store import Store
from checkpoints.survey import Bounds
from checkpoints.verdict import verdict
from checkpoints.verify import verify
from contracts.errors import MissingArtifactError, StageError
from contracts.manifest import RunPlan
from flows.engine import Session, plain_step
from flows.planning import check_unchanged
from flows.progress import no_progress
from flows.publishing import publish_run
from flows.settings import validated
from flows.snapshots import make_snapshot
from stages.pipeline import find_stage
from tests.crash.files import CrashFiles, Orders, append_line
from tests.crash.inputs import crash_settings, poisoned_query

FAILING_STAGE = "blended_rerank"
POISONED_STAGE = "greedy_selection"  # which takes out one query as a dead letter
_LIMIT_SECONDS = 120

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.crash.server"])


@dataclass(frozen=True)
class Scenario:
    """A store as it is before, and what is begun on it.

    Attributes:
        name: for people.
        act: what a process does, and does again after a crash, see `ACTS`.
        inputs: the folder of corpus, log and evidence plan.
        before: the store before.
        after: the store that an undisturbed pass leaves.
        plan: of the run that is looked at; None for none.
        target: the run that is published.
        mischief: what is wrong with the process that is killed, see `_make_mischief`.
        poisoned: whether one query makes a stage fail.
        points: where it can be killed, by name.
    """

    name: str
    act: str
    inputs: Path
    before: Path
    after: Path
    plan: RunPlan | None = None
    target: str = ""
    mischief: str | None = None
    poisoned: bool = True
    points: tuple[str, ...] = ()


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


def _ingest(scenario: Scenario, store: Path, orders: Orders) -> None:
    # make_snapshot opens the store by itself.
    flows.snapshots.Store = partial(Store, files=partial(CrashFiles, orders=orders))  # type: ignore[misc]
    settings = crash_settings(scenario.inputs).model_copy(update={"store": str(store)})
    make_snapshot(scenario.inputs / "corpus.jsonl", settings, plain_step, no_progress)


def _run(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Resumes the run, or begins it where there is none yet."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    assert scenario.plan is not None
    try:
        plan = load_plan(opened, scenario.plan.run_id)
    except MissingArtifactError:
        plan = scenario.plan
        create_run(opened, plan)
    settings = check_unchanged(opened, plan, validated(plan.settings))
    Session(opened, plan, settings).execute()


def _publish(scenario: Scenario, store: Path, orders: Orders) -> None:
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    publication = publish_run(opened, load_plan(opened, scenario.target), crash_settings(scenario.inputs).publish)
    assert not publication.failed, publication.failed


def _roll_back(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Goes back to the run that is wanted; after a crash an operator looks first whether it is there already."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    if published_pointer(opened).current().target != scenario.target:
        roll_back(opened, why=None)


def _collect(scenario: Scenario, store: Path, orders: Orders) -> None:
    """Removes every run that is not published; what was borrowed of it stays."""
    opened = Store(str(store), files=partial(CrashFiles, orders=orders))
    collect(opened, Bounds(keep=0, older_than_days=None, now=datetime.now(UTC)))


# What a process does, and what it does again after a crash until it ends.
ACTS: dict[str, Callable[[Scenario, Path, Orders], None]] = {
    "ingest": _ingest,
    "run": _run,
    "publish": _publish,
    "roll back": _roll_back,
    "gc": _collect,
}


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
    embed_queries = flows.engine.embed_queries

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
    flows.engine.embed_queries = watched_embed


def _make_mischief(job: Job) -> None:
    """What is wrong with a process.

    `fail` stops the run in a stage (see `_watch_units`), so that a note of the failure is written; `beat` renews
    the lease all the time; `forget` computes again what is committed, as no process may.
    """
    if job.mischief == "beat":
        checkpoints.lease.HEARTBEAT_SECONDS = 0.005
    if job.mischief == "forget":
        Session._missing = lambda _, entry: list(entry.shards)  # type: ignore[method-assign]
