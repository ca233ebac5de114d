"""Chat: the endpoint of an OpenAI-compatible /chat/completions, asked at an even pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from models.endpoint import Endpoint
from models.grader_settings import GraderParams

_LONGEST_REPLY = 2**20  # bytes; an answer of ours has about 500, and a service gone wrong may never end
# A service that wants us to wait longer than this is told off for now; the shard may be tried again.
_LONGEST_WAIT_SECONDS = 300.0


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


def chat_endpoint(params: GraderParams, keys: Sequence[str]) -> Endpoint:
    """The endpoint that the settings name; a call that comes too often fails, and is the grader's to make again."""
    return Endpoint(
        str(params.base_url), "/chat/completions", keys, name=f"chat model at {params.base_url}", section="grader",
        pace_setting="grader.requests_per_minute", request_advice="Check grader.model and the passage.",
        timeout_seconds=params.timeout_seconds, longest_reply=_LONGEST_REPLY,
        connections=params.concurrent_requests, patience_seconds=_LONGEST_WAIT_SECONDS,
        turn=RequestRate(params.requests_per_minute).wait,
    )  # fmt: skip
