"""HttpCrossEncoder: a cross-encoder behind `/rerank`, in the shape that Cohere, Jina and vLLM share."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from http import HTTPStatus
from itertools import groupby

import httpx
import numpy as np

from contracts.errors import InvalidAnswerError, ModelError, RefusedError, TimedOutError, TransientError
from models.cross_encoder import Logits, logits_of
from models.cross_encoder_settings import HttpParams, http_key, http_model_id

_LONGEST_REPLY = 2**26  # bytes: some services send the passages back, and one gone wrong may never end
_LONGEST_QUOTE = 200  # characters of what a service says, in an error
_LONGEST_WAIT_SECONDS = 60.0  # all together, that a request waits because the service said so
_SERVER_ERROR = 500
_LARGEST_INTEGER = 2**53  # what JSON calls a number may have thousands of digits
# What says nothing against us: the service may take the same request a moment later.
_PASSING = frozenset({
    HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS,
})  # fmt: skip
# What is said of this one request, as of a passage too long for the model: another query may be taken.
_OF_THE_REQUEST = frozenset({
    HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY,
})  # fmt: skip


@dataclass(frozen=True)
class _Request:
    """A query with some of its passages, cut to what is sent."""

    query: str
    passages: tuple[str, ...]


class HttpCrossEncoder:
    """Asks a rerank service, one query a request.

    Pairs that follow each other with the same query make its requests, in their order and in parts of
    `passages_per_request`; so what stands beside a passage depends on its query alone. Behind
    CachedCrossEncoder it also depends on which passages of the query are known already: where a service
    pads, a kept score is the one that the passage had among those it was first asked with.

    A service that says when to ask again is asked then, after at most a minute. Every other fault ends the call.
    What the call's other requests were answered is kept in memory for the next try.

    Args:
        params: the service.
        threads: how many requests are under way at once; None means one a core.

    Raises:
        ConfigurationError: the API key is not there.
    """

    def __init__(self, params: HttpParams, threads: int | None = None) -> None:
        self.model_id = http_model_id(params)
        self._params = params
        self._key = http_key(params)
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(timeout=params.timeout_seconds, headers=headers)
        weakref.finalize(self, self._client.close)
        # One pool a service: the shards of a process share it, so that they never ask more at once.
        self._pool = ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="rerank")
        self._answered: dict[_Request, Logits] = {}

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits.

        Raises:
            TransientError: the service is not reached, busy or broken; TimedOutError: it took too long.
            RefusedError: it does not take the key, or knows no such address.
            ModelError: it refuses a request for what is in it, or gives an answer that does not fit it.
        """
        requests = list(self._requests(list(zip(queries, passages, strict=True))))
        futures = [self._pool.submit(self._scores_of, request) for request in requests]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        wait(futures)
        errors = [error for future in futures if (error := _error_of(future)) is not None]
        if errors:
            self._answered |= {
                request: future.result()
                for request, future in zip(requests, futures, strict=True)
                if not future.cancelled() and future.exception() is None
            }
            raise errors[0]
        return np.concatenate([np.zeros(0, np.float32), *(future.result() for future in futures)])

    def _requests(self, pairs: Sequence[tuple[str, str]]) -> Iterator[_Request]:
        for query, run in groupby(pairs, key=lambda pair: pair[0]):
            passages = [passage[: self._params.passage_characters] for _, passage in run]
            for start in range(0, len(passages), self._params.passages_per_request):
                yield _Request(query, tuple(passages[start : start + self._params.passages_per_request]))

    def _scores_of(self, request: _Request) -> Logits:
        answered = self._answered.pop(request, None)
        if answered is not None:
            return answered
        reply = self._reply(request)
        scores = _scores_in(reply, len(request.passages))
        logits = None if scores is None else logits_of(scores, self._params.scores)
        if logits is None or np.isnan(logits).any():
            unit = "from 0 to 1" if self._params.scores == "probability" else "finite"
            raise InvalidAnswerError(
                f"cross_encoder {self.model_id}", "the service does not score the passages that it was sent",
                got=self._quote(reply), want=f"`results` with each index from 0 to {len(request.passages) - 1} once, "
                f"and a relevance_score {unit}", next_step="Check cross_encoder.http: base_url, model and scores.",
            )  # fmt: skip
        return logits

    def _reply(self, request: _Request) -> bytes:
        """The body of the answer, with status 200."""
        body = {
            "model": self._params.model, "query": request.query, "documents": list(request.passages),
            "top_n": len(request.passages), "return_documents": False,
        }  # fmt: skip
        waited = 0.0
        while True:
            status, pause, reply = self._sent(body)
            if status == HTTPStatus.OK:
                return reply
            if status != HTTPStatus.TOO_MANY_REQUESTS or pause is None or waited + pause > _LONGEST_WAIT_SECONDS:
                raise self._fault(status, reply)
            time.sleep(pause)
            waited += pause

    def _sent(self, body: Mapping[str, object]) -> tuple[int, float | None, bytes]:
        """Status, how many seconds the service wants us to wait, and body of one answer."""
        where, until = f"cross_encoder {self.model_id}", time.monotonic() + self._params.timeout_seconds
        reply = bytearray()
        try:
            with self._client.stream("POST", f"{self._params.base_url}/rerank", json=body) as answer:
                for part in answer.iter_bytes():
                    reply += part
                    if len(reply) > _LONGEST_REPLY:
                        raise InvalidAnswerError(
                            where, "the answer does not end", got=f"{len(reply)} bytes", want=f"<= {_LONGEST_REPLY}",
                            next_step="Check cross_encoder.http.base_url.",
                        )  # fmt: skip
                    # The client's own limit is for each part; a service that sends byte by byte never meets it.
                    if time.monotonic() > until:
                        raise self._late(None)
                return answer.status_code, _seconds(answer.headers.get("retry-after")), bytes(reply)
        except httpx.TimeoutException as error:
            raise self._late(error) from error
        except httpx.HTTPError as error:
            raise TransientError(
                where, "the service cannot be reached", got=f"{type(error).__name__}: {error}",
                next_step="Check that it runs, and cross_encoder.http.base_url.",
            ) from error  # fmt: skip

    def _late(self, error: Exception | None) -> TimedOutError:
        return TimedOutError(
            f"cross_encoder {self.model_id}", "the service did not answer in time",
            got=None if error is None else type(error).__name__, want=f"{self._params.timeout_seconds:g} s",
            next_step="Raise cross_encoder.http.timeout_seconds, or lower threads or passages_per_request.",
        )  # fmt: skip

    def _fault(self, status: int, reply: bytes) -> ModelError:
        """The error for an answer that is not 200."""
        where, got = f"cross_encoder {self.model_id}", f"status {status}, {self._quote(reply)}"
        if status == HTTPStatus.GATEWAY_TIMEOUT:
            return self._late(None)
        if status in _PASSING or status >= _SERVER_ERROR:
            return TransientError(where, "the service cannot answer now", got=got, next_step="Try again later.")
        if status in _OF_THE_REQUEST:
            return ModelError(
                where, "the service does not take a request", got=got,
                next_step="Check cross_encoder.http: model and passage_characters.",
            )  # fmt: skip
        return RefusedError(
            where, "the service refuses us", got=got,
            next_step="Check cross_encoder.http: base_url, model and the key in key_variable.",
        )  # fmt: skip

    def _quote(self, reply: bytes) -> str:
        """The beginning of what the service said, without the key that it may quote."""
        text = reply.decode("utf-8", "replace")
        text = text if self._key is None else text.replace(self._key, "[key]")
        return text if len(text) <= _LONGEST_QUOTE else f"{text[:_LONGEST_QUOTE]}..."


def _error_of(future: Future[Logits]) -> BaseException | None:
    return None if future.cancelled() else future.exception()


def _scores_in(reply: bytes, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """(count,) float64, NaN for a score that is no number; None where the indexes are not 0 to count - 1."""
    try:
        results = json.loads(reply)["results"]
        found = [(result["index"], result["relevance_score"]) for result in results]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    # True is 1 and 1.0 is 1 for Python, and no index.
    if any(type(index) is not int for index, _ in found) or sorted(index for index, _ in found) != list(range(count)):
        return None
    scores = np.full(count, np.nan)
    for index, score in found:
        if type(score) is float or (type(score) is int and abs(score) < _LARGEST_INTEGER):
            scores[index] = score
    return scores


def _seconds(retry_after: str | None) -> float | None:
    """The header in seconds, at least 1, so that waiting comes to an end; None where it is missing or a date."""
    return max(1.0, float(retry_after)) if retry_after is not None and retry_after.isdecimal() else None
