"""What Prefect costs: the same run with it, on a server that starts with the process, and without.

`python -m bench.prefect_cost`
"""

from __future__ import annotations

import json
from pathlib import Path

from bench.child import output_of
from bench.results import Claim, Comparison, cores
from bench.stores import prepared
from bench.terminal import run
from bench.timing import Sample
from bench.topics import Sizes


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times both in one process of their own."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=10_000, queries=20_000)
    found = prepared(work, sizes)
    words = [found.folder, found.queries, found.log_of(sizes.queries // 10), 1 if small else 3]
    printed = output_of(["-m", "bench.prefect_runs", *words])
    times = json.loads(printed.splitlines()[-1])
    above, below = (Sample(name=f"{name} Prefect", values=times[name], unit="s") for name in ("with", "without"))
    return Comparison(
        name="prefect_cost",
        title="Prefect",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": sizes.queries, "threads": cores(),
            "server": "ephemeral, SQLite in a new folder",
        },
        claims=[Claim(what="run with Prefect / without, its start left out", above=above, below=below, wanted=1.05,
                      bound="at most")],
        notes=[f"Prefect's start, once a process: import {times['import']:.1f} s, server {times['server']:.1f} s."],
    )  # fmt: skip


if __name__ == "__main__":
    run(compare)
