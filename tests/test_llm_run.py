"""Whole runs with the LLM grader: dead letters, budget and resume, keys, and what manifests and `cost` tell."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from checkpoints.run import create_run, load_plan, open_letters, stage_manifests
from checkpoints.store import Store
from checkpoints.transcripts import paid_calls
from contracts.errors import ConfigurationError, RefusedError
from contracts.manifest import RunPlan
from flows.cost import cost_rows, totals
from flows.export import stage_tables
from flows.planning import check_unchanged, plan_rerun
from flows.settings import load_settings
from tests.chat_server import Answer, ChatServer, chat_server, graded
from tests.small import planned, session_of, small_store
from tests.test_llm_grader import INVALID

KEY = "key-of-the-run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("llm")


@pytest.fixture(scope="module")
def store(folder) -> Store:
    return small_store(folder)


def judged(asked, _number=0) -> Answer:
    """Guides are correct, references ambiguous, notes incorrect."""
    grade = "correct" if "guide" in asked.passage else "ambiguous" if "reference" in asked.passage else "incorrect"
    return graded(asked, grade)


def llm(chat: ChatServer, *more: str) -> tuple[str, ...]:
    return (
        f"grader.base_url={chat.url}", "grader.model=small", "grader.provider=llm", "grader.retry_seconds=0",
        "grader.retries=1", "grader.prices.input=1.0", *more,
    )  # fmt: skip


def graded_chunks(store: Store, plan: RunPlan) -> dict[tuple[str, str], str]:
    """Query and chunk to grade, of all passages that were considered."""
    return {
        (row["query_id"], passage["chunk_id"]): passage["grade"]
        for table in stage_tables(store, plan, "crag_grading")
        for row in table.to_pylist()
        for passage in row["candidates"]
    }


def test_a_run_is_graded_by_the_model_and_a_second_one_makes_no_call(store, folder):
    with chat_server(judged) as chat:
        first = planned(store, folder, "first", *llm(chat))
        assert session_of(store, first).execute().verdict == "partial"  # the log has a bad line
        asked = len(chat.asked)
        assert asked > 20
        second = planned(store, folder, "second", *llm(chat, "grader.concurrent_requests=1", "executor.workers=1"))
        assert session_of(store, second).execute().verdict == "partial"
        assert len(chat.asked) == asked
    assert graded_chunks(store, first) == graded_chunks(store, second)
    assert set(graded_chunks(store, first).values()) >= {"correct", "ambiguous"}
    mine, reused = (list(stage_manifests(store, plan, "crag_grading")) for plan in (first, second))
    counted = sum((Counter(one.calls["grader"]) for one in mine), Counter())
    assert counted["ok"] == asked == len(paid_calls(store, "first"))
    assert sum(one.tokens for one in mine) == sum(chat.charged) == totals(cost_rows(store, "first"))["tokens"]
    assert sum(one.cost for one in mine) == pytest.approx(totals(cost_rows(store, "first"))["cost"])
    assert all(set(one.calls["grader"]) == {"reused"} and one.tokens == 0 for one in reused)
    assert cost_rows(store, "second") == []


def test_a_pair_that_the_model_cannot_grade_makes_its_query_a_dead_letter(store, folder):
    def script(asked, number):
        return INVALID["words"](asked) if asked.data["question"].endswith("option 5") else judged(asked, number)

    with chat_server(script) as chat:
        plan = planned(store, folder, "poisoned", *llm(chat, "grader.model=deaf"))
        assert session_of(store, plan).execute().verdict == "partial"
        asked_of_it = Counter(one.passage for one in chat.asked if one.data["question"].endswith("option 5"))
        assert set(asked_of_it.values()) == {2}
        others = Counter((one.data["question"], one.passage) for one in chat.asked)
        assert {count for (question, _), count in others.items() if not question.endswith("option 5")} == {1}
    letters = [letter for letter in open_letters(store, plan) if letter.stage == "crag_grading"]
    assert len(letters) == 1
    assert letters[0].reason.startswith("InvalidAnswerError: grader deaf, chunk c-")


def test_a_run_whose_budget_is_spent_is_resumed_with_a_larger_one(store, folder):
    with chat_server(judged) as chat:
        plan = planned(store, folder, "poor", *llm(chat, "grader.model=dear", "grader.token_budget=9000"))
        with pytest.raises(RefusedError, match=r"token budget of run poor: has no room .*`dartflow resume poor`"):
            session_of(store, plan).execute()
        paid = sum(call.tokens for call in paid_calls(store, "poor"))
        assert 0 < paid == sum(chat.charged) <= 9000
        raised = load_settings(
            environment={"DARTFLOW_GRADER__TOKEN_BUDGET": "1000000"}, base=load_plan(store, "poor").settings
        )
        settings = check_unchanged(store, plan, raised)
        assert settings.grader.token_budget == 1_000_000
        assert session_of(store, plan, "grader.token_budget=1000000").execute().verdict == "partial"
        asked = Counter((one.data["question"], one.passage) for one in chat.asked)
        assert set(asked.values()) == {1}
    assert graded_chunks(store, plan).keys() == graded_chunks(store, load_plan(store, "first")).keys()


def test_keys_that_are_not_there_are_missed_before_anything_is_computed(store, folder, monkeypatch):
    with chat_server(judged) as chat:
        with pytest.raises(ConfigurationError, match=r"setting grader.keys: names no API keys: got GRADER_KEYS"):
            planned(store, folder, "keyless", *llm(chat, "grader.keys=GRADER_KEYS"))
        monkeypatch.setenv("GRADER_KEYS", KEY)
        plan = planned(store, folder, "keyed", *llm(chat, "grader.keys=GRADER_KEYS", "grader.model=guarded"))
        session_of(store, plan).execute()
        assert {one.key for one in chat.asked} == {KEY}
    assert not any(KEY.encode() in path.read_bytes() for path in store.root.rglob("*") if path.is_file())


def test_another_model_is_a_reason_to_grade_again(store, folder):
    with chat_server(judged) as chat:
        plan = planned(store, folder, "before", *llm(chat, "grader.model=one"))
        session_of(store, plan).execute()
        settings = load_settings(environment={}, assignments=["grader.model=two"], base=plan.settings)
        again = plan_rerun(store, plan, settings, from_stage=None, run_id="after")
        create_run(store, again)
        computed = [entry.stage for entry in again.stages if entry.borrowed_from is None]
        assert computed == ["crag_grading", "context"]
        reason = next(entry.because for entry in again.stages if entry.stage == "crag_grading")
        assert reason == "changed: grader: one at... -> two at..."
