"""The flow `rerank`: one Prefect task a stage over a planned run, each with a table in the Prefect UI.

Prefect schedules and shows; manifests are the truth. Tasks are neither cached nor persisted, nor retried:
what is transient is tried again shard by shard (`flows.executor.retrying`), with Prefect and without it.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.tasks import Task

from checkpoints.run import load_plan, stage_names
from checkpoints.store import Store
from checkpoints.verdict import committed_of, stage_status
from contracts.errors import StageError
from contracts.manifest import StageStatus
from flows.engine import Session, Step
from flows.progress_bars import progress_bars
from flows.settings import validated


def prefect_step(session: Session) -> Step:
    """Runs each step as a Prefect task of its name, and leaves its row of the stage table as an artifact."""
    stages = set(stage_names(session.plan))

    def step(name: str, body: Callable[[], None]) -> None:
        def run_step() -> None:
            body()
            if name in stages:
                found = committed_of(session.store, session.plan, name)
                _show_in_prefect(name, stage_status(session.plan, name, found))

        as_task(name, run_step)()

    return step


def _show_in_prefect(name: str, status: StageStatus) -> None:
    """Leaves the stage's row as a table artifact; Prefect's trouble with it is no trouble of the run."""
    try:
        create_table_artifact(key=f"dartflow-{name.replace('_', '-')}", table=[status.model_dump()])
    except Exception as error:  # noqa: BLE001 - whatever it is, the stage is committed
        get_run_logger().warning("no table artifact for %s: %s", name, error)


def as_task(name: str, body: Callable[[], None]) -> Task[[], None]:
    """A task of dartflow's kind: no cache, no persisted result; shards are retried inside, with and without Prefect."""
    return task(
        name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
    )(body)


@flow(name="rerank", flow_run_name="{run_id}", persist_result=False)
def rerank(store: str, run_id: str, settings: dict[str, object]) -> None:
    """Carries out a planned run, and fails when its verdict is neither complete nor partial.

    Args:
        store: URI of the store that holds the plan.
        run_id: the planned run.
        settings: the configuration tree as plain values; the plan's own, apart from execution settings.

    Raises:
        StageError: the verdict is neither complete nor partial.
    """
    opened = Store(store)
    with progress_bars() as report:
        session = Session(opened, load_plan(opened, run_id), validated(settings), report)
        result = session.execute(prefect_step(session))
    if result.verdict not in {"complete", "partial"}:
        raise StageError(
            f"run {run_id}", "did not finish", got=result.verdict, want="complete or partial",
            next_step=f"Run `dartflow status {run_id}`.",
        )  # fmt: skip
