"""Runs with and without Prefect in one process: `python -m bench.prefect_runs FOLDER QUERIES WARM_UP ROUNDS`.

A process of its own, since Prefect reads its settings once, when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from bench.stores import Prepared, forget, whole_run
from checkpoints.corpora import current_snapshot_id
from checkpoints.run import create_run
from checkpoints.verdict import verdict
from flows.planning import new_run_id, plan_run
from flows.prefect_environment import ship_settings


def flow_run(found: Prepared, queries: Path) -> float:
    """Seconds of a run as `dartflow run` makes it: planned, then carried out by the flow `rerank`."""
    from flows.rerank import rerank  # noqa: PLC0415 - Prefect's settings must stand first

    started = time.perf_counter()
    store, settings = found.store, found.settings()
    plan = plan_run(store, settings, queries, new_run_id(), current_snapshot_id(store))
    create_run(store, plan)
    rerank(store.uri, plan.run_id, settings.model_dump(mode="json"))
    seconds = time.perf_counter() - started
    found_verdict = verdict(store, plan).verdict
    forget(found, plan)
    if found_verdict != "complete":
        raise RuntimeError(found_verdict)
    return seconds


def plain_run(found: Prepared, queries: Path) -> float:
    """Seconds of the same without Prefect."""
    started = time.perf_counter()
    plan, _ = whole_run(found, queries)
    seconds = time.perf_counter() - started
    forget(found, plan)
    return seconds


def main() -> None:
    """Prints the seconds of both, in turn, and what starting Prefect took."""
    found, queries, warm_up, rounds = (
        Prepared(Path(sys.argv[1])),
        Path(sys.argv[2]),
        Path(sys.argv[3]),
        int(sys.argv[4]),
    )
    os.environ["PREFECT_HOME"] = str(found.folder / "prefect")
    os.environ.pop("PREFECT_API_URL", None)
    ship_settings()
    plain_run(found, warm_up)
    started = time.perf_counter()
    import flows.rerank  # noqa: F401, PLC0415 - what it takes is measured

    imported = time.perf_counter() - started
    first, second = flow_run(found, warm_up), flow_run(found, warm_up)
    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        times["without"].append(plain_run(found, queries))
        times["with"].append(flow_run(found, queries))
    print(json.dumps({**times, "import": imported, "server": first - second}), flush=True)


if __name__ == "__main__":
    main()
