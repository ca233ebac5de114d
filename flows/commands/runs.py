"""Commands that make runs: demo, ingest, run, estimate, status, resume and rerun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checkpoints.run import create_run, load_plan
from checkpoints.verdict import verdict
from flows.commands.options import (
    EXIT_STATUS,
    ConfigOption,
    JsonOption,
    PrefectOption,
    RunArgument,
    SetOption,
    StoreOption,
    finish,
    settings_of,
    store_of,
    youngest_run,
)
from flows.printing import plan_rows, print_json


def demo(store: StoreOption = None, config: ConfigOption = None, without_prefect: PrefectOption = False) -> None:
    """Ingest and rerank the bundled example.

    Example: `dartflow demo`. Its log has a few bad lines on purpose, so the verdict is partial, which is success here.
    """
    from flows.fingerprint import ROOT
    from flows.launch import ingest_file, start_run
    from flows.screens import show_verdict

    plan = f"family_rescue.plan={ROOT / 'examples' / 'evidence_plan.yaml'}"
    settings = settings_of(store or ".dartflow/demo", config or ROOT / "config" / "example.yaml", [plan])
    ingest_file(ROOT / "examples" / "corpus.jsonl", settings, without_prefect=without_prefect)
    result = start_run(ROOT / "examples" / "queries.jsonl", settings, None, without_prefect=without_prefect)
    show_verdict(result)
    raise typer.Exit(0 if result.verdict in EXIT_STATUS else 1)


def ingest(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="Parquet, JSONL or CSV file of chunks.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 - Typer copies it
    without_prefect: PrefectOption = False,
) -> None:
    """Make an immutable, indexed snapshot of a corpus, and make it current.

    Example: `dartflow ingest examples/corpus.jsonl --store .dartflow`
    """
    from flows.launch import ingest_file

    ingest_file(corpus, settings_of(store, config, set_), without_prefect=without_prefect)


def run(
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="Query log: Parquet, JSONL, CSV or TSV.")],
    run_id: Annotated[
        str | None, typer.Option("--run-id", help="Name of the run; made from the time by default.")
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    without_prefect: PrefectOption = False,
) -> None:
    """Rerank a query log against the current corpus.

    Example: `dartflow run examples/queries.jsonl --set blended_rerank.top_k=8`. Exit status: 0 complete, 3 partial.
    """
    from flows.launch import start_run

    finish(start_run(queries, settings_of(store, config, set_), run_id, without_prefect=without_prefect))


def estimate(
    queries: Annotated[Path, typer.Argument(metavar="QUERIES", help="Query log: Parquet, JSONL, CSV or TSV.")],
    sample: Annotated[
        int | None, typer.Option("--sample", min=1, help="Distinct queries to run and time; chosen by default.")
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    json_: JsonOption = False,
) -> None:
    """Tell what a run of a query log would take: time by stage, disk, pairs for the cross-encoder, context tokens.

    Example: `dartflow estimate examples/queries.jsonl --set blended_rerank.top_k=8`. It runs a sample of the log and
    keeps nothing; process start and Prefect are not in its times.
    """
    from checkpoints.store import Store
    from flows.estimate import estimate as estimate_run
    from flows.progress_bars import progress_bars

    settings = settings_of(store, config, set_)
    with progress_bars() as report:
        result = estimate_run(Store(settings.store, create=False), settings, queries, sample=sample, progress=report)
    if json_:
        print_json(result.model_dump(mode="json"))
    else:
        from flows.screens import show_estimate

        show_estimate(result)


def status(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id; the youngest run by default.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Tell what is true of a run: its stages, and the verdict from plan, manifests and lease.

    Example: `dartflow status --json`
    """
    opened = store_of(store, config)
    result = verdict(opened, load_plan(opened, run_id or youngest_run(opened)))
    if json_:
        print_json(result.model_dump(mode="json"))
    else:
        from flows.screens import show_verdict

        show_verdict(result)


def resume(
    run_id: RunArgument,
    store: StoreOption = None,
    config: ConfigOption = None,
    without_prefect: PrefectOption = False,
) -> None:
    """Go on with an interrupted run; finished shards are kept.

    Example: `dartflow resume 20261130-021500-1f2e`. Refused when code, models or settings have changed since.
    """
    from flows.launch import carry_out
    from flows.planning import check_unchanged
    from flows.settings import load_settings

    opened = store_of(store, config)
    plan = load_plan(opened, run_id)
    settings = check_unchanged(opened, plan, load_settings(config, base=plan.settings))
    finish(carry_out(opened, plan, settings, without_prefect=without_prefect))


def rerun(
    run_id: RunArgument,
    from_stage: Annotated[str | None, typer.Option("--from", help="Compute this stage and all behind it.")] = None,
    set_: SetOption = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be computed, and why.")] = False,
    new_run_id: Annotated[str | None, typer.Option("--run-id", help="Name of the new run.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    without_prefect: PrefectOption = False,
    json_: JsonOption = False,
) -> None:
    """Make a new run that computes what changed, and borrows the rest from an earlier run.

    Example: `dartflow rerun RUN --set log_normal.sigma=0.2 --dry-run`
    """
    from flows.planning import new_run_id as fresh_run_id
    from flows.planning import plan_rerun
    from flows.settings import load_settings

    opened = store_of(store, config)
    parent = load_plan(opened, run_id)
    settings = load_settings(config, assignments=set_, base=parent.settings)
    plan = plan_rerun(opened, parent, settings, from_stage=from_stage, run_id=new_run_id or fresh_run_id())
    if dry_run:
        if json_:
            print_json({"run_id": run_id, "stages": plan_rows(plan)})
        else:
            from flows.screens import show_plan

            show_plan(plan)
        return
    from flows.launch import carry_out

    create_run(opened, plan)
    result = carry_out(opened, plan, without_prefect=without_prefect)
    finish(result, as_json=json_)
