"""Results: what a comparison claims and checks, kept in bench/results.json and nowhere else."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from bench.timing import Sample, ratios

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results.json"


Bound = Literal["at least", "at most"]


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
    bound: Bound = "at least"
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
        load: how many processes the machine was busy with when it began; above 0.5 figures are noisy.
    """

    name: str
    title: str
    settings: dict[str, str | int | float]
    claims: list[Claim] = Field(default_factory=list)
    checks: list[Check] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    seconds: float = 0.0
    load: float = 0.0


# Makes a comparison: `small` takes seconds and proves nothing but that it runs; the folder keeps generated data.
Compare = Callable[[bool, Path], Comparison]


def peer(module: str) -> Any:
    """Another project's module; None where it is not installed."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent package is not there either
        return None
    return importlib.import_module(module) if found else None


def claim_of(
    times: Mapping[str, Sample],
    above: str,
    below: str,
    wanted: float | None,
    bound: Bound = "at least",
    *,
    what: str = "",
    package: str = "",
) -> Claim:
    """The claim about above / below; where `package` is not installed, a side is not there, and the claim says so.

    Args:
        times: the sides by name.
        above, below: names of two sides.
        wanted, bound: what is wanted of the ratio.
        what: stands before the names, to tell claims apart.
        package: of the side that may be missing.
    """
    claim = Claim(what=f"{what}{above} / {below}", wanted=wanted, bound=bound)
    if above not in times or below not in times:
        return claim.model_copy(update={"missing": f"{package} is not installed"})
    return claim.model_copy(update={"above": times[above], "below": times[below]})


def cores() -> int:
    """Processors that this process may use: how many shards run side by side."""
    return len(os.sched_getaffinity(0))


def load() -> dict[str, Any]:
    """Everything that was found so far: `comparisons` by name, and the `machines` that they name."""
    found: dict[str, Any] = {"machines": {}, "comparisons": {}}
    return found | (json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {})


def keep(comparison: Comparison, machine: Mapping[str, Any]) -> None:
    """Puts a comparison in the place of its earlier one, with the machine that it ran on."""
    found, known = load(), json.dumps(machine, sort_keys=True)
    name = hashlib.sha256(known.encode()).hexdigest()[:8]
    found["machines"][name] = machine
    found["comparisons"][comparison.name] = {"machine": name, **comparison.model_dump()}
    used = {one["machine"] for one in found["comparisons"].values()}
    found["machines"] = {name: one for name, one in found["machines"].items() if name in used}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
