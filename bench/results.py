"""Results: what a comparison claims and checks, kept in bench/results.json and nowhere else."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from bench.machine import description
from bench.timing import Sample, ratios

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results.json"
WORK = Path(".dartflow/bench")


class Claim(BaseModel):
    """One ratio, measured in one run, and what is wanted of it.

    Attributes:
        what: what is compared, in words.
        above, below: the two sides; the ratio is above / below, round by round.
        wanted: the bound; None states the ratio without one.
        bound: whether the ratio is wanted to be at least or at most that.
        missing: why there is no ratio: the peer is not installed, or what is measured is not built.
    """

    what: str
    above: Sample | None = None
    below: Sample | None = None
    wanted: float | None = None
    bound: Literal["at least", "at most"] = "at least"
    missing: str | None = None

    @property
    def spread(self) -> tuple[float, float, float] | None:
        """Lowest, median and highest ratio of the rounds."""
        if self.above is None or self.below is None:
            return None
        found = ratios(self.above, self.below)
        return min(found), float(np.median(found)), max(found)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bound; None where there is nothing to compare."""
        if self.spread is None or self.wanted is None:
            return None
        median = self.spread[1]
        return median >= self.wanted if self.bound == "at least" else median <= self.wanted


class Check(BaseModel):
    """A share of results that must be what the oracle gives, from the run that was timed.

    Attributes:
        what: which results, and which oracle.
        share: those that agree, in [0, 1]; 1 is wanted.
        compared: how many were compared.
    """

    what: str
    share: float
    compared: int


class Table(BaseModel):
    """Figures beside the claims."""

    title: str
    columns: list[str]
    rows: list[list[str]]


class Comparison(BaseModel):
    """What one file of bench found.

    Attributes:
        name: of the file.
        title: what is compared, for the page.
        settings: sizes, threads, number types: what the figures hold for.
        claims, checks, tables, notes: what was found.
        seconds: how long it took in all.
    """

    name: str
    title: str
    settings: dict[str, str | int | float]
    claims: list[Claim] = Field(default_factory=list)
    checks: list[Check] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    seconds: float = 0.0


# Makes a comparison: `small` takes seconds and proves nothing but that it runs; the folder keeps generated data.
Compare = Callable[[bool, Path], Comparison]


def peer(module: str) -> Any:
    """Another project's module; None where it is not installed."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package is not there either
        return None
    return importlib.import_module(module) if found else None


def not_installed(
    what: str, module: str, wanted: float | None, bound: Literal["at least", "at most"] = "at least"
) -> Claim:
    """The claim of a comparison whose peer is not there."""
    return Claim(what=what, wanted=wanted, bound=bound, missing=f"{module} is not installed")


def cores() -> int:
    """Processors that this process may use: how many shards run side by side."""
    return len(os.sched_getaffinity(0))


def load() -> dict[str, Any]:
    """Everything that was found so far."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {"comparisons": {}}
    return found


def keep(comparison: Comparison) -> None:
    """Puts a comparison in the place of its earlier one, with the machine that it ran on."""
    found = load()
    found["comparisons"][comparison.name] = {**comparison.model_dump(), "machine": description()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def run(compare: Compare) -> None:
    """The command line of every comparison: prints what it finds, and keeps it unless it is small.

    Ends with status 1 when a result is not the oracle's.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, and nothing is kept")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for generated data, kept between comparisons")
    words = parser.parse_args()
    started = time.perf_counter()
    comparison = compare(words.small, words.work)
    comparison.seconds = round(time.perf_counter() - started, 1)
    print(text_of(comparison), flush=True)
    if not words.small:
        keep(comparison)
    sys.exit(0 if all(check.share == 1 for check in comparison.checks) else 1)


def text_of(comparison: Comparison) -> str:
    """A comparison in lines for the terminal."""
    lines = [f"{comparison.name}: {comparison.title} ({comparison.seconds:.0f} s)"]
    lines += [f"  {name}: {value}" for name, value in comparison.settings.items()]
    lines += [f"  {claim_text(claim)}" for claim in comparison.claims]
    lines += [f"  {check.what}: {check.share:.4f} of {check.compared}" for check in comparison.checks]
    for table in comparison.tables:
        lines += [f"  {table.title}", *("    " + " | ".join(row) for row in [table.columns, *table.rows])]
    return "\n".join([*lines, *(f"  {note}" for note in comparison.notes)])


def claim_text(claim: Claim) -> str:
    """A claim in one line."""
    bound = "" if claim.wanted is None else f", wanted {claim.bound} {claim.wanted:g}"
    if claim.spread is None or claim.above is None or claim.below is None:
        return f"{claim.what}: {claim.missing}{bound}"
    low, median, high = claim.spread
    verdict = {True: ", met", False: ", NOT MET", None: ""}[claim.met]
    sides = " / ".join(f"{side.name} {side.median:.4g} {side.unit}" for side in (claim.above, claim.below))
    return f"{claim.what}: {median:.4g} ({low:.4g} to {high:.4g}){bound}{verdict}: {sides}"
