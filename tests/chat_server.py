"""A chat service on this machine that answers as a test tells it, and reads requests as a model would."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


@dataclass(frozen=True)
class Asked:
    """One request as it came: the key, the body, and what the data between the boundary lines say."""

    key: str | None
    content: dict[str, Any]
    bytes: int
    at: float

    @property
    def lines(self) -> list[str]:
        """Of the user's message: the first boundary, the data, the second boundary, and the task."""
        return self.content["messages"][1]["content"].split("\n")

    @property
    def data(self) -> dict[str, str]:
        begin, data, end, _ = self.lines
        assert (begin.split()[0], end.split()[0]) == ("BEGIN", "END")
        assert begin.split()[1] == end.split()[1]
        return json.loads(data)

    @property
    def passage(self) -> str:
        return self.data["passage"]

    @property
    def passage_id(self) -> str:
        return self.lines[3].removeprefix("Grade passage ").removesuffix(".")

    @property
    def usage(self) -> dict[str, int]:
        """What is charged for it: a quarter of its bytes, and 12 tokens of an answer."""
        prompt = self.bytes // 4
        return {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}


@dataclass(frozen=True)
class Answer:
    """What is sent back; `hold` seconds pass before it, `pause` between its parts, and `drop` sends nothing at all."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hold: float = 0.0
    pause: float = 0.0
    drop: bool = False


Script = Callable[[Asked, int], Answer]


def completion(asked: Asked, text: str | None, finish_reason: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion with this text."""
    message = {"role": "assistant", "content": text}
    return {
        "object": "chat.completion", "usage": asked.usage,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], **more,
    }  # fmt: skip


def graded(asked: Asked, grade: str | None = None, **more: Any) -> Answer:
    """A right answer; the grade is the first word of the passage, or incorrect, where none is given."""
    word = asked.passage.split()[0] if grade is None else grade
    chosen = word if word in {"correct", "ambiguous"} else "incorrect"
    text = json.dumps({"passage": asked.passage_id, "grade": chosen})
    return Answer(body=json.dumps(completion(asked, text)).encode(), **more)


class ChatServer:
    """Answers by a script, which is called with the request and how many came before it.

    Attributes:
        asked: every request that came.
        charged: tokens of every request that was answered with 200.
        most_at_once: the most requests that were in hand at a time.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.charged: list[int] = []
        self.most_at_once = 0
        self.url = ""
        self._in_hand = 0
        self._lock = threading.Lock()

    def answer_to(self, asked: Asked) -> Answer:
        with self._lock:
            number = len(self.asked)
            self.asked.append(asked)
            self._in_hand += 1
            self.most_at_once = max(self.most_at_once, self._in_hand)
        answer = self.script(asked, number)
        with self._lock:
            if answer.status == 200 and not answer.drop:
                self.charged.append(asked.usage["total_tokens"])
        return answer

    def done(self) -> None:
        with self._lock:
            self._in_hand -= 1

    @property
    def passages(self) -> list[str]:
        return [one.passage for one in self.asked]


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up, or is killed, is part of the tests."""


@contextmanager
def chat_server(script: Script = lambda asked, _: graded(asked)) -> Iterator[ChatServer]:
    """A service at `.url`, for the time of a test."""
    chat = ChatServer(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions", self.path
            data = self.rfile.read(int(self.headers["Content-Length"]))
            bearer = self.headers["Authorization"]
            key = None if bearer is None else bearer.removeprefix("Bearer ")
            answer = chat.answer_to(Asked(key, json.loads(data), len(data), time.monotonic()))
            time.sleep(answer.hold)
            chat.done()
            if answer.drop:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            for start in range(0, len(answer.body), 64) if answer.pause else ():
                self.wfile.write(answer.body[start : start + 64])
                time.sleep(answer.pause)
            if not answer.pause:
                self.wfile.write(answer.body)

    server = Quiet(("127.0.0.1", 0), Handler)
    chat.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("no_proxy", "127.0.0.1")
        try:
            yield chat
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
