"""A corpus in which every text stands five times: no text twice in a context, whatever the route."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.example import CORPUS, ROOT, row_of, table_of

PRESET = str(ROOT / "config" / "presets" / "dartboard.yaml")
PLAN = """
name: copies
version: "1"
shapes:
  - name: everything
    recognise: ['hub']
    families:
      - {name: third, source: '^copy-3/', rescue_query: "hub battery account card the your you", wanted: 4, depth: 40}
      - {name: fourth, source: '^copy-4/', rescue_query: "hub battery account card the your you", wanted: 4, depth: 40}
"""


@pytest.fixture
def fivefold(dartflow, tmp_path) -> Path:
    """20 texts of the example, five copies each under other ids, sources and tiers, ingested."""
    texts, seen = [], set()
    for line in Path(CORPUS).read_text().splitlines():
        chunk = json.loads(line)
        if chunk["language"] == "en" and chunk["text"] not in seen and len(texts) < 20:
            seen.add(chunk["text"])
            texts.append(chunk)
    path = tmp_path / "fivefold.jsonl"
    with path.open("w") as file:
        for copy in range(5):
            for number, chunk in enumerate(texts):
                row = {
                    "chunk_id": f"{number:02d}-copy-{copy}", "text": chunk["text"], "title": chunk["title"],
                    "source": f"copy-{copy}/{number}.md", "document_id": f"{copy}/{number}", "chunk_index": 0,
                    "authority_tier": 1 + (copy + number) % 5,
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
    status, out, err = dartflow("ingest", str(path), "--without-prefect")
    assert status == 0, err
    assert "100 chunks" in out
    return path


def _log(tmp_path: Path) -> str:
    log = tmp_path / "log.jsonl"
    questions = ("my hub is offline", "refund of an invoice", "battery", "how do I return the hub", "password")
    log.write_text("".join(json.dumps({"query_id": f"q{n}", "text": q}) + "\n" for n, q in enumerate(questions)))
    return str(log)


@pytest.mark.parametrize("planned", [False, True], ids=["without a plan", "with rescue"])
def test_the_preset_gives_five_different_texts_after_fusion_and_rescue(dartflow, fivefold, tmp_path, planned):
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = ["--set", f"family_rescue.plan={tmp_path / 'plan.yaml'}"] if planned else []
    words += ["--config", PRESET, "--set", "cross_encoder.provider=none", "--set", "crag_grading.lower=0.0"]
    status, _, err = dartflow("run", _log(tmp_path), "--run-id", "copies", "--without-prefect", *words)
    assert status == 0, err
    candidates = table_of(dartflow.store, "copies", "oversample").column("candidates").to_pylist()
    texts = {chunk["chunk_id"]: chunk["chunk_id"][:2] for row in candidates for chunk in row}
    assert all(len({texts[c["chunk_id"]] for c in row}) == len(row) == 15 for row in candidates)
    for row in table_of(dartflow.store, "copies", "context").to_pylist():
        found = [passage["text"] for passage in row["candidates"]]
        assert len(found) == len(set(found)) == 5
    rows = table_of(dartflow.store, "copies", "family_rescue").to_pylist()
    assert any(candidate["rescued"] for row in rows for candidate in row["candidates"]) == planned


def test_of_copies_the_highest_authority_stands_for_all(dartflow, fivefold, tmp_path):
    words = ("--config", PRESET, "--set", "cross_encoder.provider=none")
    dartflow("run", _log(tmp_path), "--run-id", "tiers", "--without-prefect", *words)
    for stage in ("oversample", "sparse_search"):
        for candidate in row_of(dartflow.store, "tiers", stage, "q2")["candidates"]:
            number, copy = int(candidate["chunk_id"][:2]), int(candidate["chunk_id"][-1])
            assert (copy + number) % 5 == 0, "tier 1"
