"""Small corpora for tests, made in memory through the same code as ingest's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from contracts.corpus import Chunk, CorpusSnapshot
from contracts.query import DistinctQuery
from contracts.table import schema
from corpus.corpus import Corpus
from corpus.keyword_index import KeywordIndex
from corpus.tokeniser import Tokeniser, TokeniserParams


def unit(vectors: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows scaled to length 1, float32."""
    array = np.asarray(vectors, dtype=np.float64)
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def make_corpus(
    chunks: Sequence[Mapping[str, Any]],
    embeddings: Any = None,
    *,
    collapse_identical_texts: bool = True,
    language: str = "none",
    dimension: int = 8,
) -> Corpus:
    """A corpus from rows that name at least chunk_id and text; random unit embeddings when none are given."""
    order = sorted(range(len(chunks)), key=lambda i: chunks[i]["chunk_id"])
    texts = [chunks[i]["text"] for i in order]
    text_ids = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    rows = []
    for i in order:
        given = dict(chunks[i])
        metadata = [{"key": k, "value": v} for k, v in sorted(given.pop("metadata", {}).items())]
        defaults = {
            "source": f"{given['chunk_id']}.md", "document_id": given["chunk_id"], "chunk_index": 0, "title": None,
            "evidence_family": None, "authority_tier": None, "version": None, "acl": None,
        }  # fmt: skip
        rows.append({**defaults, **given, "metadata": metadata, "text_id": text_ids[given["text"]]})
    if embeddings is None:
        embeddings = np.random.default_rng(0).normal(size=(len(chunks), dimension))
    vectors = unit(np.asarray(embeddings)[order]) if len(chunks) else np.zeros((0, dimension), np.float32)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    tokeniser = Tokeniser(TokeniserParams(language=language, stop_words="none"))  # type: ignore[arg-type]
    return Corpus(
        snapshot=CorpusSnapshot(
            snapshot_id="corpus-test", chunks=len(rows), documents=len(rows), quarantined=0,
            dimension=vectors.shape[1], embedding_model="test", access_control=any("acl" in c for c in chunks),
            settings={}, files=[], source_file="memory", created_at="", seconds=0.0,
        ),
        chunks=pa.Table.from_pylist(rows, schema=schema(Chunk)),
        embeddings=vectors,
        index=index,
        keywords=KeywordIndex.build([tokeniser.tokens(text) for text in texts]),
        tokeniser=tokeniser,
        collapse_identical_texts=collapse_identical_texts,
    )  # fmt: skip


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
