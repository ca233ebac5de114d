"""The flow `ingest`: a corpus file becomes an immutable, indexed snapshot, read, built and saved in three tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import flow

from contracts.corpus import CorpusSnapshot
from flows.executor import Progress, no_progress
from flows.rerank import as_task
from flows.settings import Settings, validated
from flows.snapshots import make_snapshot


@flow(name="ingest", persist_result=False)
def ingest(corpus: str, settings: dict[str, object]) -> CorpusSnapshot:
    """Ingests a corpus; the entry point of deployments.

    Args:
        corpus: path of the corpus file.
        settings: the configuration tree as plain values.
    """
    return _carry_out(Path(corpus), validated(settings), no_progress)


def ingest_corpus(corpus: Path, settings: Settings, progress: Progress) -> CorpusSnapshot:
    """The same flow with settings that are checked already, and with progress."""

    def carry_out() -> CorpusSnapshot:
        return _carry_out(corpus, settings, progress)

    return flow(name="ingest", persist_result=False)(carry_out)()


def _carry_out(corpus: Path, settings: Settings, progress: Progress) -> CorpusSnapshot:
    def step(name: str, body: Callable[[], None]) -> None:
        as_task(name, body)()

    return make_snapshot(corpus, settings, step, progress)
