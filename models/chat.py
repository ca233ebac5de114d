"""Chat: one call of an OpenAI-compatible /chat/completions, with keys in rotation and calls evenly spaced."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from itertools import count

import httpx

from contracts.errors import ModelError, RefusedError, TimedOutError, TransientError
from models.api_keys import ApiKeys
from models.grader_settings import GraderParams

_LONGEST_REPLY = 2**20  # bytes; an answer of ours has about 500, and a service gone wrong may never end
_LONGEST_QUOTE = 200  # characters of what a service says, in an error
_SERVER_ERROR = 500

# What says nothing against us: the service may take the same request a moment later.
_PASSING = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY})
# What is said of this one request, as of one too long for the model: another query may be taken.
_OF_THE_REQUEST = frozenset({
    HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY,
})  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What a service sent with status 200.

    Attributes:
        text: the body.
        seconds: since it was asked.
        key: the number of the key that it took.
        refused_keys: how many keys it refused before.
    """

    text: str
    seconds: float
    key: int
    refused_keys: int


class UnansweredError(TransientError):
    """A request that was sent, and may have been charged for, though no whole answer came."""


class UnansweredInTimeError(UnansweredError, TimedOutError):
    """The same, since the time was over."""


class RequestRate:
    """Calls evenly spaced over all threads: never more than so many in any minute.

    Args:
        per_minute: None sets no limit.
    """

    def __init__(self, per_minute: int | None) -> None:
        self._pause = 0.0 if per_minute is None else 60.0 / per_minute
        self._next_at = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Returns when the next call may be made."""
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next_at)
            self._next_at = at + self._pause
        time.sleep(at - now)


class ChatClient:
    """A client of one endpoint. Safe for threads.

    Args:
        params: endpoint, rate and time-out.
        keys: as `models.api_keys.read_keys` gives them.
    """

    def __init__(self, params: GraderParams, keys: Sequence[str]) -> None:
        self._url = f"{(params.base_url or '').rstrip('/')}/chat/completions"
        self._where = f"chat model at {params.base_url}"
        self._timeout = params.timeout_seconds
        self._keys = ApiKeys(keys, self._where)
        self._rate = RequestRate(params.requests_per_minute)
        self._http = httpx.Client(
            timeout=httpx.Timeout(params.timeout_seconds, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=params.concurrent_requests),
        )
        weakref.finalize(self, self._http.close)

    def send(self, body: bytes) -> Reply:
        """Sends a request once; where a key is refused, once more with the next.

        Raises:
            RefusedError: the service refuses every key, or any such request.
            UnansweredError: it was sent, and may have been charged for, but no whole answer came;
                `UnansweredInTimeError` where the time was over.
            TransientError: it was not taken: no connection, too many requests, a failure of the service.
            ModelError: the service refuses this request, and may take others.
        """
        for refused_keys in count():
            key = self._keys.next()
            self._rate.wait()
            started = time.perf_counter()
            status, text, retry_after = self._exchange(body, key)
            if status == HTTPStatus.OK:
                self._keys.accepted(key)
                return Reply(self._keys.redacted(text), time.perf_counter() - started, key, refused_keys)
            if status not in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
                break
            self._keys.take_out(key)
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self._keys.cool_down(key, _seconds(retry_after))
        raise self._refusal(status, text)

    def _exchange(self, body: bytes, key: int) -> tuple[int, str, str | None]:
        """The status, the text and the Retry-After of one answer."""
        headers = {"Content-Type": "application/json"}
        if self._keys.text(key):
            headers["Authorization"] = f"Bearer {self._keys.text(key)}"
        deadline = time.monotonic() + self._timeout
        try:
            with self._http.stream("POST", self._url, content=body, headers=headers) as response:
                data = bytearray()
                for part in response.iter_bytes():
                    data += part
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer goes on", request=response.request)
                    if len(data) > _LONGEST_REPLY:
                        break
                return response.status_code, data.decode("utf-8", "replace"), response.headers.get("Retry-After")
        except httpx.HTTPError as error:
            raise self._failure(error) from None  # its request carries the key

    def _failure(self, error: httpx.HTTPError) -> TransientError:
        """The error for a call without an answer."""
        sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol)
        late = isinstance(error, httpx.TimeoutException)
        kind: type[TransientError] = TimedOutError if late else TransientError
        if sent:
            kind = UnansweredInTimeError if late else UnansweredError
        return kind(
            self._where,
            "did not answer in time" if late else "broke the connection off" if sent else "cannot be reached",
            got=f"{type(error).__name__}: {self._quoted(str(error))}", want=f"an answer within {self._timeout:g} s",
            next_step="Check the service, then `dartflow resume` the run.",
        )  # fmt: skip

    def _refusal(self, status: int, text: str) -> ModelError:
        """The error for an answer that is not 200."""
        got = f"status {status}: {self._quoted(text)}"
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            return TransientError(
                self._where, "is asked too often", got=got, next_step="Lower grader.requests_per_minute, or add a key."
            )
        if status >= _SERVER_ERROR or status in _PASSING:
            return TransientError(
                self._where, "failed", got=got, next_step="Check the service, then `dartflow resume` the run."
            )
        if status in _OF_THE_REQUEST:
            return ModelError(
                self._where, "does not take this request", got=got, next_step="Check grader.model and the passage."
            )
        return RefusedError(
            self._where, "refuses", got=got, next_step="Check grader.base_url, grader.model and the account."
        )

    def _quoted(self, text: str) -> str:
        return " ".join(self._keys.redacted(text).split())[:_LONGEST_QUOTE]


def _seconds(retry_after: str | None) -> float | None:
    """The seconds that a Retry-After asks for, given as such or as an HTTP date; None where it says neither."""
    if retry_after is None:
        return None
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        at = parsedate_to_datetime(retry_after)
    except (ValueError, OverflowError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, at.timestamp() - time.time())
