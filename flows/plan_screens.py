"""plan_screens: what people see of a checked plan and an explained question."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from flows.screens import OUT

_COLOURS = {"error": "red", "warning": "yellow"}


def show_check(file: str, found: Mapping[str, Any]) -> None:
    """The findings, one row each, and how many queries each shape takes."""
    if found["findings"]:
        table = _table("severity", "where", "problem")
        for one in found["findings"]:
            colour = _COLOURS[one["severity"]]
            table.add_row(f"[{colour}]{one['severity']}[/]", escape(one["where"]), escape(one["problem"]))
        OUT.print(table)
    for shape, count in (found["recognised"] or {}).items():
        OUT.print(f"{shape}: {count} of {found['queries']} queries", markup=False, highlight=False)
    OUT.print(f"{file}: {found['errors']} errors, {found['warnings']} warnings", markup=False, highlight=False)


def show_explanation(found: Mapping[str, Any]) -> None:
    """Shape and reason, then the families with what the corpus has for each."""
    if found["shape"] is None:
        OUT.print("no shape of the plan recognises the question: it passes through untouched", highlight=False)
    else:
        OUT.print(f"shape: {found['shape']}, by {found['recognised_by']}", markup=False, highlight=False)
    for other in found["also"]:
        line = f"also {other['shape']}, by {other['recognised_by']}; the first shape is taken"
        OUT.print(line, markup=False, highlight=False)
    for near in found["near"] if found["shape"] is None else []:
        touched = ", ".join(f'{name} "{word}"' for name, word in near["touched"].items())
        line = f"near {near['shape']}: {touched}; lacks {', '.join(near['lacks'])} (wants {near['at_least']})"
        OUT.print(line, markup=False, highlight=False)
    if not found["families"]:
        return
    table = _table("family", "chunks", "documents", "tiers", "found", "first hits of the rescue query")
    for family in found["families"]:
        tiers = ", ".join(f"{tier}: {count}" for tier, count in family["tiers"].items())
        hits = ", ".join(f"{hit['rank']} {hit['chunk_id']}" for hit in family["hits"]) or "none"
        counts = (str(family[name]) for name in ("chunks", "documents"))
        table.add_row(escape(family["name"]), *counts, tiers, str(family["found"]), escape(hits))
    OUT.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=name in {"severity", "family"})
    return table
