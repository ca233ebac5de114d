"""Growth: ten times the queries, ten times the chunks, each size in a process of its own: `python -m bench.growth`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.child_run import child_run
from bench.results import Claim, Comparison, Table, cores
from bench.stores import prepared
from bench.terminal import run
from bench.timing import Sample
from bench.topics import Sizes

TIMES = 10
BASE, QUERIES, CHUNKS = "base", "10 x the queries", "10 x the chunks"


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Runs three sizes in turn."""
    dimension, lines, chunks = (32, 60, 300) if small else (384, 2_000, 10_000)
    few = prepared(work, Sizes(chunks=chunks, queries=TIMES * lines, dimension=dimension))
    many = prepared(work, Sizes(chunks=TIMES * chunks, queries=TIMES * lines, dimension=dimension))
    warm_up = lines // 10
    cases = {
        BASE: (few, few.log_of(lines), few.log_of(warm_up)),
        QUERIES: (few, few.queries, few.log_of(warm_up)),
        CHUNKS: (many, many.log_of(lines), many.log_of(warm_up)),
    }
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    for _ in range(1 if small else 3):
        for name, (found, queries, warm) in cases.items():
            measured[name].append(child_run(found, queries, warm))
    claims = [
        _claim(measured, QUERIES, "seconds", "s", 10.5),
        _claim(measured, QUERIES, "peak_mib", "MiB", 1.1),
        _claim(measured, CHUNKS, "seconds", "s", None),
        _claim(measured, CHUNKS, "peak_mib", "MiB", None),
    ]
    start = np.median([one["start_mib"] for one in measured[BASE]])
    return Comparison(
        name="growth",
        title="Growth with queries and with chunks",
        settings={
            "base": f"{chunks} chunks, {lines} distinct queries", "dimension": dimension, "threads": cores(),
            "process": f"one a run, {start:.0f} MiB after a first run of {warm_up} queries that loads kernels",
        },
        claims=claims,
        tables=[_stages(measured)],
    )  # fmt: skip


def _claim(measured: dict[str, list[dict[str, Any]]], case: str, key: str, unit: str, wanted: float | None) -> Claim:
    above, below = (Sample(name=name, values=[one[key] for one in measured[name]], unit=unit) for name in (case, BASE))
    return Claim(what=f"{case}: {'time' if unit == 's' else 'peak memory'}", above=above, below=below, wanted=wanted,
                 bound="at most")  # fmt: skip


def _stages(measured: dict[str, list[dict[str, Any]]]) -> Table:
    """Thread seconds of each stage, medians, and how they grow."""
    rows = []
    for stage in measured[BASE][0]["stages"]:
        base, queries, chunks = (
            float(np.median([one["stages"][stage] for one in measured[name]])) for name in (BASE, QUERIES, CHUNKS)
        )
        grown = [f"{value:.2f} ({value / base:.1f} x)" if base else f"{value:.2f}" for value in (queries, chunks)]
        rows.append([stage, f"{base:.2f}", *grown])
    return Table(title="Thread seconds by stage", columns=["stage", BASE, QUERIES, CHUNKS], rows=rows)


if __name__ == "__main__":
    run(compare)
