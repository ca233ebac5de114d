"""What `dartflow estimate` says before a run against what the run then takes: `python -m bench.estimate`."""

from __future__ import annotations

import time
from pathlib import Path

from bench.results import Check, Claim, Comparison, Table, cores
from bench.stores import forget, prepared, whole_run
from bench.terminal import run
from bench.timing import Sample
from bench.topics import Sizes
from contracts.estimate import Estimate
from contracts.manifest import Verdict
from flows.estimate import estimate

WANTED = (0.7, 1.3)


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Estimates a run and carries it out, in turn."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=100_000, queries=20_000)
    # In small the sample is a part of the log too, in shards that are not those of the run.
    words, sample = (["run.shard_size=64"], 60) if small else ([], None)
    found = prepared(work, sizes)
    told: list[Estimate] = []
    seconds: list[float] = []
    taken: list[int] = []
    same = 0
    forget(found, whole_run(found, found.log_of(min(300, sizes.queries)))[0])  # compiles
    for _ in range(1 if small else 3):
        before = _files(found.folder)
        told.append(estimate(found.store, found.settings(*words), found.queries, sample=sample))
        same += _files(found.folder) == before
        started = time.perf_counter()
        plan, verdict = whole_run(found, found.queries, *words)
        seconds.append(time.perf_counter() - started)
        taken.append(sum(found.store.sizes(f"runs/{plan.run_id}").values()))
        forget(found, plan)
    sides = {
        "time": ([one.wall_seconds for one in told], seconds, "s"),
        "disk": ([one.disk_bytes / 1e6 for one in told], [one / 1e6 for one in taken], "MB"),
    }
    ran = told[-1].calibration
    return Comparison(
        name="estimate",
        title="What a run takes, said before it",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": sizes.queries,
            "queries that the estimate runs": ran.queries, "threads": cores(),
            "settings": "the defaults, vectors given, no cross-encoder", "left out": "the start of the process",
        },
        claims=[
            *(claim for name, (above, below, unit) in sides.items() for claim in _within(name, above, below, unit)),
            Claim(what="time to estimate / run", above=Sample(name="estimate", values=[one.calibration.seconds
                  for one in told], unit="s"), below=Sample(name="run", values=seconds, unit="s")),
        ],
        checks=[Check(what="estimates that leave the store as it was", share=same / len(told), compared=len(told))],
        tables=[_stages(told[-1], verdict)],
    )  # fmt: skip


def _within(name: str, above: list[float], below: list[float], unit: str) -> list[Claim]:
    """The claim that estimated / measured lies between two bounds, one each."""
    claim = Claim(
        what=f"{name}: estimated / measured",
        above=Sample(name="estimated", values=above, unit=unit),
        below=Sample(name="measured", values=below, unit=unit),
        wanted=WANTED[0],
    )
    return [claim, claim.model_copy(update={"wanted": WANTED[1], "bound": "at most"})]


def _stages(told: Estimate, verdict: Verdict) -> Table:
    """Thread seconds of each stage in the last round."""
    measured = {stage.stage: stage.seconds for stage in verdict.stages}
    rows = [[one.stage, f"{one.thread_seconds:.2f}", f"{measured[one.stage]:.2f}"] for one in told.stages]
    title = "Thread seconds by stage in the last round; those of the run leave out what a commit takes"
    return Table(title=title, columns=["stage", "estimated", "measured"], rows=rows)


def _files(folder: Path) -> set[Path]:
    """Every file in the store."""
    return {path for path in (folder / "store").rglob("*") if path.is_file()}


if __name__ == "__main__":
    run(compare)
