"""Parquet files: columns to records, with vectors kept apart in Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.columns import column
from contracts.errors import InputError
from loading.lines import BadLine, Records, as_json, readable


def read_parquet(path: Path, vector_column: str) -> Records:
    """The rows of a Parquet file; `vector_column` stays in Arrow.

    Raises:
        InputError: the file is no whole Parquet file, or two columns have one name.
    """
    try:
        table = pq.ParquetFile(path).read()
    except pa.ArrowException as error:
        raise InputError(
            str(path), "cannot be read as Parquet", got=str(error), next_step="Check that the file is whole."
        ) from error
    if len(set(table.column_names)) != len(table.column_names):
        raise InputError(
            str(path), "two columns have the same name", got=table.column_names, next_step="Rename one of them."
        )
    vectors = None
    if vector_column in table.column_names:
        vectors = column(table, vector_column)
        table = table.drop_columns([vector_column])
    try:
        return Records("parquet", list(range(1, table.num_rows + 1)), _python_rows(table), vectors, vector_column)
    except UnicodeDecodeError:
        return _decodable_rows(table, vectors, vector_column)


def _python_rows(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table.to_pylist() if table.num_columns else [{} for _ in range(table.num_rows)]
    return rows


def _decodable_rows(table: pa.Table, vectors: pa.Array | None, vector_column: str) -> Records:
    """Row by row, for the rare file with strings that are not UTF-8."""
    records = Records("parquet")
    kept = []
    for place in range(table.num_rows):
        row = table.slice(place, 1)
        try:
            records.add(place + 1, row.to_pylist()[0])
            kept.append(place)
        except UnicodeDecodeError:
            values = {name: _readable_value(row.column(name)) for name in row.column_names}
            records.bad.append(BadLine(place + 1, "undecodable", "not UTF-8", as_json(values)))
    taken = None if vectors is None else vectors.take(pa.array(kept, pa.int64()))
    return Records("parquet", records.line_numbers, records.rows, taken, vector_column, records.bad)


def _readable_value(values: pa.ChunkedArray) -> Any:
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        value = values.cast(pa.large_binary())[0].as_py()
        return None if value is None else readable(value)
    try:
        return values.to_pylist()[0]
    except UnicodeDecodeError:
        return "not UTF-8"
