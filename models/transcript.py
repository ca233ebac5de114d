"""Transcripts: what was asked of a chat model, what it answered, and what that was charged for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict

# `unanswered`: it was sent and no answer came, so that it may have been charged for.
TranscriptOutcome = Literal["ok", "invalid", "unanswered"]


class Usage(BaseModel):
    """Tokens that a call is charged for; `estimated` is an upper bound, where the service gave no number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_tokens: Annotated[int, Ge(0)]
    answer_tokens: Annotated[int, Ge(0)]
    estimated: bool = False

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.prompt_tokens + self.answer_tokens


class Transcript(BaseModel):
    """One call that was, or may have been, charged for.

    `request` is the body that was sent and `request_hash` stands for it; `attempt` counts the calls of a run with
    the same request. `answer` is the body that came back after `seconds`, `because` says why it is none. `key` is
    which of the keys was used, from 0; the key itself stands nowhere.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model_id: str
    run_id: str
    request_hash: str
    attempt: Annotated[int, Ge(1)]
    outcome: TranscriptOutcome
    because: str | None
    request: dict[str, Any]
    answer: str | None
    usage: Usage
    cost: Annotated[float, Ge(0)]
    seconds: float | None
    key: int | None


class Transcripts(Protocol):
    """Where transcripts are kept; safe for threads."""

    @property
    def run_id(self) -> str:
        """The run that pays for new calls."""
        ...

    def spent(self) -> int:
        """Tokens that the run was charged for before this process."""
        ...

    def answered(self, request_hash: str) -> Iterable[Transcript]:
        """What any run was answered to a request, where it was an answer; what cannot be read is passed over."""
        ...

    def attempts(self, request_hash: str) -> int:
        """How often the run has made a request."""
        ...

    def keep(self, transcript: Transcript) -> None:
        """Writes a transcript of the run down, for good when this returns."""
        ...
