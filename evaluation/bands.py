"""Bands: the limits of grades, chosen from labelled scores of one half and measured on the other."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Context

import numpy as np

from contracts.columns import Array

# The normal quantile of a two-sided interval of 95 %.
_Z = 1.959964
# Limits are written down with so many digits, always rounded down, so that the passage they come from stays inside.
_DIGITS = Context(prec=6, rounding=ROUND_FLOOR)


@dataclass(frozen=True)
class Labelled:
    """Graded passages of which somebody has said whether they are relevant.

    Attributes:
        queries: (passages,) text, the query of each.
        scores: (passages,) float64 in [0, 1].
        relevant: (passages,) bool.
    """

    queries: Array
    scores: Array
    relevant: Array

    def half(self, number: int) -> Labelled:
        """One of the two halves, 0 or 1, that queries fall into by a hash of their id."""
        chosen = np.array([half_of(query) == number for query in self.queries], dtype=bool)
        return Labelled(self.queries[chosen], self.scores[chosen], self.relevant[chosen])

    def counts(self) -> dict[str, int]:
        """How many queries, relevant and other passages there are."""
        relevant = int(self.relevant.sum())
        return {
            "queries": len(set(self.queries.tolist())),
            "relevant": relevant,
            "not_relevant": len(self.relevant) - relevant,
        }


@dataclass(frozen=True)
class Limits:
    """Where the bands begin: `correct` at `upper`, `ambiguous` at `lower`, `incorrect` below."""

    upper: float
    lower: float


@dataclass(frozen=True)
class Ratio:
    """A share with its 95 % interval by Wilson's method; all None when it is a share of nothing.

    The method takes passages as independent. Those of one query are not, so that the truth is a bit wider.
    """

    share: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, part: int, whole: int) -> Ratio:
        """`part` of `whole`."""
        if not whole:
            return cls(None, None, None)
        share, added = part / whole, _Z**2 / whole
        middle = (share + added / 2) / (1 + added)
        spread = _Z * math.sqrt(share * (1 - share) / whole + added / (4 * whole)) / (1 + added)
        return cls(share, max(0.0, middle - spread), min(1.0, middle + spread))


@dataclass(frozen=True)
class Band:
    """What a band holds: labelled passages, how many are relevant, and of all relevant ones which share."""

    passages: int
    relevant: int
    precision: Ratio
    recall: Ratio


def half_of(query_id: str) -> int:
    """0 or 1; the same for a query in every run and on every machine."""
    return hashlib.sha256(query_id.encode()).digest()[0] % 2


def choose_limits(labelled: Labelled, precision: float, recall: float) -> tuple[Limits, bool]:
    """The lowest `upper` whose band is as precise as asked, and the highest `lower` that loses no more than asked.

    `upper` is the lowest score from which on at least `precision` of the labelled passages are relevant; where none
    is, the one with the highest precision. `lower` is the highest score that at least `recall` of the relevant
    passages reach, and never above `upper`.

    Args:
        labelled: with a relevant passage.
        precision: asked of the passages from `upper` on, in [0, 1]. At 0 all are correct, at 1 only those above
            every passage that is not relevant.
        recall: the share of the relevant passages that must not be incorrect, in [0, 1]. At 1 none is lost.

    Returns:
        The limits, and whether the precision that was asked for was met.
    """
    order = np.argsort(-labelled.scores, kind="stable")
    scores, relevant = labelled.scores[order], labelled.relevant[order]
    last = np.flatnonzero(np.diff(scores, append=-1.0))  # of several equal scores the last: a limit takes in all
    precisions = np.cumsum(relevant)[last] / (last + 1)
    good = np.flatnonzero(precisions >= precision)
    best = good[-1] if len(good) else np.flatnonzero(precisions == precisions.max())[-1]
    upper = _rounded_down(float(scores[last[best]]))
    found = scores[relevant]
    lower = _rounded_down(float(found[max(0, math.ceil(recall * len(found) - 1e-9) - 1)]))
    return Limits(upper, min(lower, upper)), len(good) > 0


def measured_bands(labelled: Labelled, limits: Limits) -> dict[str, Band]:
    """What each band holds of labelled passages, by its grade."""
    scores, relevant = labelled.scores, labelled.relevant
    total = int(relevant.sum())
    inside = {
        "correct": scores >= limits.upper,
        "ambiguous": (scores >= limits.lower) & (scores < limits.upper),
        "incorrect": scores < limits.lower,
    }
    bands = {}
    for grade, those in inside.items():
        hits, passages = int(relevant[those].sum()), int(those.sum())
        bands[grade] = Band(passages, hits, Ratio.of(hits, passages), Ratio.of(hits, total))
    return bands


def _rounded_down(score: float) -> float:
    return float(_DIGITS.create_decimal(repr(score)))
