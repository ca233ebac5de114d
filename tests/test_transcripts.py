"""Transcripts: kept by request over all runs of a model, added up for one run, and never believed when damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.digests import model_folder
from checkpoints.store import Store
from checkpoints.transcripts import Transcripts, paid_calls
from models.transcript import Transcript, Usage
from tests.s3 import s3_bucket

MODEL = "small at http://127.0.0.1:8080/v1, 100 answer tokens"


def make_transcript(letter: str = "a", outcome: str = "ok", run_id: str = "run-a", **more) -> Transcript:
    given = {
        "model_id": MODEL, "run_id": run_id, "request_hash": letter * 32, "attempt": 1, "outcome": outcome,
        "because": None, "request": {"model": "small", "messages": [], "temperature": 0}, "answer": "{}",
        "usage": Usage(prompt_tokens=70, answer_tokens=7), "cost": 0.5, "seconds": 0.25, "key": 0,
    }  # fmt: skip
    return Transcript(**{**given, **more})


def folder(run_id: str = "run-a") -> str:
    return f"transcripts/{model_folder(MODEL)}/{run_id}"


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(str(tmp_path / "store"))


def test_what_was_kept_is_found_by_its_request_in_every_run(store):
    mine = make_transcript()
    Transcripts(store, MODEL, "run-a").keep(mine)
    for run_id in ("run-a", "run-b"):
        assert list(Transcripts(store, MODEL, run_id).answered("a" * 32)) == [mine]
        assert list(Transcripts(store, MODEL, run_id).answered("b" * 32)) == []
    assert list(Transcripts(store, "another model", "run-a").answered("a" * 32)) == []


def test_what_is_kept_is_found_at_once(store):
    opened = Transcripts(store, MODEL, "run-a")
    opened.keep(make_transcript())
    assert list(opened.answered("a" * 32)) == [make_transcript()]
    assert opened.attempts("a" * 32) == 1


def test_the_name_of_a_file_says_model_run_request_attempt_and_outcome(store):
    Transcripts(store, MODEL, "run-a").keep(make_transcript("c", "invalid", attempt=3))
    assert store.files("transcripts") == [f"{folder()}/{'c' * 32}-3.invalid.json"]


@pytest.mark.parametrize("outcome", ["invalid", "unanswered"])
def test_what_was_no_answer_is_not_reused(store, outcome):
    Transcripts(store, MODEL, "run-a").keep(make_transcript(outcome=outcome))
    assert list(Transcripts(store, MODEL, "run-a").answered("a" * 32)) == []


def test_attempts_are_counted_for_each_run(store):
    first = Transcripts(store, MODEL, "run-a")
    for attempt in (1, 2, 10):
        first.keep(make_transcript(outcome="invalid", attempt=attempt))
    assert Transcripts(store, MODEL, "run-a").attempts("a" * 32) == 10
    assert Transcripts(store, MODEL, "run-b").attempts("a" * 32) == 0


def test_a_run_has_spent_what_all_its_calls_were_charged_for(store):
    mine = Transcripts(store, MODEL, "run-a")
    mine.keep(make_transcript("a"))
    mine.keep(make_transcript("b", "invalid", usage=Usage(prompt_tokens=1000, answer_tokens=1)))
    mine.keep(make_transcript("c", "unanswered", usage=Usage(prompt_tokens=5, answer_tokens=5, estimated=True)))
    Transcripts(store, MODEL, "run-b").keep(make_transcript("d", run_id="run-b"))
    other = Transcripts(store, "another", "run-a")
    other.keep(make_transcript("e", model_id="another"))
    for opened in (mine, other):
        assert opened.spent() == 77 + 1001 + 10 + 77
    assert Transcripts(store, MODEL, "run-b").spent() == 77
    assert Transcripts(store, MODEL, "run-c").spent() == 0


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_passed_over_and_its_bytes_count_as_tokens(tmp_path_factory, place, bit):
    store = Store(str(tmp_path_factory.mktemp("damaged")))
    Transcripts(store, MODEL, "run-a").keep(make_transcript())
    path = store.files("transcripts")[0]
    data = bytearray(store.read(path))
    data[int(place * len(data))] ^= 1 << bit
    store.write(path, bytes(data))
    opened = Transcripts(store, MODEL, "run-a")
    assert list(opened.answered("a" * 32)) == []
    assert opened.spent() == len(data) > 77
    assert [call.outcome for call in paid_calls(store, "run-a")] == ["ok"]


def test_a_transcript_under_the_name_of_another_request_is_passed_over(store):
    Transcripts(store, MODEL, "run-a").keep(make_transcript())
    store.write(f"{folder()}/{'b' * 32}-1.ok.json", store.read(f"{folder()}/{'a' * 32}-1.ok.json"))
    assert list(Transcripts(store, MODEL, "run-a").answered("b" * 32)) == []


def test_an_invalid_one_under_the_name_of_an_answer_is_passed_over(store):
    Transcripts(store, MODEL, "run-a").keep(make_transcript(outcome="invalid"))
    store.write(f"{folder()}/{'a' * 32}-1.ok.json", store.read(f"{folder()}/{'a' * 32}-1.invalid.json"))
    assert list(Transcripts(store, MODEL, "run-a").answered("a" * 32)) == []


def test_what_else_lies_there_is_left_alone(store):
    store.write(f"{folder()}/notes.txt", b"mine")
    store.write(f"{folder()}/{'a' * 32}-0.ok.json", b"{}")
    opened = Transcripts(store, MODEL, "run-a")
    assert (opened.spent(), opened.attempts("a" * 32), list(opened.answered("a" * 32))) == (0, 0, [])


def test_a_second_answer_serves_when_the_first_is_damaged(store):
    Transcripts(store, MODEL, "run-a").keep(make_transcript())
    Transcripts(store, MODEL, "run-b").keep(make_transcript(run_id="run-b", answer='"second"'))
    store.write(f"{folder()}/{'a' * 32}-1.ok.json", b"")
    assert [one.answer for one in Transcripts(store, MODEL, "run-c").answered("a" * 32)] == ['"second"']


def test_a_bucket_holds_transcripts_as_a_folder_does():
    with s3_bucket() as uri:
        store = Store(uri)
        Transcripts(store, MODEL, "run-a").keep(make_transcript())
        again = Transcripts(store, MODEL, "run-a")
        assert list(again.answered("a" * 32)) == [make_transcript()]
        assert (again.spent(), again.attempts("a" * 32)) == (77, 1)
