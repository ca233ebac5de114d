"""Cross-encoders: read a query and a passage together and say how well the passage answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Logits = np.ndarray[Any, np.dtype[np.float32]]


class CrossEncoder(Protocol):
    """What stages ask of a cross-encoder.

    Attributes:
        model_id: changes whenever the scores may.
    """

    @property
    def model_id(self) -> str: ...

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits of the pairs (queries[i], passages[i]); a sigmoid makes them probabilities."""
        ...
