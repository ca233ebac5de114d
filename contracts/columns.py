"""Ragged columns: how lists of candidates lie in Arrow tables and in numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.errors import StageError

Array = np.ndarray[Any, np.dtype[Any]]
IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]
Values = Any  # a numpy array, an Arrow array, a Ragged or a mapping of these

_MOST_VALUES = 2**31 - 1  # the offsets of Arrow's list type are int32


@dataclass(frozen=True, eq=False)
class Ragged:
    """Lists of different lengths, one a row, laid end to end.

    Attributes:
        offsets: (rows + 1,) int64; row i holds the values from offsets[i] up to offsets[i + 1]. The first
            is 0 and the last is the number of values.
        values: what the lists hold, end to end: an array, another Ragged, or a mapping of field name to
            these for lists of structs; None when only the layout is asked for.

    Raises:
        StageError: offsets and values do not fit together.
    """

    offsets: IntArray
    values: Values

    def __post_init__(self) -> None:
        counts = sorted(_counts(self.values))
        fits = len(self.offsets) > 0 and self.offsets[0] == 0 and bool(np.all(np.diff(self.offsets) >= 0))
        if not fits or any(count != self.offsets[-1] for count in counts):
            raise StageError(
                "lists",
                "offsets and values do not fit together",
                got=f"offsets {np.asarray(self.offsets)} over {counts} values",
                want="offsets that rise from 0 to the number of values",
                next_step="Correct the stage that builds the lists.",
            )

    @property
    def lengths(self) -> IntArray:
        """(rows,) int64: how many values each row has."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> IntArray:
        """(values,) int64: the row of each value."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), self.lengths)

    @property
    def positions(self) -> IntArray:
        """(values,) int64: the place of each value within its row, from 0."""
        return np.arange(self.offsets[-1], dtype=np.int64) - np.repeat(self.offsets[:-1], self.lengths)

    def numpy_values(self) -> Array:
        """(values,) the values of lists of numbers, end to end, as a numpy array."""
        return as_numpy(self.values)

    def numpy(self, field: str) -> Array:
        """One field of a list of structs as a numpy array; nulls of a float field become NaN."""
        return as_numpy(self.values[field])


def _counts(values: Values) -> set[int]:
    """How many values there are; more than one number when the fields of a struct disagree."""
    if values is None:
        return set()
    if isinstance(values, Mapping):
        return {count for field in values.values() for count in _counts(field)}
    return {len(values.offsets) - 1 if isinstance(values, Ragged) else len(values)}


def offsets_from_lengths(lengths: Array) -> IntArray:
    """(rows,) lengths to (rows + 1,) int64 offsets."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def first_repeat(keys: IntArray) -> int | None:
    """The first place whose key stands at an earlier one too, or None."""
    ordered = np.sort(keys)
    if not (ordered[1:] == ordered[:-1]).any():
        return None  # a sort of keys alone takes a third of the time of one that says where they stood
    order = np.argsort(keys, kind="stable")
    return int(order[1:][keys[order][1:] == keys[order][:-1]].min())


def as_numpy(array: Values) -> Array:
    """An Arrow array as numpy, without a copy where Arrow allows it; nulls of numbers become NaN."""
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, pa.ChunkedArray):
        array = _one_array(array, "column")
    converted: Array = array.to_numpy(zero_copy_only=False)
    return converted


def column(table: pa.Table, name: str) -> pa.Array:
    """A column of a table as one Arrow array.

    Raises:
        StageError: its chunks together are too large for one array.
    """
    return _one_array(table.column(name), f"column {name}")


def _one_array(chunked: pa.ChunkedArray, where: str) -> pa.Array:
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    try:
        return chunked.combine_chunks()
    except pa.ArrowInvalid as error:
        raise _too_large(where, f"{chunked.nbytes:,} bytes in {chunked.num_chunks} chunks") from error


def _too_large(where: str, got: str) -> StageError:
    return StageError(
        where,
        "is too large for one Arrow array",
        got=got,
        want=f"at most {_MOST_VALUES:,} list values and bytes of text",
        next_step="Use smaller shards.",
    )


def ragged(table: pa.Table, name: str) -> Ragged:
    """A list column of a table as `Ragged`; lists of structs give a mapping of field to Arrow array.

    A null list has no values, like an empty one.
    """
    return ragged_lists(column(table, name))


def ragged_lists(lists: pa.Array) -> Ragged:
    """The same for an array of lists, such as a list field of a list of structs."""
    # flatten, unlike the child arrays, respects slices, nulls of lists and nulls of whole structs.
    values = lists.flatten()
    if pa.types.is_struct(values.type):
        values = dict(zip((field.name for field in values.type), values.flatten(), strict=True))
    return Ragged(_list_offsets(lists), values)


def _list_offsets(lists: pa.Array) -> IntArray:
    return offsets_from_lengths(as_numpy(pc.fill_null(pc.list_value_length(lists), 0)))


def build_array(arrow_type: pa.DataType, data: Values, name: str = "values") -> pa.Array:
    """Builds an Arrow array of exactly this type from numpy arrays, Arrow arrays, `Ragged` and mappings.

    Numbers may become other numbers that hold them, and text may be encoded otherwise; a number never
    becomes text or the other way round, since that hides an id that is no id. Entries of a mapping that
    the struct does not have are left out.

    Args:
        arrow_type: the type wanted.
        data: for a list type a `Ragged`, for a struct a mapping of field name to data, or an Arrow array.
        name: the column, for errors.

    Raises:
        StageError: a field is missing, data of another kind, or more values than int32 offsets can count.
    """
    if isinstance(data, pa.ChunkedArray):
        data = _one_array(data, f"column {name}")
    if isinstance(data, Ragged):
        return _build_list(arrow_type, data, name, nulls=None)
    if isinstance(data, Mapping):
        return _build_struct(arrow_type, data, name, nulls=None)
    if isinstance(data, pa.Array):
        return data if data.type == arrow_type else _rebuild(arrow_type, data, name)
    try:
        return pa.array(data, arrow_type)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise _wrong_data(name, str(error), str(arrow_type)) from error


def _rebuild(arrow_type: pa.DataType, data: pa.Array, name: str) -> pa.Array:
    """An Arrow array as another type: field by field where it is nested, so that nullable flags may differ."""
    nulls = data.is_null() if data.null_count else None
    if pa.types.is_list(data.type) and pa.types.is_list(arrow_type):
        return _build_list(arrow_type, Ragged(_list_offsets(data), data.flatten()), name, nulls)
    if pa.types.is_struct(data.type) and pa.types.is_struct(arrow_type):
        fields = dict(zip((field.name for field in data.type), data.flatten(), strict=True))
        return _build_struct(arrow_type, fields, name, nulls)
    if not _same_kind(data.type, arrow_type):
        raise _wrong_data(name, str(data.type), str(arrow_type))
    try:
        return data.cast(arrow_type)
    except pa.ArrowException as error:
        raise _wrong_data(name, str(error), str(arrow_type)) from error


def _build_list(arrow_type: pa.DataType, lists: Ragged, name: str, nulls: pa.Array | None) -> pa.Array:
    if not pa.types.is_list(arrow_type):
        raise _wrong_data(name, "lists", str(arrow_type))
    if lists.offsets[-1] > _MOST_VALUES:
        raise _too_large(f"column {name}", f"{lists.offsets[-1]:,} list values")
    values = build_array(arrow_type.value_type, lists.values, name)
    return pa.ListArray.from_arrays(pa.array(lists.offsets, pa.int32()), values, type=arrow_type, mask=nulls)


def _build_struct(arrow_type: pa.DataType, data: Mapping[str, Values], name: str, nulls: pa.Array | None) -> pa.Array:
    if not pa.types.is_struct(arrow_type):
        raise _wrong_data(name, "a mapping of fields", str(arrow_type))
    fields = list(arrow_type)
    missing = [field.name for field in fields if field.name not in data]
    if missing:
        raise _wrong_data(name, f"the fields {', '.join(data)}", f"also {', '.join(missing)}")
    children = [build_array(field.type, data[field.name], f"{name}.{field.name}") for field in fields]
    return pa.StructArray.from_arrays(children, fields=fields, mask=nulls)


def _same_kind(got: pa.DataType, want: pa.DataType) -> bool:
    if pa.types.is_dictionary(got):
        got = got.value_type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    numbers = (pa.types.is_integer, pa.types.is_floating)
    return pa.types.is_null(got) or any(
        any(is_kind(got) for is_kind in kind) and any(is_kind(want) for is_kind in kind) for kind in (texts, numbers)
    )


def _wrong_data(name: str, got: str, want: str) -> StageError:
    return StageError(
        f"column {name}",
        "is built from other data than its type",
        got=got,
        want=want,
        next_step="Correct the stage that builds it.",
    )


def read_only(array: Array) -> Array:
    """A view that cannot be written, so that arrays in memory and mapped from disk share one compiled kernel."""
    view = np.ascontiguousarray(array).view(np.ndarray)
    view.flags.writeable = False
    return view
