"""Screens: what people see in the terminal; results on standard output, progress on standard error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from contracts.evidence import ContextPassage
from contracts.manifest import RunPlan, Verdict
from flows.executor import Progress as Report

# Tables of candidates need room: in a narrow terminal lines break, which is better than cut names.
OUT = Console(soft_wrap=True, width=max(120, shutil.get_terminal_size().columns))
ERR = Console(stderr=True, soft_wrap=True)

# What a table of candidates has no room for: texts, and in a context the ranks and scores of every stage.
_SHOWN_OF_CONTEXT = ("rank", "chunk_id", "families", "origin", "grade", "restored")
_MOST_SHOWN = 8
_COLOURS = {"complete": "green", "partial": "yellow", "running": "cyan"}


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output, and nothing else; what has no number is None, since JSON knows no NaN."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))  # noqa: T201 - Rich would wrap and colour it


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A bar for each stage while the block runs."""
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR) as bars:
        known: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in known:
                known[stage] = bars.add_task(stage, total=total)
            bars.update(known[stage], completed=done, total=total)

        yield report


def show_verdict(verdict: Verdict) -> None:
    """The table of stages, the verdict and where the results lie."""
    table = _table(f"Run {verdict.run_id}")
    table.add_column("stage", no_wrap=True)
    for name in ("rows in", "rows out", "dead letters", "computed", "borrowed", "seconds"):
        table.add_column(name, justify="right")
    for stage in verdict.stages:
        shards = f"{stage.computed}" + (f" of {stage.computed + stage.missing}" if stage.missing else "")
        table.add_row(
            stage.stage, str(stage.rows_in), str(stage.rows_out), str(stage.dead_letters), shards,
            str(stage.borrowed), f"{stage.seconds:.2f}",
        )  # fmt: skip
    OUT.print(table)
    access = "access control by acl" if verdict.access_control else "no access control: the corpus has no acl column"
    OUT.print(
        f"{verdict.log_lines} log lines, {verdict.distinct_queries} distinct queries, "
        f"{verdict.dead_letters} dead letters; snapshot {verdict.snapshot_id}, {access}"
    )
    colour = _COLOURS.get(verdict.verdict, "red")
    because = "" if verdict.because is None else f" ({verdict.because})"
    OUT.print(f"verdict: [bold {colour}]{verdict.verdict}[/]{escape(because)}", highlight=False)
    OUT.print(f"results: {verdict.results}", highlight=False)


def _table(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def show_measures(rankings: Mapping[str, Mapping[str, float]], context: Mapping[str, float | None]) -> None:
    """One row a ranking, one column a measure, then how complete the contexts are."""
    table = _table("Rankings")
    table.add_column("stage", no_wrap=True)
    for name in next(iter(rankings.values())):
        table.add_column(name, justify="right")
    for stage, measures in rankings.items():
        table.add_row(stage, *(f"{value:.3f}" for value in measures.values()))
    OUT.print(table)
    if context["queries"]:
        OUT.print(
            f"{context['queries']:.0f} queries that need families: evidence-family recall "
            f"{context['evidence_family_recall']:.3f}, all families {context['all_families_rate']:.3f}"
        )


def show_row(row: Mapping[str, Any]) -> None:
    """One row of a stage: its plain values, then its candidates; texts and citations are left to --json."""
    for name, value in row.items():
        if name not in {"candidates", "embedding"}:
            OUT.print(f"{name}: {_shown(value)}", markup=False, highlight=False)
    candidates = row.get("candidates") or []
    names = list(candidates[0]) if candidates else []
    if names == list(ContextPassage.model_fields):
        names = list(_SHOWN_OF_CONTEXT)
    table = _table(None)
    for name in names:
        numeric = isinstance(candidates[0][name], int | float)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=name == "chunk_id")
    for candidate in candidates:
        table.add_row(*(_shown(candidate[name]) for name in names))
    if candidates:
        OUT.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value[:_MOST_SHOWN]) + (" ..." if len(value) > _MOST_SHOWN else "")
    return "-" if value is None else str(value)


def show_plan(plan: RunPlan) -> None:
    """What a rerun would compute and borrow, and why."""
    table = _table(f"Rerun of {plan.parent_run_id}")
    for name in ("stage", "compute", "borrow", "because"):
        table.add_column(name, justify="right" if name in {"compute", "borrow"} else "left", no_wrap=name == "stage")
    for row in plan_rows(plan):
        table.add_row(row["stage"], str(row["computed"]), str(row["borrowed"]), row["because"])
    OUT.print(table)


def plan_rows(plan: RunPlan) -> list[dict[str, Any]]:
    """One row a stage: how many shards would be computed and borrowed, and why."""
    return [
        {
            "stage": entry.stage,
            "computed": 0 if entry.borrowed_from else entry.parts,
            "borrowed": entry.parts if entry.borrowed_from else 0,
            "because": entry.because,
        }
        for entry in plan.stages
    ]
