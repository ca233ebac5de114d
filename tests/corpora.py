"""Small corpora for tests, made in memory through the same code as ingest's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.corpus import Chunk
from contracts.query import DistinctQuery
from contracts.table import schema
from corpus.build import build_corpus
from corpus.corpus import Corpus
from corpus.tokeniser import TokeniserParams
from loading.identity import normalised


def unit(vectors: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows scaled to length 1, float32."""
    array = np.asarray(vectors, dtype=np.float64)
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def chunk_table(chunks: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A chunk table from rows that name at least chunk_id and text, ascending chunk_id."""
    rows = []
    text_ids: dict[str, int] = {}
    for given in sorted(chunks, key=lambda chunk: chunk["chunk_id"]):
        metadata = [{"key": k, "value": v} for k, v in sorted(given.get("metadata", {}).items())]
        defaults = {
            "source": f"{given['chunk_id']}.md", "document_id": given["chunk_id"], "chunk_index": 0, "title": None,
            "evidence_family": None, "authority_tier": None, "version": None, "acl": None,
        }  # fmt: skip
        text_id = text_ids.setdefault(normalised(given["text"]), len(text_ids))
        rows.append({**defaults, **given, "metadata": metadata, "text_id": text_id})
    return pa.Table.from_pylist(rows, schema=schema(Chunk))


def make_corpus(
    chunks: Sequence[Mapping[str, Any]],
    embeddings: Any = None,
    *,
    collapse_identical_texts: bool = True,
    language: str = "none",
    dimension: int = 8,
    index_factory: str = "Flat",
) -> Corpus:
    """A corpus from rows that name at least chunk_id and text; random unit embeddings when none are given."""
    if embeddings is None:
        embeddings = np.random.default_rng(0).normal(size=(len(chunks), dimension))
    order = sorted(range(len(chunks)), key=lambda i: chunks[i]["chunk_id"])
    return build_corpus(
        chunks=chunk_table(chunks),
        embeddings=np.asarray(embeddings, dtype=np.float64).reshape(len(chunks), -1 if len(chunks) else dimension)[
            order
        ],
        embedding_model="test",
        access_control=any("acl" in chunk for chunk in chunks),
        tokeniser=TokeniserParams(language=language, stop_words="none"),  # type: ignore[arg-type]
        index_factory=index_factory,
        collapse_identical_texts=collapse_identical_texts,
    )


def make_queries(queries: Sequence[Mapping[str, Any]], dimension: int = 8) -> pa.Table:
    """A table of distinct queries from rows that name at least text; random unit embeddings when none are given."""
    random = np.random.default_rng(1)
    rows = []
    for number, query in enumerate(queries):
        given = dict(query)
        filters = [{"key": k, "value": v} for k, v in sorted(given.pop("filters", {}).items())]
        vector = unit([given.pop("embedding", random.normal(size=dimension))])[0].tolist()
        defaults = {
            "query_id": f"q-{number:04d}", "normalised_text": given["text"], "groups": [], "occurrences": 1,
        }  # fmt: skip
        rows.append({**defaults, **given, "filters": filters, "embedding": vector})
    return pa.Table.from_pylist(rows, schema=schema(DistinctQuery))
