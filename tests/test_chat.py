"""One call of a chat service: what each answer of it means, keys in rotation, even spacing, and no key shown."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

import models.api_keys
from contracts.errors import ConfigurationError, ModelError, RefusedError, TimedOutError, TransientError
from flows.settings import load_settings
from models.api_keys import ApiKeys, read_keys
from models.chat import ChatClient, RequestRate, UnansweredError, UnansweredInTimeError
from models.grade_request import grade_request
from models.grader import Pair
from models.grader_settings import GraderParams
from tests.chat_server import Answer, chat_server, graded

BODY = grade_request(Pair("q", "c", "question", "correct passage"), "small", 50).body
KEYS = ["first-secret-key", "second-secret-key"]


def client(chat, *keys, **params) -> ChatClient:
    given = {"provider": "llm", "model": "small", "base_url": chat.url, "timeout_seconds": 2.0}
    return ChatClient(GraderParams(**{**given, **params}), keys or [""])


def answering(status, body=b"", **more):
    return lambda asked, number: Answer(status, body, **more)


def test_a_reply_is_given_with_its_key_and_the_time_it_took():
    with chat_server(lambda asked, _: graded(asked, hold=0.05)) as chat:
        reply = client(chat, *KEYS).send(BODY)
    assert json.loads(reply.text)["choices"][0]["finish_reason"] == "stop"
    assert (reply.key, reply.refused_keys) == (0, 0)
    assert 0.05 <= reply.seconds < 2
    assert chat.asked[0].key == KEYS[0]


def test_without_keys_none_is_sent():
    with chat_server() as chat:
        client(chat).send(BODY)
    assert chat.asked[0].key is None


def test_keys_take_turns():
    with chat_server() as chat:
        opened = client(chat, *KEYS)
        assert [opened.send(BODY).key for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_out_and_the_next_one_is_used(status):
    with chat_server(lambda asked, _: graded(asked) if asked.key == KEYS[1] else Answer(status)) as chat:
        opened = client(chat, *KEYS)
        replies = [opened.send(BODY) for _ in range(3)]
    assert [(reply.key, reply.refused_keys) for reply in replies] == [(1, 1), (1, 0), (1, 0)]
    assert [one.key for one in chat.asked] == [KEYS[0], KEYS[1], KEYS[1], KEYS[1]]


def test_when_every_key_is_refused_no_call_is_made_any_more():
    with chat_server(answering(401, b'{"error": "bad key first-secret-key"}')) as chat:
        opened = client(chat, *KEYS)
        for _ in range(2):
            with pytest.raises(RefusedError, match="refuses every API key: got 2 keys"):
                opened.send(BODY)
    assert len(chat.asked) == 2


def test_a_key_that_is_asked_too_often_rests_while_the_other_works():
    with chat_server(
        lambda asked, _: graded(asked) if asked.key == KEYS[1] else Answer(429, headers={"Retry-After": "30"})
    ) as chat:
        opened = client(chat, *KEYS)
        with pytest.raises(TransientError, match="is asked too often"):
            opened.send(BODY)
        assert [opened.send(BODY).key for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [
        (lambda: "1", 0.95, 2.0),
        (lambda: format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True), 0.5, 2.5),
        (lambda: "0", 0.0, 0.5),
        (lambda: format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True), 0.0, 0.5),
        (lambda: "soon", 0.25, 1.0),
    ],
    ids=["seconds", "date", "at once", "past", "nonsense"],
)
def test_the_only_key_rests_as_long_as_the_service_says(monkeypatch, retry_after, least, most):
    monkeypatch.setattr(models.api_keys, "_COOL_DOWN_SECONDS", 0.3)

    def script(asked, number):
        return graded(asked) if number else Answer(429, headers={"Retry-After": retry_after()})

    with chat_server(script) as chat:
        opened = client(chat, KEYS[0])
        with pytest.raises(TransientError):
            opened.send(BODY)
        opened.send(BODY)
    first, second = chat.asked
    assert least <= second.at - first.at <= most


def test_rests_without_a_stated_time_double_until_a_call_is_taken(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(models.api_keys.time, "monotonic", lambda: now[0])
    keys = ApiKeys(["k"], "service")
    for rest in (2, 4, 8, 16, 32, 60, 60):
        keys.cool_down(0, None)
        assert keys._states[0].free_at - now[0] == rest
        now[0] += rest
    keys.accepted(0)
    keys.cool_down(0, None)
    assert keys._states[0].free_at - now[0] == 2


def test_a_rest_of_minutes_is_not_waited_for():
    with chat_server(answering(429, headers={"Retry-After": "86400"})) as chat:
        opened = client(chat, KEYS[0])
        with pytest.raises(TransientError, match="is asked too often"):
            opened.send(BODY)
        with pytest.raises(TransientError, match=r"wants to be asked later: got in 86[34]"):
            opened.send(BODY)
    assert len(chat.asked) == 1


@pytest.mark.parametrize(
    ("status", "kind", "problem"),
    [
        (500, TransientError, "failed: got status 500: no luck"),
        (503, TransientError, "failed"),
        (408, TransientError, "failed"),
        (400, ModelError, "does not take this request"),
        (413, ModelError, "does not take this request"),
        (422, ModelError, "does not take this request"),
        (404, RefusedError, "refuses: got status 404"),
        (402, RefusedError, "refuses"),
        (301, RefusedError, "refuses"),
        (204, RefusedError, "refuses"),
    ],
)
def test_a_status_says_whose_fault_it_is(status, kind, problem):
    script = answering(status, b"no luck" if status != 204 else b"")
    with chat_server(script) as chat, pytest.raises(ModelError, match=problem) as caught:
        client(chat).send(BODY)
    assert type(caught.value) is kind


def test_an_answer_that_does_not_come_in_time_may_have_been_charged_for():
    with chat_server(lambda asked, _: graded(asked, hold=0.6)) as chat:
        with pytest.raises(
            TimedOutError, match=r"did not answer in time: got ReadTimeout.* want an answer within 0.2 s"
        ):
            client(chat, timeout_seconds=0.2).send(BODY)
        with pytest.raises(UnansweredInTimeError):
            client(chat, timeout_seconds=0.2).send(BODY)


def test_an_answer_that_trickles_ends_with_the_time():
    with chat_server(lambda asked, _: graded(asked, pause=0.15)) as chat:
        started = time.monotonic()
        with pytest.raises(UnansweredInTimeError):
            client(chat, timeout_seconds=0.3).send(BODY)
        assert time.monotonic() - started < 1


def test_a_connection_that_is_lost_after_the_request_may_have_been_charged_for():
    lost = pytest.raises(UnansweredError, match="broke the connection off: got RemoteProtocolError")
    with chat_server(lambda asked, _: graded(asked, drop=True)) as chat, lost:
        client(chat).send(BODY)


def test_a_service_that_is_not_there_was_not_asked():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    params = GraderParams(provider="llm", model="small", base_url=url)
    with pytest.raises(TransientError, match="cannot be reached: got ConnectError") as caught:
        ChatClient(params, [""]).send(BODY)
    assert not isinstance(caught.value, UnansweredError)


def test_an_answer_without_an_end_is_cut():
    with chat_server(answering(200, b"x" * 3_000_000)) as chat:
        assert 2**20 < len(client(chat).send(BODY).text) < 2**21


def test_calls_are_evenly_spaced_over_all_threads():
    rate = RequestRate(1200)  # one in 50 ms
    passed = []

    def call():
        for _ in range(3):
            rate.wait()
            passed.append(time.monotonic())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed.sort()
    for number, at in enumerate(passed):
        assert at - passed[0] >= 0.05 * number - 0.02


def test_a_key_stands_in_no_error_and_no_reply():
    quoted = f'{{"error": "no such key: {KEYS[0]}"}}'.encode()
    with chat_server(lambda asked, number: Answer((500, 200)[number], quoted)) as chat:
        opened = client(chat, KEYS[0])
        with pytest.raises(TransientError, match=r"no such key: \[key 0\]"):
            opened.send(BODY)
        assert opened.send(BODY).text == '{"error": "no such key: [key 0]"}'


def test_keys_are_read_from_a_variable_a_file_or_a_folder(tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n\none\n")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "b").write_text("four\n")
    (tmp_path / "secrets" / "a").write_text("three")
    (tmp_path / "secrets" / "..data").mkdir()
    assert read_keys(None, {}) == [""]
    assert read_keys("MY_KEYS", {"MY_KEYS": " one two,three\n"}) == ["one", "two", "three"]
    assert read_keys(str(tmp_path / "keys"), {}) == ["one", "two"]
    assert read_keys(str(tmp_path / "secrets"), {}) == ["three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("MY_KEYS", None, "setting grader.keys: names no API keys: got MY_KEYS"),
        ("keys", None, "cannot be read"),
        ("keys", b"", "names no API keys"),
        ("keys", b"tr\xc3\xa9s-hidden", "names no API keys"),
        ("keys", b"very-hidden\xff", "cannot be read"),
    ],
    ids=["unset", "absent", "empty", "not ascii", "not utf-8"],
)
def test_keys_that_are_none_are_refused_and_not_shown(tmp_path, name, content, problem):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigurationError, match=problem) as refused:
        read_keys(name if name.isupper() else str(tmp_path / name), {})
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("pasted", ["sk-pasted-key", "pastedKey", "sk pasted", "Bearer sk-pasted", ""])
def test_a_key_in_the_place_of_its_name_is_refused_and_not_shown(pasted):
    with pytest.raises(ConfigurationError, match=r"setting grader.keys: is not possible") as refused:
        load_settings(environment={"DARTFLOW_GRADER__KEYS": repr(pasted)})
    assert "pasted" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:80/v1", "ftp://host/v1", "https://me:word@host/v1", "https://host/v1?key=word", "http://host:99999/v1"],
)
def test_an_address_that_is_none_or_holds_credentials_is_refused_and_not_shown(address):
    with pytest.raises(ConfigurationError, match=r"setting grader.base_url") as refused:
        load_settings(environment={}, assignments=[f"grader.base_url='{address}'"])
    assert "word" not in str(refused.value)


def test_a_model_without_an_address_is_refused():
    with pytest.raises(ConfigurationError, match="provider llm needs base_url and model"):
        load_settings(environment={}, assignments=["grader.provider=llm"])
