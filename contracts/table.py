"""Row model to Arrow schema, and the vectorised check of a table against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from contracts.columns import Values, as_numpy, build_array, column
from contracts.errors import ContractError
from contracts.rules import Rule, Violation

Float32 = Annotated[float, pa.float32()]
Int32 = Annotated[int, pa.int32()]

_PRIMITIVES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


class Row(BaseModel):
    """One row of a table: the contract in a form that a person reads and Pydantic checks.

    Field types may be str, int, float, bool, `Literal` of strings, another Row (a struct), lists
    of these, and `| None` (nullable). `Annotated` bounds (Ge, Gt, Le, Lt, MinLen) and Arrow types
    (`Float32`, `Int32`) are understood. Floats must be finite. `rules` hold what one field cannot say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _obey_rules(self) -> Row:
        for rule in self.rules:
            problem = rule.check_row(self)
            if problem is not None:
                raise ValueError(problem)
        return self


def schema(model: type[Row]) -> pa.Schema:
    """The Arrow schema of a row model: same fields in the same order, `| None` alone is nullable."""
    return pa.schema([_arrow_field(name, _annotation(info)) for name, info in model.model_fields.items()])


def build_table(model: type[Row], columns: Mapping[str, Values]) -> pa.Table:
    """A table of exactly the model's schema, from arrays, `Ragged` lists and mappings for structs."""
    wanted = schema(model)
    return pa.Table.from_arrays([build_array(field.type, columns[field.name]) for field in wanted], schema=wanted)


def rows_to_table(model: type[Row], rows: Iterable[Row]) -> pa.Table:
    """Row objects as a table; for small tables."""
    return pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema(model))


def check_table(table: pa.Table, model: type[Row], stage: str) -> None:
    """Checks a whole table against its row model at Arrow speed.

    Accepts and refuses exactly what `check_rows` does (row by row, with Pydantic).

    Raises:
        ContractError: names the stage and the first offending column, row and value.
    """
    wanted = schema(model)
    for field in wanted:
        if field.name not in table.column_names:
            raise ContractError(stage=stage, column=field.name, row=None, value="no such column", want=str(field.type))
        if not _same_type(table.schema.field(field.name).type, field.type):
            got = str(table.schema.field(field.name).type)
            raise ContractError(stage=stage, column=field.name, row=None, value=got, want=str(field.type))
    extra = [name for name in table.column_names if name not in wanted.names]
    if extra:
        raise ContractError(stage=stage, column=extra[0], row=None, value="unknown column", want=str(wanted.names))
    for violation in _violations(table, model):
        raise ContractError(
            stage=stage, column=violation.column, row=violation.row, value=violation.value, want=violation.want
        )


def check_rows(rows: Iterable[Mapping[str, Any]], model: type[Row], stage: str) -> None:
    """The slow twin of `check_table`: validates each row with Pydantic, then the rules on the whole table."""
    valid: list[Row] = []
    for number, row in enumerate(rows):
        try:
            valid.append(model.model_validate(row))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "row"
            raise ContractError(
                stage=stage, column=place, row=number, value=first["input"], want=first["msg"]
            ) from error
    for rule in model.rules:
        problem = rule.check_rows(valid)
        if problem is not None:
            raise ContractError(
                stage=stage, column=problem.column, row=problem.row, value=problem.value, want=problem.want
            )


def _violations(table: pa.Table, model: type[Row]) -> Iterator[Violation]:
    rows = np.arange(table.num_rows, dtype=np.int64)
    for name, info in model.model_fields.items():
        yield from _check_array(column(table, name), _annotation(info), name, rows)
    for rule in model.rules:
        found = rule.check_table(table)
        if found is not None:
            yield found


def _check_array(array: pa.Array, annotation: Any, path: str, rows: np.ndarray[Any, Any]) -> Iterator[Violation]:
    """Checks one column; `rows` says to which table row each of its values belongs."""
    base, bounds, nullable, _ = _unwrap(annotation)
    if array.null_count:
        valid = as_numpy(array.is_valid())
        if not nullable:
            yield Violation(path, int(rows[~valid][0]), None, "a value (not null)")
            return
        array, rows = array.drop_null(), rows[valid]
    if get_origin(base) is list:
        offsets = as_numpy(array.offsets)
        lengths = np.diff(offsets)
        yield from _check_bounds(lengths, array, bounds, path, rows)
        values = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
        yield from _check_array(values, get_args(base)[0], path, np.repeat(rows, lengths))
    elif isinstance(base, type) and issubclass(base, Row):
        for child, (name, info) in zip(array.flatten(), base.model_fields.items(), strict=True):
            yield from _check_array(child, _annotation(info), f"{path}.{name}", rows)
    elif get_origin(base) is Literal:
        allowed = pa.array(get_args(base))
        outside = ~as_numpy(pc.is_in(array, value_set=allowed))
        if outside.any():
            yield _violation(outside, array, path, rows, f"one of {list(get_args(base))}")
    elif base is str:
        yield from _check_bounds(as_numpy(pc.utf8_length(array)), array, bounds, path, rows)
    else:
        numbers = as_numpy(array)
        if base is float and not np.isfinite(numbers).all():
            yield _violation(~np.isfinite(numbers), array, path, rows, "a finite number")
        yield from _check_bounds(numbers, array, bounds, path, rows)


def _check_bounds(
    numbers: np.ndarray[Any, Any], array: pa.Array, bounds: list[Any], path: str, rows: np.ndarray[Any, Any]
) -> Iterator[Violation]:
    """Bounds on numbers, and MinLen on the lengths of strings and lists."""
    for bound in bounds:
        if isinstance(bound, Ge):
            outside, want = numbers < bound.ge, f">= {bound.ge}"
        elif isinstance(bound, Gt):
            outside, want = numbers <= bound.gt, f"> {bound.gt}"
        elif isinstance(bound, Le):
            outside, want = numbers > bound.le, f"<= {bound.le}"
        elif isinstance(bound, Lt):
            outside, want = numbers >= bound.lt, f"< {bound.lt}"
        elif isinstance(bound, MinLen):
            outside, want = numbers < bound.min_length, f"at least {bound.min_length} long"
        else:
            raise TypeError(f"the table check does not know the bound {bound!r} of {path}")
        if outside.any():
            yield _violation(outside, array, path, rows, want)


def _violation(outside: Any, array: pa.Array, path: str, rows: Any, want: str) -> Violation:
    first = int(np.argmax(outside))
    return Violation(path, int(rows[first]), array[first].as_py(), want)


def _annotation(info: FieldInfo) -> Any:
    """The annotation of a field with its bounds, which Pydantic keeps apart."""
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _unwrap(annotation: Any) -> tuple[Any, list[Any], bool, pa.DataType | None]:
    """Takes `Annotated` and `| None` apart: base type, bounds, nullable, Arrow type if one is named."""
    bounds: list[Any] = []
    nullable, arrow_type = False, None
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *metadata = get_args(annotation)
            for item in metadata:
                if isinstance(item, pa.DataType):
                    arrow_type = item
                else:
                    bounds.append(item)
        elif get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
            nullable = True
            (annotation,) = [option for option in get_args(annotation) if option is not type(None)]
        else:
            return annotation, bounds, nullable, arrow_type


def _arrow_field(name: str, annotation: Any) -> pa.Field:
    base, _, nullable, arrow_type = _unwrap(annotation)
    if arrow_type is None:
        if get_origin(base) is list:
            arrow_type = pa.list_(_arrow_field("item", get_args(base)[0]))
        elif get_origin(base) is Literal:
            arrow_type = pa.string()
        elif isinstance(base, type) and issubclass(base, Row):
            arrow_type = pa.struct([_arrow_field(n, _annotation(i)) for n, i in base.model_fields.items()])
        else:
            arrow_type = _PRIMITIVES[base]
    return pa.field(name, arrow_type, nullable=nullable)


def _same_type(got: pa.DataType, want: pa.DataType) -> bool:
    """Equal types; the nullable flags inside may differ, since nulls themselves are checked."""
    if pa.types.is_list(got) and pa.types.is_list(want):
        return _same_type(got.value_type, want.value_type)
    if pa.types.is_struct(got) and pa.types.is_struct(want):
        return got.num_fields == want.num_fields and all(
            got.field(i).name == want.field(i).name and _same_type(got.field(i).type, want.field(i).type)
            for i in range(got.num_fields)
        )
    return bool(got == want)
