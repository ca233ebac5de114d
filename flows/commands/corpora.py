"""Commands for corpus snapshots: `dartflow corpus` list, use and rollback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.options import ConfigOption, JsonOption, StoreOption, store_of
from flows.commands.publishing import ByOption, WhyOption, say_moved, standing_of
from flows.printing import print_json

if TYPE_CHECKING:
    from contracts.corpus import CorpusSnapshot

app = typer.Typer(name="corpus", help="List corpus snapshots, and choose the current one.", no_args_is_help=True)


@app.command("list")
def list_snapshots(store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False) -> None:
    """List the snapshots of the store, the youngest first, and which of them new runs use.

    Example: `dartflow corpus list`
    """
    from checkpoints.corpora import corpus_pointer, stored_snapshots
    from flows.screens import show_snapshots

    opened = store_of(store, config)
    snapshots = stored_snapshots(opened)
    current, standing, problem = standing_of(corpus_pointer(opened))
    states = {snapshot_id: state for snapshot_id, (_, state) in standing.items()}
    if json_:
        rows = [
            {
                "snapshot_id": one.snapshot_id,
                "current": current is not None and current.target == one.snapshot_id,
                "state": states.get(one.snapshot_id),
                "problem": one.problem,
                **({} if one.snapshot is None else _described(one.snapshot)),
            }
            for one in snapshots
        ]
        print_json({"current": None if current is None else current.target, "snapshots": rows})
    elif snapshots:
        show_snapshots(snapshots, states)
    if problem is not None:
        raise problem


@app.command("use")
def use(
    snapshot_id: Annotated[str, typer.Argument(metavar="ID", help="Snapshot id, as `dartflow corpus list` shows it.")],
    why: WhyOption = None,
    by: ByOption = None,
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a snapshot the one that new runs use; its files are verified first.

    Example: `dartflow corpus use corpus-0c886f854134 --why "the new chunks lack the tables"`
    """
    from checkpoints.corpora import use_snapshot
    from flows.screens import OUT

    record = use_snapshot(store_of(store, config), snapshot_id, by=by, why=why)
    if record is None:
        OUT.print(f"snapshot {snapshot_id} is current already", highlight=False)
    else:
        say_moved(f"snapshot {snapshot_id} is current", record)


@app.command("rollback")
def rollback(
    why: WhyOption = None, by: ByOption = None, store: StoreOption = None, config: ConfigOption = None
) -> None:
    """Make the snapshot current again that was so before; repeated rollbacks go further back.

    Example: `dartflow corpus rollback --why "the new chunks lack the tables"`
    """
    from checkpoints.corpora import roll_back_corpus

    record = roll_back_corpus(store_of(store, config), by=by, why=why)
    say_moved(f"snapshot {record.target} is current again", record)


def _described(snapshot: CorpusSnapshot) -> dict[str, object]:
    named = {"chunks", "documents", "quarantined", "created_at", "embedding_model", "dimension", "source_file"}
    return {**snapshot.model_dump(mode="json", include=named), "bytes": sum(file.bytes for file in snapshot.files)}
