"""Timing in turn: what is compared runs A B A B, so that a machine that slows down slows both sides."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import numpy as np
from pydantic import BaseModel

# Does its work once, told the number of the round, and gives how many units (queries, say) it did.
Work = Callable[[int], int]


class Sample(BaseModel):
    """What one side took: one value a round.

    Attributes:
        name: whose.
        values: in the order of the rounds, > 0.
        unit: of the values, as in `ms a query`.
    """

    name: str
    values: list[float]
    unit: str

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return float(np.median(self.values))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the rounds."""
        lower, upper = np.quantile(self.values, [0.25, 0.75])
        return float(lower), float(upper)


def in_turn(works: Mapping[str, Work], rounds: int, unit: str = "ms a query") -> dict[str, Sample]:
    """Runs every work once a round, in the given order, and gives the milliseconds a unit of each.

    What has to be compiled or loaded first is called before by the caller.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name, work in works.items():
            gc.collect()
            started = time.perf_counter()
            units = work(number)
            taken[name].append(1000 * (time.perf_counter() - started) / units)
    return {name: Sample(name=name, values=values, unit=unit) for name, values in taken.items()}


def ratios(above: Sample, below: Sample) -> list[float]:
    """The one side by the other, round by round."""
    return [one / other for one, other in zip(above.values, below.values, strict=True)]
