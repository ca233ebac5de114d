"""The flow `rerank`: one Prefect task a stage over a planned run, each with a table in the Prefect UI.

Prefect schedules and shows; manifests are the truth. Tasks are neither cached nor persisted, and only
transient errors are tried again: a retry finds the shards that are committed and leaves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task, exponential_backoff

from checkpoints.run import load_plan, verdict
from checkpoints.store import Store
from contracts.errors import StageError, TransientError
from contracts.manifest import Verdict
from flows.engine import Session, Step
from flows.settings import validated


def prefect_step(session: Session) -> Step:
    """Runs each step as a Prefect task of its name, and leaves its row of the stage table as an artifact."""

    def step(name: str, body: Callable[[], None]) -> None:
        def run_step() -> None:
            body()
            rows = [stage.model_dump() for stage in verdict(session.store, session.plan).stages if stage.stage == name]
            if rows:
                create_table_artifact(
                    key=f"dartflow-{name.replace('_', '-')}", table=rows, description=f"Run {session.plan.run_id}"
                )

        as_task(name, run_step)()

    return step


def as_task(name: str, body: Callable[[], None]) -> Task[[], None]:
    """A task of dartflow's kind: no cache, no persisted result, retries for transient errors alone."""
    return task(
        name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=3,
        retry_delay_seconds=exponential_backoff(backoff_factor=2),
        retry_jitter_factor=0.5,
        retry_condition_fn=_is_transient,
    )(body)


def _is_transient(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether the error behind a failed state may pass."""
    return isinstance(state.data, TransientError)


@flow(name="rerank", flow_run_name="{run_id}", persist_result=False)
def rerank(store: str, run_id: str) -> Verdict:
    """Carries out a planned run; the entry point of deployments.

    Args:
        store: URI of the store that holds the plan.
        run_id: the planned run.

    Raises:
        StageError: the verdict is neither complete nor partial.
    """
    opened = Store(store)
    plan = load_plan(opened, run_id)
    return _carry_out(Session(opened, plan, validated(plan.settings)))


def rerank_session(session: Session) -> Verdict:
    """The same flow over a session that is open already and shows its progress."""

    def carry_out() -> Verdict:
        return _carry_out(session)

    return flow(name="rerank", flow_run_name=session.plan.run_id, persist_result=False)(carry_out)()


def _carry_out(session: Session) -> Verdict:
    result = session.execute(prefect_step(session))
    if result.verdict not in {"complete", "partial"}:
        raise StageError(
            f"run {session.plan.run_id}", "did not finish", got=result.verdict, want="complete or partial",
            next_step=f"Run `dartflow status {session.plan.run_id}`.",
        )  # fmt: skip
    return result
