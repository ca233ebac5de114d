"""What users asked: log lines, distinct queries and what a query may see."""

from __future__ import annotations

from typing import Annotated, ClassVar

from annotated_types import Ge, MinLen

from contracts.rules import Rule, Unique
from contracts.table import Float32, Row

Text = Annotated[str, MinLen(1)]


class Pair(Row):
    """One metadata equality or value: `key` = `value`."""

    key: Text
    value: str


class LogLine(Row):
    """One line of the query log and the distinct query that it became.

    `query_id` is null when the line is a dead letter; `reason` then says why.
    """

    rules: ClassVar[tuple[Rule, ...]] = (Unique("line_number"),)

    line_number: Annotated[int, Ge(1)]
    logged_id: str
    query_id: str | None
    reason: str | None


class DistinctQuery(Row):
    """One distinct query: equal normalised text, groups and filters.

    `text` is the raw text of its first occurrence (exact tokens need it); `normalised_text` is NFKC
    with single spaces; `groups` and `filters` are sorted; `occurrences` counts log lines;
    `embedding` is normalised to length 1.
    """

    rules: ClassVar[tuple[Rule, ...]] = (Unique("query_id"),)

    query_id: Text
    text: Text
    normalised_text: Text
    groups: list[str]
    filters: list[Pair]
    occurrences: Annotated[int, Ge(1)]
    embedding: Annotated[list[Float32], MinLen(1)]
