"""The command `dartflow`: its commands, and how errors reach the user."""

from __future__ import annotations

import sys
import tempfile
import traceback
from typing import NoReturn

import typer

from contracts.errors import DartflowError
from flows.commands import corpora, plan, publishing, recovery, results, review, runs

app = typer.Typer(
    name="dartflow",
    help="Bulk reranking of query logs, with checkpointed stages.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (
    runs.demo,
    runs.ingest,
    runs.run,
    runs.estimate,
    runs.status,
    runs.resume,
    runs.rerun,
    recovery.verify_run,
    recovery.dead_letters,
    recovery.replay,
    results.inspect,
    results.export,
    results.evaluate,
    results.cost,
    results.contracts,
    review.calibrate,
    publishing.publish,
    publishing.rollback,
    publishing.published,
    recovery.gc,
):
    app.command(command.__name__.removesuffix("_run").replace("_", "-"))(command)
app.add_typer(corpora.app)
app.add_typer(plan.app)
app.add_typer(review.app)


def main() -> NoReturn:
    """Runs the command; an error is one sentence and an exit status, and a defect's traceback goes to a file."""
    try:
        app(standalone_mode=True)
    except DartflowError as error:
        _show_error(error, str(error))
        sys.exit(error.exit_status)
    except Exception as error:  # noqa: BLE001 - the last resort
        with tempfile.NamedTemporaryFile("w", prefix="dartflow-", suffix=".log", delete=False) as file:
            file.write("".join(traceback.format_exception(error)))
        message = next(iter(str(error).splitlines()), "no message")
        _show_error(error, f"dartflow: a defect: got {message}. Report it with {file.name}.")
        sys.exit(1)
    sys.exit(0)


def _show_error(error: Exception, sentence: str) -> None:
    from flows.screens import ERR

    ERR.print(f"[bold red]error:[/] {type(error).__name__}", highlight=False)
    ERR.print(sentence, markup=False, highlight=False)


if __name__ == "__main__":
    main()
