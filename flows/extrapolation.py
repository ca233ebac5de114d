"""Cost lines: from what a few shards took to what all shards of a run will take."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from flows.planning import even_shard_size
from stages.pipeline import RUNS_ONCE

# By default at most a tenth of a log is run, but no less than this.
_FEWEST, _SHARE = 1024, 10


@dataclass(frozen=True)
class Line:
    """A cost: `fixed` for a shard, whatever it holds, and `each` for each of its queries."""

    fixed: float
    each: float

    def of(self, queries: float) -> float:
        """The cost of a shard."""
        return self.fixed + self.each * queries


def line_through(few: tuple[float, float], many: tuple[float, float]) -> Line:
    """The line through two measured (queries, cost) of a shard, that of `many` exactly.

    Where the two hold nearly the same, noise would draw the line: all of the cost then goes with the queries.
    Neither part is below 0.
    """
    (less, low), (more, high) = few, many
    if not more:
        return Line(high, 0.0)
    each = high / more if more < 2 * less else (high - low) / (more - less)
    each = min(max(each, 0.0), high / more)
    return Line(high - each * more, each)


def wall_of(seconds: Sequence[float], workers: int) -> float:
    """How long shards take in their order, when each goes to the first worker that is free."""
    ends = [0.0] * workers
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def shard_queries(stage: str, distinct: int, shard_size: int) -> list[int]:
    """The queries of each shard of a stage; of a stage that runs once, all in one."""
    if stage in RUNS_ONCE or not distinct:
        return [distinct]
    size = even_shard_size(distinct, shard_size)
    return [min(size, distinct - start) for start in range(0, distinct, size)]


def sample_size(distinct: int, shard_size: int, side_by_side: int, asked: int | None) -> int:
    """How many distinct queries the calibration runs.

    A shard for each worker, as the run has them, so that it takes about as long as one shard of every stage,
    whatever the log's length; but no more than a tenth of the log, unless that is less than 1,024 queries.
    """
    default = max(min(side_by_side * shard_size, distinct // _SHARE), _FEWEST)
    return min(distinct, default if asked is None else asked)
