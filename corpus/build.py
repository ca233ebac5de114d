"""Building of a corpus: chunk table and embeddings to everything that searches need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import column
from contracts.corpus import CorpusSnapshot
from contracts.errors import InputError
from corpus.corpus import Corpus, filter_keys
from corpus.keyword_index import KeywordIndex
from corpus.passages import SearchedText, passage_texts
from corpus.tokeniser import Tokeniser, TokeniserParams
from corpus.vectors import build_index
from models.embedder import Embedder, unit_rows

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 256


def build_corpus(
    *,
    chunks: pa.Table,
    embeddings: Array,
    embedding_model: str,
    access_control: bool,
    tokeniser: TokeniserParams,
    chunking: str = "not stated",
    searched_text: SearchedText = "title_and_text",
    index_factory: str = "Flat",
    collapse_identical_texts: bool = True,
    settings: Mapping[str, object] | None = None,
    quarantined: int = 0,
) -> Corpus:
    """A corpus in memory, ready to be searched and written.

    Its snapshot is complete but for what only writing knows: files, source file, time and duration.
    `snapshot_id` comes from the content alone: chunks, embeddings, the model behind them, keyword postings,
    access control, and the settings that searches stand on. The same corpus is the same snapshot.

    Args:
        chunks: table of `contracts.corpus.Chunk`, ascending chunk_id.
        embeddings: (chunks, dimension) of the passage texts, finite, no row zero; any length.
        embedding_model: the id of the model that made them.
        access_control: whether `acl` is heeded.
        tokeniser, chunking, searched_text, index_factory, collapse_identical_texts: see `CorpusParams`.
        settings: what else is recorded with the snapshot, and changes nothing.
        quarantined: how many chunks were left out.

    Raises:
        InputError: embeddings that do not belong to the chunks, or are not finite.
        ConfigurationError: an index that FAISS cannot build.
    """
    _check_embeddings(chunks, embeddings)
    vectors = unit_rows(embeddings)
    words = Tokeniser(tokeniser)
    keywords = KeywordIndex.build([words.tokens(text) for text in passage_texts(chunks, searched_text)])
    recorded = {
        "chunking": chunking,
        "index_factory": index_factory,
        "searched_text": searched_text,
        "tokeniser": tokeniser.model_dump(mode="json"),
    }
    content = {**recorded, "embedding_model": embedding_model, "access_control": access_control}
    snapshot = CorpusSnapshot(
        snapshot_id=f"corpus-{_digest(content, chunks, vectors, keywords)[:12]}",
        chunks=chunks.num_rows,
        documents=pc.count_distinct(chunks.column("document_id")).as_py(),
        quarantined=quarantined,
        dimension=vectors.shape[1],
        embedding_model=embedding_model,
        access_control=access_control,
        filter_keys=filter_keys(chunks),
        settings={**(settings or {}), **recorded},
        files=[],
        source_file="",
        created_at="",
        seconds=0.0,
    )
    return Corpus(
        snapshot=snapshot,
        chunks=chunks,
        embeddings=vectors,
        index=build_index(vectors, index_factory),
        keywords=keywords,
        tokeniser=words,
        searched_text=searched_text,
        collapse_identical_texts=collapse_identical_texts,
    )


def embed_chunks(
    chunks: pa.Table,
    embedder: Embedder,
    searched_text: SearchedText,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Array:
    """(chunks, dimension) float32 unit rows: the passage text of each chunk, equal ones embedded once.

    Args:
        chunks: table of `contracts.corpus.Chunk`.
        embedder: makes the vectors.
        searched_text: what is embedded of a chunk.
        progress: told how many of how many distinct texts are done.
    """
    place: dict[str, int] = {}
    texts = passage_texts(chunks, searched_text)
    places = np.array([place.setdefault(text, len(place)) for text in texts], dtype=np.int64)
    distinct = list(place)
    vectors = np.empty((len(distinct), embedder.dimension), dtype=np.float32)
    for start in range(0, len(distinct), _BLOCK):
        block = distinct[start : start + _BLOCK]
        vectors[start : start + len(block)] = embedder.embed(block)
        progress(start + len(block), len(distinct))
    return vectors[places]


def _check_embeddings(chunks: pa.Table, embeddings: Array) -> None:
    if embeddings.ndim != 2 or len(embeddings) != chunks.num_rows:  # noqa: PLR2004 - a matrix
        raise InputError(
            "corpus", "the embeddings do not belong to the chunks", got=f"an array of shape {embeddings.shape}",
            want=f"({chunks.num_rows}, dimension)", next_step="Give one embedding a chunk, in the order of the chunks.",
        )  # fmt: skip
    wrong = ~np.isfinite(embeddings).all(axis=1) | ~embeddings.any(axis=1)
    if wrong.any():
        first = column(chunks, "chunk_id")[int(np.argmax(wrong))].as_py()
        raise InputError(
            f"chunk {first}", "its embedding is not usable", got="zero, a NaN or an infinity",
            want="finite numbers, not all 0", next_step="Check the model, or set corpus.on_bad_chunk: quarantine.",
        )  # fmt: skip


def _digest(content: Mapping[str, object], chunks: pa.Table, vectors: Array, keywords: KeywordIndex) -> str:
    """SHA-256 over what a corpus is, whatever the versions of the libraries that write it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for line in _lines(chunks):
        digest.update(line)
    digest.update(json.dumps([vectors.shape, keywords.terms]).encode())
    for array in (vectors, keywords.offsets, keywords.rows, keywords.frequencies):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _lines(chunks: pa.Table) -> Iterator[bytes]:
    for batch in chunks.to_batches(max_chunksize=8192):
        for row in batch.to_pylist():
            yield json.dumps(row, sort_keys=True).encode() + b"\n"
