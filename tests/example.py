"""The bundled example, ingested and run once for all tests, and the command line called in this process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from checkpoints.run import load_plan, stage_manifests
from checkpoints.store import Store
from contracts.manifest import Manifest
from flows import cli
from flows.export import stage_tables

ROOT = Path(__file__).resolve().parents[1]
CONFIG = str(ROOT / "config" / "example.yaml")
CORPUS = str(ROOT / "examples" / "corpus.jsonl")
QUERIES = str(ROOT / "examples" / "queries.jsonl")
RUN = "example"


class CommandLine:
    """Calls `dartflow ...` in this process; gives exit status, standard output and standard error."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
        self._capsys, self._monkeypatch, self.store = capsys, monkeypatch, store

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["dartflow", *words, "--store", str(self.store)])
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(stop.value.code or 0), out, err

    def json(self, *words: str) -> dict[str, Any]:
        """The one object that a command prints with --json."""
        _, out, _ = self(*words, "--json")
        found: dict[str, Any] = json.loads(out)
        return found


def table_of(store: Path, run: str, stage: str) -> pa.Table:
    """The table of a stage over all shards."""
    opened = Store(str(store))
    return pa.concat_tables(stage_tables(opened, load_plan(opened, run), stage))


def manifests_of(store: Path, run: str, stage: str) -> list[Manifest]:
    """The manifests of a stage."""
    opened = Store(str(store))
    return list(stage_manifests(opened, load_plan(opened, run), stage))


def row_of(store: Path, run: str, stage: str, logged_id: str) -> dict[str, Any]:
    """What a stage wrote for the query of a log line."""
    lines = {line["logged_id"]: line["query_id"] for line in table_of(store, run, "log_lines").to_pylist()}
    rows = {row["query_id"]: row for row in table_of(store, run, stage).to_pylist()}
    found: dict[str, Any] = rows[lines[logged_id]]
    return found
