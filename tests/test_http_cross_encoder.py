"""The cross-encoder `http`: what is sent, what is believed, and how each fault of a service ends."""

from __future__ import annotations

import json
import socket
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.special import expit

import models.api_keys
import models.http_cross_encoder
from checkpoints.run import load_plan
from contracts.errors import (
    ConfigurationError,
    InvalidAnswerError,
    RefusedError,
    StageError,
    TimedOutError,
    TransientError,
)
from flows.export import row_of_query, stage_tables
from flows.preflight import check_keys
from flows.quarantine import is_fault_of_data
from models.cross_encoder import CachedCrossEncoder, blocks, logits_of, model_id_of, open_cross_encoder, probabilities
from models.cross_encoder_settings import CrossEncoderParams, HttpParams
from models.http_cross_encoder import HttpCrossEncoder
from tests.rerank_server import Answer, relevance, rerank_server, scored
from tests.small import planned, session_of, small_settings, small_store

QUERY = "reset the password"
PASSAGES = ["reset the password here", "bananas are rich in potassium", "the password is long"]
SECRETS = ("rr-4f1c0a77d2b94e", "rr-90b3e5618ac7d2")
SECRET = SECRETS[0]


@pytest.fixture
def server():
    with rerank_server() as one:
        yield one


def encoder_of(server, threads=2, **settings):
    return HttpCrossEncoder(HttpParams(base_url=server.base_url, model="reranker", **settings), threads)


def test_scores_come_back_in_the_order_of_the_pairs_though_the_service_sorts_them(server):
    scores = encoder_of(server).score([QUERY] * 3, PASSAGES)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(expit(scores), [relevance(QUERY, passage) for passage in PASSAGES], atol=1e-6)


def test_a_request_has_the_shape_that_services_share(server):
    encoder_of(server).score([QUERY] * 3, PASSAGES)
    assert server.paths == ["/v1/rerank"]
    assert server.bodies == [
        {"model": "reranker", "query": QUERY, "documents": PASSAGES, "top_n": 3, "return_documents": False}
    ]
    assert "authorization" not in {name.lower() for name in server.headers[0]}


def test_each_query_has_requests_of_its_own_in_bounded_parts(server):
    encoder = encoder_of(server, threads=1, passages_per_request=2)
    texts = [f"passage {number}" for number in range(7)]
    scores = encoder.score(["a", "a", "a", "b", "b", "a", "c"], texts)
    assert [(body["query"], body["documents"]) for body in server.bodies] == [
        ("a", texts[:2]), ("a", texts[2:3]), ("b", texts[3:5]), ("a", texts[5:6]), ("c", texts[6:]),
    ]  # fmt: skip
    assert len(scores) == 7


def test_no_pairs_ask_nothing(server):
    assert encoder_of(server).score([], []).shape == (0,)
    assert server.bodies == []


def test_as_many_requests_are_under_way_as_threads_say(server):
    server.answer = lambda _number, body: Answer(**{**vars(scored(body)), "after_seconds": 0.05})
    queries = [f"query {number}" for number in range(12)]
    alone = encoder_of(server, threads=1).score(queries, ["text"] * 12)
    assert server.most_at_once == 1
    assert encoder_of(server, threads=4).score(queries, ["text"] * 12).tolist() == alone.tolist()
    assert 1 < server.most_at_once <= 4


def test_a_long_passage_is_cut_where_the_settings_say(server):
    encoder_of(server, passage_characters=5).score([QUERY] * 2, ["123456789", "1234"])
    assert server.bodies[0]["documents"] == ["12345", "1234"]


@pytest.mark.parametrize(
    ("kind", "given_", "want"),
    [
        ("probability", [0.0, 0.5, 1.0, 1e-12], [1e-9, 0.5, 1 - 1e-9, 1e-9]),
        ("logit", [-40.0, 0.0, 3.5, 100.0], expit([-40.0, 0.0, 3.5, 100.0])),
    ],
)
def test_scores_become_logits(server, kind, given_, want):
    server.answer = lambda *_: Answer(
        body={"results": [{"index": index, "relevance_score": score} for index, score in enumerate(given_)]}
    )
    found = probabilities(encoder_of(server, scores=kind), [QUERY] * 4, ["a", "b", "c", "d"])
    np.testing.assert_allclose(found, want, rtol=1e-5)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=20))
def test_a_sigmoid_brings_probabilities_back_and_their_order_stays(chances):
    given_ = np.array(sorted(chances))
    logits = logits_of(given_, "probability")
    assert np.isfinite(logits).all()
    assert (np.diff(logits) >= 0).all()
    np.testing.assert_allclose(expit(logits.astype(float)), given_, atol=2e-7)


@pytest.mark.parametrize("score", [-0.1, 1.0000001, np.nan, np.inf, -np.inf])
def test_what_is_no_probability_has_no_logit(score):
    assert np.isnan(logits_of(np.array([score]), "probability")).all()


def results(*pairs):
    return {"results": [{"index": index, "relevance_score": score} for index, score in pairs]}


WRONG = {
    "one too few": results((0, 0.1), (1, 0.2)),
    "one twice": results((0, 0.1), (1, 0.2), (1, 0.3)),
    "one too many": results((0, 0.1), (1, 0.2), (2, 0.3), (3, 0.3)),
    "a foreign index": results((0, 0.1), (1, 0.2), (7, 0.3)),
    "counted from one": results((1, 0.1), (2, 0.2), (3, 0.3)),
    "a negative index": results((0, 0.1), (1, 0.2), (-1, 0.3)),
    "an index that is no integer": results((0, 0.1), (1.0, 0.2), (2, 0.3)),
    "an index that is a bool": results((0, 0.1), (True, 0.2), (2, 0.3)),
    "an index that is a text": results(("0", 0.1), ("1", 0.2), ("2", 0.3)),
    "a score above one": results((0, 0.1), (1, 7.25), (2, 0.3)),
    "a score of NaN": results((0, 0.1), (1, float("nan")), (2, 0.3)),
    "a score that is none": results((0, 0.1), (1, None), (2, 0.3)),
    "a score that is a text": results((0, 0.1), (1, "0.2"), (2, 0.3)),
    "a score of a thousand digits": results((0, 0.1), (1, 10**1000), (2, 0.3)),
    "an error with status 200": {"error": {"message": "model overloaded"}},
    "results that are no list": {"results": {"index": 0}},
    "results that are numbers": {"results": [0.1, 0.2, 0.3]},
    "a list": [0.1, 0.2, 0.3],
    "null": None,
    "no JSON": "<html>sign in</html>",
    "half of it": '{"results": [{"index": 0, "rel',
    "nested too deep": "[" * 100_000,
    "nothing": "",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_does_not_fit_is_never_believed(server, wrong):
    server.answer = lambda *_: Answer(body=WRONG[wrong])
    with pytest.raises(InvalidAnswerError, match="does not score the passages that it was sent: got ") as found:
        encoder_of(server).score([QUERY] * 3, PASSAGES)
    assert is_fault_of_data(found.value)
    assert "each index from 0 to 2 once, and a relevance_score from 0 to 1" in str(found.value)


def test_a_service_that_is_not_there_may_come_back():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        params = HttpParams(base_url=f"http://127.0.0.1:{free.getsockname()[1]}", model="reranker")
        with pytest.raises(TransientError, match="cannot be reached: got ConnectError"):
            HttpCrossEncoder(params).score([QUERY], PASSAGES[:1])


def test_a_service_that_hangs_up_may_come_back(server):
    server.answer = lambda *_: Answer(body="x" * 50, dribbled=True)
    with pytest.raises(TransientError, match="broke the connection off: got RemoteProtocolError"):
        encoder_of(server).score([QUERY] * 3, PASSAGES)


@pytest.mark.parametrize("late", [{"after_seconds": 1.0}, {"dribbled": True, "body": "x" * 500}])
def test_a_service_that_takes_too_long_is_given_up(server, late):
    """Also one that sends something all the time."""
    server.answer = lambda *_: Answer(**late)
    with pytest.raises(TimedOutError, match=r"did not answer in time.*within 0\.3 s.*http\.timeout_seconds"):
        encoder_of(server, timeout_seconds=0.3).score([QUERY] * 3, PASSAGES)


def in_seconds(seconds):
    """As an HTTP date, which has no fractions."""
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("after", [lambda: "0", lambda: in_seconds(-60), lambda: in_seconds(2)])
def test_a_service_that_says_when_to_ask_again_is_asked_then(server, after):
    server.answer = lambda number, body: scored(body) if number == 2 else Answer(429, headers={"Retry-After": after()})
    started = time.monotonic()
    assert len(encoder_of(server).score([QUERY] * 3, PASSAGES)) == 3
    assert len(server.bodies) == 3
    assert time.monotonic() - started >= 2, "at least a second each, or it would be asked for ever"


@pytest.mark.parametrize("after", ["61", "Wed, 21 Oct 2099 07:28:00 GMT", "nan", "9" * 400])
def test_a_service_that_wants_more_than_a_minute_fails_for_now(server, after):
    server.answer = lambda *_: Answer(429, headers={"Retry-After": after})
    with pytest.raises(TransientError, match="is asked too often: got status 429"):
        encoder_of(server).score([QUERY] * 3, PASSAGES)
    assert len(server.bodies) == 1


def keyed(server, monkeypatch, *answers):
    """An encoder with two keys, to which the service gives these answers; None is a right one."""
    monkeypatch.setenv("RERANK_KEYS", ",".join(SECRETS))
    monkeypatch.setattr(models.api_keys, "_COOL_DOWN_SECONDS", 20.0)

    def answer(number, body):
        return answers[SECRETS.index(keys_asked(server)[number])] or scored(body)

    server.answer = answer
    return encoder_of(server, threads=1, keys="RERANK_KEYS")


def keys_asked(server):
    return [headers["Authorization"].removeprefix("Bearer ") for headers in server.headers]


@pytest.mark.parametrize(
    "answer", [Answer(401), Answer(403), Answer(429), Answer(429, headers={"Retry-After": "30"})],
    ids=["unknown", "forbidden", "too often", "too often for half a minute"],
)  # fmt: skip
def test_where_one_key_is_not_taken_the_other_goes_on(server, monkeypatch, answer):
    encoder = keyed(server, monkeypatch, answer, None)
    for _ in range(3):
        assert len(encoder.score([QUERY] * 3, PASSAGES)) == 3
    assert keys_asked(server) == [SECRETS[0], *[SECRETS[1]] * 3]


def test_where_no_key_is_taken_nothing_is_asked_any_more(server, monkeypatch):
    encoder = keyed(server, monkeypatch, Answer(401), Answer(403))
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"every API key: got 2 keys.* Correct `cross_encoder\.http\.keys`"):
            encoder.score([QUERY] * 3, PASSAGES)
    assert keys_asked(server) == list(SECRETS)


def test_where_every_key_rests_the_one_that_is_free_first_is_waited_for(server, monkeypatch):
    answers = [Answer(429, headers={"Retry-After": after}) for after in ("30", "1")]
    encoder = keyed(server, monkeypatch, *answers)
    asked_by_keys = server.answer
    server.answer = lambda number, body: asked_by_keys(number, body) if number < 2 else scored(body)
    started = time.monotonic()
    assert len(encoder.score([QUERY] * 3, PASSAGES)) == 3
    assert 0.95 <= time.monotonic() - started < 10
    assert keys_asked(server) == [SECRETS[0], SECRETS[1], SECRETS[1]]


def test_where_every_key_rests_for_more_than_a_minute_the_call_fails_and_the_next_asks_nothing(server, monkeypatch):
    encoder = keyed(server, monkeypatch, *[Answer(429, headers={"Retry-After": "90"})] * 2)
    for problem in ("is asked too often: got status 429", r"asked later: got in (90|89|88) s, want at most 60 s"):
        with pytest.raises(TransientError, match=problem):
            encoder.score([QUERY] * 3, PASSAGES)
    assert keys_asked(server) == list(SECRETS)


def test_a_call_ends_with_its_minute_though_a_key_is_always_free(server, monkeypatch):
    monkeypatch.setattr(models.http_cross_encoder, "_LONGEST_WAIT_SECONDS", 0.5)
    encoder = keyed(server, monkeypatch, *[Answer(429, headers={"Retry-After": "0"}, after_seconds=0.6)] * 2)
    with pytest.raises(TransientError, match="is asked too often: got status 429"):
        encoder.score([QUERY] * 3, PASSAGES)
    assert len(server.bodies) == 1


def test_what_was_answered_before_a_fault_is_not_asked_again(server):
    """A paid answer beside a failed one is kept for the next try, and used once."""
    failing = threading.Event()
    failing.set()
    queries = [f"query {number}" for number in range(6)]

    def answer(_number, body):
        return Answer(503) if failing.is_set() and body["query"] == "query 5" else scored(body)

    server.answer = answer
    encoder = encoder_of(server, threads=1)
    with pytest.raises(TransientError):
        encoder.score(queries, ["query 1"] * 6)
    failing.clear()
    scores = encoder.score(queries, ["query 1"] * 6)
    assert sorted(body["query"] for body in server.bodies) == [*queries, "query 5"]
    assert scores.tolist() == encoder_of(server).score(queries, ["query 1"] * 6).tolist()
    before = len(server.bodies)
    encoder.score(queries, ["query 1"] * 6)
    assert len(server.bodies) == before + 6


def test_after_a_fault_requests_that_had_not_started_are_not_sent(server):
    server.answer = lambda *_: Answer(500)
    with pytest.raises(TransientError):
        encoder_of(server, threads=1).score([f"query {number}" for number in range(200)], ["text"] * 200)
    assert len(server.bodies) < 100


def test_the_key_comes_from_the_environment_and_shows_nowhere(server, monkeypatch):
    monkeypatch.setenv("RERANK_KEY", SECRET)
    server.answer = lambda *_: Answer(401, {"message": f"Incorrect key {SECRET}"})
    encoder = encoder_of(server, keys="RERANK_KEY")
    with pytest.raises(RefusedError) as found:
        encoder.score([QUERY], PASSAGES[:1])
    assert server.headers[0]["Authorization"] == f"Bearer {SECRET}"
    assert "Incorrect key [key 0]" in str(found.value)
    assert SECRET not in "".join(traceback.format_exception(found.value)) + repr(vars(found.value)) + encoder.model_id


@pytest.mark.parametrize("held", [None, "", "  ", ",", "sch\u00fcssel", "not\x7fprintable"])
def test_a_variable_without_a_key_is_refused_before_anything_is_asked(monkeypatch, held):
    monkeypatch.delenv("RERANK_KEY", raising=False)
    if held is not None:
        monkeypatch.setenv("RERANK_KEY", held)
    params = CrossEncoderParams(provider="http", http=HttpParams(base_url="http://h", model="m", keys="RERANK_KEY"))
    settings = small_settings_with(params)
    missing = r"setting cross_encoder\.http\.keys: names no API keys: got RERANK_KEY,"
    for ask in (open_cross_encoder, lambda _params: check_keys(settings)):
        with pytest.raises(ConfigurationError, match=missing) as found:
            ask(params)
        assert not held or not held.strip(" ,") or held not in str(found.value)


def small_settings_with(params, folder="."):
    from pathlib import Path

    return small_settings(Path(folder)).model_copy(update={"cross_encoder": params})


@pytest.mark.parametrize("given_", [{}, {"base_url": "http://h"}, {"model": "m"}])
def test_the_provider_needs_address_and_model(given_):
    with pytest.raises(ValidationError, match=r"needs http\.base_url and http\.model"):
        CrossEncoderParams(provider="http", http=HttpParams(**given_))


def test_the_id_changes_with_whatever_may_change_a_score_and_with_nothing_else():
    given_ = {"base_url": "http://h:8000/v1", "model": "m"}

    def id_of(**changed):
        return model_id_of(CrossEncoderParams(provider="http", http=HttpParams(**{**given_, **changed})))

    others = {
        "base_url": "http://h:8001/v1", "model": "n", "scores": "logit", "passages_per_request": 1,
        "passage_characters": 7,
    }  # fmt: skip
    execution = {"keys": "KEYS", "timeout_seconds": 1.0}
    assert others.keys() | execution.keys() == HttpParams.model_fields.keys()
    assert len({id_of(), *(id_of(**{name: value}) for name, value in others.items())}) == 1 + len(others)
    assert {id_of(**{name: value}) for name, value in execution.items()} == {id_of()}
    assert id_of() == "http h:8000/v1 m probability, 8000 characters, 64 a request"
    assert id_of(base_url="http://h:8000/v1/") == id_of()
    assert HttpCrossEncoder(HttpParams(**given_)).model_id == id_of()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=8), st.integers(1, 7))
def test_blocks_of_pairs_end_where_queries_do(runs, most):
    queries = [f"{place}-{name}" for place, (name, count) in enumerate(runs) for _ in range(count)]
    cut = list(blocks(queries, most))
    assert [place for start, end in cut for place in range(start, end)] == list(range(len(queries)))
    assert all(0 < end - start <= most for start, end in cut)
    alone = {query: list(blocks([query] * queries.count(query), most)) for query in queries}
    for start, end in cut:
        for query in set(queries[start:end]):
            first = queries.index(query)
            share = (max(start, first) - first, min(end, first + queries.count(query)) - first)
            assert share in alone[query]


class Scores:
    """Kept scores, in memory."""

    def __init__(self):
        self.kept = {}

    def get(self, keys):
        return np.array([self.kept.get(key, np.nan) for key in keys], dtype=np.float32)

    def put(self, keys, scores):
        self.kept.update(zip(keys, scores.tolist(), strict=True))


def padded(_number, body):
    """A service whose scores depend on the longest passage of the request."""
    width = max(len(passage) for passage in body["documents"])
    return Answer(body=results(*((index, 1 / (2 + width)) for index in range(len(body["documents"])))))


def test_what_stands_beside_a_passage_does_not_depend_on_the_queries_of_its_shard(server):
    """Even of a service that pads, and however the blocks of pairs fall."""
    server.answer = padded
    pairs = [(f"query {q}", "x" * (1 + q + p)) for q in range(30) for p in range(20)]

    def shards(size):
        found = []
        for start in range(0, len(pairs), 20 * size):
            part = pairs[start : start + 20 * size]
            encoder = CachedCrossEncoder(encoder_of(server), Scores())
            found += encoder.score([query for query, _ in part], [passage for _, passage in part]).tolist()
        return found

    whole = shards(30)
    assert whole == shards(1) == shards(7)
    assert len(set(whole)) == 30, "each query has its own longest passage"


def run_over(server, folder, run_id, *assignments):
    return planned(
        small_store(folder), folder, run_id, "cross_encoder.provider=http",
        f"cross_encoder.http.base_url={server.base_url}", "cross_encoder.http.model=reranker", *assignments,
    )  # fmt: skip


def test_a_run_ranks_with_the_service_and_a_second_one_asks_nothing(server, tmp_path, monkeypatch):
    monkeypatch.setenv("RERANK_KEY", SECRET)
    store, plan = small_store(tmp_path), run_over(server, tmp_path, "one", "cross_encoder.http.keys=RERANK_KEY")
    assert session_of(store, plan).execute().verdict == "partial"  # the log has a bad line
    asked = len(server.bodies)
    lines = (tmp_path / "corpus.jsonl").read_text().splitlines()
    texts = {chunk["chunk_id"]: chunk["text"] for chunk in map(json.loads, lines)}
    for table in stage_tables(store, plan, "blended_rerank"):
        for row in table.to_pylist():
            query = row_of_query(store, plan, "queries", row["query_id"])["normalised_text"]
            assert row["rerank_status"] == "cross_encoder"
            read = {one["chunk_id"]: one["cross_encoder"] for one in row["candidates"]}
            for chunk_id, chance in read.items():
                if chance is not None:
                    np.testing.assert_allclose(chance, relevance(query, texts[chunk_id]), atol=1e-6)
            assert any(chance is not None for chance in read.values())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text(SECRET)
    again = run_over(server, tmp_path, "two", "cross_encoder.http.keys=./keys", "run.shard_size=3")
    assert again.settings["cross_encoder"]["http"]["keys"] == str(tmp_path / "keys")
    assert session_of(store, again).execute().verdict == "partial"
    assert len(server.bodies) == asked
    assert "http 127.0.0.1" in json.dumps(load_plan(store, "one").model_dump(mode="json"))
    for path in (tmp_path / "store").rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path


def test_a_query_that_the_service_cannot_take_is_a_dead_letter_and_the_others_are_ranked(server, tmp_path):
    def answer(_number, body):
        return Answer(422, {"detail": "too long"}) if "option 4" in body["query"] else scored(body)

    server.answer = answer
    store, plan = small_store(tmp_path), run_over(server, tmp_path, "one")
    verdict = session_of(store, plan).execute()
    assert verdict.verdict == "partial"
    by_stage = {stage.stage: stage.dead_letters for stage in verdict.stages}
    assert by_stage["blended_rerank"] == 1
    asked = [json.dumps(body) for body in server.bodies if "option 4" not in body["query"]]
    assert len(asked) == len(set(asked)), "halving the shard pays for no answer twice"


def test_an_outage_is_bridged_and_one_that_lasts_fails_the_run_without_dead_letters(server, tmp_path):
    server.answer = lambda number, body: Answer(503) if number < 2 else scored(body)
    store, plan = small_store(tmp_path), run_over(server, tmp_path, "one", "executor.workers=1")
    assert session_of(store, plan).execute().verdict == "partial"
    server.answer = lambda *_: Answer(503)
    lasting = run_over(server, tmp_path, "two", "cross_encoder.http.passage_characters=20")
    with pytest.raises((TransientError, StageError), match="failed: got status 503"):
        session_of(store, lasting).execute()
