"""Outcomes of calls to models and services, kept apart: a service that failed is not one that found nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, Protocol, runtime_checkable

from contracts.errors import InvalidAnswerError, RefusedError, TimedOutError
from models.cross_encoder import CrossEncoder, Logits
from models.grader import Grader

# `invalid`: it answered, but not what was asked for. `reused`: no call, since it had answered before.
Outcome = Literal["ok", "no_match", "failed", "refused", "timed_out", "invalid", "reused"]


def outcome_of(error: Exception) -> Outcome:
    """How a call that raised ended."""
    if isinstance(error, TimedOutError):
        return "timed_out"
    if isinstance(error, InvalidAnswerError):
        return "invalid"
    return "refused" if isinstance(error, RefusedError) else "failed"


@dataclass
class Spending:
    """What calls of a service came to: how they ended, tokens charged for and their cost. Safe for threads."""

    calls: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    cost: float = 0.0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def note(self, outcome: Outcome, *, times: int = 1, tokens: int = 0, cost: float = 0.0) -> None:
        """Adds calls that ended in one way."""
        with self._lock:
            self.calls.update({outcome: times} if times else {})
            self.tokens += tokens
            self.cost += cost


@runtime_checkable
class CallingGrader(Grader, Protocol):
    """A grader that makes calls which can be counted."""

    def counting(self, spending: Spending) -> Grader:
        """The same grader, which notes in `spending` what it calls for whoever holds it."""
        ...


def counted_grader(grader: Grader | None, spending: Spending) -> Grader | None:
    """A grader whose calls are noted in `spending`, where it makes any."""
    return grader.counting(spending) if isinstance(grader, CallingGrader) else grader


class CountedCrossEncoder:
    """A cross-encoder whose calls are counted by how they end, each try of a repeated call by itself."""

    def __init__(self, encoder: CrossEncoder, calls: Counter[str]) -> None:
        self._encoder = encoder
        self._calls = calls

    @property
    def model_id(self) -> str:
        """That of the encoder."""
        return self._encoder.model_id

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits of the encoder; an error of it is counted and passes."""
        try:
            scores = self._encoder.score(queries, passages)
        except Exception as error:
            self._calls[outcome_of(error)] += 1
            raise
        self._calls["ok"] += 1
        return scores
