"""`dartflow cost`: calls, tokens and cost of a run by model and outcome, as its transcripts have them."""

from __future__ import annotations

import json
import sys

import pytest

from checkpoints.run import create_run
from checkpoints.store import Store
from checkpoints.transcripts import Transcripts
from flows import cli
from models.transcript import Usage
from tests.runs import make_plan
from tests.test_transcripts import MODEL, make_transcript

OTHER = "large at https://host/v1, 50 answer tokens"


@pytest.fixture
def store(tmp_path) -> Store:
    """A run with calls of two models, one file that is damaged, and another run."""
    opened = Store(str(tmp_path / "store"))
    create_run(opened, make_plan())
    mine, other = Transcripts(opened, MODEL, "run-a"), Transcripts(opened, OTHER, "run-a")
    mine.keep(make_transcript("a"))
    mine.keep(make_transcript("b", cost=0.25))
    mine.keep(make_transcript("c", "invalid"))
    mine.keep(make_transcript("d", "unanswered", usage=Usage(prompt_tokens=900, answer_tokens=100, estimated=True)))
    other.keep(make_transcript("e", model_id=OTHER, usage=Usage(prompt_tokens=1, answer_tokens=2), cost=2.0))
    Transcripts(opened, MODEL, "run-b").keep(make_transcript("f", run_id="run-b"))
    other.keep(make_transcript("0", model_id=OTHER))
    damaged = next(path for path in opened.files("transcripts") if path.endswith(f"{'0' * 32}-1.ok.json"))
    opened.write(damaged, b"not what was written")
    return opened


def told(monkeypatch, capsys, store: Store, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["dartflow", "cost", *words, "--store", store.uri])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0), capsys.readouterr().out


def test_calls_are_added_up_by_model_and_outcome(monkeypatch, capsys, store):
    status, out = told(monkeypatch, capsys, store, "run-a", "--json")
    assert status == 0
    assert json.loads(out) == {
        "run_id": "run-a", "calls": 6, "tokens": 77 + 77 + 77 + 1000 + 3 + 20, "cost": 0.5 + 0.25 + 0.5 + 0.5 + 2.0,
        "by_outcome": [
            {"model": "(unreadable)", "outcome": "ok", "calls": 1, "tokens": 20, "estimated_tokens": 20, "cost": 0},
            {"model": OTHER, "outcome": "ok", "calls": 1, "tokens": 3, "estimated_tokens": 0, "cost": 2.0},
            {"model": MODEL, "outcome": "invalid", "calls": 1, "tokens": 77, "estimated_tokens": 0, "cost": 0.5},
            {"model": MODEL, "outcome": "ok", "calls": 2, "tokens": 154, "estimated_tokens": 0, "cost": 0.75},
            {
                "model": MODEL, "outcome": "unanswered", "calls": 1, "tokens": 1000, "estimated_tokens": 1000,
                "cost": 0.5,
            },
        ],
    }  # fmt: skip


def test_people_see_a_table_and_the_sum(monkeypatch, capsys, store):
    status, out = told(monkeypatch, capsys, store, "run-a")
    assert status == 0
    assert MODEL in out
    assert "6 calls, 1254 tokens, cost 3.750000" in out


def test_a_run_without_calls_cost_nothing(monkeypatch, capsys, store):
    create_run(store, make_plan("run-c"))
    assert told(monkeypatch, capsys, store, "run-c") == (0, "0 calls, 0 tokens, cost 0.000000\n")


def test_a_run_that_is_not_there_is_refused(monkeypatch, capsys, store):
    assert told(monkeypatch, capsys, store, "run-z")[0] == 1
