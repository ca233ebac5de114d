"""Corpus files: rows become the chunk table, and what cannot be a chunk is refused or quarantined by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pyarrow as pa
from annotated_types import MinLen
from pydantic import Field

from contracts.corpus import Chunk
from contracts.errors import InputError
from contracts.params import Params
from contracts.table import check_table, schema
from corpus.corpus import SearchedText
from corpus.tokeniser import TokeniserParams
from loading.chunk_row import ChunkReader, DefaultAccess
from loading.identity import normalised
from loading.lines import Records
from loading.records import read_records
from loading.values import RefusedRowError, is_nested
from loading.vectors import LoadedVectors, vectors_of_array, vectors_of_values

ChunkColumn = Literal[
    "chunk_id", "text", "source", "document_id", "chunk_index", "title", "evidence_family", "authority_tier",
    "version", "acl", "embedding",
]  # fmt: skip
REQUIRED: tuple[ChunkColumn, ...] = ("chunk_id", "text", "source", "document_id")

Array = np.ndarray[Any, np.dtype[Any]]


class CorpusParams(Params):
    """How a corpus file is read and indexed.

    Attributes:
        columns: where the file has another name than ours: `{chunk_index: position}`. Ours are chunk_id,
            text, source, document_id (these four must be there), chunk_index (0 where the file has none),
            title, evidence_family, authority_tier, version, acl and embedding. Further columns become metadata.
        chunking: a label for how the texts were cut; recorded with the snapshot, and nothing depends on it.
        default_access: what a null in an existing acl column means: an error, a chunk for everybody
            (`public`), or for nobody (`deny`). A file without the column has no access control.
        searched_text: what retrievers and models read of a chunk. With the title, short chunks gain context;
            with long titles, chunks of one document look alike.
        tokeniser: how text becomes keyword terms.
        index_factory: FAISS factory string. `Flat` is exact; `HNSW32` or `IVF1024,Flat` answer faster over
            millions of chunks, and miss some neighbours.
        collapse_identical_texts: of chunks with equal texts let a query see one (true), or all (false, for
            ablations: copies then take the places of other evidence).
        on_bad_chunk: `refuse` stops at the first bad chunk and names it; `quarantine` leaves bad chunks out,
            by name, of repeated ids all but the first.
    """

    columns: dict[ChunkColumn, Annotated[str, MinLen(1)]] = Field(default_factory=dict)
    chunking: str = "not stated"
    default_access: DefaultAccess = "error"
    searched_text: SearchedText = "title_and_text"
    tokeniser: TokeniserParams = Field(default_factory=TokeniserParams)
    index_factory: Annotated[str, MinLen(1)] = "Flat"
    collapse_identical_texts: bool = True
    on_bad_chunk: Literal["refuse", "quarantine"] = "refuse"


@dataclass(frozen=True)
class QuarantinedChunk:
    """A chunk that was left out.

    Attributes:
        chunk_id: None where the line has none that can be read.
        line_number: from 1.
        reason: `undecodable`, `invalid`, `empty_text`, `no_access_list`, `bad_vector` or `duplicate_id`.
        detail: what is wrong, in words.
        original: the line or row, with nothing lost.
    """

    chunk_id: str | None
    line_number: int
    reason: str
    detail: str
    original: str


@dataclass(frozen=True)
class LoadedCorpus:
    """A loaded corpus file.

    Attributes:
        chunks: table of `contracts.corpus.Chunk`, ascending chunk_id.
        embeddings: (chunks, width) float32 or float64, finite, no row zero; None where the file has none.
        access_control: whether the file has an acl column.
        quarantined: what was left out, by line.
        left_out_columns: columns that are no metadata because they hold lists or structs, or stand
            behind a mapped column of the same name.
    """

    chunks: pa.Table
    embeddings: Array | None
    access_control: bool
    quarantined: list[QuarantinedChunk]
    left_out_columns: list[str]


def load_corpus_file(path: Path, params: CorpusParams, *, with_vectors: bool = True) -> LoadedCorpus:
    """Reads a corpus file.

    Args:
        path: Parquet, JSONL or CSV.
        params: see `CorpusParams`.
        with_vectors: whether a column of embeddings is read and checked; pass False where an embedder
            makes them anew.

    Raises:
        InputError: a file that cannot be read, without a needed column or without chunks; with
            `on_bad_chunk: refuse` also the first bad chunk.
    """
    records = read_records(path, params.columns.get("embedding", "embedding"))
    columns = {name: params.columns.get(name, name) for name in get_args(ChunkColumn)}
    present = _present(path, records, columns, params)
    further = sorted({*records.columns()} - {columns[name] for name in present})
    nested = {name for name in further if any(is_nested(row.get(name)) for row in records.rows)}
    left_out = sorted(name for name in further if name in nested or name in columns or not name)
    metadata = tuple(name for name in further if name not in left_out)
    reader = ChunkReader(columns, present, metadata, records.file_format, params.default_access)
    vectors = _vectors(records, columns["embedding"]) if with_vectors and "embedding" in present else None
    kept, bad = _sort_out(records, reader, vectors)
    if bad and params.on_bad_chunk == "refuse":
        raise _refusal(path, bad)
    if not kept:
        raise InputError(
            str(path), "holds no chunk", got=f"{len(bad)} bad lines", want="at least one chunk",
            next_step="Check the export.",
        )  # fmt: skip
    kept.sort(key=lambda one: str(one[1]["chunk_id"]))
    return LoadedCorpus(
        chunks=_table([chunk for _, chunk in kept]),
        embeddings=None if vectors is None else vectors.matrix[[place for place, _ in kept]],
        access_control="acl" in present,
        quarantined=[one for one, _ in bad],
        left_out_columns=left_out,
    )


def _present(path: Path, records: Records, columns: dict[ChunkColumn, str], params: CorpusParams) -> frozenset[str]:
    """Which of our columns the file has.

    Raises:
        InputError: a needed or a mapped one is missing.
    """
    theirs = {*records.columns(), *([columns["embedding"]] if records.vectors is not None else [])}
    for name in (*REQUIRED, *params.columns):
        if records.rows and columns[name] not in theirs:
            raise InputError(
                str(path), f"has no column for {name}", got=", ".join(sorted(theirs)), want=columns[name],
                next_step=f"Name the file's column in corpus.columns, as {{{name}: the_column}}.",
            )  # fmt: skip
    return frozenset(name for name in columns if columns[name] in theirs)


def _vectors(records: Records, column: str) -> LoadedVectors:
    if records.vectors is not None:
        return vectors_of_array(records.vectors)
    return vectors_of_values([row.get(column) for row in records.rows])


def _sort_out(
    records: Records, reader: ChunkReader, vectors: LoadedVectors | None
) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[QuarantinedChunk, RefusedRowError]]]:
    """The good chunks with their places among the records, and the bad ones by line."""
    kept: list[tuple[int, dict[str, Any]]] = []
    bad: list[tuple[QuarantinedChunk, RefusedRowError]] = []
    line_of: dict[str, int] = {}
    for place, (number, row) in enumerate(zip(records.line_numbers, records.rows, strict=True)):
        try:
            chunk = reader.read(row)
            _check_vector(vectors, place)
            _check_first(line_of, chunk["chunk_id"], number)
        except RefusedRowError as refused:
            original = records.original(place)
            one = QuarantinedChunk(reader.chunk_id(row), number, refused.reason, str(refused), original)
            bad.append((one, refused))
        else:
            kept.append((place, chunk))
    for line in records.bad:
        if line.reason != "empty":  # an empty line holds no chunk that could be missed
            one = QuarantinedChunk(None, line.line_number, line.reason, line.detail, line.original)
            bad.append((one, RefusedRowError(line.reason, line.detail)))
    return kept, sorted(bad, key=lambda pair: pair[0].line_number)


def _check_vector(vectors: LoadedVectors | None, place: int) -> None:
    if vectors is not None and place in vectors.problems:
        raise RefusedRowError("bad_vector", vectors.problems[place])


def _check_first(line_of: dict[str, int], chunk_id: str, number: int) -> None:
    first = line_of.setdefault(chunk_id, number)
    if first != number:
        raise RefusedRowError(
            "duplicate_id", "its chunk_id stands twice", got=f"lines {first} and {number}", want="each id once"
        )


def _refusal(path: Path, bad: list[tuple[QuarantinedChunk, RefusedRowError]]) -> InputError:
    (one, refused), count = bad[0], len(bad)
    named = "" if one.chunk_id is None else f", chunk {one.chunk_id}"
    return InputError(
        f"{path}, line {one.line_number}{named}", refused.problem, got=refused.got, want=refused.want,
        next_step=f"Correct it ({count} bad in all), or set corpus.on_bad_chunk: quarantine to leave bad chunks out.",
    )  # fmt: skip


def _table(chunks: list[dict[str, Any]]) -> pa.Table:
    """The chunk table with text ids: equal for equal normalised texts, numbered by first appearance."""
    numbers: dict[str, int] = {}
    for chunk in chunks:
        chunk["text_id"] = numbers.setdefault(normalised(chunk["text"]), len(numbers))
    table = pa.Table.from_pylist(chunks, schema=schema(Chunk))
    check_table(table, Chunk, "ingest")
    return table
