"""Commands for evidence plans: `dartflow plan` check and explain."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.commands.options import ConfigOption, JsonOption, SetOption, StoreOption, settings_of
from flows.printing import print_json

if TYPE_CHECKING:
    from flows.resources import Resources
    from flows.settings import Settings

app = typer.Typer(name="plan", help="Check evidence plans, and see what they make of a question.", no_args_is_help=True)


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The evidence plan, YAML.")],
    queries: Annotated[
        Path | None, typer.Option("--queries", help="A query log to hold the recognisers against.")
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 - Typer copies it
    json_: JsonOption = False,
) -> None:
    """Hold an evidence plan against the current corpus, and a query log; exit status 1 when there are errors.

    Example: `dartflow plan check examples/evidence_plan.yaml --queries examples/queries.jsonl`
    """
    from flows.plan_check import check_plan, read_plan, recognised_counts

    settings = settings_of(store, config, set_)
    plan, findings = read_plan(file)
    texts: list[str] | None = None
    if plan is not None:
        from loading.query_log import load_query_log

        if queries is not None:
            log = load_query_log(queries, settings.query_log, with_vectors=False)
            texts = log.queries.column("normalised_text").to_pylist()
        opened = _resources(settings)
        slots = settings.blended_rerank.top_k
        findings = check_plan(plan, opened.corpus, opened.keyword_search, texts, slots)
    errors = sum(one.severity == "error" for one in findings)
    found: dict[str, Any] = {
        "plan": None if plan is None else plan.name,
        "version": None if plan is None else plan.version,
        "errors": errors,
        "warnings": len(findings) - errors,
        "queries": None if texts is None else len(texts),
        "recognised": None if plan is None or texts is None else recognised_counts(plan, texts),
        "findings": [asdict(one) for one in findings],
    }
    if json_:
        print_json(found)
    else:
        from flows.plan_screens import show_check

        show_check(str(file), found)
    if errors:
        raise typer.Exit(1)


@app.command("explain")
def explain_question(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="A question, as users ask it.")],
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan; that of the configuration by default.")] = None,
    groups: Annotated[
        list[str] | None, typer.Option("--group", help="Groups of who asks; an operator's view of all by default.")
    ] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006
    json_: JsonOption = False,
) -> None:
    """Tell which shape a question has and why, its families, and what the corpus has for each.

    Example: `dartflow plan explain "who may refund a disputed charge" --plan examples/evidence_plan.yaml`
    """
    from contracts.errors import ConfigurationError
    from corpus.scope import Scope
    from flows.plan_check import everything
    from flows.plan_explain import explain

    chosen = [] if plan is None else [f"family_rescue.plan={plan}"]
    opened = _resources(settings_of(store, config, [*set_, *chosen]))
    if opened.plan is None:
        raise ConfigurationError(
            "setting family_rescue.plan", "names no evidence plan", next_step="Set it, or give one by --plan FILE."
        )
    scope = everything(opened.corpus) if groups is None else Scope(groups=tuple(sorted(set(groups))))
    found = explain(opened.plan, question, opened.corpus, opened.keyword_search, scope)
    if json_:
        print_json(found)
    else:
        from flows.plan_screens import show_explanation

        show_explanation(found)


def _resources(settings: Settings) -> Resources:
    """The current corpus of the store, and what is handed out with it."""
    from checkpoints.corpora import current_snapshot_id
    from checkpoints.store import Store
    from flows.resources import Resources

    opened = Store(settings.store, create=False)
    return Resources(opened, settings, current_snapshot_id(opened))
