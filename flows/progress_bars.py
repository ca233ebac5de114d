"""Progress bars: how far long work is, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flows.progress import Progress as Report
from flows.screens import ERR


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar for each stage while the block runs."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR) as bars:
        known: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(stage, total=total)
            bars.update(known[stage], completed=done, total=total)

        yield report
