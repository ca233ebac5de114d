"""HttpCrossEncoder: a cross-encoder behind `/rerank`, in the shape that Cohere, Jina and vLLM share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from contracts.errors import InvalidAnswerError
from models.api_keys import read_keys
from models.cross_encoder import Logits, logits_of
from models.cross_encoder_settings import HttpParams, http_model_id
from models.endpoint import Endpoint

_LONGEST_REPLY = 2**26  # bytes: some services send the passages back, and one gone wrong may never end
_LONGEST_WAIT_SECONDS = 60.0  # from the first time that a request is made, where it came too often
_LARGEST_INTEGER = 2**53  # what JSON calls a number may have thousands of digits


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

    A request that comes too often is made again with another key, or when the service says, within a minute. Every
    other fault ends the call. What the call's other requests were answered is kept in memory for the next try.

    Args:
        params: the service.
        threads: how many requests are under way at once; None means one a core.

    Raises:
        ConfigurationError: the API keys are not there.
    """

    def __init__(self, params: HttpParams, threads: int | None = None) -> None:
        self.model_id = http_model_id(params)
        self._params = params
        threads = threads or os.cpu_count() or 1
        self._endpoint = Endpoint(
            str(params.base_url), "/rerank", read_keys("cross_encoder.http", params.keys),
            name=f"cross_encoder {self.model_id}", section="cross_encoder.http", pace_setting="cross_encoder.threads",
            request_advice="Check cross_encoder.http.model and cross_encoder.http.passage_characters.",
            timeout_seconds=params.timeout_seconds, longest_reply=_LONGEST_REPLY, connections=threads,
            patience_seconds=_LONGEST_WAIT_SECONDS, repeats=True,
        )  # fmt: skip
        # One pool a service: the shards of a process share it, so that they never ask more at once.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="rerank")
        self._answered: dict[_Request, Logits] = {}

    def score(self, queries: Sequence[str], passages: Sequence[str]) -> Logits:
        """(pairs,) float32 logits.

        Raises:
            TransientError: the service is not reached, busy or broken; TimedOutError: it took too long.
            RefusedError: it takes none of the keys, or knows no such address.
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
        reply = self._endpoint.post(self._body_of(request)).text
        scores = _scores_in(reply, len(request.passages))
        logits = None if scores is None else logits_of(scores, self._params.scores)
        if logits is None or np.isnan(logits).any():
            unit = "from 0 to 1" if self._params.scores == "probability" else "finite"
            raise InvalidAnswerError(
                f"cross_encoder {self.model_id}", "the service does not score the passages that it was sent",
                got=self._endpoint.quoted(reply), want="`results` with each index from 0 to "
                f"{len(request.passages) - 1} once, and a relevance_score {unit}",
                next_step="Check cross_encoder.http: base_url, model and scores.",
            )  # fmt: skip
        return logits

    def _body_of(self, request: _Request) -> bytes:
        body = {
            "model": self._params.model, "query": request.query, "documents": list(request.passages),
            "top_n": len(request.passages), "return_documents": False,
        }  # fmt: skip
        return json.dumps(body, ensure_ascii=False).encode()


def _error_of(future: Future[Logits]) -> BaseException | None:
    return None if future.cancelled() else future.exception()


def _scores_in(reply: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
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
