"""Outcomes of calls to models and services, kept apart: a service that failed is not one that found nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from contracts.errors import RefusedError, TimedOutError
from models.cross_encoder import CrossEncoder, Logits

Outcome = Literal["ok", "no_match", "failed", "refused", "timed_out"]


def outcome_of(error: Exception) -> Outcome:
    """How a call that raised ended."""
    if isinstance(error, TimedOutError):
        return "timed_out"
    return "refused" if isinstance(error, RefusedError) else "failed"


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
