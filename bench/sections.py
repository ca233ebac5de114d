"""Sections: a finding with its tables, as data; figures become text only on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Value = str | int | float | Sequence[float] | None


@dataclass(frozen=True)
class Figures:
    """A table. A sequence of three numbers is a difference with the ends of its interval.

    Attributes:
        title: above it.
        columns: their heads.
        rows: one value a column.
    """

    title: str
    columns: list[str]
    rows: list[list[Value]]


@dataclass(frozen=True)
class Section:
    """What was measured in one go.

    Attributes:
        title: of the section.
        said: what it was measured on, in a paragraph.
        tables: in their order.
    """

    title: str
    said: str
    tables: list[Figures] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """What goes to the file."""
        return asdict(self)


def page_of(section: dict[str, Any]) -> str:
    """A section as it was kept, in Markdown."""
    lines = [f"### {section['title']}\n", section["said"]]
    for table in section["tables"]:
        lines += [f"\n{table['title']}:\n", f"| {' | '.join(table['columns'])} |", f"|{'---|' * len(table['columns'])}"]
        lines += [f"| {' | '.join(map(_text, row))} |" for row in table["rows"]]
    return "\n".join(lines) + "\n"


def _text(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    middle, low, high = value
    return f"{middle:+.3f} ({low:+.3f} to {high:+.3f})"
