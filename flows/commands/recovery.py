"""Commands for what went wrong or grew old: verify, dead-letters, replay and gc."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer

from checkpoints.run import create_or_load, load_plan, open_letters
from checkpoints.verdict import verdict
from contracts.errors import ConfigurationError
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


def verify_run(
    run_id: RunArgument, store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False
) -> None:
    """Read and hash every artifact of a run again.

    Example: `dartflow verify 20261130-021500-1f2e`. Exit status: 0 when all are what was committed.
    """
    from checkpoints.verify import verify
    from flows.screens import OUT

    opened = store_of(store, config)
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


def dead_letters(
    run_id: RunArgument, store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False
) -> None:
    """List what was taken out of a run, with its reason; --json has the original rows too.

    Example: `dartflow dead-letters 20261130-021500-1f2e`
    """
    opened = store_of(store, config)
    letters = open_letters(opened, load_plan(opened, run_id))
    if json_:
        print_json({"run_id": run_id, "dead_letters": [letter.model_dump(mode="json") for letter in letters]})
    else:
        from flows.screens import show_letters

        show_letters(letters)


def replay(
    run_id: RunArgument,
    store: StoreOption = None,
    config: ConfigOption = None,
    without_prefect: PrefectOption = False,
    json_: JsonOption = False,
) -> None:
    """Take the dead letters of a run up again, after a fix: a new run that borrows all the rest.

    Example: `dartflow replay 20261130-021500-1f2e`. Twice gives the same run. Lines of the log that could not be
    read stay dead letters: correct the log and run it.
    """
    from flows.launch import carry_out
    from flows.replay import plan_replay
    from flows.screens import ERR
    from flows.settings import load_settings

    opened = store_of(store, config)
    parent = load_plan(opened, run_id)
    plan = plan_replay(opened, parent, load_settings(config, base=parent.settings))
    if plan is None:
        ERR.print(f"run {run_id} has no query among its dead letters: nothing to replay", highlight=False)
        finish(verdict(opened, parent), as_json=json_)
    plan = create_or_load(opened, plan)
    finish(carry_out(opened, plan, without_prefect=without_prefect), as_json=json_)


def gc(
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="How many of the youngest runs stay.")] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Runs and snapshots younger stay.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would go, and why the rest stays.")
    ] = False,
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove old runs and snapshots; what is published, at work, or stood on by anything that stays is kept.

    Example: `dartflow gc --keep 7 --older-than 30 --dry-run`. With both options a run goes only if both let it go.
    Snapshots go by age alone.
    """
    from checkpoints.gc import collect
    from checkpoints.survey import Bounds

    if keep is None and older_than is None:
        raise ConfigurationError(
            "gc", "does not know what is old", want="--keep N, --older-than DAYS or both", next_step="Give one of them."
        )
    bounds = Bounds(keep, older_than, datetime.now(UTC))
    result = collect(store_of(store, config), bounds, dry_run=dry_run)
    if json_:
        items = [asdict(item) for item in result.items]
        print_json({"dry_run": dry_run, "items": items, "unfinished": result.unfinished})
    else:
        from flows.screens import show_collected

        show_collected(result, dry_run=dry_run)
