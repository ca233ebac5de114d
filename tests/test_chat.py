"""The endpoint of a chat service: how often it is asked, and which calls are its caller's to make again."""

from __future__ import annotations

import threading
import time

import pytest

from contracts.errors import ConfigurationError, TransientError
from flows.settings import load_settings
from models.chat import RequestRate, chat_endpoint
from models.endpoint import Endpoint
from models.grader_settings import GraderParams
from tests.chat_server import Answer, chat_server, graded
from tests.test_endpoint import BODY, KEYS, answering


def endpoint(chat, *keys) -> Endpoint:
    params = GraderParams(provider="llm", model="small", base_url=chat.url, timeout_seconds=2.0)
    return chat_endpoint(params, keys or [""])


def test_a_key_that_is_asked_too_often_rests_while_the_other_works():
    with chat_server(
        lambda asked, _: graded(asked) if asked.key == KEYS[1] else Answer(429, headers={"Retry-After": "30"})
    ) as chat:
        opened = endpoint(chat, *KEYS)
        with pytest.raises(TransientError, match="is asked too often"):
            opened.post(BODY)
        assert [opened.post(BODY).key for _ in range(3)] == [1, 1, 1]


def test_a_rest_of_minutes_is_not_waited_for():
    with chat_server(answering(429, headers={"Retry-After": "86400"})) as chat:
        opened = endpoint(chat, KEYS[0])
        with pytest.raises(TransientError, match="is asked too often"):
            opened.post(BODY)
        with pytest.raises(TransientError, match=r"wants to be asked later: got in 86[34]"):
            opened.post(BODY)
    assert len(chat.asked) == 1


def test_an_answer_without_an_end_is_cut():
    with chat_server(answering(200, b"x" * 3_000_000)) as chat:
        assert 2**20 < len(endpoint(chat).post(BODY).text) < 2**21


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


def test_a_model_without_an_address_is_refused():
    with pytest.raises(ConfigurationError, match="provider llm needs base_url and model"):
        load_settings(environment={}, assignments=["grader.provider=llm"])
