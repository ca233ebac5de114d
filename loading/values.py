"""Values as they stand in files: what they are as text, numbers and names, and why a row is refused."""

from __future__ import annotations

import json
import math
from typing import Any


class RefusedRowError(Exception):
    """A row that becomes a dead letter or a quarantined chunk; never leaves this package.

    Args:
        reason: a snake_case word.
        problem: what is wrong, in words.
        got: what was found, when that helps.
        want: what would have been right, when that helps.
    """

    def __init__(self, reason: str, problem: str, *, got: object = None, want: str | None = None) -> None:
        found = ", ".join(f"{word} {value}" for word, value in (("got", got), ("want", want)) if value is not None)
        super().__init__(problem + (f": {found}" if found else ""))
        self.reason = reason
        self.problem = problem
        self.got = got
        self.want = want


def scalar_text(value: Any) -> str | None:
    """A single value as text: `true` and `false`, numbers and dates as Python and ISO write them; None for no value.

    A whole float is written as an integer: some writers make floats of integers in a column with nulls.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if is_missing(value) or is_nested(value):
        return None
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def identifier(value: Any) -> str | None:
    """An id as text: a string that is not empty, or a whole number, also as a float; None for anything else."""
    if type(value) in (str, int) or (isinstance(value, float) and value.is_integer()):
        return scalar_text(value) or None
    return None


def is_missing(value: Any) -> bool:
    """Null, or the NaN that some writers put in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_nested(value: Any) -> bool:
    """Lists, structs and bytes, which no single text stands for."""
    return isinstance(value, (list, dict, tuple, bytes))


def integer(value: Any) -> int | None:
    """A whole number of 64 bits, also as a float or in digits; None for anything else."""
    if isinstance(value, str):
        try:
            value = int(value) if value.strip().removeprefix("-").isdecimal() else None
        except ValueError:  # more digits than Python reads
            return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and -(2**63) <= value < 2**63 else None


def names(value: Any, file_format: str) -> tuple[str, ...] | None:
    """A list of names, sorted, each once; None for anything else.

    A text that starts with `[` is a list in JSON; in CSV any other text has `;` between the names.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = from_json(value)
        except ValueError:
            return None
    elif file_format == "csv" and isinstance(value, str):
        value = [name for part in value.split(";") if (name := part.strip())]
    if not isinstance(value, list) or any(not isinstance(name, str) or not name for name in value):
        return None
    return tuple(sorted(set(value)))


def from_json(text: str) -> Any:
    """What a JSON text says.

    Raises:
        UnicodeError: it holds an escaped half of a surrogate pair, which is JSON, but no text.
        ValueError: it is no JSON, is nested too deeply, or an object in it has a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_each_key_once)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        message = "nested too deeply"
        raise ValueError(message) from error
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        message = "an object has a key twice"
        raise ValueError(message)
    return found


def shown(value: Any) -> str:
    """A value for an error message, cut."""
    return repr(value)[:80]
