"""The whole pipeline in memory, for tests: the same stages, no store, no flow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.evidence import EvidencePlan
from corpus.corpus import Corpus
from stages.pipeline import numbered_stages
from stages.stage import StageOutput


class TableCrossEncoder:
    """A precomputed cross-encoder: the logit of a pair is looked up, others get the default."""

    model_id = "table"

    def __init__(self, logits: Mapping[tuple[str, str], float] | None = None, default: float = 0.0) -> None:
        self.logits = dict(logits or {})
        self.default = default
        self.asked: list[tuple[str, str]] = []

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        pairs = list(zip(queries, passages, strict=True))
        self.asked += pairs
        return np.array([self.logits.get(pair, self.default) for pair in pairs], dtype=np.float32)


def resources_of(
    corpus: Corpus, plan: EvidencePlan | None = None, cross_encoder: Any = None, grader: Any = None
) -> dict[str, Any]:
    """What stages may name in `needs`, over an in-memory corpus."""
    return {
        "corpus": corpus,
        "keyword_search": corpus.keyword_search(1.5, 0.75, 0.25),
        "cross_encoder": cross_encoder,
        "grader": grader,
        "plan": plan,
    }


def run_chain(
    queries: pa.Table, resources: Mapping[str, Any], params: Mapping[str, Any] | None = None
) -> dict[str, StageOutput]:
    """Runs every stage in order; `params` overrides the default settings of stages by name."""
    tables = {"queries": queries}
    outputs: dict[str, StageOutput] = {}
    for _, stage in numbered_stages():
        inputs = {name: tables[name] for name in stage.reads}
        chosen = (params or {}).get(stage.name) or stage.params()
        outputs[stage.name] = stage.checked_run(inputs, resources, chosen)
        tables[stage.name] = outputs[stage.name].table
    return outputs
