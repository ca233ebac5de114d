"""Row model to Arrow schema, and the vectorised check of a table against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from contracts.annotations import Float32, Int32, arrow_field, field_annotations
from contracts.checks import NO_SUCH_COLUMN, UNKNOWN_COLUMN, column_violation, type_violations
from contracts.columns import Values, build_array, column
from contracts.errors import ContractError, StageError
from contracts.rules import Rule, Violation

__all__ = ["Float32", "Int32", "Row", "build_table", "check_rows", "check_table", "rows_to_table", "schema"]


class Row(BaseModel):
    """One row of a table: the contract in a form that a person reads and Pydantic checks.

    Field types may be str, int, float, bool, `Literal` of strings, another Row (a struct), lists
    of these, and `| None` (nullable). `Annotated` bounds (Ge, Gt, Le, Lt, MinLen) and Arrow types
    (`Float32`, `Int32`) are understood. Floats must be finite; a bound on a `Float32` is compared with
    the rounded number, so that 0.1, which is 0.100000001 in float32, breaks `Le(0.1)`.
    `rules` hold what one field cannot say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _obey_rules(self) -> Row:
        for rule in self.rules:
            found = rule.check_row(self)
            if found is not None:
                parts = {"column": found.column, "got": repr(found.value), "want": found.want, "value": found.value}
                raise PydanticCustomError("rule", "{column}: got {got}, want {want}", parts)
        return self


def schema(model: type[Row]) -> pa.Schema:
    """The Arrow schema of a row model: same fields in the same order, `| None` alone is nullable."""
    return pa.schema([arrow_field(name, annotation) for name, annotation in field_annotations(model).items()])


def build_table(model: type[Row], columns: Mapping[str, Values]) -> pa.Table:
    """A table of exactly the model's schema, from arrays, `Ragged` lists and mappings for structs.

    Entries of `columns` that the model does not know are left out.

    Raises:
        StageError: a column is missing, of another kind or length, or has more values than one shard can hold.
    """
    wanted = schema(model)
    missing = [name for name in wanted.names if name not in columns]
    if missing:
        raise StageError(
            f"table of {model.__name__}",
            "columns are missing",
            got=", ".join(columns),
            want=", ".join(missing),
            next_step="Correct the stage that builds it.",
        )
    arrays = [build_array(field.type, columns[field.name], field.name) for field in wanted]
    if len({len(array) for array in arrays}) > 1:
        raise StageError(
            f"table of {model.__name__}",
            "columns differ in length",
            got=", ".join(f"{name} {len(array)}" for name, array in zip(wanted.names, arrays, strict=True)),
            want="one length",
            next_step="Correct the stage that builds it.",
        )
    return pa.Table.from_arrays(arrays, schema=wanted)


def rows_to_table(model: type[Row], rows: Iterable[Row]) -> pa.Table:
    """Row objects as a table; for small tables."""
    return pa.Table.from_pylist([row.model_dump() for row in rows], schema=schema(model))


def check_table(table: pa.Table, model: type[Row], stage: str) -> None:
    """Checks a whole table against its row model at Arrow speed.

    Accepts and refuses what `check_rows` does (row by row, with Pydantic), and refuses besides what
    rows cannot show: the columns of an empty table, the width and encoding of a type (int32 for
    int64, int for float, a dictionary or large_string for string), a column that stands twice, and
    bytes that are not UTF-8. The order of columns and fields is free.

    The first violation is reported, in this order: missing columns and wrong types in the order of
    the model, unknown columns, then the values column by column, and last the rules one by one. Of a
    column and of a rule the lowest row is reported, however the table is chunked.

    Raises:
        ContractError: names the stage and the offending column, row and value.
    """
    found = next(_violations(table, model), None)
    if found is not None:
        raise _refusal(stage, found)


def check_rows(rows: Iterable[Mapping[str, Any]], model: type[Row], stage: str) -> None:
    """The slow twin of `check_table`: validates each row with Pydantic, then the rules on the whole table.

    Raises:
        ContractError: names the stage and the offending column, row and value.
    """
    valid: list[Row] = []
    for number, row in enumerate(rows):
        try:
            valid.append(model.model_validate(row))
        except ValidationError as error:
            raise _refusal(stage, _first_problem(error, number)) from error
    for rule in model.rules:
        found = rule.check_rows(valid)
        if found is not None:
            raise _refusal(stage, found)


def _refusal(stage: str, found: Violation) -> ContractError:
    return ContractError(stage=stage, column=found.column, row=found.row, value=found.value, want=found.want)


def _first_problem(error: ValidationError, row: int) -> Violation:
    """What Pydantic says, in the words of the table check: places in lists are left out of the column."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "rule":
        return Violation(first["ctx"]["column"], row, first["ctx"]["value"], first["ctx"]["want"])
    path = ".".join(part for part in first["loc"] if isinstance(part, str)) or "row"
    words = {"missing": NO_SUCH_COLUMN, "extra_forbidden": UNKNOWN_COLUMN}
    return Violation(path, row, words.get(first["type"], first["input"]), first["msg"].removeprefix("Input should be "))


def _violations(table: pa.Table, model: type[Row]) -> Iterator[Violation]:
    yield from type_violations(list(table.schema), list(schema(model)))
    for name, annotation in field_annotations(model).items():
        found = column_violation(table.column(name), annotation, name)
        if found is not None:
            yield found
    looked_at = dict.fromkeys(name for rule in model.rules for name in rule.columns)
    whole = pa.table({name: column(table, name) for name in looked_at})
    for rule in model.rules:
        broken = rule.check_table(whole)
        if broken is not None:
            yield broken
