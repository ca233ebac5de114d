"""Screens: what people see in the terminal; results on standard output, what goes beside them on standard error."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from contracts.estimate import Estimate
from contracts.manifest import DeadLetter, RunPlan, Verdict
from flows.printing import plan_rows

if TYPE_CHECKING:  # they bring Arrow along
    from checkpoints.corpora import StoredSnapshot
    from checkpoints.gc import Collected
    from checkpoints.pointer import HistoryEntry
    from checkpoints.published import Gate
    from evaluation.bands import Ratio
    from flows.calibrate import Calibration
    from flows.cost import CostRow

# Tables of candidates need room: in a narrow terminal lines break, which is better than cut names.
OUT = Console(soft_wrap=True, width=max(120, shutil.get_terminal_size().columns))
ERR = Console(stderr=True, soft_wrap=True)

# What a table of candidates has no room for: texts, and in a context the ranks and scores of every stage.
_SHOWN_OF_CONTEXT = ("rank", "chunk_id", "families", "origin", "grade", "graded_by", "restored")
_MOST_SHOWN = 8
_MOST_MOVES = 20
_COLOURS = {"complete": "green", "partial": "yellow", "running": "cyan"}


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
    for note in verdict.notes:
        OUT.print(f"note: {note}", markup=False, highlight=False)
    OUT.print(f"results: {verdict.results}", highlight=False)


def show_estimate(estimate: Estimate) -> None:
    """One row a stage, then what it comes to, and what was measured."""
    pairs, tokens, by = estimate.model_pairs, estimate.context_tokens, estimate.calibration
    table = _table(f"Estimate for {estimate.query_log}")
    table.add_column("stage", no_wrap=True)
    for name in ("shards", "thread seconds", "wall seconds", "disk", "model pairs"):
        table.add_column(name, justify="right")
    for stage in estimate.stages:
        table.add_row(
            stage.stage, str(stage.shards), f"{stage.thread_seconds:.2f}", f"{stage.wall_seconds:.2f}",
            size_of(stage.disk_bytes), str(stage.pairs or "-"),
        )  # fmt: skip
    OUT.print(table)
    each = "" if pairs.seconds_a_pair is None else f", {1000 * pairs.seconds_a_pair:.1f} ms each"
    said = {
        "time": f"{estimate.wall_seconds:.1f} s, of which {estimate.reading_seconds:.1f} s to read the log and "
        f"{estimate.opening_seconds:.1f} s to plan and open; process start and Prefect come on top",
        "disk": size_of(estimate.disk_bytes),
        "model pairs": f"{pairs.to_read} to be read{each}, {pairs.kept} of {pairs.pairs} kept; "
        f"cross-encoder {pairs.cross_encoder}",
        "context tokens": f"{tokens.tokens_a_query:.0f} a query, {tokens.tokens} in all",
        "measured": f"{by.queries} queries in {by.shards} shards, {by.pairs_read} model pairs, in {by.seconds:.1f} s",
    }
    OUT.print(
        f"{estimate.log_lines} log lines, {estimate.distinct_queries} distinct queries, {estimate.dead_letters} "
        f"dead letters; snapshot {estimate.snapshot_id}, {estimate.workers} workers",
        highlight=False,
    )
    for name, text in said.items():
        OUT.print(f"{name}: {text}", markup=False, highlight=False)
    for note in estimate.notes:
        OUT.print(f"note: {note}", markup=False, highlight=False)


def show_letters(letters: Sequence[DeadLetter]) -> None:
    """One row a dead letter: what it was, where and why it was taken out."""
    table = _table(None)
    for name in ("stage", "line or query", "log lines", "attempt", "reason"):
        table.add_column(name, justify="right" if name in {"log lines", "attempt"} else "left", no_wrap=name == "stage")
    for letter in letters:
        name = letter.query_id or f"line {letter.line_number}"
        table.add_row(letter.stage, name, str(letter.log_lines), str(letter.attempt), escape(letter.reason))
    if letters:
        OUT.print(table)
    lines = sum(letter.log_lines for letter in letters)
    OUT.print(f"{len(letters)} dead letters take out {lines} lines of the log", highlight=False)


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
    if set(_SHOWN_OF_CONTEXT) <= set(names):
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


def show_gates(run_id: str, gates: Sequence[Gate]) -> None:
    """One row a gate of an audit."""
    table = _table(f"Gates of run {run_id}")
    for name in ("gate", "found", "wanted", "passed"):
        table.add_column(name, no_wrap=name == "gate")
    for gate in gates:
        found = gate.value if isinstance(gate.value, str) else f"{gate.value:.3f}"
        table.add_row(gate.gate, escape(found), escape(gate.want), "[green]yes[/]" if gate.passed else "[red]no[/]")
    OUT.print(table)


def show_history(name: str, entries: Sequence[HistoryEntry], states: Mapping[int, str]) -> None:
    """One row a move of a pointer, the youngest first; `name` is what it points to, `states` are by generation."""
    table = _table("History")
    for column in ("generation", name, "action", "at", "by", "state", "why"):
        table.add_column(column, justify="right" if column == "generation" else "left", no_wrap=column in {name, "at"})
    for entry in entries[:_MOST_MOVES]:
        known = {True: states.get(entry.generation, ""), False: "not carried out", None: "not known"}
        state, record = known[entry.carried_out], entry.record
        shown = ["?"] * 4 if record is None else [record.target, record.action, record.at, record.by]
        why = entry.problem if record is None else record.why
        table.add_row(str(entry.generation), *map(escape, shown), state, escape(why or ""))
    OUT.print(table)
    if len(entries) > _MOST_MOVES:
        OUT.print(f"and {len(entries) - _MOST_MOVES} earlier ones: --json has all", highlight=False)


def show_snapshots(snapshots: Sequence[StoredSnapshot], states: Mapping[str, str]) -> None:
    """One row a corpus snapshot, the youngest first; `states` are by id."""
    table = _table(None)
    for name in ("snapshot", "chunks", "documents", "created", "embedding model", "size", "state"):
        table.add_column(name, justify="right" if name in {"chunks", "documents", "size"} else "left", no_wrap=True)
    for one in snapshots:
        found = one.snapshot
        shown = ["?"] * 5
        if found is not None:
            size = size_of(sum(file.bytes for file in found.files))
            shown = [str(found.chunks), str(found.documents), found.created_at, found.embedding_model, size]
        table.add_row(one.snapshot_id, *map(escape, shown), states.get(one.snapshot_id, ""))
    OUT.print(table)
    for one in snapshots:
        if one.problem is not None:
            OUT.print(one.problem, markup=False, highlight=False)


def show_collected(collected: Collected, *, dry_run: bool) -> None:
    """What gc removes, thing by thing, and why the rest stays."""
    table = _table("Gc, dry run" if dry_run else "Gc")
    for name in ("what", "files go", "size", "stays because"):
        table.add_column(name, justify="right" if name in {"files go", "size"} else "left", no_wrap=name == "what")
    for item in collected.items:
        kind = {"run": "run", "remains": "remains of run", "snapshot": "snapshot"}[item.kind]
        table.add_row(
            f"{kind} {item.name}", str(len(item.goes) or "-"), size_of(item.bytes) if item.goes else "-",
            escape("; ".join(item.kept)),
        )  # fmt: skip
        if item.kind == "run" and item.stays:
            table.add_row("", "", "", f"{item.stays} of its files, which kept runs borrow")
    OUT.print(table)
    files = sum(len(item.goes) for item in collected.items)
    size = size_of(sum(item.bytes for item in collected.items))
    OUT.print(f"{files} files, {size}: {'nothing is removed in a dry run' if dry_run else 'removed'}", highlight=False)
    if collected.unfinished:
        OUT.print(f"{collected.unfinished} unfinished files of killed processes removed", highlight=False)


def show_cost(rows: Sequence[CostRow], total: Mapping[str, float]) -> None:
    """One row a model and outcome, then the sum."""
    table = _table(None)
    for name in ("model", "outcome", "calls", "tokens", "estimated", "cost"):
        table.add_column(name, justify="left" if name in {"model", "outcome"} else "right")
    for row in rows:
        numbers = (str(row.calls), str(row.tokens), str(row.estimated_tokens), f"{row.cost:.6f}")
        table.add_row(escape(row.model), row.outcome, *numbers)
    if rows:
        OUT.print(table)
    OUT.print(f"{total['calls']} calls, {total['tokens']} tokens, cost {total['cost']:.6f}", highlight=False)


def show_calibration(found: Calibration, run_id: str, precision: float) -> None:
    """The bands on the held-out half with the limits of now and with those proposed, and the words that set them."""
    for title, limits, bands in (
        ("now", found.now, found.bands_now),
        ("proposed", found.limits, found.proposed_bands),
    ):
        table = _table(f"Bands on the held-out half, {title}: upper {limits.upper:g}, lower {limits.lower:g}")
        for name in ("band", "labelled", "relevant", "precision", "95 %", "recall", "95 %"):
            table.add_column(name, justify="left" if name == "band" else "right")
        for grade, band in bands.items():
            shown = [text for ratio in (band.precision, band.recall) for text in _ratio(ratio)]
            table.add_row(grade, str(band.passages), str(band.relevant), *shown)
        OUT.print(table)
    for half, counts in (("chosen on", found.chosen_on), ("measured on", found.held_out)):
        OUT.print(
            f"{half} {counts['queries']} queries: {counts['relevant']} relevant and {counts['not_relevant']} other "
            "labelled passages",
            highlight=False,
        )
    if not found.reached:
        OUT.print(f"note: no upper reaches a precision of {precision:g}; this one comes nearest", highlight=False)
    OUT.print(f"dartflow rerun {run_id} {found.assignments}", markup=False, highlight=False)


def _ratio(ratio: Ratio) -> tuple[str, str]:
    """A share and its interval."""
    if ratio.share is None:
        return "-", "-"
    return f"{ratio.share:.3f}", f"{ratio.low:.2f} to {ratio.high:.2f}"


def size_of(count: int) -> str:
    """A number of bytes for people."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
