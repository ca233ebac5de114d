"""Where the time of a whole run goes, by stage and by function, on one thread: `python -m bench.profile`."""

from __future__ import annotations

import cProfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from unittest.mock import patch

from threadpoolctl import threadpool_limits

from bench.limits import Least, Rates, least_of, measured_rates
from bench.results import ROOT, Comparison, Table
from bench.stores import Prepared, forget, prepared, whole_run
from bench.terminal import run
from bench.topics import Sizes
from contracts.manifest import RunPlan
from flows import engine
from flows.resources import Resources
from flows.settings import ExecutorParams
from stages.pipeline import PIPELINE

HOTTEST = 12
# Parts of a limit below this many seconds are left out.
_SHOWN = 0.01


def in_this_thread(
    work: Callable[[int], None], shards: Sequence[int], _params: ExecutorParams, report: Callable[[int], None]
) -> None:
    """What `map_shards` does with one worker, but where the profiler can see it."""
    with threadpool_limits(1, user_api="blas"):
        for done, shard in enumerate(shards, start=1):
            work(shard)
            report(done)


def profiled(found: Prepared, lines: int) -> tuple[RunPlan, dict[str, tuple[float, cProfile.Profile]]]:
    """A run, with seconds and profile of every step, and of what is done between them (`plan and verdict`)."""
    plan, _ = whole_run(found, found.log_of(min(300, lines)))  # compiles
    forget(found, plan)
    steps: dict[str, tuple[float, cProfile.Profile]] = {}
    between = cProfile.Profile()

    def step(name: str, body: Callable[[], None]) -> None:
        between.disable()
        profile, started = cProfile.Profile(), time.perf_counter()
        profile.runcall(body)
        steps[name] = time.perf_counter() - started, profile
        between.enable()

    with patch.object(engine, "map_shards", in_this_thread):
        started = time.perf_counter()
        between.enable()
        plan, _ = whole_run(found, found.log_of(lines), step=step)
        between.disable()
        whole = time.perf_counter() - started
    steps["plan and verdict"] = whole - sum(seconds for seconds, _ in steps.values()), between
    return plan, steps


def by_stage(steps: Mapping[str, tuple[float, cProfile.Profile]], queries: int) -> Table:
    """Each step with its share and its hottest functions of this project."""
    whole = sum(seconds for seconds, _ in steps.values())
    rows = []
    for name, (seconds, profile) in _by_seconds(steps):
        hot = "; ".join(f"{where} {own:.2f} s" for own, where in hottest([profile])[:3])
        rows.append([name, f"{seconds:.2f}", f"{seconds / whole:.0%}", f"{1000 * seconds / queries:.3f}", hot])
    rows.append(["whole", f"{whole:.2f}", "100%", f"{1000 * whole / queries:.3f}", ""])
    return Table(title="By step", columns=["step", "s", "share", "ms a query", "most of it in"], rows=rows)


def by_function(steps: Mapping[str, tuple[float, cProfile.Profile]]) -> Table:
    """The hottest functions of this project over all steps."""
    rows = [[f"{own:.2f}", where] for own, where in hottest([profile for _, profile in steps.values()])[:HOTTEST]]
    return Table(title="By function", columns=["s, with the libraries it calls", "function"], rows=rows)


def by_limit(seconds: Mapping[str, float], least: Mapping[str, Least], rates: Rates) -> Table:
    """How far stages are from what the machine could do: the part that bounds each, and all parts together."""
    rows = []
    for name, work in least.items():
        parts = work.seconds(rates)
        bound = max(parts, key=lambda part: parts[part])
        total = sum(parts.values())
        told = ", ".join(f"{part} {taken:.2f} s" for part, taken in parts.items() if taken >= _SHOWN)
        rows.append([name, f"{seconds[name]:.2f}", f"{total:.2f}", bound, told, f"{seconds[name] / total:.1f}"])
    columns = ["stage", "s", "least s", "bounded by", "of it", "times the least"]
    return Table(title="The three heaviest stages against the machine", columns=columns, rows=rows)


def _by_seconds(
    steps: Mapping[str, tuple[float, cProfile.Profile]],
) -> list[tuple[str, tuple[float, cProfile.Profile]]]:
    return sorted(steps.items(), key=lambda one: -one[1][0])


def hottest(profiles: Sequence[cProfile.Profile]) -> list[tuple[float, str]]:
    """(seconds, where) of this project's functions with the libraries and kernels that they call, hottest first."""
    taken: defaultdict[str, float] = defaultdict(float)
    for profile in profiles:
        for entry in profile.getstats():
            where = _where(entry.code)
            if where is not None:
                below = sum(call.totaltime for call in entry.calls or () if _where(call.code) is not None)
                taken[where] += entry.totaltime - below
    return sorted(((seconds, where) for where, seconds in taken.items()), reverse=True)


def _where(code: str | CodeType) -> str | None:
    """Place and name of a function of this project; None for any other."""
    if isinstance(code, str) or not Path(code.co_filename).is_relative_to(ROOT) or "site-packages" in code.co_filename:
        return None
    return f"`{Path(code.co_filename).relative_to(ROOT)}:{code.co_firstlineno} {code.co_name}`"


def compare(small: bool, work: Path) -> Comparison:  # noqa: FBT001 - every comparison is called alike
    """Profiles one run on one thread, and holds its three heaviest stages against the machine."""
    sizes = Sizes(chunks=600, queries=300, dimension=32) if small else Sizes(chunks=100_000, queries=20_000)
    found, lines = prepared(work, sizes), 300 if small else 4_000
    plan, steps = profiled(found, lines)
    settings, store = found.settings(), found.store
    resources = Resources(store, settings, plan.snapshot_id)
    rates = measured_rates(found.folder)
    names = {stage.name for stage in PIPELINE}
    heaviest = [name for name, _ in _by_seconds(steps) if name in names][:3]
    least = {name: least_of(name, found, plan, resources.corpus, resources.keyword_search) for name in heaviest}
    forget(found, plan)
    return Comparison(
        name="profile",
        title="Where the time of a run goes",
        settings={
            "chunks": sizes.chunks, "dimension": sizes.dimension, "distinct queries": lines, "threads": 1,
            "profiler": "cProfile, which costs some time itself",
            "settings": "the defaults, vectors given, no cross-encoder",
        },
        tables=[
            by_stage(steps, lines),
            by_function(steps),
            by_limit({name: seconds for name, (seconds, _) in steps.items()}, least, rates),
        ],
        notes=[_told(rates)],
    )  # fmt: skip


def _told(rates: Rates) -> str:
    return (
        f"One thread of this machine at its best: {rates.float32 / 1e9:.0f} GFlop/s in products of float32, "
        f"{rates.float64 / 1e9:.0f} of float64, {rates.memory / 1e9:.1f} GB/s through memory (a copy), "
        f"{rates.disk / 1e6:.0f} MB/s onto the disk (write and sync). The least is what the method cannot do without: "
        "its products, the postings that it reads, its tables once through memory and its files once onto the disk."
    )


if __name__ == "__main__":
    run(compare)
