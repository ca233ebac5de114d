"""A rerun from grading on against the whole run: `python -m bench.rerun`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.results import Check, Claim, Comparison, claim_of, cores
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
_SHALLOW = ("blended_rerank.cross_encoder_depth=2", "crag_grading.corrective_limit=1")


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
    """Times whole runs and reruns of the youngest, with no cross-encoder and with the embedded one."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=10_000, queries=20_000)
    found, rounds = prepared(work, sizes), 1 if small else 5
    cases = [
        ("no cross-encoder", 300 if small else 4_000, ()),
        # The model reads 20 passages a query, 2 in the small case: a query takes thousands of times as long.
        ("the cross-encoder", 4 if small else 40, ("cross_encoder.provider=onnx", *(_SHALLOW if small else ()))),
    ]
    result = Comparison(
        name="rerun",
        title="A rerun from a late stage",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "threads": cores(),
            **{f"{case}: distinct queries": lines for case, lines, _ in cases},
            "left out": "the start of the process, and scores that the cross-encoder has kept",
        },
    )  # fmt: skip
    for case, lines, assignments in cases:
        claim, check = _measured(found, found.log_of(lines), assignments, case, rounds)
        result.claims.append(claim)
        result.checks.append(check)
    return result


def _measured(
    found: Prepared, queries: Path, assignments: Sequence[str], case: str, rounds: int
) -> tuple[Claim, Check]:
    plans = list[RunPlan]()

    def whole(_number: int) -> int:
        shutil.rmtree(found.folder / "store" / "pair_scores", ignore_errors=True)
        plans.append(whole_run(found, queries, *assignments)[0])
        return plans[-1].distinct_queries

    def again(_number: int) -> int:
        plans.append(rerun(found, plans[-1].run_id))
        return plans[-1].distinct_queries

    whole(0)
    again(0)  # compiles
    names = f"rerun from {FROM}", "whole run"
    times = in_turn({names[1]: whole, names[0]: again}, rounds)
    same = table_of(found, plans[-1], "context").equals(table_of(found, plans[-2], "context"))
    for plan in reversed(plans):
        forget(found, plan)
    claim = claim_of(times, *names, 0.1, "at most", what=f"{case}: ")
    return claim, Check(what=f"{case}: contexts of the rerun that are those of the run", share=float(same), compared=1)


if __name__ == "__main__":
    run(compare)
