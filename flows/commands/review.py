"""Commands by which people grade: review export, review import and calibrate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from checkpoints.run import create_or_load, load_plan
from flows.commands.options import (
    ConfigOption,
    JsonOption,
    PrefectOption,
    RunArgument,
    StoreOption,
    finish,
    store_of,
)
from flows.printing import print_json

app = typer.Typer(name="review", help="Let people decide about ambiguous passages.", no_args_is_help=True)


@app.command("export")
def export_passages(
    run_id: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write: .jsonl or .csv.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Write the ambiguous passages of a run, with an empty `decision` to fill in.

    Example: `dartflow review export RUN review.csv`. First come queries that have no correct passage, and of these
    the ones that are asked most; of a query what stays for the context, in rank order.
    """
    from flows.review import write_review
    from flows.screens import OUT

    opened = store_of(store, config)
    written = write_review(opened, load_plan(opened, run_id), file)
    if json_:
        print_json({"run_id": run_id, "file": str(file), "passages": written})
    else:
        OUT.print(f"{written} ambiguous passages written to {file}", markup=False, highlight=False)


@app.command("import")
def import_decisions(
    run_id: RunArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file with decisions: .jsonl or .csv.")],
    store: StoreOption = None,
    config: ConfigOption = None,
    without_prefect: PrefectOption = False,
    json_: JsonOption = False,
) -> None:
    """Grade a run again with the decisions in a file: a new run that borrows all before crag_grading.

    Example: `dartflow review import RUN review.csv`. A decision is correct, ambiguous or incorrect; lines without
    one are passed over. Twice gives the same run.
    """
    from flows.launch import carry_out
    from flows.review import plan_review

    opened = store_of(store, config)
    plan = create_or_load(opened, plan_review(opened, load_plan(opened, run_id), str(file), config))
    finish(carry_out(opened, plan, without_prefect=without_prefect), as_json=json_)


def calibrate(
    run_id: RunArgument,
    qrels: Annotated[Path, typer.Option("--qrels", help="TREC judgements: query 0 chunk relevance.")],
    precision: Annotated[
        float, typer.Option("--precision", min=0, max=1, help="Wanted of the passages that are called correct.")
    ] = 0.8,
    recall: Annotated[
        float, typer.Option("--recall", min=0, max=1, help="Of the relevant passages, not to be called incorrect.")
    ] = 0.95,
    complete: Annotated[
        bool, typer.Option("--complete", help="The judgements name all that is relevant: what they do not name is not.")
    ] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Choose the limits of grades from judged queries, and measure them on a half that was not looked at.

    Example: `dartflow calibrate RUN --qrels examples/qrels.tsv --complete`. Passages that the judgements do not name
    are left out unless you say --complete.
    """
    from flows.calibrate import calibrate_run
    from flows.evaluate import load_qrels

    opened = store_of(store, config)
    found = calibrate_run(
        opened, load_plan(opened, run_id), load_qrels(qrels), precision=precision, recall=recall, complete=complete
    )
    if json_:
        print_json({"run_id": run_id, **found.as_json()})
    else:
        from flows.screens import show_calibration

        show_calibration(found, run_id, precision)
