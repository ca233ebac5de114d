"""A rerun from grading on against the whole run: `python -m bench.rerun`."""

from __future__ import annotations

from pathlib import Path

from bench.results import Check, Comparison, claim_of, cores
from bench.stores import Prepared, forget, prepared, table_of, whole_run
from bench.terminal import run
from bench.timing import in_turn
from bench.topics import Sizes
from checkpoints.run import create_run, load_plan
from contracts.manifest import RunPlan
from flows.engine import Session
from flows.planning import new_run_id, plan_rerun
from flows.settings import load_settings, validated

FROM = "crag_grading"


def rerun(found: Prepared, run_id: str) -> RunPlan:
    """What `dartflow rerun RUN --from crag_grading --without-prefect` does, once the process has started."""
    store = found.store
    parent = load_plan(store, run_id)
    settings = load_settings(None, environment={}, base=parent.settings)
    plan = plan_rerun(store, parent, settings, from_stage=FROM, run_id=new_run_id())
    create_run(store, plan)
    Session(store, plan, validated(plan.settings)).execute()
    return plan


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Times whole runs and reruns of the youngest."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=10_000, queries=20_000)
    found, lines = prepared(work, sizes), 300 if small else 4_000
    queries, plans = found.log_of(lines), list[RunPlan]()

    def whole(_number: int) -> int:
        plans.append(whole_run(found, queries)[0])
        return lines

    def again(_number: int) -> int:
        plans.append(rerun(found, plans[-1].run_id))
        return lines

    whole(0)
    again(0)  # compiles
    names = f"rerun from {FROM}", "whole run"
    times = in_turn({names[1]: whole, names[0]: again}, rounds=1 if small else 5)
    same = table_of(found, plans[-1], "context").equals(table_of(found, plans[-2], "context"))
    result = Comparison(
        name="rerun",
        title="A rerun from a late stage",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": lines, "threads": cores(),
            "left out": "the start of the process",
        },
        claims=[claim_of(times, *names, 0.1, "at most")],
        checks=[Check(what="contexts of the rerun that are those of the run", share=float(same), compared=1)],
    )  # fmt: skip
    for plan in reversed(plans):
        forget(found, plan)
    return result


if __name__ == "__main__":
    run(compare)
