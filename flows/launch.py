"""Launch: starts ingest and runs from the command line, under Prefect or without it.

Prefect is imported only where it is used: it takes seconds, and most commands do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import check_run_id, create_run
from checkpoints.store import Store
from checkpoints.verdict import verdict
from contracts.errors import DartflowError, StageError
from contracts.manifest import RunPlan, Verdict
from flows.progress_bars import progress_bars
from flows.screens import ERR, OUT

if TYPE_CHECKING:
    from flows.settings import Settings


def ingest_file(corpus: Path, settings: Settings, *, without_prefect: bool) -> None:
    """Makes a snapshot of a corpus file and says what it is."""
    if without_prefect:
        from flows.engine import plain_step
        from flows.snapshots import make_snapshot

        with progress_bars() as report:
            snapshot = make_snapshot(corpus, settings, plain_step, report)
    else:
        with _prefect("Use --without-prefect, which gives the same snapshot."):
            from flows.ingest import ingest

            snapshot = ingest(str(corpus), settings.model_dump(mode="json"))
    OUT.print(
        f"snapshot {snapshot.snapshot_id}: {snapshot.chunks} chunks of {snapshot.documents} documents, "
        f"{snapshot.dimension} dimensions by {snapshot.embedding_model}, {snapshot.quarantined} quarantined",
        highlight=False,
    )
    left_out = snapshot.settings["left_out_columns"]
    if isinstance(left_out, list) and left_out:
        OUT.print(f"left out, since they hold lists or structs: {', '.join(left_out)}", highlight=False)


def start_run(queries: Path, settings: Settings, run_id: str | None, *, without_prefect: bool) -> Verdict:
    """Plans a run of a query log against the current snapshot, writes the plan down and carries it out."""
    from flows.planning import new_run_id, plan_run

    store = Store(settings.store)
    chosen = check_run_id(new_run_id() if run_id is None else run_id)
    plan = plan_run(store, settings, queries, chosen, current_snapshot_id(store))
    create_run(store, plan)
    return carry_out(store, plan, without_prefect=without_prefect)


def carry_out(store: Store, plan: RunPlan, settings: Settings | None = None, *, without_prefect: bool) -> Verdict:
    """Carries out a plan with progress bars, as a Prefect flow or without Prefect.

    Args:
        store: where the plan lies.
        plan: what is to be done.
        settings: the plan's own when None; others may differ in execution settings alone.
        without_prefect: the same work and the same artifacts, without a flow run.
    """
    from flows.engine import Session
    from flows.settings import validated

    chosen = validated(plan.settings) if settings is None else settings
    try:
        if without_prefect:
            with progress_bars() as report:
                return Session(store, plan, chosen, report).execute()
        with _prefect(f"Go on with `dartflow resume {plan.run_id} --without-prefect`."):
            from flows.rerank import rerank

            rerank(store.uri, plan.run_id, chosen.model_dump(mode="json"))
    except KeyboardInterrupt:
        ERR.print(f"interrupted: go on with `dartflow resume {plan.run_id}`", markup=False, highlight=False)
        raise
    return verdict(store, plan)


@contextmanager
def _prefect(way_out: str) -> Iterator[None]:
    """Ships dartflow's settings to Prefect, and says in one line when Prefect itself fails.

    Raises:
        StageError: Prefect failed; dartflow's own errors pass as they are.
    """
    from flows.prefect_environment import ship_settings

    ship_settings()
    try:
        yield
    except DartflowError:
        raise
    except Exception as error:
        message = next(iter(str(error).splitlines()), "")
        raise StageError(
            "Prefect", "could not carry out the flow", got=f"{type(error).__name__}: {message}",
            want="an API that answers at PREFECT_API_URL", next_step=way_out,
        ) from error  # fmt: skip
