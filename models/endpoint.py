"""Endpoint: an address that is asked by POST, with keys in rotation and one meaning for each way to fail."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import httpx

from contracts.errors import ModelError, RefusedError, TimedOutError, TransientError
from models.api_keys import ApiKeys

_LONGEST_QUOTE = 200  # characters of what a service says, in an error
_LEAST_REST_SECONDS = 1.0  # of a key in a call that is made again, or a service that says 0 would be asked for ever
_SERVER_ERROR = 500

_OF_THE_KEY = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
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


class Endpoint:
    """A client of one address. Safe for threads.

    Args:
        base_url: what stands before `path` in the address.
        path: the last part of it.
        keys: as `models.api_keys.read_keys` gives them.
        name: what errors call the service.
        section: the settings with its base_url, model, keys and timeout_seconds.
        pace_setting: the setting that slows requests down.
        request_advice: what errors say of a request that is not taken.
        timeout_seconds: for one answer, all of it.
        longest_reply: in bytes; what comes after them is left out.
        connections: how many are kept open.
        patience_seconds: how long a call waits, all together, for a key that rests.
        repeats: whether a call that comes too often is made again within that time: with a key that is free, or
            else when the service says; where it does not say, the call has failed.
        turn: is called before each request, and returns when it may be made.
    """

    def __init__(
        self,
        base_url: str,
        path: str,
        keys: Sequence[str],
        *,
        name: str,
        section: str,
        pace_setting: str,
        request_advice: str,
        timeout_seconds: float,
        longest_reply: int,
        connections: int,
        patience_seconds: float,
        repeats: bool = False,
        turn: Callable[[], None] = lambda: None,
    ) -> None:
        self._url = base_url.rstrip("/") + path
        self._name = name
        self._section = section
        self._pace_setting = pace_setting
        self._request_advice = request_advice
        self._timeout = timeout_seconds
        self._longest_reply = longest_reply
        self._patience = patience_seconds
        self._repeats = repeats
        self._turn = turn
        self._keys = ApiKeys(keys, name, f"{section}.keys")
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_seconds, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections),
        )
        weakref.finalize(self, self._http.close)

    def post(self, body: bytes) -> Reply:
        """The answer to a request in JSON; where a key is refused, it is made once more with the next.

        Raises:
            RefusedError: the service refuses every key, or any such request.
            UnansweredError: it was sent, and may have been charged for, but no whole answer came;
                `UnansweredInTimeError` where the time was over.
            TransientError: it was not taken: no connection, too many requests, a failure of the service.
            ModelError: the service refuses this request, and may take others.
        """
        until = time.monotonic() + self._patience
        refused_keys = 0
        while True:
            key = self._keys.next(until)
            self._turn()
            started = time.perf_counter()
            status, text, retry_after = self._exchange(body, key)
            if status == HTTPStatus.OK:
                self._keys.accepted(key)
                return Reply(self._keys.redacted(text), time.perf_counter() - started, key, refused_keys)
            said = f"status {status}: {self.quoted(text)}"
            if status in _OF_THE_KEY:
                self._keys.take_out(key, said)
                refused_keys += 1
            elif status != HTTPStatus.TOO_MANY_REQUESTS or not self._again(key, retry_after, until):
                raise self._refusal(status, said)

    def quoted(self, text: str) -> str:
        """The beginning of what the service said, for an error: in one line, without the keys that it may quote."""
        return " ".join(self._keys.redacted(text).split())[:_LONGEST_QUOTE]

    def _again(self, key: int, retry_after: str | None, until: float) -> bool:
        """Lets a key rest that was used too often, and says whether the call goes on."""
        seconds = _seconds(retry_after)
        if seconds is not None and self._repeats:
            seconds = max(_LEAST_REST_SECONDS, seconds)
        self._keys.cool_down(key, seconds)
        rest = self._keys.rest_seconds()
        return self._repeats and time.monotonic() + rest <= until and (rest == 0 or seconds is not None)

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
                    # The client's own limit is for each part; a service that sends byte by byte never meets it.
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout("the answer goes on", request=response.request)
                    if len(data) > self._longest_reply:
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
            self._name,
            "did not answer in time" if late else "broke the connection off" if sent else "cannot be reached",
            got=f"{type(error).__name__}: {self.quoted(str(error))}", want=f"an answer within {self._timeout:g} s",
            next_step=f"Check the service and {self._section}.{'timeout_seconds' if late else 'base_url'}, "
            "then `dartflow resume` the run.",
        )  # fmt: skip

    def _refusal(self, status: int, said: str) -> ModelError:
        """The error for an answer that is not 200."""
        kind: type[ModelError]
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            kind, problem, advice = TransientError, "is asked too often", f"Lower {self._pace_setting}, or add a key."
        elif status >= _SERVER_ERROR or status in _PASSING:
            kind = TimedOutError if status == HTTPStatus.GATEWAY_TIMEOUT else TransientError
            problem, advice = "failed", "Check the service, then `dartflow resume` the run."
        elif status in _OF_THE_REQUEST:
            kind, problem, advice = ModelError, "does not take this request", self._request_advice
        else:
            advice = f"Check {self._section}.base_url, {self._section}.model and the account."
            kind, problem = RefusedError, "refuses"
        return kind(self._name, problem, got=said, next_step=advice)


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
