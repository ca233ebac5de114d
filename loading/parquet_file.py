"""Parquet files: columns to records, with vectors kept apart in Arrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from contracts.columns import column
from contracts.errors import InputError
from loading.lines import BadLine, Records, as_json, readable

_BUFFER_BYTES = 2**20
_BATCH_ROWS = 4096


def read_parquet(path: Path, vector_column: str) -> Records:
    """The rows of a Parquet file; dates and times become text, and `vector_column` stays in Arrow.

    Raises:
        InputError: the file is no whole Parquet file, two columns have one name, or a column holds values
            that Python cannot.
    """
    try:
        # In batches from small buffers: read at once, a column of vectors takes three times its size on the way.
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            batches = list(file.iter_batches(batch_size=_BATCH_ROWS, use_threads=False))
            table = pa.Table.from_batches(batches, file.schema_arrow)
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
    table = _with_times_as_text(table)
    try:
        return _records(table, vectors, vector_column)
    except (ValueError, OverflowError, LookupError) as error:
        raise InputError(
            f"{path}, column {_unreadable_column(table)}", "its values cannot be read", got=str(error),
            next_step="Leave the column out of the file, or write it as text.",
        ) from error  # fmt: skip


def _with_times_as_text(table: pa.Table) -> pa.Table:
    """Dates, times and durations as text, because Arrow holds more of them than Python does (nanoseconds, years)."""
    for place, (name, values) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_temporal(values.type):
            table = table.set_column(place, name, _time_text(values))
    return table


def _time_text(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """ISO 8601 as `isoformat` writes it, with nine digits where six do not do; a duration counts its unit.

    Where the time zone is not known, the time is that of UTC.
    """
    try:
        text = values.cast(pa.string())
    except pa.ArrowInvalid:
        text = values.cast(pa.timestamp(values.type.unit, "UTC")).cast(pa.string())
    if pa.types.is_duration(values.type):
        return text
    zone = r"($|Z|[+-]\d{4}$)"
    for pattern, replacement in (
        (r"^(\S+) (\d\d:)", r"\1T\2"),
        (rf"\.0+{zone}", r"\1"),
        (rf"\.(\d{{3}}){zone}", r".\1000\2"),
        (rf"\.(\d{{6}})000{zone}", r".\1\2"),
        (r"(:.*)Z$", r"\1+00:00"),
        (r"(:.*[+-]\d\d)(\d\d)$", r"\1:\2"),
    ):
        text = pc.replace_substring_regex(text, pattern=pattern, replacement=replacement)
    return text


def _unreadable_column(table: pa.Table) -> str:
    for name, values in zip(table.column_names, table.columns, strict=True):
        try:
            values.to_pylist()
        except UnicodeDecodeError:
            continue  # such rows are named one by one
        except (ValueError, OverflowError, LookupError):
            return str(name)
    return "not known"


def _records(table: pa.Table, vectors: pa.Array | None, vector_column: str) -> Records:
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
