"""The command `dartflow`: ingest a corpus, run a query log, see what is true, and run again from any stage."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from checkpoints.run import create_run, load_plan, run_ids, verdict, verify
from checkpoints.store import Store
from contracts.errors import DartflowError, MissingArtifactError
from contracts.manifest import Verdict
from flows.launch import carry_out, ingest_file, start_run
from flows.screens import ERR, OUT, plan_rows, print_json, show_measures, show_plan, show_row, show_verdict
from flows.settings import Settings, load_settings

app = typer.Typer(
    name="dartflow",
    help="Bulk reranking of query logs, with checkpointed stages.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)

EXIT_STATUS = {"complete": 0, "partial": 3}


StoreOption = Annotated[str | None, typer.Option("--store", help="Folder or URI of the store.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
SetOption = Annotated[list[str], typer.Option("--set", help="A setting, as in `log_normal.sigma=0.2`.")]
PrefectOption = Annotated[bool, typer.Option("--without-prefect", help="Run without Prefect; same artifacts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id.")]


def main() -> NoReturn:
    """Runs the command; an error is one sentence and an exit status, and a defect's traceback goes to a file."""
    try:
        app(standalone_mode=True)
    except DartflowError as error:
        ERR.print(f"[bold red]error:[/] {type(error).__name__}", highlight=False)
        ERR.print(str(error), markup=False, highlight=False)
        sys.exit(error.exit_status)
    except Exception as error:  # noqa: BLE001 - the last resort
        with tempfile.NamedTemporaryFile("w", prefix="dartflow-", suffix=".log", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        ERR.print(f"[bold red]error:[/] {type(error).__name__}", highlight=False)
        ERR.print(
            f"dartflow: a defect: got {next(iter(str(error).splitlines()), 'no message')}. Report it with {file.name}.",
            markup=False,
            highlight=False,
        )
        sys.exit(1)
    sys.exit(0)


@app.command()
def demo(store: StoreOption = None, config: ConfigOption = None, without_prefect: PrefectOption = False) -> None:
    """Ingest and rerank the bundled example.

    Example: `dartflow demo`. Its log has a few bad lines on purpose, so the verdict is partial, which is success here.
    """
    from flows.fingerprint import ROOT

    plan = f"family_rescue.plan={ROOT / 'examples' / 'evidence_plan.yaml'}"
    settings = _settings(store or ".dartflow/demo", config or ROOT / "config" / "example.yaml", [plan])
    ingest_file(ROOT / "examples" / "corpus.jsonl", settings, without_prefect=without_prefect)
    result = start_run(ROOT / "examples" / "queries.jsonl", settings, None, without_prefect=without_prefect)
    show_verdict(result)
    raise typer.Exit(0 if result.verdict in EXIT_STATUS else 1)


@app.command()
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
    ingest_file(corpus, _settings(store, config, set_), without_prefect=without_prefect)


@app.command()
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
    _finish(start_run(queries, _settings(store, config, set_), run_id, without_prefect=without_prefect))


@app.command()
def status(
    run_id: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id; the youngest run by default.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Tell what is true of a run: its stages, and the verdict from plan, manifests and lease.

    Example: `dartflow status --json`
    """
    opened = _store(store, config)
    result = verdict(opened, load_plan(opened, run_id or _youngest(opened)))
    if json_:
        print_json(result.model_dump(mode="json"))
    else:
        show_verdict(result)


@app.command()
def resume(
    run_id: RunArgument,
    store: StoreOption = None,
    config: ConfigOption = None,
    without_prefect: PrefectOption = False,
) -> None:
    """Go on with an interrupted run; finished shards are kept.

    Example: `dartflow resume 20261130-021500-1f2e`. Refused when code, models or settings have changed since.
    """
    from flows.planning import check_unchanged

    opened = _store(store, config)
    plan = load_plan(opened, run_id)
    settings = check_unchanged(opened, plan, load_settings(config, base=plan.settings))
    _finish(carry_out(opened, plan, settings, without_prefect=without_prefect))


@app.command()
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

    opened = _store(store, config)
    parent = load_plan(opened, run_id)
    settings = load_settings(config, assignments=set_, base=parent.settings)
    plan = plan_rerun(opened, parent, settings, from_stage=from_stage, run_id=new_run_id or fresh_run_id())
    if dry_run:
        if json_:
            print_json({"run_id": run_id, "stages": plan_rows(plan)})
        else:
            show_plan(plan)
        return
    create_run(opened, plan)
    result = carry_out(opened, plan, without_prefect=without_prefect)
    if json_:
        print_json(result.model_dump(mode="json"))
        raise typer.Exit(EXIT_STATUS.get(result.verdict, 1))
    _finish(result)


@app.command(name="verify")
def verify_run(
    run_id: RunArgument, store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False
) -> None:
    """Read and hash every artifact of a run again.

    Example: `dartflow verify 20261130-021500-1f2e`. Exit status: 0 when all are what was committed.
    """
    opened = _store(store, config)
    findings = verify(opened, load_plan(opened, run_id))
    bad = [(artifact, finding) for artifact, finding in findings if finding != "ok"]
    if json_:
        artifacts = [{"artifact": artifact, "finding": finding} for artifact, finding in findings]
        print_json({"run_id": run_id, "ok": not bad, "artifacts": artifacts})
    else:
        for artifact, finding in bad:
            OUT.print(f"{artifact}: {finding}", markup=False, highlight=False)
        OUT.print(f"{len(findings) - len(bad)} of {len(findings)} artifacts are what was committed")
    raise typer.Exit(1 if bad else 0)


@app.command()
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

    opened = _store(store, config)
    row = row_of_query(opened, load_plan(opened, run_id), stage, query_id)
    if json_:
        print_json(row)
    else:
        show_row(row)


@app.command()
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

    opened = _store(store, config)
    written = write_export(opened, load_plan(opened, run_id), stage, format_, out)
    OUT.print(f"{written.lines} lines of {stage} written to {out}", highlight=False)
    if written.repeated_ids:
        ERR.print(f"{written.repeated_ids} log lines repeat the id of another query: see the log", highlight=False)


@app.command()
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

    opened = _store(store, config)
    plan = load_plan(opened, run_id)
    rankings, context = evaluate_run(opened, plan, load_qrels(qrels))
    if json_:
        repeated = repeated_ids(opened, plan)
        print_json({"run_id": run_id, "rankings": rankings, "context": context, "repeated_ids": repeated})
    else:
        show_measures(rankings, context)


@app.command()
def contracts(
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="One stage; all by default.")] = None,
) -> None:
    """Print the contract of every stage: what it reads and writes, who owns it, when it has succeeded.

    Example: `dartflow contracts rrf_merge`
    """
    from flows.contract_pages import contract_page
    from stages.pipeline import find_stage, numbered_stages

    chosen = [found for _, found in numbered_stages()] if stage is None else [find_stage(stage)]
    for found in chosen:
        OUT.print(contract_page(found), markup=False, highlight=False)


def _settings(store: str | None, config: Path | None, assignments: list[str]) -> Settings:
    settings = load_settings(config, assignments=assignments)
    return settings if store is None else settings.model_copy(update={"store": store})


def _store(store: str | None, config: Path | None) -> Store:
    """The store of a command that reads what is there."""
    return Store(_settings(store, config, []).store, create=False)


def _youngest(store: Store) -> str:
    found = run_ids(store)
    if not found:
        raise MissingArtifactError(f"store {store.uri}", "has no run yet", next_step="Run `dartflow run QUERIES`.")
    return found[0]


def _finish(result: Verdict) -> NoReturn:
    show_verdict(result)
    raise typer.Exit(EXIT_STATUS.get(result.verdict, 1))


if __name__ == "__main__":
    main()
