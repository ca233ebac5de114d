"""One row of a query log: its text, logged id, groups and filters, or why it is refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from loading.identity import is_blank, normalised
from loading.values import RefusedRowError, from_json, identifier, is_missing, names, scalar_text, shown


@dataclass(frozen=True)
class AskedQuery:
    """What one log line asks: `groups` and `filters` are sorted, without repeats."""

    text: str
    normalised_text: str
    groups: tuple[str, ...]
    filters: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class RowReader:
    """How rows of one log are read.

    Attributes:
        columns: our name to the log's.
        file_format: in CSV, groups are a `;`-separated text or a list in JSON, and filters a JSON text; in
            Parquet, a null field of a filter struct is no filter, since a struct has all its fields in every row.
        max_characters: a longer text is refused.
        filter_keys: keys that filters may name; None knows none that are wrong.
    """

    columns: Mapping[str, str]
    file_format: str
    max_characters: int
    filter_keys: Collection[str] | None = None

    def logged_id(self, row: Mapping[str, Any], line_number: int) -> str:
        """The id that the log gives the line, `line-<n>` where it gives none or one that `read` refuses."""
        return identifier(row.get(self.columns["query_id"])) or f"line-{line_number}"

    def read(self, row: Mapping[str, Any]) -> AskedQuery:
        """What the row asks.

        Raises:
            RefusedRowError: `empty`, `over_long`, `invalid` or `unknown_filter`.
        """
        text = row.get(self.columns["text"])
        if is_missing(text):
            raise RefusedRowError("empty", "has no text")
        if not isinstance(text, str):
            raise RefusedRowError("invalid", "its text is no string", got=shown(text))
        if is_blank(text):
            raise RefusedRowError("empty", "its text has no character that is seen")
        if len(text) > self.max_characters:
            want = f"at most {self.max_characters}"
            raise RefusedRowError("over_long", "its text is too long", got=f"{len(text)} characters", want=want)
        query_id = row.get(self.columns["query_id"])
        if not is_missing(query_id) and query_id != "" and identifier(query_id) is None:
            want = "a string, a whole number or null"
            raise RefusedRowError("invalid", "its query_id is not usable", got=shown(query_id), want=want)
        groups = self._groups(row.get(self.columns["groups"]))
        return AskedQuery(text, normalised(text), groups, self._filters(row.get(self.columns["filters"])))

    def _groups(self, value: Any) -> tuple[str, ...]:
        if is_missing(value):
            return ()
        groups = names(value, self.file_format)
        if groups is None:
            raise RefusedRowError("invalid", "its groups are not usable", got=shown(value), want="a list of names")
        return groups

    def _filters(self, value: Any) -> tuple[tuple[str, str], ...]:
        if is_missing(value):
            return ()
        if self.file_format == "csv" and isinstance(value, str):
            try:
                value = from_json(value)
            except ValueError as error:
                raise _unusable_filters(value) from error
        pairs = _pairs(value)
        if self.file_format == "parquet":
            pairs = [(key, one) for key, one in pairs if one is not None]
        filters = sorted({(_key(key), _text(one)) for key, one in pairs})
        if len({key for key, _ in filters}) != len(filters):
            raise RefusedRowError("invalid", "its filters ask for two values of one key", got=shown(value))
        for key, _ in filters:
            if self.filter_keys is not None and key not in self.filter_keys:
                want = ", ".join(sorted(self.filter_keys))
                raise RefusedRowError("unknown_filter", "no chunk has the metadata key", got=key, want=want)
        return tuple(filters)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Filters as pairs: a JSON object, a list of {key, value}, or an Arrow map (a list of pairs)."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list):
        if all(isinstance(one, dict) and one.keys() == {"key", "value"} for one in value):
            return [(one["key"], one["value"]) for one in value]
        if all(isinstance(one, tuple) and len(one) == 2 for one in value):  # noqa: PLR2004 - key and value
            return value
    raise _unusable_filters(value)


def _unusable_filters(value: Any) -> RefusedRowError:
    want = "an object, or a list of {key, value}"
    return RefusedRowError("invalid", "its filters are not usable", got=shown(value), want=want)


def _key(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise RefusedRowError("invalid", "a filter has no usable key", got=shown(value), want="a name")


def _text(value: Any) -> str:
    """A filter's value as text, in the form that ingest gives metadata."""
    text = scalar_text(value)
    if text is None:
        raise RefusedRowError("invalid", "a filter has no usable value", got=shown(value), want="one value")
    return text
