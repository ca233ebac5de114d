"""Field annotations of row models: which Arrow type and which bounds they mean."""

from __future__ import annotations

import struct
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import pyarrow as pa
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


def _round_to_float32(value: float) -> float:
    """The float32 nearest to a finite number: what a table would hold instead of it."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:
        raise PydanticCustomError("finite_number", "Input should be a finite number in float32") from None
    return float(rounded)


_ROUNDED = AfterValidator(_round_to_float32)

# Rows hold what tables hold: a row's float is rounded like the column's, so that bounds and order are
# judged on the same number, and an int that the column cannot hold is refused.
Float32 = Annotated[float, pa.float32(), _ROUNDED]
Int32 = Annotated[int, pa.int32(), Ge(-(2**31)), Le(2**31 - 1)]

Bound = Ge | Gt | Le | Lt | MinLen
_PRIMITIVES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}


class Meaning(NamedTuple):
    """An annotation taken apart.

    Attributes:
        base: str, int, float, bool, a `Literal`, a list or a row model.
        bounds: in the order they are written.
        nullable: whether None is allowed.
        arrow_type: the Arrow type when one is named.
    """

    base: Any
    bounds: list[Bound]
    nullable: bool
    arrow_type: pa.DataType | None


def field_annotations(model: type[BaseModel]) -> dict[str, Any]:
    """Every field of a model with its whole annotation; Pydantic keeps the outer bounds apart."""
    return {name: _whole_annotation(info) for name, info in model.model_fields.items()}


def _whole_annotation(info: FieldInfo) -> Any:
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def unwrap(annotation: Any) -> Meaning:
    """Takes `Annotated` and `| None` apart.

    Raises:
        TypeError: a row model asks for something that the table check could not see.
    """
    bounds: list[Bound] = []
    nullable, arrow_type = False, None
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *metadata = get_args(annotation)
            for item in metadata:
                if isinstance(item, pa.DataType):
                    arrow_type = item
                elif isinstance(item, Bound):
                    bounds.append(item)
                elif item is not _ROUNDED:
                    raise TypeError(f"the table check does not know {item!r}; it knows Ge, Gt, Le, Lt and MinLen")
        elif get_origin(annotation) in (Union, UnionType):
            options = [option for option in get_args(annotation) if option is not type(None)]
            if len(options) != 1:
                raise TypeError(f"a column has one type, got {annotation!r}")
            nullable, annotation = True, options[0]
        else:
            return Meaning(annotation, bounds, nullable, arrow_type)


def is_row(base: Any) -> bool:
    """Whether an unwrapped annotation is a row model, that is a struct."""
    return isinstance(base, type) and issubclass(base, BaseModel)


def arrow_field(name: str, annotation: Any) -> pa.Field:
    """The Arrow field of an annotation; `| None` alone is nullable.

    Raises:
        TypeError: a row model asks for something that a table cannot hold or its check could not see.
    """
    base, _, nullable, arrow_type = unwrap(annotation)
    if arrow_type is not None:
        return pa.field(name, arrow_type, nullable=nullable)
    if get_origin(base) is list:
        arrow_type = pa.list_(arrow_field("item", get_args(base)[0]))
    elif get_origin(base) is Literal and all(isinstance(option, str) for option in get_args(base)):
        arrow_type = pa.string()
    elif is_row(base):
        if getattr(base, "rules", ()):
            raise TypeError(f"{base.__name__} is a struct inside {name}: rules belong to the table's own row model")
        arrow_type = pa.struct([arrow_field(child, inner) for child, inner in field_annotations(base).items()])
    elif base in _PRIMITIVES:
        arrow_type = _PRIMITIVES[base]
    else:
        raise TypeError(f"{name}: a column cannot be {base!r}")
    return pa.field(name, arrow_type, nullable=nullable)
