"""Where the time of a whole run goes, by stage and by function, on one thread: `python -m bench.profile`."""

from __future__ import annotations

import argparse
import cProfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from unittest.mock import patch

from threadpoolctl import threadpool_limits

from bench.results import ROOT
from bench.stores import forget, prepared, whole_run
from bench.terminal import WORK
from bench.topics import Sizes
from flows import engine
from flows.settings import ExecutorParams

HOTTEST = 12


def in_this_thread(
    work: Callable[[int], None], shards: Sequence[int], _params: ExecutorParams, report: Callable[[int], None]
) -> None:
    """What `map_shards` does with one worker, but where the profiler can see it."""
    with threadpool_limits(1, user_api="blas"):
        for done, shard in enumerate(shards, start=1):
            work(shard)
            report(done)


def profiled(folder: Path, sizes: Sizes) -> dict[str, tuple[float, cProfile.Profile]]:
    """Seconds and profile of every step of a run, and of what is done between them (`plan and verdict`)."""
    found = prepared(folder, sizes)
    plan, _ = whole_run(found, found.log_of(min(300, sizes.queries)))  # compiles
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
        plan, _ = whole_run(found, found.queries, step=step)
        between.disable()
        whole = time.perf_counter() - started
    forget(found, plan)
    steps["plan and verdict"] = whole - sum(seconds for seconds, _ in steps.values()), between
    return steps


def by_stage(steps: dict[str, tuple[float, cProfile.Profile]], queries: int) -> str:
    """A table: each step with its share and its hottest function of this project."""
    whole = sum(seconds for seconds, _ in steps.values())
    lines = ["| step | s | share | ms a query | most of it in |", "|---|---|---|---|---|"]
    for name, (seconds, profile) in sorted(steps.items(), key=lambda one: -one[1][0]):
        hot = "; ".join(f"{where} {own:.2f} s" for own, where in hottest([profile])[:3])
        lines.append(f"| {name} | {seconds:.2f} | {seconds / whole:.0%} | {1000 * seconds / queries:.3f} | {hot} |")
    return "\n".join([*lines, f"| whole | {whole:.2f} | 100% | {1000 * whole / queries:.3f} | |"])


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


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=20_000)
    parser.add_argument("--queries", type=int, default=4_000)
    parser.add_argument("--dimension", type=int, default=384)
    parser.add_argument("--functions", type=int, default=HOTTEST, help="how many of the hottest are listed")
    parser.add_argument("--work", type=Path, default=WORK)
    words = parser.parse_args()
    sizes = Sizes(chunks=words.chunks, queries=words.queries, dimension=words.dimension)
    steps = profiled(words.work, sizes)
    print(f"{sizes.queries} distinct queries, {sizes.chunks} chunks, {sizes.dimension} dimensions, one thread.\n")
    print(by_stage(steps, sizes.queries))
    print("\n| s, with the libraries it calls | function |\n|---|---|")
    for own, where in hottest([profile for _, profile in steps.values()])[: words.functions]:
        print(f"| {own:.2f} | {where} |")


if __name__ == "__main__":
    main()
