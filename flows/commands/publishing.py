"""Commands for what consumers read: publish, rollback and published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from checkpoints.run import load_plan
from checkpoints.store import Store
from contracts.errors import DartflowError
from flows.commands.options import (
    ConfigOption,
    JsonOption,
    RunArgument,
    SetOption,
    StoreOption,
    settings_of,
    store_of,
)
from flows.printing import print_json

if TYPE_CHECKING:
    from checkpoints.pointer import Pointer, PointerRecord
    from checkpoints.published import PublishedRun

WhyOption = Annotated[str | None, typer.Option("--why", help="A sentence for the history.")]
ByOption = Annotated[str | None, typer.Option("--by", help="Who does it; user@host by default.")]


def publish(
    run_id: RunArgument,
    why: WhyOption = None,
    by: ByOption = None,
    approve: Annotated[str | None, typer.Option("--approve", help="Name of the person who approves the run.")] = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    set_: SetOption = [],  # noqa: B006 - Typer copies it
    json_: JsonOption = False,
) -> None:
    """Audit a run, and make it the one that consumers read; the section `publish` of the configuration has the gates.

    Example: `dartflow publish 20261130-021500-1f2e --why "nightly"`. Exit status: 0 when it is published, 1 when it
    does not pass a gate; what is published stays then.
    """
    from flows.publishing import publish_run
    from flows.screens import OUT, show_gates

    settings = settings_of(store, config, set_)
    opened = Store(settings.store, create=False)
    result = publish_run(opened, load_plan(opened, run_id), settings.publish, by=by, why=why, approved_by=approve)
    if json_:
        print_json({
            "run_id": run_id, "published": not result.failed, "changed": result.moved, "failed": result.failed,
            "gates": [gate.model_dump(mode="json") for gate in result.gates],
            "current": None if result.record is None else result.record.model_dump(mode="json"),
        })  # fmt: skip
        raise typer.Exit(1 if result.failed else 0)
    if result.gates:
        show_gates(run_id, result.gates)
    if result.failed:
        standing = "nothing is" if result.record is None else f"run {result.record.target} still is"
        OUT.print(f"run {run_id} is not published, {standing}: failed {', '.join(result.failed)}", highlight=False)
        raise typer.Exit(1)
    if result.record is not None:
        say_moved(f"run {run_id} is published{'' if result.moved else ' already'}", result.record)


def rollback(
    why: WhyOption = None,
    by: ByOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Publish the run again that was published before; repeated rollbacks go further back.

    Example: `dartflow rollback --why "empty contexts for Polish"`. The files of that run are verified first.
    """
    from checkpoints.published import roll_back

    record = roll_back(store_of(store, config), by=by, why=why)
    if json_:
        print_json({"run_id": record.target, "current": record.model_dump(mode="json")})
    else:
        say_moved(f"run {record.target} is published again", record)


def published(store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False) -> None:
    """Show which run consumers read, and what was published before, the youngest first.

    Example: `dartflow published --json`
    """
    from checkpoints.published import published_pointer, published_run
    from flows.screens import show_history

    pointer = published_pointer(store_of(store, config))
    current, standing, problem = standing_of(pointer)
    entries = pointer.history()
    if json_:
        history = [
            {
                "generation": entry.generation, "carried_out": entry.carried_out, "problem": entry.problem,
                "record": None if entry.record is None else entry.record.model_dump(mode="json"),
            }
            for entry in entries
        ]  # fmt: skip
        print_json({"current": None if current is None else current.model_dump(mode="json"), "history": history})
    else:
        if current is not None:
            _describe(current, published_run(current))
        if entries:
            show_history("run", entries, {record.generation: state for record, state in standing.values()})
    if problem is not None:
        raise problem


def standing_of(
    pointer: Pointer,
) -> tuple[PointerRecord | None, dict[str, tuple[PointerRecord, str]], DartflowError | None]:
    """The current record, what stands (see `Pointer.standing`), and what keeps it from being read."""
    current, standing, problem = None, {}, None
    try:
        current = pointer.current()
        standing = pointer.standing()
    except DartflowError as error:
        problem = error
    return current, standing, problem


def say_moved(what: str, record: PointerRecord) -> None:
    """What is current now, and what a rollback would do."""
    from flows.screens import OUT

    back = "there is nothing to go back to"
    if record.previous is not None:
        back = f"a rollback goes back to generation {record.previous}"
    OUT.print(f"{what}, as generation {record.generation}; {back}", markup=False, highlight=False)


def _describe(record: PointerRecord, run: PublishedRun) -> None:
    from flows.screens import OUT

    OUT.print(f"run {run.run_id} is published since {record.at}, by {record.by}", markup=False, highlight=False)
    approved = "" if run.approved_by is None else f", approved by {run.approved_by}"
    counts = run.counts
    OUT.print(
        f"{run.verdict}{approved}: {counts['log_lines']} log lines, {counts['distinct_queries']} distinct queries, "
        f"{counts['dead_letters']} dead letters; snapshot {run.snapshot_id}",
        markup=False,
        highlight=False,
    )
    files = ", ".join(f"{len(files)} files of {stage}" for stage, files in run.artifacts.items())
    OUT.print(f"{files}: published/current.json names them", markup=False, highlight=False)
