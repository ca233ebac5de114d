"""One call of a service: what each answer of it means, keys in rotation, time and length, and no key shown."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from operator import attrgetter

import pytest

import models.api_keys
from contracts.errors import ConfigurationError, ModelError, RefusedError, TimedOutError, TransientError
from flows.quarantine import is_fault_of_data
from flows.settings import load_settings
from models.api_keys import ApiKeys, read_keys
from models.endpoint import Endpoint, UnansweredError, UnansweredInTimeError
from models.grade_request import grade_request
from models.grader import Pair
from models.outcomes import outcome_of
from tests.chat_server import Answer, ChatServer, chat_server, graded

BODY = grade_request(Pair("q", "c", "question", "correct passage"), "small", 50).body
KEYS = ["first-secret-key", "second-secret-key"]


def endpoint(chat, *keys, **more) -> Endpoint:
    given = {
        "name": "service", "section": "section", "pace_setting": "section.pace", "request_advice": "Look at it.",
        "timeout_seconds": 2.0, "longest_reply": 2**20, "connections": 2, "patience_seconds": 60.0,
    }  # fmt: skip
    return Endpoint(chat.url, "/chat/completions", keys or [""], **{**given, **more})


def answering(status, body=b"", **more):
    return lambda asked, number: Answer(status, body, **more)


def test_a_reply_is_given_with_its_key_and_the_time_it_took():
    with chat_server(lambda asked, _: graded(asked, hold=0.05)) as chat:
        reply = endpoint(chat, *KEYS).post(BODY)
    assert json.loads(reply.text)["choices"][0]["finish_reason"] == "stop"
    assert (reply.key, reply.refused_keys) == (0, 0)
    assert 0.05 <= reply.seconds < 2
    assert chat.asked[0].key == KEYS[0]


def test_without_keys_none_is_sent():
    with chat_server() as chat:
        endpoint(chat).post(BODY)
    assert chat.asked[0].key is None


def test_keys_take_turns():
    with chat_server() as chat:
        opened = endpoint(chat, *KEYS)
        assert [opened.post(BODY).key for _ in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_out_and_the_next_one_is_used(status):
    with chat_server(lambda asked, _: graded(asked) if asked.key == KEYS[1] else Answer(status)) as chat:
        opened = endpoint(chat, *KEYS)
        replies = [opened.post(BODY) for _ in range(3)]
    assert [(reply.key, reply.refused_keys) for reply in replies] == [(1, 1), (1, 0), (1, 0)]
    assert [one.key for one in chat.asked] == [KEYS[0], KEYS[1], KEYS[1], KEYS[1]]


def test_when_every_key_is_refused_no_call_is_made_any_more():
    refused = (
        r"refuses every API key: got 2 keys, the last with status 401: .*bad key \[key 0\].* Correct `section.keys`"
    )
    with chat_server(answering(401, b'{"error": "bad key first-secret-key"}')) as chat:
        opened = endpoint(chat, *KEYS)
        for _ in range(2):
            with pytest.raises(RefusedError, match=refused):
                opened.post(BODY)
    assert len(chat.asked) == 2


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
        opened = endpoint(chat, KEYS[0])
        with pytest.raises(TransientError):
            opened.post(BODY)
        opened.post(BODY)
    first, second = chat.asked
    assert least <= second.at - first.at <= most


def test_rests_without_a_stated_time_double_until_a_call_is_taken(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(models.api_keys.time, "monotonic", lambda: now[0])
    keys = ApiKeys(["k"], "service", "section.keys")
    for rest in (2, 4, 8, 16, 32, 60, 60):
        keys.cool_down(0, None)
        assert keys._states[0].free_at - now[0] == rest
        now[0] += rest
    keys.accepted(0)
    keys.cool_down(0, None)
    assert keys._states[0].free_at - now[0] == 2


@pytest.mark.parametrize(
    ("status", "kind", "outcome", "problem"),
    [
        (500, TransientError, "failed", "failed"), (502, TransientError, "failed", "failed"),
        (503, TransientError, "failed", "failed"), (529, TransientError, "failed", "failed"),
        (408, TransientError, "failed", "failed"), (504, TimedOutError, "timed_out", "failed"),
        (429, TransientError, "failed", "is asked too often"),
        (400, ModelError, "failed", "does not take this request"),
        (413, ModelError, "failed", "does not take this request"),
        (422, ModelError, "failed", "does not take this request"),
        (401, RefusedError, "refused", "refuses every API key: got 1 keys, the last with"),
        (403, RefusedError, "refused", "refuses every API key: got 1 keys, the last with"),
        (404, RefusedError, "refused", "refuses"), (405, RefusedError, "refused", "refuses"),
        (402, RefusedError, "refused", "refuses"), (301, RefusedError, "refused", "refuses"),
        (307, RefusedError, "refused", "refuses"), (204, RefusedError, "refused", "refuses"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("repeats", [False, True])
def test_a_status_says_whose_fault_it_is(status, kind, outcome, problem, repeats):
    said = "" if status == 204 else '{"message": "no"}'
    script = answering(status, said.encode(), headers={"Location": "http://127.0.0.1:1/"})
    with chat_server(script) as chat, pytest.raises(ModelError) as caught:
        endpoint(chat, repeats=repeats).post(BODY)
    assert type(caught.value) is kind
    assert outcome_of(caught.value) == outcome
    assert is_fault_of_data(caught.value) == (kind is ModelError)
    assert f"service: {problem}{'' if 'got' in problem else ': got'} status {status}: {said}" in str(caught.value)
    assert len(chat.asked) == 1


def test_an_answer_that_does_not_come_in_time_may_have_been_charged_for():
    with chat_server(lambda asked, _: graded(asked, hold=0.6)) as chat:
        with pytest.raises(
            TimedOutError, match=r"did not answer in time: got ReadTimeout.* want an answer within 0.2 s"
        ):
            endpoint(chat, timeout_seconds=0.2).post(BODY)
        with pytest.raises(UnansweredInTimeError):
            endpoint(chat, timeout_seconds=0.2).post(BODY)


def test_an_answer_that_trickles_ends_with_the_time():
    with chat_server(lambda asked, _: graded(asked, pause=0.15)) as chat:
        started = time.monotonic()
        with pytest.raises(UnansweredInTimeError):
            endpoint(chat, timeout_seconds=0.3).post(BODY)
        assert time.monotonic() - started < 1


def test_a_connection_that_is_lost_after_the_request_may_have_been_charged_for():
    lost = pytest.raises(UnansweredError, match="broke the connection off: got RemoteProtocolError")
    with chat_server(lambda asked, _: graded(asked, drop=True)) as chat, lost:
        endpoint(chat).post(BODY)


def test_a_service_that_is_not_there_was_not_asked():
    absent = ChatServer(answering(200))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        absent.url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(TransientError, match="cannot be reached: got ConnectError") as caught:
        endpoint(absent).post(BODY)
    assert not isinstance(caught.value, UnansweredError)


def test_a_key_stands_in_no_error_and_no_reply():
    quoted = f'{{"error": "no such key: {KEYS[0]}"}}'.encode()
    with chat_server(lambda asked, number: Answer((500, 200)[number], quoted)) as chat:
        opened = endpoint(chat, KEYS[0])
        with pytest.raises(TransientError, match=r"no such key: \[key 0\]"):
            opened.post(BODY)
        assert opened.post(BODY).text == '{"error": "no such key: [key 0]"}'


def test_keys_are_read_from_a_variable_a_file_or_a_folder(tmp_path):
    (tmp_path / "keys").write_text("one\ntwo\n\none\n")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "b").write_text("four\n")
    (tmp_path / "secrets" / "a").write_text("three")
    (tmp_path / "secrets" / "..data").mkdir()
    assert read_keys("section", None, {}) == [""]
    assert read_keys("section", "MY_KEYS", {"MY_KEYS": " one two,three\n"}) == ["one", "two", "three"]
    assert read_keys("section", str(tmp_path / "keys"), {}) == ["one", "two"]
    assert read_keys("section", str(tmp_path / "secrets"), {}) == ["three", "four"]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("MY_KEYS", None, "setting section.keys: names no API keys: got MY_KEYS"),
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
        read_keys("section", name if name.isupper() else str(tmp_path / name), {})
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize("section", ["grader", "cross_encoder.http"])
@pytest.mark.parametrize("pasted", ["sk-pasted-key", "pastedKey", "sk pasted", "Bearer sk-pasted", ""])
def test_a_key_in_the_place_of_its_name_is_refused_and_not_shown(section, pasted):
    variable = f"DARTFLOW_{section.replace('.', '__').upper()}__KEYS"
    with pytest.raises(ConfigurationError, match=f"setting {section}.keys: is not possible") as refused:
        load_settings(environment={variable: repr(pasted)})
    assert "pasted" not in str(refused.value)


@pytest.mark.parametrize("section", ["grader", "cross_encoder.http"])
@pytest.mark.parametrize(
    "address",
    [
        "", "/v1", "127.0.0.1:80/v1", "localhost:8000", "ftp://host/v1", "http://", "http://:80/v1", "http://host:99999/v1",
        "https://me:word@host/v1", "https://host/v1?key=word", "https://me:word", "http://host/v1#word",
    ],
)  # fmt: skip
def test_an_address_that_is_none_or_holds_credentials_is_refused_and_not_shown(section, address):
    with pytest.raises(ConfigurationError, match=f"setting {section}.base_url") as refused:
        load_settings(environment={}, assignments=[f"{section}.base_url='{address}'"])
    assert "word" not in str(refused.value)


def test_an_address_may_have_a_port_a_path_and_a_host_of_any_kind():
    for address in ("http://[::1]:8000", "https://api.jina.ai/v1", "http://localhost", "http://10.0.0.1:80/a/b/"):
        for section in ("grader", "cross_encoder.http"):
            settings = load_settings(environment={}, assignments=[f"{section}.base_url='{address}'"])
            assert attrgetter(f"{section}.base_url")(settings) == address
