"""Launch: starts ingest and runs from the command line, under Prefect or without it.

Prefect is imported only where it is used: it takes seconds, and most commands do without.
"""

from __future__ import annotations

from pathlib import Path

from checkpoints.corpora import current_snapshot_id
from checkpoints.run import check_run_id, create_run
from checkpoints.store import Store
from contracts.manifest import RunPlan, Verdict
from flows.screens import OUT, progress_bars
from flows.settings import Settings


def ingest_file(corpus: Path, settings: Settings, *, without_prefect: bool) -> None:
    """Makes a snapshot of a corpus file and says what it is."""
    from flows.engine import plain_step
    from flows.snapshots import make_snapshot

    with progress_bars() as report:
        if without_prefect:
            snapshot = make_snapshot(corpus, settings, plain_step, report)
        else:
            from flows.prefect_environment import ship_settings

            ship_settings()
            from flows.ingest import ingest_corpus

            snapshot = ingest_corpus(corpus, settings, report)
    OUT.print(
        f"snapshot {snapshot.snapshot_id}: {snapshot.chunks} chunks of {snapshot.documents} documents, "
        f"{snapshot.dimension} dimensions by {snapshot.embedding_model}, {snapshot.quarantined} quarantined",
        highlight=False,
    )


def start_run(queries: Path, settings: Settings, run_id: str | None, *, without_prefect: bool) -> Verdict:
    """Plans a run of a query log against the current snapshot, writes the plan down and carries it out."""
    from flows.planning import new_run_id, plan_run

    store = Store(settings.store)
    chosen = check_run_id(new_run_id() if run_id is None else run_id)
    plan = plan_run(store, settings, queries, chosen, current_snapshot_id(store))
    create_run(store, plan)
    return carry_out(store, plan, settings, without_prefect=without_prefect)


def carry_out(store: Store, plan: RunPlan, settings: Settings, *, without_prefect: bool) -> Verdict:
    """Carries out a plan with progress bars, as a Prefect flow or without Prefect."""
    from flows.engine import Session

    with progress_bars() as report:
        session = Session(store, plan, settings, report)
        if without_prefect:
            return session.execute()
        from flows.prefect_environment import ship_settings

        ship_settings()
        from flows.rerank import rerank_session

        return rerank_session(session)
