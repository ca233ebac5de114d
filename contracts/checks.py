"""The vectorised check of types and values: Arrow arrays against the field annotations of a row model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Gt, Le, Lt, MinLen

from contracts.annotations import Bound, field_annotations, is_row, unwrap
from contracts.columns import Array, as_numpy, offsets_from_lengths
from contracts.rules import Violation

NO_SUCH_COLUMN, UNKNOWN_COLUMN = "no such column", "unknown column"

# Small chunks are joined up to this size, so that each costs less than its check; larger ones stay
# apart, since the text of one Arrow array cannot exceed 2 GB.
_PIECE_BYTES = 64 * 2**20

RowOf = Callable[[int], int]  # the place of a value within its array -> its row in the table


def type_violations(got: Sequence[pa.Field], want: Sequence[pa.Field], path: str = "") -> Iterator[Violation]:
    """Fields of a table or struct against those wanted, by name; nulls are left to the check of values.

    Missing fields and wrong types come first, in the order wanted, then unknown fields.
    """
    names = [field.name for field in got]
    for field in want:
        if names.count(field.name) > 1:
            yield Violation(path + field.name, None, f"{names.count(field.name)} columns of this name", "one")
        elif field.name not in names:
            yield Violation(path + field.name, None, NO_SUCH_COLUMN, str(field.type))
        else:
            yield from _type_mismatch(path + field.name, got[names.index(field.name)].type, field.type)
    known = [field.name for field in want]
    for name in names:
        if name not in known:
            yield Violation(path + name, None, UNKNOWN_COLUMN, f"only {', '.join(known)}")


def _type_mismatch(path: str, got: pa.DataType, want: pa.DataType) -> Iterator[Violation]:
    if pa.types.is_list(got) and pa.types.is_list(want):
        yield from _type_mismatch(path, got.value_type, want.value_type)
    elif pa.types.is_struct(got) and pa.types.is_struct(want):
        yield from type_violations(list(got), list(want), f"{path}.")
    elif got != want:
        yield Violation(path, None, str(got), str(want))


def column_violation(chunked: pa.ChunkedArray, annotation: Any, name: str) -> Violation | None:
    """The violation in the lowest row of a column; in that row, the first in the order of the checks.

    The types must have been checked.
    """
    start = 0
    for piece in _pieces(chunked):
        found = list(_check_array(piece, annotation, name, _plus(start)))
        if found:
            return min(found, key=lambda violation: violation.row or 0)
        start += len(piece)
    return None


def _pieces(chunked: pa.ChunkedArray) -> Iterator[pa.Array]:
    """The chunks of a column, small ones joined."""
    gathered: list[pa.Array] = []
    size = 0
    for chunk in chunked.chunks:
        if gathered and size + chunk.nbytes > _PIECE_BYTES:
            yield pa.concat_arrays(gathered)
            gathered, size = [], 0
        gathered.append(chunk)
        size += chunk.nbytes
    if gathered:
        yield gathered[0] if len(gathered) == 1 else pa.concat_arrays(gathered)


def _check_array(array: pa.Array, annotation: Any, path: str, row_of: RowOf) -> Iterator[Violation]:
    """The first violation of every check that an array fails; nulls are left out of the later checks."""
    base, bounds, nullable, _ = unwrap(annotation)
    if array.null_count:
        valid = as_numpy(array.is_valid())
        if not nullable:
            yield Violation(path, row_of(int(np.argmin(valid))), None, "a value (not null)")
        array, row_of = array.drop_null(), _through(np.flatnonzero(valid), row_of)
    if get_origin(base) is list:
        lengths = as_numpy(pc.list_value_length(array))
        yield from _check_bounds(lengths, array, bounds, path, row_of)
        yield from _check_array(array.flatten(), get_args(base)[0], path, _parent(lengths, row_of))
    elif is_row(base):
        children = dict(zip((field.name for field in array.type), array.flatten(), strict=True))
        for name, inner in field_annotations(base).items():
            yield from _check_array(children[name], inner, f"{path}.{name}", row_of)
    elif pa.types.is_string(array.type):
        yield from _check_text(array, base, bounds, path, row_of)
    elif base is not bool:
        numbers = as_numpy(array)
        if base is float:
            yield from _first(~np.isfinite(numbers), array, path, row_of, "a finite number")
        yield from _check_bounds(numbers, array, bounds, path, row_of)


def _check_text(array: pa.Array, base: Any, bounds: list[Bound], path: str, row_of: RowOf) -> Iterator[Violation]:
    """Text must decode before anything else can be said of it."""
    if not _decodes(array):
        first = _first_undecodable(array)
        yield Violation(path, row_of(first), array.view(pa.binary())[first].as_py(), "text in UTF-8")
    elif get_origin(base) is Literal:
        outside = ~as_numpy(pc.is_in(array, value_set=pa.array(get_args(base), pa.string())))
        yield from _first(outside, array, path, row_of, f"one of {', '.join(get_args(base))}")
    elif bounds:
        # Bytes are counted at once, characters one by one; both tell an empty text from others.
        only_empty = all(isinstance(bound, MinLen) and bound.min_length <= 1 for bound in bounds)
        lengths = pc.binary_length(array) if only_empty else pc.utf8_length(array)
        yield from _check_bounds(as_numpy(lengths), array, bounds, path, row_of)


def _decodes(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _first_undecodable(array: pa.Array) -> int:
    """Halves the stretch that holds the first bad value until it alone is left."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        if _decodes(array.slice(low, middle - low)):
            low = middle
        else:
            high = middle
    return low


def _check_bounds(
    numbers: Array, array: pa.Array, bounds: list[Bound], path: str, row_of: RowOf
) -> Iterator[Violation]:
    """Bounds on numbers, and MinLen on the lengths of texts and lists."""
    # A float64 limit makes numpy compare float32 exactly, as Python does, instead of rounding the limit.
    exact: Callable[[Any], Any] = np.float64 if numbers.dtype.kind == "f" else lambda limit: limit
    for bound in bounds:
        if isinstance(bound, Ge):
            outside, want = numbers < exact(bound.ge), f">= {bound.ge}"
        elif isinstance(bound, Gt):
            outside, want = numbers <= exact(bound.gt), f"> {bound.gt}"
        elif isinstance(bound, Le):
            outside, want = numbers > exact(bound.le), f"<= {bound.le}"
        elif isinstance(bound, Lt):
            outside, want = numbers >= exact(bound.lt), f"< {bound.lt}"
        else:
            outside, want = numbers < bound.min_length, f"at least {bound.min_length} long"
        yield from _first(outside, array, path, row_of, want)


def _first(outside: Array, array: pa.Array, path: str, row_of: RowOf, want: str) -> Iterator[Violation]:
    if outside.any():
        first = int(np.argmax(outside))
        yield Violation(path, row_of(first), array[first].as_py(), want)


def _plus(start: int) -> RowOf:
    return lambda place: start + place


def _through(places: Array, row_of: RowOf) -> RowOf:
    return lambda place: row_of(int(places[place]))


def _parent(lengths: Array, row_of: RowOf) -> RowOf:
    """From a value inside lists to the row of its list; found when asked, since most tables are sound."""

    def row(place: int) -> int:
        offsets = offsets_from_lengths(lengths)
        return row_of(int(np.searchsorted(offsets, place, side="right")) - 1)

    return row
