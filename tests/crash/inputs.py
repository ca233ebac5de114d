"""What the crash tests run: a corpus of 40 chunks, a log of 7 distinct queries, and an evidence plan that rescues."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from flows.settings import Settings, validated
from loading.query_log import query_id_of

_TOPICS = ("refund", "login", "meter", "invoice")
_KINDS = ("policies", "procedures", "matrices", "notes")
_WORDS = "account customer request form approval limit deadline contact support review record change".split()

_TEXTS = [f"{topic} {word}" for word in ("form", "deadline") for topic in _TOPICS][:7]

PLAN = """
name: crash
version: "1"
shapes:
  - name: refund
    recognise: ['refund']
    families:
      - {name: policy, source: '^policies/', rescue_query: 'refund policy', wanted: 1, depth: 20}
      - {name: approval, source: '^matrices/meter', rescue_query: 'meter approval limit', wanted: 1, depth: 20}
"""


def write_inputs(folder: Path) -> None:
    """Writes a corpus of 40 chunks, a log of 7 distinct queries and a bad line, and an evidence plan."""
    chance = random.Random(11)
    vectors = np.random.default_rng(11)
    centres = dict(zip(_TOPICS, vectors.normal(size=(len(_TOPICS), 16)), strict=True))

    def near(topic: str) -> list[float]:
        return [round(float(x), 4) for x in centres[topic] + 0.6 * vectors.normal(size=16)]

    chunks = []
    for number in range(40):
        topic, kind = _TOPICS[number % 4], _KINDS[number // 4 % 4]
        text = f"{topic} {kind} {' '.join(chance.sample(_WORDS, 6))} {number}"
        source = f"{kind}/{topic}.md"
        chunks.append({
            "chunk_id": f"c-{number:03d}", "text": text, "source": source, "document_id": source,
            "chunk_index": number // 16, "embedding": near(topic),
        })  # fmt: skip
    queries: list[dict[str, Any]] = [
        {"query_id": f"l-{number}", "text": text, "embedding": near(_TOPICS[number % 4])}
        for number, text in enumerate(_TEXTS)
    ]
    queries[4:4] = [dict(queries[0], query_id="l-again"), {"query_id": "l-bad", "text": "", "embedding": near("meter")}]
    for name, rows in (("corpus.jsonl", chunks), ("queries.jsonl", queries)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "plan.yaml").write_text(PLAN, encoding="utf-8")


def poisoned_query() -> str:
    """The id of the query that the poisoned stage cannot take."""
    return query_id_of(_TEXTS[5], [], [])


def crash_settings(folder: Path) -> Settings:
    """The settings of the run: two shards, side by side, no models.

    A third shard would cost half as much time again, and shows nothing that two do not.
    """
    return validated({
        "embedder": {"provider": "precomputed"},
        "cross_encoder": {"provider": "none"},
        "run": {"shard_size": 4, "dead_letter_share": 0.5},
        "executor": {"workers": 2},
        "oversample": {"k": 3, "oversampling": 2},
        "greedy_selection": {"k": 4},
        "sparse_search": {"depth": 6},
        "family_rescue": {"plan": str(folder / "plan.yaml")},
        "blended_rerank": {"top_k": 4},
        "publish": {"max_lost_line_share": 0.5},
    })  # fmt: skip
