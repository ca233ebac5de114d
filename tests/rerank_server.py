"""A rerank service on loopback that answers as it is told: real requests over real sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Answer:
    """What the service sends back.

    Attributes:
        status: of HTTP.
        body: text as it is, anything else as JSON.
        headers: besides length and type.
        after_seconds: how long it takes.
        dribbled: whether the body comes byte by byte, each after so long, and never whole.
    """

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    after_seconds: float = 0.0
    dribbled: bool = False


def relevance(query: str, passage: str) -> float:
    """The share of the query's words that the passage has, kept inside (0, 1)."""
    words = set(query.lower().split())
    return (0.5 + len(words & set(passage.lower().split()))) / (1 + len(words))


def scored(body: Body) -> Answer:
    """A right answer in the shape of Cohere: best first."""
    scores = [relevance(body["query"], passage) for passage in body["documents"]]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return Answer(body={"results": [{"index": index, "relevance_score": scores[index]} for index in order]})


class RerankServer:
    """What was asked, and what comes back.

    Attributes:
        answer: makes an answer of the number of the request, from 0, and its body.
        bodies, headers, paths: of every request so far.
        most_at_once: how many requests were under way at once.
    """

    def __init__(self) -> None:
        self.answer: Callable[[int, Body], Answer] = lambda _number, body: scored(body)
        self.bodies: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def answer_to(self, path: str, headers: dict[str, str], body: Body) -> Answer:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self.paths.append(path)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        answer = self.answer(number, body)
        time.sleep(answer.after_seconds)
        with self._lock:
            self._at_once -= 1
        return answer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    rerank: RerankServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = self.rerank.answer_to(self.path, dict(self.headers), body)
        sent = (answer.body if isinstance(answer.body, str) else json.dumps(answer.body)).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        try:
            if not answer.dribbled:
                self.wfile.write(sent)
                return
            for byte in sent[:-1]:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                time.sleep(0.02)
        except OSError:
            pass  # whoever asked has gone
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@contextmanager
def rerank_server() -> Iterator[RerankServer]:
    """A server on a free port of loopback."""
    rerank = RerankServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"rerank": rerank}))
    server.daemon_threads = True
    rerank.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield rerank
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
