"""The flow `ingest`: a corpus file becomes an immutable, indexed snapshot, read, built and saved in three tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import flow

from contracts.corpus import CorpusSnapshot
from flows.progress_bars import progress_bars
from flows.rerank import as_task
from flows.settings import validated
from flows.snapshots import make_snapshot


@flow(name="ingest", persist_result=False)
def ingest(corpus: str, settings: dict[str, object]) -> CorpusSnapshot:
    """Ingests a corpus file and makes its snapshot current.

    Args:
        corpus: path of the corpus file.
        settings: the configuration tree as plain values.
    """

    def step(name: str, body: Callable[[], None]) -> None:
        as_task(name, body)()

    with progress_bars() as report:
        return make_snapshot(Path(corpus), validated(settings), step, report)
