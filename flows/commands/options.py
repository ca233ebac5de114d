"""Options that commands share, and what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from checkpoints.run import run_ids
from checkpoints.store import Store
from contracts.errors import MissingArtifactError
from contracts.manifest import Verdict
from flows.defaults import DEFAULT_STORE, PREFIX
from flows.printing import print_json

if TYPE_CHECKING:
    from flows.settings import Settings

EXIT_STATUS = {"complete": 0, "partial": 3}

StoreOption = Annotated[str | None, typer.Option("--store", help="Folder or URI of the store.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]
SetOption = Annotated[list[str], typer.Option("--set", help="A setting, as in `log_normal.sigma=0.2`.")]
PrefectOption = Annotated[bool, typer.Option("--without-prefect", help="Run without Prefect; same artifacts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id.")]


def settings_of(store: str | None, config: Path | None, assignments: list[str]) -> Settings:
    """The configuration of a command."""
    from flows.settings import load_settings

    settings = load_settings(config, assignments=assignments)
    return settings if store is None else settings.model_copy(update={"store": store})


def store_of(store: str | None, config: Path | None) -> Store:
    """The store of a command that reads what is there.

    The configuration is read only where it could say something: the settings of the stages bring their
    compiled kernels along, and to look at a run takes none.
    """
    if config is not None or any(name.startswith(PREFIX) for name in os.environ):
        store = settings_of(store, config, []).store
    return Store(DEFAULT_STORE if store is None else store, create=False)


def youngest_run(store: Store) -> str:
    """The run that was planned last.

    Raises:
        MissingArtifactError: a store without runs.
    """
    found = run_ids(store)
    if not found:
        raise MissingArtifactError(f"store {store.uri}", "has no run yet", next_step="Run `dartflow run QUERIES`.")
    return found[0]


def finish(result: Verdict, *, as_json: bool = False) -> NoReturn:
    """Shows a verdict and ends the command with its exit status: 0 complete, 3 partial, 1 otherwise."""
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        from flows.screens import show_verdict

        show_verdict(result)
    raise typer.Exit(EXIT_STATUS.get(result.verdict, 1))
