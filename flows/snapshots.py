"""Snapshots: a corpus file becomes an immutable, indexed snapshot in the store."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from checkpoints.corpora import save_snapshot
from checkpoints.store import Store
from contracts.corpus import CorpusSnapshot
from contracts.errors import ConfigurationError
from corpus.build import build_corpus, embed_chunks
from corpus.corpus import Corpus
from corpus.files import described_snapshot, snapshot_files
from flows.engine import Step
from flows.planning import now
from flows.preflight import ingest_settings
from flows.progress import Progress
from flows.settings import Settings
from loading.corpus_file import LoadedCorpus, load_corpus_file
from models.embedder import embedder_model_id, open_embedder


def make_snapshot(path: Path, settings: Settings, step: Step, progress: Progress) -> CorpusSnapshot:
    """Reads a corpus file, embeds and indexes it, saves the snapshot and makes it current.

    Args:
        path: Parquet, JSONL or CSV.
        settings: the parts `corpus` and `embedder` decide what the snapshot holds.
        step: how each of the steps `read_corpus`, `build_corpus` and `save_corpus` is run.
        progress: told about embedded texts.

    Raises:
        InputError: a corpus that cannot be used; nothing is saved then.
    """
    started = time.perf_counter()
    made: dict[str, Any] = {}

    def read() -> None:
        precomputed = settings.embedder.provider == "precomputed"
        made["loaded"] = load_corpus_file(path, settings.corpus, with_vectors=precomputed)

    def build() -> None:
        made["corpus"] = _build(made["loaded"], settings, progress)

    def save() -> None:
        corpus: Corpus = made["corpus"]
        files = snapshot_files(corpus)
        made["snapshot"] = described_snapshot(
            corpus.snapshot,
            files,
            source_file=str(path),
            created_at=now(),
            seconds=round(time.perf_counter() - started, 3),
        )
        save_snapshot(Store(settings.store), made["snapshot"], files)

    for name, body in (("read_corpus", read), ("build_corpus", build), ("save_corpus", save)):
        step(name, body)
    snapshot: CorpusSnapshot = made["snapshot"]
    return snapshot


def _build(loaded: LoadedCorpus, settings: Settings, progress: Progress) -> Corpus:
    embedder = open_embedder(settings.embedder)
    embeddings = loaded.embeddings
    if embedder is not None:
        searched = settings.corpus.searched_text
        embeddings = embed_chunks(
            loaded.chunks, embedder, searched, lambda done, total: progress("embedding", done, total)
        )
    if embeddings is None:
        raise ConfigurationError(
            "setting embedder.provider", "the corpus has no column of embeddings", got="precomputed",
            want="a column `embedding`, or a provider that computes them",
            next_step="Add the column, map it in corpus.columns, or set embedder.provider: use-multilingual.",
        )  # fmt: skip
    return build_corpus(
        chunks=loaded.chunks,
        embeddings=embeddings,
        embedding_model=embedder_model_id(settings.embedder),
        access_control=loaded.access_control,
        tokeniser=settings.corpus.tokeniser,
        chunking=settings.corpus.chunking,
        searched_text=settings.corpus.searched_text,
        index_factory=settings.corpus.index_factory,
        settings={
            "ingest": ingest_settings(settings),
            "left_out_columns": loaded.left_out_columns,
            "quarantined": [chunk.__dict__ for chunk in loaded.quarantined],
        },
        quarantined=len(loaded.quarantined),
    )
