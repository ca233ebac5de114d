"""Report: the tables of docs/benchmarks.md, made from bench/results.json alone: `python -m bench.report`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.results import ROOT, Claim, Comparison, load
from bench.timing import Sample

PAGE = ROOT / "docs" / "benchmarks.md"
_BEGIN, _END = "<!-- written by bench.report: begin -->", "<!-- written by bench.report: end -->"

# The order of the page, and of `python -m bench`.
COMPARISONS = (
    "selection", "keyword_search", "fusion", "whole_run", "scifact", "contract_cost", "prefect_cost", "growth",
    "deduplication", "rerun", "commands", "estimate", "profile",
)  # fmt: skip

# Packages whose versions the page tells; the file has them all.
_TOLD = (
    "numpy", "numba", "scipy", "pyarrow", "faiss-cpu", "pydantic", "prefect", "rank-bm25", "bm25s", "pyversity", "ranx",
    "llama-index-core",
)  # fmt: skip


def page_text(results: dict[str, Any]) -> str:
    """The generated part of the page."""
    found = {name: results["comparisons"][name] for name in COMPARISONS if name in results["comparisons"]}
    parts = []
    for key, machine in results["machines"].items():
        theirs = [name for name in found if found[name]["machine"] == key]
        parts += [_machine(machine, [] if len(theirs) == len(found) else theirs)] if theirs else []
    for one in found.values():
        parts.append(_section(Comparison.model_validate({key: one[key] for key in one if key != "machine"})))
    return "\n".join(parts)


def _machine(machine: dict[str, Any], comparisons: Sequence[str]) -> str:
    """A machine in one paragraph, with the comparisons that it alone made."""
    packages = ", ".join(f"{name} {machine['packages'][name]}" for name in _TOLD if name in machine["packages"])
    named = f" of {', '.join(comparisons)}" if comparisons else ""
    return (
        f"Machine{named}: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, Python {machine['python']}; {packages}.\n"
    )


def _section(comparison: Comparison) -> str:
    settings = "; ".join(f"{name} {value}" for name, value in comparison.settings.items())
    took = f"`python -m bench.{comparison.name}`, {comparison.seconds:.0f} s, load {comparison.load:.1f} before."
    lines = [f"### {comparison.title}\n", f"{took} {settings}.\n"]
    if comparison.claims:
        lines += ["| what | ratio (lowest to highest) | wanted | | medians (quartiles) |", "|---|---|---|---|---|"]
        lines += [_row(claim) for claim in comparison.claims]
    if comparison.checks:
        lines += ["", "| checked in the same run | share | of |", "|---|---|---|"]
        lines += [f"| {check.what} | {check.share:.4f} | {check.compared} |" for check in comparison.checks]
    for table in comparison.tables:
        lines += [f"\n{table.title}:\n", f"| {' | '.join(table.columns)} |", f"|{'---|' * len(table.columns)}"]
        lines += [f"| {' | '.join(row)} |" for row in table.rows]
    lines += [f"\n{note}" for note in comparison.notes]
    return "\n".join(lines) + "\n"


def _row(claim: Claim) -> str:
    wanted = "" if claim.wanted is None else f"{claim.bound} {claim.wanted:g}"
    if claim.spread is None or claim.above is None or claim.below is None:
        return f"| {claim.what} | {claim.missing} | {wanted} | | |"
    low, median, high = claim.spread
    met = {True: "met", False: "**not met**", None: ""}[claim.met]
    return (
        f"| {claim.what} | {_figure(median)} ({_figure(low)} to {_figure(high)}) | {wanted} | {met} "
        f"| {_side(claim.above)}; {_side(claim.below)} |"
    )


def _side(sample: Sample) -> str:
    lower, upper = sample.quartiles
    return f"{sample.name}: {_figure(sample.median)} {sample.unit} ({_figure(lower)} to {_figure(upper)})"


def _figure(value: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def write_page() -> None:
    """Puts the tables between the markers of docs/benchmarks.md."""
    before, rest = PAGE.read_text(encoding="utf-8").split(_BEGIN)
    _, after = rest.split(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{page_text(load())}{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_page()
