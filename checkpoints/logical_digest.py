"""Logical digest: of Arrow data for lineage, the same whatever file or writer the data went through."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from checkpoints.digests import canonical_json
from contracts.columns import Array, as_numpy, column
from contracts.errors import CheckpointError


def logical_digest(table: pa.Table) -> str:
    """A digest of names, types and values in their order, whatever the chunks, slices, buffers or Parquet writer.

    Encodings do not count: a dictionary is what it decodes to, and large text and lists are text and
    lists. Floats count by their bits, except that -0.0 is 0.0 and every NaN is one NaN.

    Raises:
        CheckpointError: a type that no row model asks for (dates, decimals, binary ...).
    """
    state = hashlib.sha256()
    columns = [[field.name, _type_name(field.type, field.name)] for field in table.schema]
    state.update(canonical_json({"columns": columns, "rows": table.num_rows}))
    for place, name in enumerate(table.schema.names):
        _update(state, column(table.select([place]), name))
    return state.hexdigest()


def _type_name(kind: pa.DataType, name: str) -> Any:
    """A type by its names alone: nullable flags and the name of list items say nothing about the data."""
    if pa.types.is_dictionary(kind):
        return _type_name(kind.value_type, name)
    if _is_list(kind):
        return ["list", _type_name(kind.value_type, name)]
    if pa.types.is_struct(kind):
        return ["struct", [[field.name, _type_name(field.type, f"{name}.{field.name}")] for field in kind]]
    if _is_text(kind):
        return "string"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return str(kind)
    raise CheckpointError(
        f"column {name}",
        "has a type that takes no digest",
        got=kind,
        want="text, numbers, booleans, and lists and structs of them",
        next_step="Correct the row model of the stage.",
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _update(state: Any, array: pa.Array) -> None:
    """Adds an array: its length, nulls and where they are, then the rest; each part tells the length of the next."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()  # first of all, since the dictionary itself may hold nulls
    state.update(len(array).to_bytes(8, "little"))
    state.update(array.null_count.to_bytes(8, "little"))
    if array.null_count:
        state.update(np.packbits(as_numpy(array.is_valid())))
        array = array.drop_null()
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            _update(state, child)
    elif _is_list(array.type):
        _update_numbers(state, as_numpy(pc.list_value_length(array)).astype(np.int64))
        _update(state, array.flatten())
    elif _is_text(array.type):
        _update_numbers(state, as_numpy(pc.binary_length(array)).astype(np.int64))
        state.update(_text_bytes(array))
    elif pa.types.is_boolean(array.type):
        state.update(np.packbits(as_numpy(array)))
    elif not pa.types.is_null(array.type):
        _update_numbers(state, as_numpy(array))


def _update_numbers(state: Any, numbers: Array) -> None:
    """Adds numbers in little-endian order, without a copy of integers where that is the machine's own."""
    if numbers.dtype.kind == "f":
        numbers = numbers + 0.0  # -0.0 + 0.0 is 0.0
        unknown = np.isnan(numbers)
        if unknown.any():
            numbers[unknown] = np.nan
    state.update(np.ascontiguousarray(numbers, dtype=numbers.dtype.newbyteorder("<")))


def _text_bytes(array: pa.Array) -> memoryview:
    """The bytes of all texts end to end, without a copy; a slice shares its buffers with the whole."""
    _, offsets, data = array.buffers()
    if not len(array) or data is None:
        return memoryview(b"")
    kind = np.int64 if pa.types.is_large_string(array.type) else np.int32
    borders = np.frombuffer(offsets, dtype=kind)
    return memoryview(data)[int(borders[array.offset]) : int(borders[array.offset + len(array)])]
