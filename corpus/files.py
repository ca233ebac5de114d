"""Files of a snapshot: a corpus to named bytes and back, each held against its hash."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from contracts.columns import Ragged, as_numpy, build_array, ragged
from contracts.corpus import Chunk, CorpusSnapshot, SnapshotFile
from contracts.errors import CorruptArtifactError, MissingArtifactError
from contracts.table import schema
from corpus.corpus import Corpus
from corpus.keyword_index import KeywordIndex
from corpus.passages import SearchedText
from corpus.tokeniser import Tokeniser, TokeniserParams

CHUNKS, EMBEDDINGS, INDEX, KEYWORDS = "chunks.parquet", "embeddings.npy", "index.faiss", "keyword_index.parquet"

# Bounded row groups: a reader decodes a part of a large corpus at a time.
_ROW_GROUP = 65_536

_POSTINGS = pa.schema(
    [
        pa.field("term", pa.string(), nullable=False),
        pa.field("rows", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
        pa.field("frequencies", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
)


def snapshot_files(corpus: Corpus) -> dict[str, bytes]:
    """The files of a snapshot by name; the same corpus gives the same bytes."""
    import faiss  # noqa: PLC0415 - as below

    embeddings = io.BytesIO()
    np.save(embeddings, np.ascontiguousarray(corpus.embeddings))
    return {
        CHUNKS: _parquet(corpus.chunks),
        EMBEDDINGS: embeddings.getvalue(),
        INDEX: faiss.serialize_index(corpus.index).tobytes(),
        KEYWORDS: _parquet(_postings(corpus.keywords)),
    }


def described_snapshot(
    snapshot: CorpusSnapshot, files: Mapping[str, bytes], *, source_file: str, created_at: str, seconds: float
) -> CorpusSnapshot:
    """The manifest of a snapshot with its files and with what only the writer knows."""
    listed = [
        SnapshotFile(name=name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        for name, data in sorted(files.items())
    ]
    return snapshot.model_copy(
        update={"files": listed, "source_file": source_file, "created_at": created_at, "seconds": seconds}
    )


def open_corpus(folder: Path, snapshot: CorpusSnapshot, collapse_identical_texts: bool = True) -> Corpus:  # noqa: FBT001, FBT002 - the one choice of a reader
    """A corpus from the files of its snapshot; embeddings and a flat index stay on disk, mapped into memory.

    Args:
        folder: a local folder with the files.
        snapshot: their manifest.
        collapse_identical_texts: see `Corpus`.

    Raises:
        MissingArtifactError: a file is not there.
        CorruptArtifactError: a file is not what was committed.
    """
    import faiss  # noqa: PLC0415 - a fifth of a second, for commands that open no corpus

    for file in snapshot.files:
        _check_file(folder / file.name, file, snapshot.snapshot_id)
    settings = snapshot.settings
    return Corpus(
        snapshot=snapshot,
        # Row groups put together once: each look at a column would do it again.
        chunks=pq.read_table(folder / CHUNKS, partitioning=None).cast(schema(Chunk)).combine_chunks(),
        embeddings=np.load(folder / EMBEDDINGS, mmap_mode="r", allow_pickle=False),
        index=faiss.read_index(str(folder / INDEX), faiss.IO_FLAG_MMAP_IFC),
        keywords=_keyword_index(pq.read_table(folder / KEYWORDS, partitioning=None), snapshot.chunks),
        tokeniser=Tokeniser(TokeniserParams.model_validate(settings["tokeniser"])),
        searched_text=_searched_text(settings["searched_text"]),
        collapse_identical_texts=collapse_identical_texts,
    )


def _check_file(path: Path, file: SnapshotFile, snapshot_id: str) -> None:
    next_step = "Ingest the corpus again, or use another snapshot."
    try:
        with path.open("rb") as content:
            got = hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise MissingArtifactError(
            f"snapshot {snapshot_id}", "a file is missing", got="nothing", want=str(path), next_step=next_step
        ) from error
    if got != file.sha256:
        raise CorruptArtifactError(
            f"snapshot {snapshot_id}, {path}",
            "the file is not what was committed",
            got=f"SHA-256 {got}",
            want=file.sha256,
            next_step=next_step,
        )


def _searched_text(value: object) -> SearchedText:
    if value not in get_args(SearchedText):
        raise CorruptArtifactError(
            "snapshot settings", "searched_text is not known", got=value, want=get_args(SearchedText),
            next_step="Use the version that made the snapshot.",
        )  # fmt: skip
    return cast(SearchedText, value)


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table.combine_chunks(), sink, compression="zstd", row_group_size=_ROW_GROUP)
    return sink.getvalue()


def _postings(index: KeywordIndex) -> pa.Table:
    """One row a term; the lengths of the chunks are the sums of their frequencies, and not kept."""
    columns: dict[str, Any] = {
        "term": list(index.terms),
        "rows": Ragged(index.offsets, index.rows),
        "frequencies": Ragged(index.offsets, index.frequencies),
    }
    return pa.Table.from_arrays([build_array(field.type, columns[field.name]) for field in _POSTINGS], schema=_POSTINGS)


def _keyword_index(postings: pa.Table, chunks: int) -> KeywordIndex:
    rows, frequencies = ragged(postings, "rows"), ragged(postings, "frequencies")
    lengths = np.bincount(rows.numpy_values(), weights=as_numpy(frequencies.values), minlength=chunks)
    return KeywordIndex(
        terms=tuple(postings.column("term").to_pylist()),
        offsets=rows.offsets,
        rows=rows.numpy_values(),
        frequencies=frequencies.numpy_values(),
        lengths=lengths.astype(np.int32),
    )
