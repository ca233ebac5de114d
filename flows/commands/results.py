"""Commands that read results: inspect, export, evaluate, cost and contracts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from checkpoints.run import load_plan
from flows.commands.options import (
    ConfigOption,
    JsonOption,
    RunArgument,
    StoreOption,
    store_of,
)
from flows.printing import print_json


def inspect(
    run_id: RunArgument,
    stage: Annotated[str, typer.Argument(metavar="STAGE", help="Stage name.")],
    query_id: Annotated[str, typer.Argument(metavar="QUERY_ID", help="Query id, or the id of a log line.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Show what a stage wrote for one query; --json prints all of it.

    Example: `dartflow inspect RUN rrf_merge log-0017`
    """
    from flows.export import row_of_query

    opened = store_of(store, config)
    row = row_of_query(opened, load_plan(opened, run_id), stage, query_id)
    if json_:
        print_json(row)
    else:
        from flows.screens import show_row

        show_row(row)


def export(
    run_id: RunArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write.")],
    format_: Annotated[Literal["jsonl", "trec"], typer.Option("--format", help="jsonl or trec.")] = "jsonl",
    stage: Annotated[str, typer.Option("--stage", help="Which ranking; the final context by default.")] = "context",
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Write the results of a run, or the ranking of any stage, to a file.

    Example: `dartflow export RUN --format trec run.trec --stage blended_rerank`
    """
    from flows.export import write_export
    from flows.screens import ERR, OUT

    opened = store_of(store, config)
    written = write_export(opened, load_plan(opened, run_id), stage, format_, out)
    OUT.print(f"{written.lines} lines of {stage} written to {out}", highlight=False)
    if written.repeated_ids:
        ERR.print(f"{written.repeated_ids} log lines repeat the id of another query: see the log", highlight=False)


def evaluate(
    run_id: RunArgument,
    qrels: Annotated[Path, typer.Option("--qrels", help="TREC judgements: query 0 chunk relevance.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Measure every ranking of a run against judgements, to see where quality is won or lost.

    Example: `dartflow evaluate RUN --qrels examples/qrels.tsv`
    """
    from flows.evaluate import evaluate_run, load_qrels
    from flows.export import repeated_ids

    opened = store_of(store, config)
    plan = load_plan(opened, run_id)
    rankings, context = evaluate_run(opened, plan, load_qrels(qrels))
    if json_:
        repeated = repeated_ids(opened, plan)
        print_json({"run_id": run_id, "rankings": rankings, "context": context, "repeated_ids": repeated})
    else:
        from flows.screens import show_measures

        show_measures(rankings, context)


def cost(
    run_id: RunArgument, store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False
) -> None:
    """Tell what the calls of a run's LLM grader came to, by model and outcome, from its transcripts.

    Example: `dartflow cost 20261130-021500-1f2e`. What a run reuses of earlier calls costs it nothing.
    """
    from flows.cost import cost_rows, totals

    opened = store_of(store, config)
    rows = cost_rows(opened, load_plan(opened, run_id).run_id)
    if json_:
        print_json({"run_id": run_id, **totals(rows), "by_outcome": [asdict(row) for row in rows]})
    else:
        from flows.screens import show_cost

        show_cost(rows, totals(rows))


def contracts(
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="One stage; all by default.")] = None,
) -> None:
    """Print the contract of every stage: what it reads and writes, who owns it, when it has succeeded.

    Example: `dartflow contracts rrf_merge`
    """
    from flows.contract_pages import contract_page
    from flows.screens import OUT
    from stages.pipeline import find_stage, numbered_stages

    chosen = [found for _, found in numbered_stages()] if stage is None else [find_stage(stage)]
    for found in chosen:
        OUT.print(contract_page(found), markup=False, highlight=False)
