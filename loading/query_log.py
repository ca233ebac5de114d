"""Query logs: many lines become few distinct queries, and every line that cannot becomes a dead letter."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import numpy as np
import pyarrow as pa
from annotated_types import Ge
from pydantic import Field

from contracts.columns import Array, IntArray, Ragged, build_array
from contracts.errors import ConfigurationError, InputError, ModelError
from contracts.manifest import DeadLetter
from contracts.params import Params
from contracts.query import DistinctQuery, LogLine
from contracts.table import schema
from loading.lines import BadLine, Records
from loading.log_row import AskedQuery, RowReader
from loading.records import read_records
from loading.values import RefusedRowError
from loading.vectors import LoadedVectors, vectors_of_array, vectors_of_values
from models.embedder import Embedder, Vectors, unit_rows

Column = Literal["text", "query_id", "groups", "filters", "embedding"]

# OpenSearch User Behavior Insights (index `ubi_queries`) has the text here; its `query_id` is ours.
UBI_TEXT = "user_query"

STAGE = "log_lines"


class QueryLogParams(Params):
    """How a query log is read.

    Attributes:
        columns: where the log has another name than ours: `{text: q, groups: teams}`. Ours are `text`,
            `query_id`, `groups`, `filters` and `embedding`; all but `text` may be missing. A log with
            `user_query` and no `text` is read as OpenSearch UBI without being told.
        max_characters: a longer text is a dead letter, >= 1. Small values lose real questions; large ones
            let pasted logs and documents through, which match everything a little.
        allow_empty: whether a log without a single line is a run that is complete, or an error.
    """

    columns: dict[Column, str] = Field(default_factory=dict)
    max_characters: Annotated[int, Ge(1)] = 4000
    allow_empty: bool = False


@dataclass(frozen=True)
class QueryLog:
    """A loaded query log.

    Attributes:
        lines: table of `contracts.query.LogLine`, by line number.
        queries: table of `contracts.query.DistinctQuery` without its embedding, by first occurrence.
        vectors: (records, width) the vectors that came with the log, as they stand in it, or None.
        places: (queries,) int64: the row of `vectors` that each query has.
        dead_letters: the lines taken out, by line number; their run id is filled in by the run.
    """

    lines: pa.Table
    queries: pa.Table
    vectors: Array | None
    places: IntArray
    dead_letters: list[DeadLetter]

    def embeddings(self, rows: IntArray) -> Vectors | None:
        """(rows, width) float32 unit vectors of some rows of `queries`, where they came with the log."""
        return None if self.vectors is None else unit_rows(self.vectors[self.places[rows]])


def load_query_log(
    path: Path,
    params: QueryLogParams,
    *,
    filter_keys: Collection[str] | None = None,
    with_vectors: bool = True,
    dimension: int | None = None,
) -> QueryLog:
    """Reads a log and finds its distinct queries.

    Two lines are one query when normalised text (NFKC, single spaces), groups and filters are equal. Its id
    is derived from these alone, its text is that of the first line.

    Args:
        path: Parquet, JSONL, CSV, or TSV (`id<TAB>text`).
        params: see `QueryLogParams`.
        filter_keys: keys that a filter may name (`Corpus.filter_keys`); a line with another is a dead
            letter. None lets every key through.
        with_vectors: whether a column of embeddings is read and its faulty lines refused; pass False
            where an embedder makes them anew.
        dimension: how many numbers an embedding must have, as those of the corpus (`CorpusSnapshot.dimension`);
            a line with another number is a dead letter. None takes the number that most lines have.

    Raises:
        InputError: a log that cannot be read, has no column of texts, is empty and may not be, or whose
            embeddings all have another number than `dimension`.
    """
    records = read_records(path, params.columns.get("embedding", "embedding"))
    if not records.rows and not records.bad and not params.allow_empty:
        raise InputError(
            str(path), "the query log is empty", got="no line", want="at least one query",
            next_step="Check the export, or set query_log.allow_empty: true.",
        )  # fmt: skip
    columns = _columns(path, records, params)
    reader = RowReader(columns, records.file_format, params.max_characters, filter_keys)
    vectors = _vectors(path, records, columns["embedding"], dimension) if with_vectors else None
    lines: list[tuple[int, str, AskedQuery | BadLine, int]] = []
    for place, (number, row) in enumerate(zip(records.line_numbers, records.rows, strict=True)):
        asked = _read(reader, records, place, None if vectors is None else vectors.problems.get(place))
        lines.append((number, reader.logged_id(row, number), asked, place))
    lines += [(bad.line_number, f"line-{bad.line_number}", bad, -1) for bad in records.bad]
    lines.sort(key=lambda line: line[0])
    return _query_log(lines, None if vectors is None else vectors.matrix)


def _read(reader: RowReader, records: Records, place: int, vector_problem: str | None) -> AskedQuery | BadLine:
    try:
        asked = reader.read(records.rows[place])
    except RefusedRowError as refused:
        return BadLine(records.line_numbers[place], refused.reason, str(refused), records.original(place))
    if vector_problem is not None:
        return BadLine(records.line_numbers[place], "invalid", vector_problem, records.original(place))
    return asked


def _columns(path: Path, records: Records, params: QueryLogParams) -> dict[str, str]:
    """Our column names to the log's.

    Raises:
        InputError: a mapped column, or the texts, are not there.
    """
    columns: dict[str, str] = {name: name for name in get_args(Column)}
    columns.update({str(name): theirs for name, theirs in params.columns.items()})
    present = {*records.columns(), *([columns["embedding"]] if records.vectors is not None else [])}
    if columns["text"] not in present and UBI_TEXT in present and "text" not in params.columns:
        columns["text"] = UBI_TEXT
    missing = [columns[name] for name in ("text", *params.columns) if columns[name] not in present]
    if present and missing:  # where no row has a column at all, every line is a dead letter
        raise InputError(
            str(path), "a column is missing", got=", ".join(sorted(present)), want=missing[0],
            next_step="Name the log's column in query_log.columns, as {text: question}.",
        )  # fmt: skip
    return columns


def _vectors(path: Path, records: Records, column: str, dimension: int | None) -> LoadedVectors | None:
    if records.vectors is not None:
        vectors = vectors_of_array(records.vectors, dimension)
    elif any(column in row for row in records.rows):
        vectors = vectors_of_values([row.get(column) for row in records.rows], dimension)
    else:
        return None
    if dimension is not None and vectors.widths and dimension not in vectors.widths:
        raise InputError(
            f"{path}, column {column}", "no vector has the width of the corpus",
            got=", ".join(map(str, vectors.widths)), want=dimension,
            next_step="Embed the log with the model that embedded the corpus, or ingest the corpus anew.",
        )  # fmt: skip
    return vectors


def _query_log(lines: list[tuple[int, str, AskedQuery | BadLine, int]], matrix: Array | None) -> QueryLog:
    """Makes lines in order of their number into the tables."""
    first: dict[str, tuple[AskedQuery, int]] = {}
    occurrences: Counter[str] = Counter()
    rows, letters = [], []
    for number, logged_id, asked, place in lines:
        query_id, reason = None, None
        if isinstance(asked, BadLine):
            reason = asked.reason
            letters.append(DeadLetter(
                run_id="", stage=STAGE, shard=0, reason=reason, attempt=1, line_number=number, query_id=None,
                log_lines=1, original=asked.original,
            ))  # fmt: skip
        else:
            query_id = query_id_of(asked.normalised_text, asked.groups, asked.filters)
            first.setdefault(query_id, (asked, place))
            occurrences[query_id] += 1
        rows.append({"line_number": number, "logged_id": logged_id, "query_id": query_id, "reason": reason})
    queries = [
        {
            "query_id": query_id,
            "text": asked.text,
            "normalised_text": asked.normalised_text,
            "groups": list(asked.groups),
            "filters": [{"key": key, "value": value} for key, value in asked.filters],
            "occurrences": occurrences[query_id],
        }
        for query_id, (asked, _) in first.items()
    ]
    without_embedding = pa.schema([field for field in schema(DistinctQuery) if field.name != "embedding"])
    return QueryLog(
        lines=pa.Table.from_pylist(rows, schema=schema(LogLine)),
        queries=pa.Table.from_pylist(queries, schema=without_embedding),
        vectors=matrix,
        places=np.array([place for _, place in first.values()], dtype=np.int64),
        dead_letters=letters,
    )


def embed_queries(queries: pa.Table, vectors: Vectors | None, embedder: Embedder | None) -> pa.Table:
    """The queries as `contracts.query.DistinctQuery`, with embeddings from the embedder or from the log.

    Args:
        queries: rows of `QueryLog.queries`.
        vectors: theirs from the log; used where there is no embedder.
        embedder: embeds the normalised texts; None where vectors are precomputed.

    Raises:
        ConfigurationError: neither the one nor the other.
    """
    if embedder is not None:
        vectors = embedder.embed_queries(queries.column("normalised_text").to_pylist())
    if vectors is None and queries.num_rows:
        raise ConfigurationError(
            "setting embedder.provider", "the query log has no column of embeddings", got="precomputed",
            want="a column `embedding`, or a provider that computes them",
            next_step="Add the column, map it in query_log.columns, or set embedder.provider: use-multilingual.",
        )  # fmt: skip
    wanted = schema(DistinctQuery).field("embedding")
    flat = np.zeros((0, 1), dtype=np.float32) if vectors is None else np.ascontiguousarray(vectors, dtype=np.float32)
    if not np.isfinite(flat).all():
        raise ModelError(
            "embedder", "gave a vector with a NaN or an infinity", want="finite numbers",
            next_step="Check the model behind embedder.provider.",
        )  # fmt: skip
    offsets = np.arange(queries.num_rows + 1, dtype=np.int64) * flat.shape[1]
    return queries.append_column(wanted, build_array(wanted.type, Ragged(offsets, flat.ravel())))


def query_id_of(normalised_text: str, groups: Iterable[str], filters: Iterable[tuple[str, str]]) -> str:
    """`q-` and 16 hex digits of the SHA-256 of what makes a query itself."""
    identity = json.dumps([normalised_text, sorted(groups), sorted(filters)], separators=(",", ":"))
    return f"q-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
