"""Terminal: the command line of every comparison, and what it prints."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from bench.machine import description
from bench.report import write_page
from bench.results import Claim, Compare, Comparison, keep

# Where generated data are kept between comparisons.
WORK = Path(".dartflow/bench")


def run(compare: Compare) -> None:
    """Prints what a comparison finds, and keeps it, here and on the page, unless it is small.

    Ends with status 1 when a result is not the oracle's.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--small", action="store_true", help="seconds, and nothing is kept")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for generated data, kept between comparisons")
    words = parser.parse_args()
    load, started = os.getloadavg()[0], time.perf_counter()
    comparison = compare(words.small, words.work)
    comparison.seconds, comparison.load = round(time.perf_counter() - started, 1), round(load, 1)
    print(text_of(comparison), flush=True)
    if not words.small:
        keep(comparison, description())
        write_page()
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
