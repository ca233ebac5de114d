"""Digests: of files for integrity, of Arrow data for lineage, and the keys made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.columns import as_numpy


def sha256(data: bytes) -> str:
    """SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def key_of(parts: Mapping[str, Any]) -> str:
    """The key of an artifact: a digest of everything that can change its result."""
    return sha256(canonical_json(parts))[:32]


def logical_digest(table: pa.Table) -> str:
    """A digest of names, types and values, whatever the chunks, slices, buffers or Parquet writer.

    Floats count by their bits, except that -0.0 is 0.0 and every NaN is one NaN.
    """
    state = hashlib.sha256()
    for field in table.schema:
        state.update(f"{field.name}:{_type_name(field.type)};".encode())
        chunked = table.column(field.name)
        array = (
            chunked.chunk(0)
            if chunked.num_chunks == 1
            else pa.concat_arrays(chunked.chunks or [pa.nulls(0, field.type)])
        )
        _update(state, array)
    return state.hexdigest()


def _type_name(kind: pa.DataType) -> str:
    """A type by its names alone: nullable flags and the name of list items say nothing about the data."""
    if pa.types.is_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    if pa.types.is_struct(kind):
        fields = (kind.field(i) for i in range(kind.num_fields))
        return "struct<" + ",".join(f"{field.name}:{_type_name(field.type)}" for field in fields) + ">"
    return str(kind)


def _update(state: Any, array: pa.Array) -> None:
    state.update(len(array).to_bytes(8, "little"))
    valid = as_numpy(array.is_valid())
    state.update(np.packbits(valid).tobytes())
    array = array.drop_null() if array.null_count else array
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            _update(state, child)
    elif pa.types.is_list(array.type):
        lengths = as_numpy(pc.list_value_length(array)).astype("<i8")
        state.update(lengths.tobytes())
        _update(state, array.flatten())
    elif pa.types.is_string(array.type):
        lengths = as_numpy(pc.binary_length(array)).astype("<i8")
        state.update(lengths.tobytes())
        offsets = (
            np.frombuffer(array.buffers()[1], dtype=np.int32)[array.offset : array.offset + len(array) + 1]
            if len(array)
            else [0, 0]
        )
        data = array.buffers()[2]
        if data is not None:
            state.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
    elif pa.types.is_floating(array.type):
        numbers = as_numpy(array) + 0.0  # -0.0 + 0.0 is 0.0
        numbers = np.where(np.isnan(numbers), np.array(np.nan, numbers.dtype), numbers)
        state.update(np.ascontiguousarray(numbers).astype(numbers.dtype.newbyteorder("<")).tobytes())
    elif pa.types.is_boolean(array.type):
        state.update(np.packbits(as_numpy(array)).tobytes())
    else:
        numbers = as_numpy(array)
        state.update(np.ascontiguousarray(numbers).astype(numbers.dtype.newbyteorder("<")).tobytes())
